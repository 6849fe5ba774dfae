"""Tasks written down on a page of plain arrays, and simulated by the rule of the simulator.

One task stands for what all devices of a cell do. Lanes: the compute of each cell, then its
collectives (one at a time). Links of each box: out, in, and the bus inside. The rule by which
tasks start is that of `foretell.simulate.events`, which simulates them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from foretell.compiled import C1, F1, I1, J1, S1, compiled
from foretell.simulate.events import Fixed, State, run

FORWARD, BACKWARD, SEND, SYNC, PRODUCT, UPDATE, SHARE = range(7)  # what a task is
TASKS, LANES, USES, EDGES = range(4)  # places in `Page.count`


class Page(NamedTuple):
    """Room to write tasks down."""

    seconds: F1
    priority: J1
    what: C1
    cell: S1
    group: S1
    lane_start: I1
    lane: J1
    use_start: I1
    use_link: J1
    use_demand: F1
    edge_from: J1
    edge_to: J1
    count: I1  # type: ignore[assignment]


@compiled
def page(groups: int, cells: int, micros: int) -> Page:
    """Room for the tasks of any placement of so many groups."""
    n = micros * groups * cells * 10 + 8 * groups + 4 * cells + 64
    wide = 4 * n + 8 * groups * cells
    return Page(
        np.empty(n), np.empty(n, np.int32), np.empty(n, np.int8), np.empty(n, np.int16),
        np.empty(n, np.int16), np.empty(n + 1, np.int64), np.empty(wide, np.int32),
        np.empty(n + 1, np.int64), np.empty(wide, np.int32), np.empty(wide),
        np.empty(wide, np.int32), np.empty(wide, np.int32), np.zeros(4, np.int64),
    )  # fmt: skip


@compiled
def law(rows: Any, size: float) -> float:
    """The least of some laws at one size."""
    best = np.inf
    root = np.sqrt(size)
    for i in range(len(rows)):
        best = min(best, rows[i, 0] + rows[i, 1] * size + rows[i, 2] * root)
    return best


@compiled
def task(p: Page, seconds: float, priority: int, what: int, cell: int, group: int) -> Any:
    """A new task; lanes, links and waits that are added next are its own."""
    i = p.count[TASKS]
    p.seconds[i], p.priority[i], p.what[i], p.cell[i], p.group[i] = (
        seconds,
        priority,
        what,
        cell,
        group,
    )
    p.count[TASKS] = i + 1
    p.lane_start[i + 1], p.use_start[i + 1] = p.count[LANES], p.count[USES]
    return i


@compiled
def holds(p: Page, lane: int) -> None:
    """The newest task holds a lane."""
    p.lane[p.count[LANES]] = lane
    p.count[LANES] += 1
    p.lane_start[p.count[TASKS]] = p.count[LANES]


@compiled
def uses(p: Page, link: int, demand: float) -> None:
    """The newest task uses a part of a link."""
    n = p.count[USES]
    p.use_link[n], p.use_demand[n] = link, demand
    p.count[USES] = n + 1
    p.use_start[p.count[TASKS]] = n + 1


@compiled
def waits(p: Page, after: int) -> None:
    """The newest task waits for another; nothing where there is none."""
    if after >= 0:
        n = p.count[EDGES]
        p.edge_from[n], p.edge_to[n] = after, p.count[TASKS] - 1
        p.count[EDGES] = n + 1


@compiled
def waits_all(p: Page, arrived: Any, to: int) -> None:
    """The newest task waits for all messages to one cell."""
    edge_from, edge_to, newest = p.edge_from, p.edge_to, p.count[TASKS] - 1
    n = p.count[EDGES]
    for a in range(len(arrived)):
        if arrived[a, to] >= 0:
            edge_from[n], edge_to[n] = arrived[a, to], newest
            n += 1
    p.count[EDGES] = n


@compiled
def play(p: Page, cells: int, links: int) -> Any:
    """Simulate what is written on a page: start and end of every task."""
    n, edges, held = p.count[TASKS], p.count[EDGES], p.count[LANES]
    follow_start = np.zeros(n + 1, np.int64)
    waiting = np.zeros(n, np.int32)
    for e in range(edges):
        follow_start[p.edge_from[e] + 1] += 1
        waiting[p.edge_to[e]] += 1
    for i in range(n):
        follow_start[i + 1] += follow_start[i]
    follower = np.empty(edges, np.int32)
    at = follow_start.copy()
    for e in range(edges):
        follower[at[p.edge_from[e]]] = p.edge_to[e]
        at[p.edge_from[e]] += 1
    base = np.zeros(2 * cells + 1, np.int64)
    for k in range(held):
        base[p.lane[k] + 1] += 1
    for lane in range(2 * cells):
        base[lane + 1] += base[lane]
    fixed = Fixed(
        p.seconds[:n], np.zeros(0), p.priority[:n], p.lane_start[: n + 1], p.lane[:held], base,
        follow_start, follower, np.zeros(0), np.zeros(n + 1, np.int64), np.zeros(0, np.int32),
        p.use_start[: n + 1], p.use_link[: p.count[USES]], p.use_demand[: p.count[USES]],
        np.ones(links),
    )  # fmt: skip
    fresh, ready = np.empty(n, np.int32), 0
    for i in range(n):
        if waiting[i] == 0:
            fresh[ready] = i
            ready += 1
    state = State(
        waiting, np.zeros(n), np.full(n, -1, np.int32), np.zeros(n), np.full(n, -1, np.int32),
        np.zeros(n), np.zeros(n), np.full(n, -1, np.int32), np.zeros(n, np.uint8),
        np.zeros(2 * cells, np.uint8), np.zeros(2 * cells), np.full(2 * cells, -1, np.int32),
        np.empty(held, np.int32), np.zeros(2 * cells, np.int64), np.empty(2 * n + 1),
        np.empty(2 * n + 1, np.int64), fresh, np.array([0, ready]),
    )  # fmt: skip
    run(fixed, state, 0.0)
    return state.start, state.end
