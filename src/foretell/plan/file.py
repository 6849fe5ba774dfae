"""A plan on disk: JSON (`.plan`, `.json`) or TOML (`.toml`), only the fields that are not plain.

A plan that was searched for carries what was predicted of it, for which model and cluster: the
table `predicted`, which changes nothing of the plan.

Names of the ops of a captured step in a plan, and a fingerprint of that step.

    gelu.0              the first gelu of forward and loss
    mm.3.backward       the fourth mm of the backward
    convolution.0.bias  one of several kernels of an operator

Operators are counted as they are issued, views too, so that every tracer of the same model finds
the same names. `made_for` is what a plan keeps in `model`: a print of the parameters, and one of
the ops it names with the sizes they are given.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import tomllib
import typing
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from foretell.errors import InputError, unknown
from foretell.graph import Graph, Kind, Phase, WaitKind
from foretell.io import parse_toml, read_json, read_text, write_text
from foretell.plan.plan import Plan, field_types

FORWARD, BACKWARD = (Phase.FORWARD, Phase.LOSS), (Phase.BACKWARD,)
COPY = "*"  # behind an op's name: recomputed in this region, and where it was too
_BLOCK = 512  # bytes: what a GPU's allocator rounds to, and so the buffers of a capture


PREDICTED = "predicted"  # the table of what was predicted
FILES = (".plan", ".json", ".toml")
_MADE = "`foretell plan … -o FILE` writes one"
_SHOWN = 60  # letters of a value that is wrong


def op_names(graph: Graph) -> dict[int, str]:
    """The name of each kernel of forward, loss and backward, by its task."""
    mine = np.isin(graph.phase, (*FORWARD, *BACKWARD))
    issued = _issued(graph)
    calls = [t for t in np.flatnonzero(mine).tolist() if _is_call(graph, t, issued)]
    count: Counter[str] = Counter()
    named: dict[int, str] = {}
    for task in calls:
        named[task] = numbered(_op(graph, task), graph.phase[task] in BACKWARD, count)
    kernels = np.flatnonzero(mine & (graph.kind == Kind.KERNEL)).tolist()
    return {t: named[issued.get(t, t)] + _part(graph, t) for t in kernels}


def numbered(op: str, is_backward: bool, count: Counter[str]) -> str:
    """The name of the next operator of its sort; `count` is of those before it."""
    side = ".backward" if is_backward else ""
    plain = op.rstrip("_")  # in place or not, it is the same op
    count[plain + side] += 1
    return f"{plain}.{count[plain + side] - 1}{side}"


def given(graph: Graph, task: int) -> str:
    """The sizes of what an op is given: `32x256+256`."""
    text = graph.names[int(graph.shape[task])]
    return next((part[3:] for part in text.split(",") if part.startswith("in=")), "")


def parameter_print(sizes: Mapping[str, float]) -> str:
    """The same for two models exactly when their trained parameters are: names and bytes."""
    rows = [f"{name} {-(-int(size) // _BLOCK) * _BLOCK}" for name, size in sorted(sizes.items())]
    return _print(rows)


def made_for(parameters: str, ops: Iterable[tuple[str, str]]) -> str:
    """What a plan keeps of the step it was made for: its parameters, and (name, given) of ops."""
    return f"{parameters}.{_print(sorted(f'{name} {sizes}' for name, sizes in ops))}"


def named_ops(regions: Iterable[Iterable[str]], late: Iterable[str]) -> list[str]:
    """Every op that a plan speaks of, once."""
    inside = (name.removesuffix(COPY) for region in regions for name in region)
    return list(dict.fromkeys([*inside, *late]))


def _print(rows: list[str]) -> str:
    return hashlib.sha256("\n".join(rows).encode()).hexdigest()[:16]


def _issued(graph: Graph) -> dict[int, int]:
    """For each kernel the call that issued it."""
    edges = graph.edges
    mine = edges.kinds == WaitKind.LAUNCH
    pairs = zip(edges.waiting[mine].tolist(), edges.after[mine].tolist(), strict=True)
    return dict(pairs)


def _is_call(graph: Graph, task: int, issued: Mapping[int, int]) -> bool:
    """Whether a task issues an operator: a call of the host, or a kernel without an operator."""
    return bool(graph.kind[task] == Kind.HOST) or (
        bool(graph.kind[task] == Kind.KERNEL) and task not in issued
    )


def _op(graph: Graph, task: int) -> str:
    return str(graph.names[int(graph.op[task])])


def _part(graph: Graph, task: int) -> str:
    text = graph.names[int(graph.shape[task])]
    word = next((part[5:] for part in text.split(",") if part.startswith("part=")), "")
    return f".{word}" if word else ""


def save(plan: Plan, path: Path, predicted: Mapping[str, Any] | None = None) -> None:
    """Write a plan and what was predicted of it; the ending of the name says how."""
    fields = as_fields(plan)
    if path.suffix == ".toml":
        text = _toml(fields) + (f"\n[{PREDICTED}]\n{_toml(predicted)}" if predicted else "")
    else:
        more = {PREDICTED: dict(predicted)} if predicted else {}
        text = json.dumps(fields | more, indent=1) + "\n"
    write_text(path, text)


def load(path: Path) -> Plan:
    """Read a plan back."""
    return of_fields(_fields(path), str(path))


def predicted(path: Path) -> dict[str, Any]:
    """The prediction stored in a plan's file; empty where there is none."""
    fields = _fields(path)
    found = fields.get(PREDICTED) if isinstance(fields, dict) else None
    return found if isinstance(found, dict) else {}


