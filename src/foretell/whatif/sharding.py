"""Parameters gathered unit by unit, ahead of each pass, and gradients scattered behind it.

A unit is a run of layers whose parameters come to a number of bytes. While one unit computes,
the next ones are gathered, `prefetch` of them; a gather waits for room, that is for the end of the
unit that many and one before. A gathered unit is copied into place, its gradients into one buffer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from foretell.graph.edit import Edit
from foretell.graph.graph import NONE, Array, Graph, Ids, Kind, Phase, group_text
from foretell.whatif.base import DoesNotApply
from foretell.whatif.bucket_copies import KERNEL, first_of_update, host_op, launch_calls
from foretell.whatif.collective_cost import Wires
from foretell.whatif.exchange import CALL, comm_lane, take_out
from foretell.whatif.gradients import Gradients, compute_lane
from foretell.whatif.interference import share_devices
from foretell.whatif.parameters import PACK


@dataclass(frozen=True, eq=False)
class Units:
    """The units of one rank in forward order, and the device tasks where each begins and ends."""

    rank: int
    bytes: Array
    forward: Ids  # the first kernel of each unit's forward
    backward: Ids  # and of its backward
    ready: Ids  # the task behind which all its gradients are there


def units(graph: Graph, found: Gradients, cap: float) -> Units:
    """Runs of layers, first to last, whose parameters come to `cap` bytes."""
    lane = compute_lane(graph, found.rank)
    begins = [_layer_begins(graph, lane, phase) for phase in (Phase.FORWARD, Phase.BACKWARD)]
    rows: list[tuple[float, int, int, int]] = []
    bytes = 0.0
    forward: list[int] = []
    backward: list[int] = []
    ready: list[int] = []
    for i in reversed(range(len(found))):
        layer = found.layer[i]
        forward += [begins[0][layer]] if layer in begins[0] else []
        backward += [begins[1][layer]] if layer in begins[1] else []
        bytes, ready = bytes + float(found.bytes[i]), [*ready, int(found.ready[i])]
        if forward and backward and (bytes >= cap or i == 0):
            rows.append(
                (bytes, _first(graph, forward), _first(graph, backward), _last(graph, ready))
            )
            bytes, forward, backward, ready = 0.0, [], [], []
    if not rows:
        raise DoesNotApply("no layer of this step has both a forward and a backward")
    rows[-1] = (rows[-1][0] + bytes, *rows[-1][1:3], _last(graph, [rows[-1][3], *ready]))
    rows.sort(key=lambda row: int(graph.order[row[1]]))
    size, ahead, back, done = zip(*rows, strict=True)
    return Units(found.rank, np.array(size), np.array(ahead), np.array(back), np.array(done))


def _layer_begins(graph: Graph, lane: int, phase: Phase) -> dict[str, int]:
    """The first kernel of every layer in a phase, on one lane."""
    mine = np.flatnonzero((graph.lane == lane) & (graph.phase == phase))
    mine = mine[np.argsort(graph.order[mine], kind="stable")][::-1]
    found = {graph.text_of("layer", int(i)): int(i) for i in mine}
    found.pop("", None)
    return found


def _first(graph: Graph, tasks: list[int]) -> int:
    return min(tasks, key=lambda i: int(graph.order[i]))


def _last(graph: Graph, tasks: list[int]) -> int:
    return max(tasks, key=lambda i: int(graph.order[i]))


def sharded(
    edit: Edit,
    found: tuple[Gradients, ...],
    cap: float,
    prefetch: int,
    group: tuple[int, ...],
    links: Wires,
    rate: float,
    behind: float,
) -> None:
    """All gathers and reduce-scatters of zero=3."""
    graph, before = edit.before, edit.size
    take_out(edit, copies=True)
    sides = [units(graph, side, cap) for side in _unpacked(graph, found)]
    size = sides[0].bytes
    marks = np.array([_mark(edit, side) for side in sides])
    back = np.argsort(graph.order[sides[0].backward], kind="stable")  # mostly last to first
    _gather(edit, sides, size, [s.forward for s in sides], marks, prefetch, group, links, rate)
    _gather(
        edit, sides, size[back],
        [s.backward[back] for s in sides], marks * 0 + NONE, prefetch, group, links, rate,
    )  # fmt: skip
    _scatter(edit, sides, group, links, rate, behind)
    new = np.arange(before, edit.size)
    kind = edit.column("kind")[new]
    share_devices(
        edit, [s.rank for s in sides], new[kind == Kind.COLLECTIVE], new[kind == Kind.KERNEL]
    )


def _unpacked(graph: Graph, found: tuple[Gradients, ...]) -> tuple[Gradients, ...]:
    """The same gradients, each ready behind a task that is no copy into a bucket."""
    return tuple(
        replace(side, ready=np.array([_ahead_of(graph, int(i)) for i in side.ready]))
        if side.source == "packed"
        else side
        for side in found
    )


def _ahead_of(graph: Graph, task: int) -> int:
    """The last task ahead of a copy, on the thread that launches it or else on its stream."""
    call = int(launch_calls(graph, np.array([task]))[0])
    at = task if call == NONE else call
    of_exchange = np.isin(graph.op, graph.names.matching(PACK))
    of_exchange |= np.isin(graph.name, graph.names.matching("gradients"))
    mine = (graph.lane == graph.lane[at]) & (graph.order < graph.order[at]) & ~of_exchange
    tasks = np.flatnonzero(mine)
    return int(tasks[np.argmax(graph.order[tasks])])


def _mark(edit: Edit, side: Units) -> int:
    """A kernel of no length ahead of the first forward: what is gathered is the updated ones."""
    lane = int(edit.before.lane[side.forward[0]])
    return int(
        edit.insert(
            1, issued_before=int(side.forward[0]), kind="kernel", op="unshard", rank=side.rank,
            lane=lane, phase="forward",
        )[0]
    )  # fmt: skip


def _gather(
    edit: Edit,
    sides: list[Units],
    size: Array,
    begins: list[Ids],
    marks: Ids,
    prefetch: int,
    group: tuple[int, ...],
    links: Wires,
    rate: float,
) -> None:
    """All-gathers of units ahead of the pass that needs them; without marks the first is there."""
    start = 0 if marks[0] != NONE else 1
    which = np.arange(start, len(size))
    if not len(which):
        return
    ahead = np.maximum(which - prefetch, 0)
    sent = _collectives(
        edit, "all_gather", size[which], group, links, sides, begins[0][ahead], True
    )
    for side, begin, mark in zip(sides, begins, marks.tolist(), strict=True):
        room = np.array([_just_ahead(edit.before, int(i)) for i in begin[ahead]])
        if mark != NONE:
            edit.wait(sent, mark, kind="event")
        known = room != NONE
        edit.wait(sent[known], room[known], kind="event")
        calls = _call(edit, side.rank, launch_calls(edit.before, begin[ahead]), True)
        if len(calls):
            edit.wait(sent, calls, kind="launch")
        copies = edit.insert(
            issued_before=begin[which], kind="kernel", op="unshard", rank=side.rank,
            lane=edit.before.lane[begin[which]], phase=edit.before.phase[begin[which]],
            seconds=KERNEL + 2 * size[which] / rate, source="formula",
        )  # fmt: skip
        edit.wait(copies, sent, kind="event")


def _collectives(
    edit: Edit,
    op: str,
    size: Array,
    group: tuple[int, ...],
    links: Wires,
    sides: list[Units],
    anchor: Ids,
    is_ahead: bool,
) -> Ids:
    where: dict[str, Any] = {"issued_before": anchor} if is_ahead else {"issued_after": anchor}
    what = "parameters" if is_ahead else "gradients"
    sent = edit.insert(
        **where, kind="collective", op=op, name=[f"{what} {k}" for k in range(len(size))],
        rank=sides[0].rank, lane=comm_lane(edit, sides[0].rank), phase="communicate",
        seconds=links.seconds(op, size, group), sigma=links.sigma(op, size, group),
        comm_bytes=size, group=group_text(group), source="formula",
    )  # fmt: skip
    for side in sides[1:]:
        edit.hold(sent, comm_lane(edit, side.rank))
    return sent


def _call(edit: Edit, rank: int, anchor: Ids, is_ahead: bool) -> Ids:
    """The host's calls of collectives, none where no host launches."""
    if (anchor == NONE).any():
        return np.zeros(0, np.int64)
    where: dict[str, Any] = {"issued_before": anchor} if is_ahead else {"issued_after": anchor}
    return edit.insert(
        **where, kind="host", op="collective", name="gradients", rank=rank,
        lane=edit.before.lane[anchor], seconds=CALL + 2 * host_op(edit.before, rank),
        phase=edit.before.phase[anchor],
    )  # fmt: skip


