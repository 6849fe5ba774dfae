"""Dependencies of a step: every edge that is not the order of a thread or a stream.

    launch   a call → the work it started
    drain    a synchronising call waits for what was issued before it on the streams it names
    queue    a launch waits until the device has taken up the work `depth` launches before it
    event    work on one stream waits for work on another (cudaEventRecord, cudaStreamWaitEvent)
    thread   backward runs on a thread of its own, which the main thread starts and waits for

How long a call was measured to wait is dropped: the simulation decides it. A stream whose work went
on behind the end of a call was not waited for. No trace records the hand-over between threads: a
thread takes up work behind a pause in which the main thread worked; the main thread waited in an
idle stretch if the other one ran a backward pass in it, or filled most of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foretell.graph import WaitKind
from foretell.graph.columns import NONE, Array
from foretell.trace.runs import distinct, median
from foretell.trace.step.streams import (
    Issue,
    SyncCall,
    calls_that,
    event_lags,
    issue,
    stream_waits,
    sync_calls,
    times_of,
    unexplained,
)
from foretell.trace.step.tasks import NOISE, RankStep, typical
from foretell.trace.words import Does, Tells

_OWN_TIME = 0.5  # share of an idle stretch that another thread fills if it was waited for
_SAME = NOISE / 10  # seconds by which stamps of two threads may contradict each other


@dataclass(frozen=True, eq=False)
class HandOvers:
    """Waits between host tasks of different threads, and idle time that is no gap."""

    waiting: Array
    after: Array
    lag: Array
    idle_behind: Array  # tasks
    idle: Array  # seconds


def hand_overs(d: RankStep) -> HandOvers:
    """All hand-overs between the main thread and the others."""
    main = np.flatnonzero(d.host.thread == d.thread)
    none = np.zeros(0, np.int64)
    rows: list[tuple[Array, ...]] = [(none, none, np.zeros(0), none, np.zeros(0))]
    for thread in distinct(d.host.thread).tolist():
        if thread != d.thread and len(main):
            mine = np.flatnonzero(d.host.thread == thread)
            rows += [_taken_up(d, main, mine), _waited_for(d, main, mine)]
    return HandOvers(*(np.concatenate([r[k] for r in rows]) for k in range(5)))


def _taken_up(d: RankStep, main: Array, mine: Array) -> tuple[Array, ...]:
    """The other thread's first task behind each pause waits for the main one's last before it.

    Backward work of the main thread does not break a pause: while it waits, it stores gradients
    for the other thread.
    """
    h = d.host
    busy = main[~_is_backward(d, main)]
    a = np.searchsorted(h.start[busy], h.end[mine[:-1]], side="left")
    b = np.searchsorted(h.start[busy], h.start[mine[1:]], side="left")
    breaks = np.flatnonzero(b > a)
    first = mine[np.append(0, breaks + 1)]
    at = np.searchsorted(h.end[main], h.start[first] + _SAME, side="right") - 1
    first, giver = first[at >= 0], main[at[at >= 0]]
    lag = np.maximum(h.start[first] - h.end[giver], 0.0)
    pause = h.start[mine[breaks + 1]] - h.end[mine[breaks]]
    return first, giver, lag, mine[breaks], pause


def _waited_for(d: RankStep, main: Array, mine: Array) -> tuple[Array, ...]:
    """The main thread's task behind each idle stretch waits for the other's last task in it."""
    h = d.host
    begin, end = h.end[main[:-1]], h.start[main[1:]]
    a = np.searchsorted(h.start[mine], begin - _SAME, side="left")
    b = np.searchsorted(h.end[mine], end + _SAME, side="right")
    worked = np.append(0.0, np.cumsum(h.end[mine] - h.start[mine]))
    backward = np.append(0, np.cumsum(_is_backward(d, mine)))
    some = np.flatnonzero((b > a) & (end - begin > NOISE))
    fills = worked[b[some]] - worked[a[some]] >= _OWN_TIME * (end - begin)[some]
    waited = some[fills | (backward[b[some]] > backward[a[some]])]
    taker, last = main[waited + 1], mine[b[waited] - 1]
    lag = np.maximum(h.start[taker] - h.end[last], 0.0)
    return taker, last, lag, main[waited], (end - begin)[waited]


def _is_backward(d: RankStep, tasks: Array) -> Array:
    label = d.host.label[tasks]
    if not len(d.nest.tells):
        return np.zeros(len(tasks), bool)
    found: Array = (label != NONE) & ((d.nest.tells[label] & Tells.BACKWARD) > 0)
    return found


# Launches that fit in a stream's queue: an H200's driver blocks with 999 to 1031 outstanding.
QUEUE_DEPTH = 1024
_LEAST_DEPTH = 512  # fewer outstanding launches than this never block
_SLOW_LAUNCH = 5.0  # medians: a launch that takes longer was held up


def drains(d: RankStep, issue: Issue, synced: dict[int, SyncCall]) -> tuple[Array, Array, Array]:
    """(task, stream, last work on it) of all that waits for streams to be empty."""
    rows: list[tuple[int, int, int]] = []
    work = d.device.work
    calls = calls_that(d, Does.DRAIN_DEVICE, Does.DRAIN_STREAM, Does.FREE).tolist()
    for task in calls + np.flatnonzero(d.host.is_return).tolist():
        is_return = bool(d.host.is_return[task])
        for stream in _candidates(d, issue, synced, task):
            # A blocking copy is issued by the very call that waits for it.
            last = issue.last_before(stream, float(d.host.start[task]), behind=is_return)
            if last != NONE and work.end[last] <= d.host.end[task] + NOISE:
                rows.append((task, stream, last))
    table = np.array(rows, np.int64).reshape(-1, 3)
    return table[:, 0], table[:, 1], table[:, 2]


def _candidates(d: RankStep, issue: Issue, synced: dict[int, SyncCall], task: int) -> list[int]:
    """The streams that a call may wait for."""
    if d.host.is_return[task]:
        return [int(d.device.work.stream[np.flatnonzero(d.device.host == d.host.call[task])[-1]])]
    if d.nest.does[d.host.label[task]] in (Does.DRAIN_DEVICE, Does.FREE):
        return list(issue.rows)
    known = synced.get(int(d.nest.event[d.host.label[task]]))
    if known is not None:
        return [known.stream] if known.stream in issue.rows else []
    near = _stream_before(d, task)
    return [near] if near != NONE else []


def _stream_before(d: RankStep, task: int) -> int:
    """The stream of the last work that the same thread launched before a task."""
    known = np.flatnonzero(d.device.host != NONE)
    launcher = d.device.host[known]
    mine = (launcher < task) & (d.host.thread[launcher] == d.host.thread[task])
    if not mine.any():
        return NONE
    return int(d.device.work.stream[known[mine][np.argmax(launcher[mine])]])


def event_drains(d: RankStep, issue: Issue, synced: dict[int, SyncCall]) -> tuple[Array, Array]:
    """(task, work) of calls that wait for an event: the last work before its record.

    Where the trace does not name the stream it is the one whose work ended last of those that can
    be meant.
    """
    found: list[tuple[int, int]] = []
    records, work = times_of(d, Does.RECORD)[0], d.device.work
    for task in calls_that(d, Does.DRAIN_EVENT).tolist():
        start = float(d.host.start[task])
        known = synced.get(int(d.nest.event[d.host.label[task]]), SyncCall(NONE, NONE, None))
        at = int(np.searchsorted(records, start)) - 1
        record = known.record if known.record is not None else records[at] if at >= 0 else start
        streams = [known.source] if known.source in issue.rows else list(issue.rows)
        last = [k for s in streams if (k := issue.last_before(s, float(record))) != NONE]
        done = [k for k in last if work.end[k] <= d.host.end[task] + NOISE]
        if done:
            found.append((task, max(done, key=lambda k: work.end[k])))
    table = np.array(found, np.int64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def queue(d: RankStep) -> tuple[Array, Array]:
    """(launch, work) where a launch goes on only when that work has made room in the queue.

    The launch can return once the device has taken up the work `depth` launches before it, which
    is when the work before that has ended.
    """
    tasks, before = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    work, of = d.device.work, d.device.host
    for stream in distinct(work.stream).tolist():
        mine = np.flatnonzero(work.stream == stream)
        first = np.append(True, (of[mine][1:] != of[mine][:-1]) | (of[mine][1:] == NONE))
        head = mine[first]  # the first work of every launch
        calls = np.flatnonzero(of[head] != NONE)
        depth = _depth(d, head, calls)
        late = calls[calls > depth]
        task, made_room = of[head[late]], head[late - depth] - 1
        fits = work.end[made_room] <= d.host.end[task]
        tasks.append(task[fits])
        before.append(made_room[fits])
    return np.concatenate(tasks), np.concatenate(before)


def _depth(d: RankStep, head: Array, calls: Array) -> int:
    """How many launches one stream's queue takes: what held-up launches show, or the usual."""
    task = d.device.host[head[calls]]
    took = d.host.end[task] - d.host.start[task]
    starts = np.sort(d.device.work.start[head])
    outstanding = calls - np.searchsorted(starts, d.host.end[task], side="right") + 1
    slow = took > _SLOW_LAUNCH * typical(took, np.inf)
    held = slow & (outstanding >= max(_LEAST_DEPTH, 0.95 * outstanding.max(initial=0)))
    if held.sum() >= 2:
        return int(median(outstanding[held]))
    return max(QUEUE_DEPTH, int(outstanding.max(initial=0)) + 1)


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


def waits(d: RankStep) -> Waits:
    """All waits of a step."""
    order, synced, hosts = issue(d), sync_calls(d), len(d.host)
    source, target = stream_waits(d, order, synced)
    drain_task, drain_stream, last = drains(d, order, synced)
    until_event, until_room, over = event_drains(d, order, synced), queue(d), hand_overs(d)
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


def _launches(d: RankStep, source: Array, target: Array) -> list[_Row]:
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


def _adopted(d: RankStep) -> tuple[Array, Array, Array]:
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


def _own_seconds(d: RankStep, released: Array) -> tuple[Array, Array]:
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


def _early(d: RankStep) -> tuple[Array, Array]:
    """Calls whose work began before they returned, and when it did."""
    of, work = d.device.host, d.device.work
    early = np.flatnonzero(d.device.pace.is_prompt & (of != NONE))
    early = early[work.start[early] < d.host.end[of[early]]]
    first = np.full(len(d.host), np.inf)
    np.minimum.at(first, of[early], work.start[early])
    task = np.flatnonzero(np.isfinite(first))
    return task, first[task]


def _call_of_copy(d: RankStep, returns: Array) -> Array:
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