def _fields(path: Path) -> Any:
    if path.suffix != ".toml":
        return read_json(path, what="plan", hint=_MADE)
    try:
        return parse_toml(read_text(path, what="plan"), f"`{path}`")
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"`{path}` is no plan: {error}", hint=_MADE) from None


def read(text: str) -> Plan:
    """A plan from its text, from a file's name, or from a file with some fields changed.

    `best.plan:dp=24,global_batch=48` prices a plan that was found for other devices.
    """
    if text.endswith(FILES):
        return load(Path(text))
    name, _, changes = text.partition(":")
    if not name.endswith(FILES):
        return Plan.parse(text)
    return load(Path(name)).changed(changes)


def as_fields(plan: Plan) -> dict[str, Any]:
    """The fields that are not plain, as JSON has them."""
    plain = Plan()
    return {
        f.name: _list(getattr(plan, f.name))
        for f in dataclasses.fields(plan)
        if getattr(plan, f.name) != getattr(plain, f.name)
    }


def of_fields(fields: Any, where: str) -> Plan:
    """A plan from the fields of a file."""
    known = field_types()
    if not isinstance(fields, dict):
        raise InputError(f"`{where}` is no plan", hint="it is one table of fields")
    fields = {key: value for key, value in fields.items() if key != PREDICTED}
    for key, value in fields.items():
        if key not in known:
            raise unknown(f"field of a plan in `{where}`", key, known)
        if not _fits(value, known[key]):
            raise InputError(
                f"`{key}` in `{where}` is {_short(value)}, which it cannot be", hint=_MADE
            )
    return Plan(**{key: _tuple(value) for key, value in fields.items()})


def _fits(value: Any, kind: Any) -> bool:
    if typing.get_origin(kind) is tuple:
        inner = typing.get_args(kind)[0]
        return isinstance(value, list) and all(_fits(item, inner) for item in value)
    if typing.get_origin(kind) is typing.Literal:
        return value in typing.get_args(kind)
    kinds = typing.get_args(kind) or (kind,)
    is_whole_float = float in kinds and type(value) is int
    return type(value) in kinds or is_whole_float


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _list(value: Any) -> Any:
    return [_list(item) for item in value] if isinstance(value, tuple) else value


def _tuple(value: Any) -> Any:
    return tuple(_tuple(item) for item in value) if isinstance(value, list) else value


def _toml(fields: Mapping[str, Any]) -> str:
    """JSON's numbers, texts, lists and booleans are TOML's too."""
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in fields.items())
