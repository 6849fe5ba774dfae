"""A workload from what a person writes: a built-in model, a captured step, a trace, or a script.

gpt:layers=24,…    llama-3.1-8b:seq=8192    config.json    step.graph    train.py:make
train.py --lr 0.1

Workloads that are not built in: a captured step, a trace, or a script to capture now.

    step.graph · step.json.gz · train.py:make · package.module:make:size=8
    train.py --lr 0.1 · -m package.train --lr 0.1      a script or module with its arguments
    step.graph:batch=32,seq=4096,dtype=bf16        the same step, another batch, length or format

Readers of traces and captures are above this package and imported by name, on first use.
"""

from __future__ import annotations

import shlex
from dataclasses import replace
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from foretell import spec
from foretell.errors import InputError, unknown
from foretell.graph import Graph
from foretell.graph.file import is_graph_file
from foretell.graph.file import load as load_graph
from foretell.io import is_there
from foretell.workload import config
from foretell.workload.captured import from_graph
from foretell.workload.models import FAMILIES, NAMED, Family, family
from foretell.workload.workload import BYTES, Exchange, Layer, Op, Workload

OPTIONS = ("batch", "seq", "dtype")
_LENGTHS = ("tokens", "queries", "keys")  # dims that are as long as a sample


MOST = 1e12  # numbers along one dimension of an op
MOST_LAYERS = 20_000  # of a model, and experts of a layer
_COUNTED = ("layers", "blocks", "depth", "experts", "stages")


def refuse(text: str, *, scripts: bool, files: bool) -> None:
    """Raise where a text names code or a file and may not."""
    if not files:
        raise InputError(
            f"`{text[:80]}` is no model of the list", hint="name a family: gpt:layers=24,…"
        )
    if not scripts and _is_code(text):
        raise InputError(
            f"`{text[:80]}` names code, and code is never run because a file says so",
            hint="give the script as an argument of the command, or name a captured .graph file",
        )


def opened(text: str) -> Workload:
    """The workload of a file or a script."""
    name, _, rest = text.partition(":")
    path = Path(name)
    if _is_code(text):
        return _captured(text)
    if is_there(name):
        return _changed(_read(str(path), path.stat().st_mtime_ns), spec.options(rest, text), text)
    if config.is_id(name):
        raise config.missing(name)
    raise InputError(
        f"there is no file `{name}`",
        hint="name a .graph file, a trace, train.py:make or a model's config.json",
    )


def _is_code(text: str) -> bool:
    """Whether a text names a script, or a function of a module."""
    if has_arguments(text):
        return True
    name, _, rest = text.partition(":")
    is_module = rest and all(part.isidentifier() for part in name.split("."))
    return name.endswith(".py") or bool(is_module and not is_there(name))


@lru_cache(maxsize=16)
def _read(name: str, _: int) -> Workload:
    """The workload of a file as it was at some time."""
    return from_graph(_graph(Path(name)), name)


def _graph(path: Path) -> Graph:
    if path.is_file() and is_graph_file(path):
        return load_graph(path)
    graph: Graph = import_module("foretell.trace").read(path).graph
    return graph


@lru_cache(maxsize=16)
def _captured(text: str) -> Workload:
    """The step of a script, captured now."""
    try:
        capture = import_module("foretell.pytorch.capture").capture
        find = import_module("foretell.pytorch.capture.step").find
    except ModuleNotFoundError as error:
        raise InputError(
            f"`{text}` has to be captured, which needs PyTorch: {error}",
            hint="pip install 'foretell[torch]', or name a .graph file captured elsewhere",
        ) from None
    if _is_loop(text):
        return from_graph(_step_of_script(text), text)
    parts: Any = find(text)
    return from_graph(capture(*parts.four, real=parts.real), text)


def _is_loop(text: str) -> bool:
    """Whether a text names a training script, which is run as it is, and no function in one."""
    if has_arguments(text):
        return True
    path = Path(text)
    if path.suffix != ".py" or not path.is_file():
        return False
    return not import_module("foretell.pytorch.intake.request").is_description(path)


def _step_of_script(text: str) -> Graph:
    """The step of an unchanged training script, run on fake tensors until it is recorded."""
    capture = import_module("foretell.pytorch.intake.launch").capture_script
    script = import_module("foretell.pytorch.intake.request").Script(*_script_of(text))
    with TemporaryDirectory(prefix="foretell-") as folder:
        capture(script, Path(folder) / "step.graph")
        return load_graph(Path(folder) / "step.graph")


def _script_of(text: str) -> tuple[str, tuple[str, ...], bool]:
    """A script or module, its arguments, and whether it is a module."""
    if not has_arguments(text):
        return text, (), False
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise InputError(f"`{text[:80]}`: {error}", hint="quote arguments as in a shell") from None
    is_module = words[0] == "-m"
    name, *args = words[is_module:] or [""]
    return name, tuple(args), is_module


def _changed(workload: Workload, options: dict[str, str], text: str) -> Workload:
    """Another batch, length of a sample or number format."""
    for key in options:
        if key not in OPTIONS:
            raise unknown(f"option of `{text.partition(':')[0]}`", key, OPTIONS)
    if "seq" in options:
        workload = resized(workload, int(spec.read(options["seq"], int, "`seq`")))
    if "batch" in options:
        workload = replace(workload, batch=int(spec.read(options["batch"], int, "`batch`")))
    if "dtype" in options:
        if options["dtype"] not in BYTES:
            raise unknown("number format", options["dtype"], BYTES)
        workload = replace(workload, dtype=options["dtype"])
    return replace(workload, name=text)


def resized(workload: Workload, tokens: int) -> Workload:
    """The same model with samples of another length."""
    old = workload.tokens
    if old <= 1 or tokens < 1:
        raise InputError(
            f"`{workload.name}` has no words whose number could be {tokens}",
            hint="`seq` is for models whose layers run over the words of a sample",
        )

    def sized(dims: Any) -> dict[str, float]:
        return {k: float(tokens) if k in _LENGTHS and v == old else v for k, v in dims.items()}

    def piece(one: Op | Exchange) -> Op | Exchange:
        return replace(one, dims=sized(one.dims))

    def layer(one: Layer) -> Layer:
        return replace(one, ops=tuple(map(piece, one.ops)), sizes=sized(one.sizes))

    return replace(workload, layers=tuple(map(layer, workload.layers)), tokens=float(tokens))


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
    """Whether a text is a command line: a script or a module with arguments."""
    is_line = text.startswith("-m ") or ".py " in text or ".py' " in text
    return is_line and not is_there(text.partition(":")[0])


@lru_cache(maxsize=256)
def _built_in(text: str) -> Workload:
    name, given = spec.split(text)
    if (known := config.published().get(name.lower())) is not None:
        return _configured(known, text, where=name)
    options: dict[str, str] = {}
    if _plain(name) in NAMED:
        name, options = spec.split(NAMED[_plain(name)])
    if name not in FAMILIES:
        raise unknown("workload", name, names())
    kind = family(name)
    made = kind.of(options | config.renamed(given, kind.__dataclass_fields__))
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
