"""Dependencies of a step: every edge that is not the order of a thread or a stream.

    launch   a call → the work it started
    drain    a synchronising call waits for what was issued before it on the streams it names
    queue    a launch waits until the device has taken up the work `depth` launches before it
    event    work on one stream waits for work on another (cudaEventRecord, cudaStreamWaitEvent)
    thread   backward runs on a thread of its own, which the main thread starts and waits for

How long a call was measured to wait is dropped: the simulation decides it. A stream whose work went
on behind the end of a call was not waited for. Where the trace does not name the streams of an
event (most do not), the order of calls in the operator shows which can be meant and the measured
times which work: the latest that was done when the waiting work began. So no edge contradicts a
measured time. No trace records the hand-over between threads: a thread takes up work behind a pause
in which the main thread worked; the main thread waited in an idle stretch if the other one ran a
backward pass in it, or filled most of it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from foretell.graph import WaitKind
from foretell.graph.graph import NONE, Array
from foretell.trace.decode import NO_ID
from foretell.trace.events import What
from foretell.trace.runs import distinct, highest, is_follower, median
from foretell.trace.step.tasks import NOISE, RankStep, join, typical
from foretell.trace.words import CallEffect, RangeKind


@dataclass(frozen=True, eq=False)
class Issue:
    """The order of issue on every stream of a step."""

    time: Array  # when each piece of work was issued
    rising: list[float]  # the same, never less than that of work before it on the stream
    rows: dict[int, tuple[int, int]]  # stream → its first row and the row behind its last

    def last_before(self, stream: int, time: float, *, behind: bool = False) -> int:
        """The last work issued on a stream before a time (or at it), NONE where there is none."""
        a, b = self.rows[stream]
        at = (bisect_right if behind else bisect_left)(self.rising, time, a, b) - 1
        return at if at >= a else NONE

    def first_from(self, stream: int, time: float) -> int:
        """The first work issued on a stream at or behind a time, NONE where there is none."""
        a, b = self.rows[stream]
        at = bisect_left(self.rising, time, a, b)
        return at if at < b else NONE


def issue(d: RankStep) -> Issue:
    """When the device work of a step was issued: with its call; as it started where none is known;
    before everything where it was there before the step."""
    work, of = d.device.work, d.device.host
    time = np.where(d.device.is_ahead, -1.0, work.start)
    time[of != NONE] = d.host.start[of[of != NONE]]
    streams, first, count = np.unique(work.stream, return_index=True, return_counts=True)
    bounds = zip(first.tolist(), (first + count).tolist(), strict=True)
    rows = dict(zip(streams.tolist(), bounds, strict=True))
    return Issue(time, highest(time, work.stream).tolist(), rows)


def calls_that(d: RankStep, *wanted: CallEffect) -> Array:
    """Host tasks that are calls of those sorts."""
    tasks = np.flatnonzero(d.host.is_call & ~d.host.is_return)
    return tasks[np.isin(d.event_tree.call_effect[d.host.label[tasks]], wanted)]


def times_of(d: RankStep, *wanted: CallEffect) -> tuple[Array, Array]:
    """(start, place in the nest) of calls of those sorts, tasks or not, by start."""
    place = np.flatnonzero(np.isin(d.event_tree.call_effect, wanted))
    start = d.events.start[d.event_tree.event[place]] - d.begin
    ranked = np.argsort(start, kind="stable")
    return start[ranked], place[ranked]


@dataclass(frozen=True)
class SyncCall:
    """A `cuda_sync` event of a call: streams as their numbers, NONE where not given."""

    stream: int  # the one that waits, or is waited for by the host
    source: int  # the one whose event is waited for
    record: float | None  # when that event was recorded


def sync_calls(d: RankStep) -> dict[int, SyncCall]:
    """The `cuda_sync` events of the synchronising calls of a step, by the event of the call."""
    e, calls = d.events, d.event_tree.event
    sync = np.flatnonzero(e.what == What.WAIT)
    call = join(e.correlation[sync], e.correlation[calls], calls)
    record = join(e.waits_for_record[sync], e.correlation[calls], calls)
    found = {}
    for w, c, r in zip(sync.tolist(), call.tolist(), record.tolist(), strict=True):
        if c != NONE:
            at = None if r == NONE else float(e.start[r]) - d.begin
            found[c] = SyncCall(int(e.place[w]), _source(d, w), at)
    return found


def _source(d: RankStep, sync: int) -> int:
    stream = int(d.events.waits_for_stream[sync])
    key = (d.events.streams[d.events.place[sync]][0], str(stream))
    return d.events.streams.index(key) if stream != NO_ID and key in d.events.streams else NONE


def ready_times(d: RankStep, source: Array, target: Array) -> Array:
    """When each piece of work could have started: launched, its stream and its events done."""
    work, of = d.device.work, d.device.host
    ready = np.where(is_follower(work.stream), np.roll(work.end, 1), 0.0)
    known = of != NONE
    ready[known] = np.maximum(ready[known], d.host.end[of[known]])
    np.maximum.at(ready, target, work.end[source])
    return np.minimum(ready, work.start)


IDLE = 5e-6  # seconds: no turnaround, latency or event takes that long
HELD_UP = 5e-5  # seconds: work that is ready that long before it starts waits for something
_NO_EVENT = 1e-6  # seconds an event takes where a trace shows none: the H200 median, rounded
_MANY_STREAMS = 8  # beyond this only the streams next to a wait are candidates
Pairs = tuple[Array, Array]  # source, target


def stream_waits(d: RankStep, issue: Issue, synced: dict[int, SyncCall]) -> Pairs:
    """(source, target) pairs of device work on different streams."""
    if len(issue.rows) < 2:
        return _table(set())
    times, places = times_of(d, CallEffect.WAIT)
    if not len(times):
        return _table(_guessed(d, issue, ~d.device.is_ahead))
    records, lines = times_of(d, CallEffect.RECORD)[0].tolist(), _lines(d, issue)
    spans = d.device.work.start.tolist(), d.device.work.end.tolist()
    pairs = _guessed(d, issue, _in_graphs(d))
    for time, place in zip(times.tolist(), places.tolist(), strict=True):
        known = synced.get(int(d.event_tree.event[place]))
        if known is not None and known.source != NONE:
            record = known.record if known.record is not None else time
            pairs.add(_pair(issue, spans, (known.source, known.stream), record, time))
            continue
        k = bisect_left(records, time) - 1
        record = records[k] if k >= 0 else time
        for streams in _stream_pairs(d, issue, lines, time, place):
            pairs.add(_pair(issue, spans, streams, record, time))
    return _table(pairs - {_NO_PAIR})


def _table(pairs: set[tuple[int, int]]) -> Pairs:
    table = np.array(sorted(pairs), np.int64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


class _Line(NamedTuple):
    """The work that one thread launched, in the order of issue."""

    time: list[float]
    unit: list[int]
    stream: list[int]
    streams: set[int]  # all of them


def _lines(d: RankStep, issue: Issue) -> dict[int, _Line]:
    """The work that each thread launched."""
    known = np.flatnonzero(d.device.host != NONE)
    thread = d.host.thread[d.device.host[known]]
    ranked = known[np.lexsort((known, issue.time[known], thread))]
    thread = d.host.thread[d.device.host[ranked]]
    found = {}
    for t in distinct(thread).tolist():
        mine = ranked[thread == t]
        columns = (issue.time[mine], d.host.unit[d.device.host[mine]], d.device.work.stream[mine])
        time, unit, stream = (c.tolist() for c in columns)
        found[t] = _Line(time, unit, stream, set(stream))
    return found


def _stream_pairs(
    d: RankStep, issue: Issue, lines: dict[int, _Line], time: float, place: int
) -> list[tuple[int, int]]:
    """(source, target) streams that a wait may join: those used around it on its thread.

    Targets get work behind the wait in the same operator, or next. Sources had work before it in
    the same operator, or last; where none of these differs from the target, any other stream may be
    meant (a wait for a collective that another thread launched).
    """
    line = lines.get(int(d.events.place[d.event_tree.event[place]]), _Line([], [], [], set()))
    at = bisect_left(line.time, time)
    unit = int(d.event_tree.unit[place])
    sources = _streams_along(line, range(at - 1, -1, -1), unit)
    targets = _streams_along(line, range(at, len(line.time)), unit)
    found = []
    for target in targets:
        others = sources - {target}
        if not others and len(issue.rows) <= _MANY_STREAMS:
            others = set(issue.rows) - {target}
        found += [(source, target) for source in others]
    return found


def _streams_along(line: _Line, places: range, unit: int) -> set[int]:
    """The streams of the first work of some places and of all that follows it in one operator."""
    found: set[int] = set()
    for at in places:
        if found and (unit == NONE or line.unit[at] != unit or found == line.streams):
            break
        found.add(line.stream[at])
    return found


def _pair(
    issue: Issue,
    spans: tuple[list[float], list[float]],
    streams: tuple[int, int],
    record: float,
    time: float,
) -> tuple[int, int]:
    """The last work that the first on the target behind the wait can have waited for, and that."""
    source, target = streams
    if source not in issue.rows or target not in issue.rows:
        return _NO_PAIR
    to, last = issue.first_from(target, time), issue.last_before(source, record)
    if to == NONE or last == NONE:
        return _NO_PAIR
    (starts, ends), a = spans, issue.rows[source][0]
    done = bisect_right(ends, starts[to] + NOISE, a, last + 1) - 1
    return (done, to) if done >= a else _NO_PAIR


_NO_PAIR = (NONE, NONE)


def _in_graphs(d: RankStep) -> Array:
    """Which work was launched together with other work: by a graph, without events of its own."""
    of = d.device.host
    count = np.bincount(of[of != NONE], minlength=len(d.host) + 1)
    found: Array = (of != NONE) & (count[of] > 1)
    return found


def _guessed(d: RankStep, issue: Issue, candidates: Array) -> set[tuple[int, int]]:
    """Pairs where a trace records no waits: work that was ready and began just when work of
    another stream, issued before it, had ended."""
    work, none = d.device.work, np.zeros(0, np.int64)
    held = np.flatnonzero((work.start - ready_times(d, none, none) > HELD_UP) & candidates)
    ranked = np.argsort(work.end, kind="stable")
    ends, pairs = work.end[ranked], set()
    for target in held.tolist():
        start, issued = work.start[target], issue.time[target]
        low, high = np.searchsorted(ends, [start - NOISE, start + NOISE / 10])
        near = ranked[low:high]
        together = (issue.time[near] == issued) & (work.start[near] < start)
        near = near[
            (work.stream[near] != work.stream[target]) & ((issue.time[near] < issued) | together)
        ]
        if len(near):
            pairs.add((int(near[-1]), target))
    return pairs


def unexplained(d: RankStep, source: Array, target: Array) -> tuple[Array, Array, Array]:
    """(work, what released it, delay) where work was ready and waited on an idle device.

    Nothing in the trace says why (the first launch of a kernel loads it, a graph is set up), so the
    delay is kept, behind the last thing it waited for: its launch, as a host task, or other work,
    numbered behind all host tasks.
    """
    work, of, hosts = d.device.work, d.device.host, len(d.host)
    ready, by = _released(d, source, target)
    ranked = np.argsort(work.start, kind="stable")
    high = np.append(-np.inf, np.maximum.accumulate(work.end[ranked]))
    # When everything that began before it, on any stream, had ended.
    last = high[np.searchsorted(work.start[ranked], work.start, side="left")]
    idle = (last <= ready) & (work.start - ready > IDLE) & (of != NONE) & ~d.device.is_ahead
    late = np.flatnonzero(idle)
    after = np.where(by[late] == NONE, of[late], hosts + by[late])
    return late, after, work.start[late] - ready[late]


def event_lags(d: RankStep, source: Array, target: Array) -> Array:
    """How long an event takes from one stream to the other: as measured where nothing else held
    the work up, otherwise what is usual."""
    _, by = _released(d, source, target)
    seen = d.device.work.start[target] - d.device.work.end[source]
    pure = (by[target] == source) & (seen >= 0) & (seen <= IDLE)
    return np.where(pure, seen, typical(seen[pure], _NO_EVENT))


def _released(d: RankStep, source: Array, target: Array) -> tuple[Array, Array]:
    """When each piece of work could have started, and by which work; NONE: by its launch."""
    work, of = d.device.work, d.device.host
    same = is_follower(work.stream)
    by = np.where(same, np.arange(len(work)) - 1, NONE)
    ready = np.where(same, work.end[by], -np.inf)
    ranked = np.argsort(work.end[source], kind="stable")  # the last to end is written last
    source, target = source[ranked], target[ranked]
    later = work.end[source] > ready[target]
    by[target[later]] = source[later]
    np.maximum.at(ready, target, work.end[source])
    launched = np.where(of != NONE, d.host.end[of], -np.inf) if len(d.host) else ready
    by[launched >= ready] = NONE
    return np.maximum(ready, launched), by


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
    if not len(d.event_tree.tells):
        return np.zeros(len(tasks), bool)
    found: Array = (label != NONE) & ((d.event_tree.tells[label] & RangeKind.BACKWARD) > 0)
    return found


# Launches that fit in a stream's queue: an H200's driver blocks with 999 to 1031 outstanding.
QUEUE_DEPTH = 1024
_LEAST_DEPTH = 512  # fewer outstanding launches than this never block
_SLOW_LAUNCH = 5.0  # medians: a launch that takes longer was held up


def drains(d: RankStep, issue: Issue, synced: dict[int, SyncCall]) -> tuple[Array, Array, Array]:
    """(task, stream, last work on it) of all that waits for streams to be empty."""
    rows: list[tuple[int, int, int]] = []
    work = d.device.work
    calls = calls_that(
        d, CallEffect.DRAIN_DEVICE, CallEffect.DRAIN_STREAM, CallEffect.FREE
    ).tolist()
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
    if d.event_tree.call_effect[d.host.label[task]] in (CallEffect.DRAIN_DEVICE, CallEffect.FREE):
        return list(issue.rows)
    known = synced.get(int(d.event_tree.event[d.host.label[task]]))
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
    records, work = times_of(d, CallEffect.RECORD)[0], d.device.work
    for task in calls_that(d, CallEffect.DRAIN_EVENT).tolist():
        start = float(d.host.start[task])
        known = synced.get(int(d.event_tree.event[d.host.label[task]]), SyncCall(NONE, NONE, None))
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
    """Time of each host task without waiting, and the untraced time behind it.

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
