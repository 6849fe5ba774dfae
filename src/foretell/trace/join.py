"""The ranks of one step put together: tasks numbered in the order of issue, and the graph of them.

A task's number is its place in the issue order of its lanes, and nothing waits for a higher number.
Collectives that several ranks run together become one task that holds the lanes of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from foretell.graph import (
    Drained,
    Graph,
    Held,
    LaneKind,
    Lanes,
    Links,
    Names,
    Used,
    assemble,
    edges,
)
from foretell.graph.graph import NONE, Array
from foretell.trace.step.compose import Part
from foretell.trace.words import Texts

_TICK = 1e-12  # seconds between tasks that must come one after the other
Together = Sequence[Sequence[tuple[int, int]]]  # sets of (part, task) that are one task


@dataclass(frozen=True, eq=False)
class Whole:
    """All tasks of a step in the order of their numbers, not yet a graph."""

    columns: dict[str, Array]
    waits: tuple[Array, Array, Array, Array]  # waiting, after, lag, kind
    drained: tuple[Array, Array]
    held: tuple[Array, Array]
    used: tuple[Array, Array, Array]
    lanes: Lanes
    links: Links
    names: Names
    start: Array
    end: Array
    recorded: Array
    is_ahead: Array


@dataclass(frozen=True, eq=False)
class _Stack:
    """The tasks of all ranks one after the other, and which task each has become."""

    parts: Sequence[Part]
    base: Array  # number of the first task of each part
    lane_base: Array
    columns: dict[str, Array]
    issued: Array
    same: Array  # itself, or the task it is one with


def whole(parts: Sequence[Part], texts: Texts, together: Together = ()) -> Whole:
    """The tasks of all ranks, numbered in the order in which they were issued."""
    s = _stacked(parts)
    start = np.concatenate([p.start for p in parts])
    end = np.concatenate([p.end for p in parts])
    held = _merge(s, together, start, end)
    waiting, after, lag, kind = _waits(s)
    drained = _drained(s)
    number = _numbers(s, (waiting, after), drained) if together else s.issued
    keep = np.flatnonzero(s.same == np.arange(len(s.same)))
    ranked = keep[np.lexsort((start[keep], number[keep]))]
    final = np.full(len(number), NONE, np.int64)
    final[ranked] = np.arange(len(ranked))
    final = final[s.same]
    right = final[after] < final[waiting]  # where stamps contradict the order of a lane it wins
    used, links = _uses(s, final, texts)
    return Whole(
        {k: v[ranked] for k, v in s.columns.items()},
        (final[waiting][right], final[after][right], lag[right], kind[right]),
        (final[drained[0]], drained[1]),
        (final[held[0]], held[1]),
        used,
        _lanes(parts, texts),
        links,
        Names(texts.numbers),
        start[ranked],
        end[ranked],
        np.concatenate([p.recorded for p in parts])[ranked],
        np.concatenate([p.is_ahead for p in parts])[ranked],
    )


def _stacked(parts: Sequence[Part]) -> _Stack:
    base = np.cumsum([0] + [len(p.issued) for p in parts])
    lane_base = np.cumsum([0] + [len(p.lanes) for p in parts])
    columns = {k: np.concatenate([p.columns[k] for p in parts]) for k in parts[0].columns}
    columns["lane"] += np.repeat(lane_base[:-1], np.diff(base)).astype(np.int32)
    issued = np.concatenate([p.issued for p in parts])
    return _Stack(parts, base, lane_base, columns, issued, np.arange(len(issued)))


def _merge(s: _Stack, together: Together, start: Array, end: Array) -> tuple[Array, Array]:
    """Make each set one task, in place: its first; (task, lane) of the lanes it holds besides."""
    rows: list[tuple[int, int]] = []
    for group in together:
        tasks = np.array([s.base[part] + task for part, task in group])
        one = tasks[0]
        s.same[tasks] = one
        rows += [(int(one), int(lane)) for lane in s.columns["lane"][tasks[1:]]]
        # Whatever came last did not wait: its time is that of the transfer.
        s.columns["seconds"][one] = s.columns["seconds"][tasks].min()
        s.columns["gap"][one] = s.columns["gap"][tasks].min()
        s.columns["comm_bytes"][one] = s.columns["comm_bytes"][tasks].max()
        start[one], end[one] = start[tasks].max(), end[tasks].max()
        s.issued[one] = s.issued[tasks].max()
    table = np.array(rows, np.int64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def _waits(s: _Stack) -> tuple[Array, Array, Array, Array]:
    waits = [p.waits for p in s.parts]
    shift = [np.full(len(w.waiting), b) for w, b in zip(waits, s.base, strict=False)]
    moved = np.concatenate(shift)
    return (
        np.concatenate([w.waiting for w in waits]) + moved,
        np.concatenate([w.after for w in waits]) + moved,
        np.concatenate([w.lag for w in waits]),
        np.concatenate([w.kind for w in waits]),
    )


def _drained(s: _Stack) -> tuple[Array, Array]:
    task = [p.waits.drain_task + b for p, b in zip(s.parts, s.base, strict=False)]
    lane = [p.drain_lane + b for p, b in zip(s.parts, s.lane_base, strict=False)]
    return np.concatenate(task), np.concatenate(lane)


def _numbers(s: _Stack, waits: tuple[Array, Array], drained: tuple[Array, Array]) -> Array:
    """Times of issue, raised so that each task comes behind all that it waits for.

    A collective is issued when its last rank has issued it, which can be long after what comes
    behind it on the lanes of the others.
    """
    pairs = [waits, _lane_pairs(s), _drain_pairs(s, drained)]
    waiting = s.same[np.concatenate([p[0] for p in pairs])]
    after = s.same[np.concatenate([p[1] for p in pairs])]
    apart = waiting != after
    return _raised(s.issued, waiting[apart], after[apart])


def _raised(times: Array, waiting: Array, after: Array) -> Array:
    """Times raised so that each is at least a tick behind all it waits for.

    Where ranks contradict each other no order is right; the graph's own check will say so.
    """
    ranked = np.argsort(after, kind="stable")
    bounds = np.searchsorted(after[ranked], np.arange(len(times) + 1)).tolist()
    follower, found = waiting[ranked].tolist(), times.tolist()
    left = np.bincount(waiting, minlength=len(times)).tolist()
    free = [i for i, count in enumerate(left) if not count]
    while free:
        i = free.pop()
        behind = found[i] + _TICK
        for f in follower[bounds[i] : bounds[i + 1]]:
            found[f] = max(found[f], behind)
            left[f] -= 1
            if not left[f]:
                free.append(f)
    return np.array(found)


def _lane_pairs(s: _Stack) -> tuple[Array, Array]:
    """Every task and the one before it on its lane, rank by rank as they were issued there."""
    before = np.concatenate([p.issued for p in s.parts])  # not as the last rank issued it
    lane = s.columns["lane"]
    ranked = np.lexsort((before, lane))
    same = lane[ranked[1:]] == lane[ranked[:-1]]
    return ranked[1:][same], ranked[:-1][same]


def _drain_pairs(s: _Stack, drained: tuple[Array, Array]) -> tuple[Array, Array]:
    """Every task that drains a lane, and the last one issued there before it."""
    before = np.concatenate([p.issued for p in s.parts])
    lane = s.columns["lane"]
    ranked = np.lexsort((before, lane))
    at = _search(lane[ranked], before[ranked], drained[1], before[drained[0]]) - 1
    fits = (at >= 0) & (lane[ranked[at]] == drained[1])
    return drained[0][fits], ranked[at[fits]]


def _search(lane: Array, time: Array, wanted_lane: Array, wanted_time: Array) -> Array:
    """Where a (lane, time) belongs in rows sorted by both."""
    both = np.lexsort(
        (
            np.append(np.ones(len(lane)), np.zeros(len(wanted_lane))),
            np.append(time, wanted_time),
            np.append(lane, wanted_lane),
        )
    )
    is_row = both < len(lane)
    count = np.cumsum(is_row)
    found = np.empty(len(wanted_lane), np.int64)
    found[both[~is_row] - len(lane)] = count[~is_row]
    return found


def _uses(s: _Stack, final: Array, texts: Texts) -> tuple[tuple[Array, Array, Array], Links]:
    """Which tasks share which device, and the devices as links of capacity one."""
    names: list[str] = []
    rows: list[tuple[Array, Array, Array]] = []
    for p, base in zip(s.parts, s.base, strict=False):
        devices, link = np.unique(p.shared.device, return_inverse=True)
        task = final[base + len(p.step.host) + p.shared.work]
        rows.append((task, len(names) + link.reshape(-1), p.shared.demand))
        names += [f"rank {p.step.rank} device {k}" for k in devices.tolist()]
    task, link, demand = (np.concatenate([r[k] for r in rows]) for k in range(3))
    return (task, link, demand), Links(texts.table(names), np.ones(len(names)))


def _lanes(parts: Sequence[Part], texts: Texts) -> Lanes:
    rows = [(p.step.rank, name, kind) for p in parts for name, kind in p.lanes]
    return Lanes(
        np.array([r[0] for r in rows]),
        texts.table(r[1] for r in rows),
        np.array([r[2] for r in rows]),
        np.array([r[2] != LaneKind.OTHER for r in rows]),
    )


def graph_of(w: Whole, keep: Array, facts: dict[str, Any]) -> Graph:
    """The graph of the tasks kept, numbered anew."""
    number = np.cumsum(keep) - 1
    size = int(keep.sum())
    waiting, after, lag, kind = w.waits
    inside = keep[waiting] & keep[after]
    made = edges(size, number[waiting[inside]], number[after[inside]], lag[inside], kind[inside])
    return assemble(
        size,
        {k: v if keep.all() else v[keep] for k, v in w.columns.items()},
        made,
        names=w.names,
        lanes=w.lanes,
        links=w.links,
        drained=Drained(*_rows(w.drained, keep, number)),
        held=Held(*_rows(w.held, keep, number)),
        used=Used(*_rows(w.used, keep, number)),
        facts=facts,
    )


def _rows(rows: tuple[Array, ...], keep: Array, number: Array) -> list[Array]:
    """Rows of the tasks kept, numbered anew and sorted by task."""
    task, inside = rows[0], keep[rows[0]]
    ranked = np.lexsort((rows[1][inside], task[inside]))
    return [number[task[inside]][ranked], *(r[inside][ranked] for r in rows[1:])]
