"""The operator calls of a traced step: the host tasks of each, and the tensors it makes and keeps.

A trace cuts an operator's time on its thread at every call into the driver. The pieces and calls of
one operator stand together; behind its last piece comes the gap of untraced time. The calls with
their sizes become a tape (→ `foretell.memory.tape`).
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import numpy as np

from foretell.graph.graph import NONE, Array, Graph, Kind, Phase, WaitKind
from foretell.memory.read import tape_of
from foretell.memory.tape import FACT, Call, encode
from foretell.trace.events import Events, What
from foretell.trace.step.compose import Labels, labels
from foretell.trace.step.tasks import RankStep

CALLS = ("cuda", "cu", "hip")  # how calls into a driver begin


def operators(graph: Graph) -> Array:
    """For every task the number of the operator it is the host's part of; NONE for all others."""
    found = np.full(graph.size, NONE, np.int64)
    host = np.flatnonzero(graph.kind == Kind.HOST)
    if not len(host):
        return found
    host = host[np.lexsort((graph.order[host], graph.lane[host]))]
    call = is_call(graph)[host]
    whose = _names(graph, host, call)
    same = np.ones(len(host), bool)
    for column in (graph.lane[host], graph.layer[host], graph.phase[host], whose):
        same[1:] &= column[1:] == column[:-1]
    over = ~call & (graph.gap[host] > 0)  # untraced time lies between operators
    alone = ~call & _launches(graph)[host]  # a piece that launches itself is the whole operator
    same[1:] &= ~over[:-1] & ~alone[1:] & ~alone[:-1]
    same[0] = False
    found[host] = np.cumsum(~same)
    return found


def is_call(graph: Graph) -> Array:
    """Which tasks are calls into the driver."""
    known = {int(k) for k in np.unique(graph.op) if graph.names[int(k)].startswith(CALLS)}
    found: Array = np.isin(graph.op, sorted(known))
    return found


def _names(graph: Graph, host: Array, call: Array) -> Array:
    """The operator each host task works for: a call works for that of the piece before it."""
    at = np.maximum.accumulate(np.where(call, 0, np.arange(len(host))))
    found: Array = graph.name[host][at]
    return found


def _launches(graph: Graph) -> Array:
    found = np.zeros(graph.size, bool)
    found[graph.edges.after[graph.edges.kinds == WaitKind.LAUNCH]] = True
    return found


_ZERO = "Optimizer.zero_grad"


def held(d: RankStep) -> dict[str, str]:
    """The tape of a step as a fact of its graph; nothing where sizes are not recorded."""
    try:
        found = calls(d, labels(d))
        tape = tape_of(found, is_zeroed_first=_is_zeroed_first(d, found))
    except (ArithmeticError, LookupError, TypeError, ValueError):
        return {}  # arguments of a form that torch does not write: the graph is none the worse
    return {} if tape is None else {FACT: encode(tape)}


def calls(d: RankStep, labels: Labels) -> list[Call]:
    """All operators that lie in no other, in the order in which they began; kernels beside."""
    n, e = d.event_tree, d.events
    made: dict[int, Call] = {}
    roots: list[Call] = []
    places = np.flatnonzero(e.what[n.event] == What.OP)
    outer = n.parent.tolist()
    for place in places.tolist():
        call = made[place] = _call(e, int(n.event[place]), int(labels.phase[place]))
        above = outer[place]
        while above != NONE and above not in made:
            above = outer[above]
        (made[above].inner if above != NONE else roots).append(call)
    _kernels(d, made)
    return sorted(roots, key=lambda call: call.start)


def _is_zeroed_first(d: RankStep, found: list[Call]) -> bool:
    """Whether gradients are not set to zero between the forward and the backward pass."""
    e, n = d.events, d.event_tree
    known = [k for k, text in enumerate(e.texts) if text.startswith(_ZERO)]
    times = e.start[n.event[np.isin(e.name[n.event], known)]]
    forward = [c.start for c in found if c.phase == Phase.FORWARD]
    backward = [c.start for c in found if c.phase == Phase.BACKWARD]
    if not forward or not backward:
        return True
    return not ((times > min(forward)) & (times < min(backward))).any()


def _call(e: Events, event: int, phase: int) -> Call:
    dims, types, values = _inputs(e.shapes[e.shape[event]])
    name = e.texts[e.name[event]].removeprefix("aten::")
    return Call(name, dims, types, values, int(e.sequence[event]), float(e.start[event]), phase)


def _kernels(d: RankStep, made: dict[int, Call]) -> None:
    """Give every call the names of the kernels it launched itself."""
    e, n = d.events, d.event_tree
    known = d.device.host != NONE
    label = d.host.label[d.device.host[known]]
    for event, place in zip(d.device.work.event[known].tolist(), label.tolist(), strict=True):
        op = int(n.op[place]) if place != NONE else NONE
        if op in made:
            made[op].kernels.append(e.texts[e.name[event]])


@lru_cache(65536)
def _inputs(raw: tuple[bytes, bytes, bytes]) -> tuple[Any, Any, Any]:
    """Sizes, formats and plain values of the inputs; nothing where they are not as expected."""
    try:
        dims, types, values = (json.loads(part) if part else [] for part in raw)
        return (
            tuple(_sizes(d) for d in dims),
            tuple(t if isinstance(t, str) else "" for t in types),
            tuple(v if isinstance(v, str) else json.dumps(v) for v in values),
        )
    except (ValueError, TypeError):
        return (), (), ()


def _sizes(dims: Any) -> Any:
    """Sizes of a tensor, or of all tensors of a list."""
    if not isinstance(dims, list):
        return ()
    return tuple(_sizes(d) if isinstance(d, list) else int(d) for d in dims)
