"""A workload from what a person writes: `gpt:layers=24,…`, `step.graph`, `train.py:make`."""

from __future__ import annotations

from functools import lru_cache

from foretell import spec
from foretell.errors import InputError, unknown
from foretell.io import is_there
from foretell.workload.models import FAMILIES, NAMED, Family, family
from foretell.workload.workload import Workload


def load(text: str, *, scripts: bool = False, files: bool = True) -> Workload:
    """The workload a spec, a file or, where `scripts` allows it, a training script stands for.

    Scripts are code: allow them only for what the user typed, never for what was read from a file.
    """
    name = text.partition(":")[0]
    if name not in FAMILIES and name not in NAMED and is_source(name):
        from foretell.workload.source import opened, refuse

        refuse(text, scripts=scripts, files=files)
        return _checked(opened(text), text)
    return _built_in(text)


def is_source(name: str) -> bool:
    """Whether a name is that of a file, a script or a module rather than a built-in workload."""
    is_module = "." in name and all(part.isidentifier() for part in name.split("."))
    return is_there(name) or "/" in name or name.endswith((".py", ".graph")) or is_module


@lru_cache(maxsize=256)
def _built_in(text: str) -> Workload:
    name, given = spec.split(text)
    if name in NAMED:
        name, said = spec.split(NAMED[name])
        given = said | given
    if name not in FAMILIES:
        raise unknown("workload", name, [*FAMILIES, *NAMED])
    made = family(name).of(given)
    if not isinstance(made, Family):
        raise InputError(f"`{name}` makes no workload")
    return _checked(made.workload(), text)


def _checked(workload: Workload, text: str) -> Workload:
    for layer in workload.layers:
        wrong = [
            f"{op.name}: {dim} = {size:g}"
            for op in layer.ops
            for dim, size in op.dims.items()
            if not size >= 1
        ]
        if wrong or layer.times < 1:
            what = wrong[0] if wrong else f"{layer.name} runs {layer.times} times"
            raise InputError(f"`{text}` has no such sizes ({what})", hint="sizes are 1 or more")
    return workload
