"""A workload from what a person writes.

gpt:layers=24,…    llama-3.1-8b:seq=8192    config.json    step.graph    train.py:make
train.py --lr 0.1
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from foretell import spec
from foretell.errors import InputError, unknown
from foretell.io import is_there
from foretell.workload import config
from foretell.workload.models import FAMILIES, NAMED, Family, family
from foretell.workload.workload import Workload

MOST = 1e12  # numbers along one dimension of an op
MOST_LAYERS = 20_000  # of a model, and experts of a layer
_COUNTED = ("layers", "blocks", "depth", "experts", "stages")


def load(text: str, *, scripts: bool = False, files: bool = True) -> Workload:
    """The workload a spec, a file or, where `scripts` allows it, a training script stands for.

    Scripts are code: allow them only for what the user typed, never for what was read from a file.
    """
    name = text.partition(":")[0]
    if has_arguments(text):
        return _sourced(text, scripts=scripts, files=files)
    if not is_built_in(name) and files and (path := config.found(name)) is not None:
        return _configured(config.read(path), text, where=str(path))
    if not is_built_in(name) and is_source(name):
        return _sourced(text, scripts=scripts, files=files)
    return _built_in(text)


def _sourced(text: str, *, scripts: bool, files: bool) -> Workload:
    """The workload of a file or, where that is allowed, of a script."""
    from foretell.workload.source import opened, refuse

    refuse(text, scripts=scripts, files=files)
    return _checked(opened(text), text, least=0.0)  # of a recorded step, a sample's share


def names() -> list[str]:
    """Everything that is known by name."""
    return [*FAMILIES, *NAMED, *config.published()]


def is_built_in(name: str) -> bool:
    """Whether a name is that of a family, of a member of one, or of a shipped model."""
    return name in FAMILIES or _plain(name) in NAMED or name.lower() in config.published()


def is_source(name: str) -> bool:
    """Whether a name is that of a file, a script or a module rather than a built-in workload."""
    is_module = "." in name and all(part.isidentifier() for part in name.split("."))
    return is_there(name) or "/" in name or name.endswith((".py", ".graph")) or is_module


def has_arguments(text: str) -> bool:
    """Whether a text is a script or a module with arguments, in the words of a shell."""
    is_line = text.startswith("-m ") or ".py " in text or ".py' " in text
    return is_line and not is_there(text.partition(":")[0])


@lru_cache(maxsize=256)
def _built_in(text: str) -> Workload:
    name, given = spec.split(text)
    if (known := config.published().get(name.lower())) is not None:
        return _configured(known, text, where=name)
    said: dict[str, str] = {}
    if _plain(name) in NAMED:
        name, said = spec.split(NAMED[_plain(name)])
    if name not in FAMILIES:
        raise unknown("workload", name, names())
    kind = family(name)
    made = kind.of(said | config.renamed(given, kind.__dataclass_fields__))
    if not isinstance(made, Family):
        raise InputError(f"`{name}` makes no workload")
    return _checked(_built(made, text), text)


def _plain(name: str) -> str:
    """Names of members as torchvision writes them."""
    return name.lower().replace("-", "_")


def _configured(fields: config.Fields, text: str, *, where: str) -> Workload:
    """The workload of a config, with the options behind its name."""
    made, notes = config.model(fields, spec.options(text.partition(":")[2], text), where)
    return replace(_checked(_built(made, text), text), name=text, notes=notes)


def _built(made: Family, text: str) -> Workload:
    """The layers of a model, built one by one; sizes of which none can be made are refused."""
    for name, value in vars(made).items():
        most = MOST_LAYERS if name.endswith(_COUNTED) else MOST
        if isinstance(value, int) and not -MOST <= value <= most:
            raise InputError(f"`{name}` is {value} in `{text[:200]}`", hint=f"{most:g} at most")
    try:
        return made.workload()
    except (ZeroDivisionError, OverflowError):
        raise InputError(f"`{text}` has no such sizes", hint="sizes are 1 or more") from None


def _checked(workload: Workload, text: str, least: float = 1.0) -> Workload:
    for layer in workload.layers:
        wrong = [
            f"{op.name}: {dim} = {size:g}"
            for op in layer.ops
            for dim, size in op.dims.items()
            if not least <= size <= MOST or not size
        ]
        if wrong or layer.times < 1:
            what = wrong[0] if wrong else f"{layer.name} runs {layer.times} times"
            hint = f"sizes are from 1 to {MOST:g}"
            raise InputError(f"`{text[:200]}` has no such sizes ({what})", hint=hint)
    return workload
