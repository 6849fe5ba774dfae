"""What waits for what in a step: every edge that is not the order of a thread or a stream.

    launch   a call → the work it started
    drain    a synchronising call waits for what was issued before it on the streams it names
    queue    a launch waits until the device has taken up the work `depth` launches before it
    event    work on one stream waits for work on another (cudaEventRecord, cudaStreamWaitEvent)
    thread   one thread hands over to another and waits for it

What a call was measured to wait is not kept: only what it takes once there is nothing left to wait
for. How long it waits is decided when the graph is simulated.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foretell.graph import WaitKind
from foretell.graph.columns import NONE, Array
from foretell.trace.step.device import typical
from foretell.trace.step.draft import NOISE, Draft
from foretell.trace.step.drains import drains, event_drains, queue
from foretell.trace.step.issue import issue, told_waits
from foretell.trace.step.streams import event_lags, stream_waits, unexplained
from foretell.trace.step.threads import hand_overs

_NO_LAUNCH = 1e-5  # seconds: a launch where a trace shows none to go by
_Row = tuple[Array, Array, Array | float, WaitKind]  # waiting, after, lag, kind


@dataclass(frozen=True, eq=False)
class Waits:
    """Edges between host tasks (numbered first) and device tasks, and the drained streams."""

    waiting: Array
    after: Array
    lag: Array
    kind: Array
    drain_task: Array
    drain_stream: Array
    start: Array  # of host tasks, behind their waiting
    seconds: Array  # of host tasks, without their waiting
    gap: Array  # of host tasks
    source: Array  # device work that other streams wait for, by event
    target: Array


def waits(d: Draft) -> Waits:
    """All waits of a step."""
    order, told, hosts = issue(d), told_waits(d), len(d.host)
    source, target = stream_waits(d, order, told)
    drain_task, drain_stream, last = drains(d, order, told)
    until_event, until_room, over = event_drains(d, order, told), queue(d), hand_overs(d)
    released = d.host.start.copy()  # when what each host task waited for was done
    for task, work in ((drain_task, last), until_event, until_room):
        np.maximum.at(released, task, d.device.work.end[work])
    seconds, gap = _own_seconds(d, released)
    np.subtract.at(gap, over.idle_behind, over.idle)
    rows: list[_Row] = [
        *_launches(d, source, target),
        *((t, hosts + w, 0.0, WaitKind.SYNC) for t, w in (until_event, until_room)),
        (hosts + target, hosts + source, event_lags(d, source, target), WaitKind.EVENT),
        (over.waiting, over.after, over.lag, WaitKind.THREAD),
    ]
    return Waits(
        *_stacked(rows),
        drain_task,
        drain_stream,
        np.minimum(released, np.maximum(d.host.end, d.host.start)),
        seconds,
        np.maximum(gap, 0.0),
        source,
        target,
    )


def _stacked(rows: list[_Row]) -> tuple[Array, Array, Array, Array]:
    return (
        np.concatenate([r[0] for r in rows]),
        np.concatenate([r[1] for r in rows]),
        np.concatenate([np.broadcast_to(r[2], len(r[0])) for r in rows]),
        np.concatenate([np.full(len(r[0]), r[3], np.uint8) for r in rows]),
    )


def _launches(d: Draft, source: Array, target: Array) -> list[_Row]:
    """Work behind the call that started it: the first of every call on every stream."""
    hosts, of = len(d.host), d.device.host
    known = np.flatnonzero(of != NONE)
    key = of[known] * (len(d.events.streams) + 1) + d.device.work.stream[known]
    work = known[np.unique(key, return_index=True)[1]]
    late, after, delay = unexplained(d, source, target)
    task, orphan, lag = _adopted(d)
    return [
        (hosts + work, of[work], d.device.pace.lag[work], WaitKind.LAUNCH),
        (hosts + late, after, delay, WaitKind.LAUNCH),
        (hosts + orphan, task, lag, WaitKind.LAUNCH),
    ]


def _adopted(d: Draft) -> tuple[Array, Array, Array]:
    """(task, work, lag) for work whose launch the trace lacks and which did not just follow on.

    It started when some host task had got that far: the last that had ended.
    """
    work = d.device.work
    orphan = np.flatnonzero((d.device.host == NONE) & ~d.device.is_ahead)
    follows = (orphan > 0) & (work.stream[orphan] == work.stream[orphan - 1])
    before = np.where(follows, work.end[orphan - 1], -np.inf)
    orphan = orphan[work.start[orphan] - before > NOISE]
    ranked = np.argsort(d.host.end, kind="stable")
    at = np.searchsorted(d.host.end[ranked], work.start[orphan], side="right") - 1
    orphan, task = orphan[at >= 0], ranked[at[at >= 0]]
    return task, orphan, work.start[orphan] - d.host.end[task]


def _own_seconds(d: Draft, released: Array) -> tuple[Array, Array]:
    """What each host task takes without waiting, and the untraced time behind it.

    Work can start before its launch returns: the call then ends, for those who wait for it, when
    the work starts, and its thread stays taken until it returns.
    """
    h = d.host
    seconds = np.maximum(h.end - np.maximum(h.start, np.minimum(released, h.end)), 0.0)
    following = h.next_on_thread()
    gap = np.where(following == NONE, 0.0, h.start[following] - h.end)
    task, first = _early(d)
    shown = np.clip(first - np.maximum(h.start, released)[task], 0.0, seconds[task])
    gap[task] += seconds[task] - shown
    seconds[task] = shown
    returns = np.flatnonzero(h.is_return)
    seconds[h.call[returns]], gap[h.call[returns]] = _call_of_copy(d, returns), 0.0
    return seconds, np.maximum(gap, 0.0)


def _early(d: Draft) -> tuple[Array, Array]:
    """Calls whose work began before they returned, and when it did."""
    of, work = d.device.host, d.device.work
    early = np.flatnonzero(d.device.pace.is_prompt & (of != NONE))
    early = early[work.start[early] < d.host.end[of[early]]]
    first = np.full(len(d.host), np.inf)
    np.minimum.at(first, of[early], work.start[early])
    task = np.flatnonzero(np.isfinite(first))
    return task, first[task]


def _call_of_copy(d: Draft, returns: Array) -> Array:
    """How long the calls of blocking copies took to start them.

    What the copy shows if its stream was idle; otherwise what a launch usually takes.
    """
    calls, of, work = d.host.call[returns], d.device.host, d.device.work
    known = np.flatnonzero(of != NONE)
    copy = np.full(len(d.host), NONE, np.int64)
    copy[of[known]] = known
    mine = copy[calls]
    is_launch = copy != NONE
    is_launch[calls] = False
    usual = typical((d.host.end - d.host.start)[is_launch], _NO_LAUNCH)
    follows = (mine > 0) & (work.stream[mine] == work.stream[mine - 1])
    idle = ~follows | (work.end[mine - 1] <= d.host.start[calls])
    until_start = np.maximum(work.start[mine] - d.host.start[calls], 0.0)
    shown: Array = np.where(idle, until_start, np.minimum(usual, until_start))
    return shown