def _just_ahead(graph: Graph, task: int) -> int:
    """The task before one on its lane, NONE where there is none."""
    tasks = np.flatnonzero((graph.lane == graph.lane[task]) & (graph.order < graph.order[task]))
    return int(tasks[np.argmax(graph.order[tasks])]) if len(tasks) else NONE


def _scatter(
    edit: Edit,
    sides: list[Units],
    group: tuple[int, ...],
    links: Wires,
    rate: float,
    behind: float,
) -> None:
    """Reduce-scatters of the gradients of each unit, and the optimizer behind them.

    The slowest rank is `behind` so many seconds with the unit that is ready last.
    """
    graph, size = edit.before, sides[0].bytes
    copies = [_flattened(edit, side, rate) for side in sides]
    sent = _collectives(edit, "reduce_scatter", size, group, links, sides, copies[0], False)
    for side, copy in zip(sides, copies, strict=True):
        edit.wait(sent, copy, kind="event")
        edit.wait(sent[0], copy[0], lag=behind, kind="event")
        kernel, _ = first_of_update(graph, side.rank)
        if kernel != NONE:
            edit.wait(np.full(len(sent), kernel), sent, kind="event")


def _flattened(edit: Edit, side: Units, rate: float) -> Ids:
    """The copy of a unit's gradients into one buffer."""
    graph = edit.before
    is_hosted = bool((graph.kind[side.ready] == Kind.HOST).all())
    calls = _call(edit, side.rank, side.ready, False) if is_hosted else side.ready
    copies = edit.insert(
        issued_after=calls, kind="kernel", op="flatten", rank=side.rank,
        lane=compute_lane(graph, side.rank), phase="backward",
        seconds=KERNEL + 2 * side.bytes / rate, source="formula",
    )  # fmt: skip
    edit.wait(copies, calls, kind="launch" if is_hosted else "data")
    return copies
