"""Names of the ops of a captured step in a plan, and a fingerprint of that step.

    gelu.0              the first gelu of forward and loss
    mm.3.backward       the fourth mm of the backward
    convolution.0.bias  one of several kernels of an operator

Operators are counted as they are issued, views too, so that every tracer of the same model finds
the same names. `made_for` is what a plan keeps in `model`: a print of the parameters, and one of
the ops it names with the sizes they are given.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping

import numpy as np

from foretell.graph import Graph, Kind, Phase, WaitKind

FORWARD, BACKWARD = (Phase.FORWARD, Phase.LOSS), (Phase.BACKWARD,)
COPY = "*"  # behind an op's name: recomputed in this region, and where it was too
_BLOCK = 512  # bytes: what a GPU's allocator rounds to, and so the buffers of a capture


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
