"""When work was issued to its stream, and which work on one stream waits for work on another.

Where the trace does not name the streams of an event (most do not), the order of calls in the
operator shows which can be meant and the measured times which work: the latest that was done when
the waiting work began. So no edge contradicts a measured time.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from foretell.graph.columns import NONE, Array
from foretell.trace.decode import NO_ID
from foretell.trace.events import What
from foretell.trace.runs import distinct, highest, is_follower
from foretell.trace.step.tasks import NOISE, RankStep, join, typical
from foretell.trace.words import Does


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


def calls_that(d: RankStep, *wanted: Does) -> Array:
    """Host tasks that are calls of those sorts."""
    tasks = np.flatnonzero(d.host.is_call & ~d.host.is_return)
    return tasks[np.isin(d.nest.does[d.host.label[tasks]], wanted)]


def times_of(d: RankStep, *wanted: Does) -> tuple[Array, Array]:
    """(start, place in the nest) of calls of those sorts, tasks or not, by start."""
    place = np.flatnonzero(np.isin(d.nest.does, wanted))
    start = d.events.start[d.nest.event[place]] - d.begin
    ranked = np.argsort(start, kind="stable")
    return start[ranked], place[ranked]


@dataclass(frozen=True)
class SyncCall:
    """What a `cuda_sync` event tells of a call: streams as their numbers, NONE where not given."""

    stream: int  # the one that waits, or is waited for by the host
    source: int  # the one whose event is waited for
    record: float | None  # when that event was recorded


def sync_calls(d: RankStep) -> dict[int, SyncCall]:
    """What the trace tells of the synchronising calls of a step, by the event of the call."""
    e, calls = d.events, d.nest.event
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
    times, places = times_of(d, Does.WAIT)
    if not len(times):
        return _table(_guessed(d, issue, ~d.device.is_ahead))
    records, lines = times_of(d, Does.RECORD)[0].tolist(), _lines(d, issue)
    spans = d.device.work.start.tolist(), d.device.work.end.tolist()
    pairs = _guessed(d, issue, _in_graphs(d))
    for time, place in zip(times.tolist(), places.tolist(), strict=True):
        known = synced.get(int(d.nest.event[place]))
        if known is not None and known.source != NONE:
            record = known.record if known.record is not None else time
            pairs.add(_pair(issue, spans, (known.source, known.stream), record, time))
            continue
        k = bisect_left(records, time) - 1
        record = records[k] if k >= 0 else time
        for streams in _candidates(d, issue, lines, time, place):
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


def _candidates(
    d: RankStep, issue: Issue, lines: dict[int, _Line], time: float, place: int
) -> list[tuple[int, int]]:
    """(source, target) streams that a wait may join: those used around it on its thread.

    Targets get work behind the wait in the same operator, or next. Sources had work before it in
    the same operator, or last; where none of these differs from the target, any other stream may be
    meant (a wait for a collective that another thread launched).
    """
    line = lines.get(int(d.events.place[d.nest.event[place]]), _Line([], [], [], set()))
    at = bisect_left(line.time, time)
    unit = int(d.nest.unit[place])
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


def _guessed(d: RankStep, issue: Issue, asked: Array) -> set[tuple[int, int]]:
    """Pairs where a trace records no waits: work that was ready and began just when work of
    another stream, issued before it, had ended."""
    work, none = d.device.work, np.zeros(0, np.int64)
    held = np.flatnonzero((work.start - ready_times(d, none, none) > HELD_UP) & asked)
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
