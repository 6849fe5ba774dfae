"""A collective taken apart: kernels and smaller collectives in its place, one after the other.

What the collective waited for, the first stage waits for; who waited for it waits for the last.
Kernels run on every rank that takes part, the first on the stream that computes, those behind
messages on a stream of their own, where the callbacks of a communication hook run. The host starts
them all where it started the collective: callbacks run in the thread that calls the hook. A stage
whose outcome the host needs (`is_awaited`) holds that thread up until the device has come there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from foretell.graph.edit import Edit
from foretell.graph.graph import NONE, Array, Graph, Ids, Kind
from foretell.whatif.bucket_copies import first_of_update, launch_calls
from foretell.whatif.exchange import comm_lane
from foretell.whatif.gradients import compute_lane
from foretell.whatif.interference import share_devices
from foretell.whatif.parameters import UNPACK


@dataclass(frozen=True, eq=False)
class Stage:
    """One piece of work in the place of each of some collectives."""

    op: str
    seconds: Array
    bytes: Array  # moved in memory by a kernel, the tensor communicated by a message
    is_message: bool = False
    host: Array = field(default_factory=lambda: np.zeros(1))  # seconds the host takes to start it
    is_awaited: bool = False  # the host waits until the device has done it
    group: tuple[str, ...] = ()  # of each message; by default those of the collective
    lane: str = ""  # of messages: a lane of that name, by default the collective's own


def take_apart(edit: Edit, old: Ids, stages: Sequence[Stage]) -> None:
    """Put stages in the place of collectives."""
    graph = edit.before
    sides = _sides(graph, old)
    ranks = sorted({rank for side in sides for rank in side})
    last = {rank: np.full(len(old), NONE) for rank in ranks}
    started, before = False, edit.size
    for stage in stages:
        if stage.is_message:
            _message(edit, old, stage, sides, last, started)
        else:
            for rank in ranks:
                _kernel(edit, old, stage, rank, _where(sides, rank), last, started)
        started = True
    _tie(edit, old, last, sides)
    new = np.arange(before, edit.size)
    kind = edit.column("kind")[new]
    _handed_back(edit, ranks, old, new[np.isin(kind, (Kind.HOST, Kind.SYNC))])
    share_devices(edit, ranks, new[kind == Kind.COLLECTIVE], new[kind == Kind.KERNEL])
    edit.remove(old, bridge=False)
    edit.fact(taken_apart=edit.spec.partition(":")[0])


def _sides(graph: Graph, old: Ids) -> list[tuple[int, ...]]:
    """The ranks of the graph that take part in each collective."""
    lanes = [graph[int(i)].lanes for i in old]
    return [tuple(graph.lanes.rank[list(own)].tolist()) for own in lanes]


def _where(sides: list[tuple[int, ...]], rank: int) -> Ids:
    return np.array([k for k, side in enumerate(sides) if rank in side], np.int64)


def _kernel(
    edit: Edit, old: Ids, stage: Stage, rank: int, which: Ids, last: dict[int, Ids], started: bool
) -> None:
    graph = edit.before
    if not len(which):
        return
    lane = (
        edit.lane("hook stream", rank=rank, kind="compute")
        if started
        else compute_lane(graph, rank)
    )
    new = edit.insert(
        issued_after=np.where(last[rank][which] != NONE, last[rank][which], old[which]),
        kind="kernel", op=stage.op, name=[graph.text_of("name", int(i)) for i in old[which]],
        rank=rank, lane=lane, seconds=_each(stage.seconds, old)[which],
        bytes=_each(stage.bytes, old)[which], phase="communicate" if started else "backward",
        source="formula",
    )  # fmt: skip
    _behind(edit, old, new, which, last, [rank], started)
    host = _each(stage.host, old)[which]
    last[rank][which] = _hosted(edit, old[which], new, rank, host, stage, started)


def _message(
    edit: Edit,
    old: Ids,
    stage: Stage,
    sides: list[tuple[int, ...]],
    last: dict[int, Ids],
    started: bool,
) -> None:
    graph, which = edit.before, np.arange(len(old))
    first = np.array([side[0] for side in sides])
    # Kernels were put behind each other rank by rank: the message comes behind the last of them.
    behind = np.array([last[max(s)][k] if started else old[k] for k, s in enumerate(sides)])
    lanes = _lanes_of(edit, old, stage, sides)
    new = edit.insert(
        issued_after=behind, kind="collective", op=stage.op,
        name=[graph.text_of("name", int(i)) for i in old], rank=first,
        lane=[own[0] for own in lanes], phase="communicate",
        seconds=_each(stage.seconds, old), comm_bytes=_each(stage.bytes, old),
        group=list(stage.group) or [graph.text_of("group", int(i)) for i in old],
        sigma=graph.sigma[old], source="formula",
    )  # fmt: skip
    for k, own in enumerate(lanes):
        if len(own) > 1:
            edit.hold(np.full(len(own) - 1, new[k]), np.array(own[1:]))
    _behind(edit, old, new, which, last, sorted(last), started)
    for rank in last:
        mine = _where(sides, rank)
        last[rank][mine] = new[mine]


def _lanes_of(
    edit: Edit, old: Ids, stage: Stage, sides: list[tuple[int, ...]]
) -> list[tuple[int, ...]]:
    if not stage.lane:
        return [edit.before[int(i)].lanes for i in old]
    return [tuple(comm_lane(edit, rank, stage.lane) for rank in side) for side in sides]


def _behind(
    edit: Edit,
    old: Ids,
    new: Ids,
    which: Ids,
    last: dict[int, Ids],
    ranks: list[int],
    started: bool,
) -> None:
    """Let a stage wait for the one before it on some ranks, or for what its collective did."""
    if started:
        for rank in ranks:
            known = last[rank][which] != NONE
            edit.wait(new[known], last[rank][which][known], kind="event")
        return
    e, place = edit.before.edges, np.full(edit.before.size, NONE)
    place[old[which]] = np.arange(len(which))
    mine = (place[e.waiting] != NONE) & np.isin(edit.before.rank[e.after], ranks)
    edit.wait(new[place[e.waiting[mine]]], e.after[mine], lag=e.lags[mine])


def _hosted(
    edit: Edit, old: Ids, new: Ids, rank: int, host: Array, stage: Stage, started: bool
) -> Ids:
    """The host's time for starting kernels, and its wait for them; the last tasks of the stage.

    The first stage is started ahead of the call for the collective, the others behind it.
    """
    graph, end = edit.before, new.copy()
    calls = launch_calls(graph, old)
    mine = calls != NONE
    mine[mine] = graph.rank[calls[mine]] == rank
    mine &= graph.order[np.maximum(calls, 0)] < graph.order[old]  # moved by another what-if: none
    some = mine & (host > 0)
    like: dict[str, Any] = {"rank": rank, "phase": "backward"}
    if some.any():
        starts = edit.insert(
            issued_before=new[some] if started else calls[some], kind="host", op=stage.op,
            lane=graph.lane[calls[some]], seconds=host[some], **like,
        )  # fmt: skip
        edit.wait(new[some], starts, kind="launch")
    if stage.is_awaited and mine.any():
        waits = edit.insert(
            issued_after=new[mine], kind="sync", op="cudaStreamSynchronize",
            lane=graph.lane[calls[mine]], **like,
        )  # fmt: skip
        edit.wait(waits, new[mine], kind="sync")
        end[mine] = waits
    return end


def _handed_back(edit: Edit, ranks: list[int], old: Ids, hosted: Ids) -> None:
    """The backward pass is over on its thread when the last hook is: the update waits for it."""
    graph = edit.before
    for rank in ranks:
        mine = hosted[edit.column("rank")[hosted] == rank]
        copies = graph.select(kind="host", op=UNPACK, rank=rank)
        first = first_of_update(graph, rank)[1]
        first = int(copies[np.argmin(graph.order[copies])]) if len(copies) else first
        if len(mine) and first != NONE and graph.order[first] > graph.order[old].max():
            edit.wait(np.full(len(mine), first), mine, kind="thread")


def _tie(edit: Edit, old: Ids, last: dict[int, Ids], sides: list[tuple[int, ...]]) -> None:
    """Let those who waited for a collective wait for the last stage of it."""
    graph, place = edit.before, np.full(edit.before.size, NONE)
    place[old] = np.arange(len(old))
    e = graph.edges
    mine = (place[e.after] != NONE) & (place[e.waiting] == NONE)
    which, who = place[e.after[mine]], e.waiting[mine]
    for rank in last:
        known = last[rank][which] != NONE
        # A trace may show a task behind a collective that is issued ahead of it.
        near = known & (graph.order[who] > graph.order[old[which]])
        near &= (graph.rank[who] == rank) | (np.array([len(s) for s in sides])[which] == 1)
        edit.wait(who[near], last[rank][which[near]], kind="event")


def _each(values: Array, old: Ids) -> Array:
    return np.broadcast_to(np.asarray(values, np.float64), len(old))
