"""When device work was put on its stream, and what was there before or behind a moment."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass

import numpy as np

from foretell.graph.columns import NONE, Array
from foretell.trace.decode import NO_ID
from foretell.trace.events import What
from foretell.trace.runs import highest, is_follower
from foretell.trace.step.device import join
from foretell.trace.step.draft import Draft
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


def issue(d: Draft) -> Issue:
    """When the device work of a step was issued: with its call; as it started where none is known;
    before everything where it was there before the step."""
    work, of = d.device.work, d.device.host
    time = np.where(d.device.is_ahead, -1.0, work.start)
    time[of != NONE] = d.host.start[of[of != NONE]]
    streams, first, count = np.unique(work.stream, return_index=True, return_counts=True)
    bounds = zip(first.tolist(), (first + count).tolist(), strict=True)
    rows = dict(zip(streams.tolist(), bounds, strict=True))
    return Issue(time, highest(time, work.stream).tolist(), rows)


def calls_that(d: Draft, *wanted: Does) -> Array:
    """Host tasks that are calls of those sorts."""
    tasks = np.flatnonzero(d.host.is_call & ~d.host.is_return)
    return tasks[np.isin(d.nest.does[d.host.label[tasks]], wanted)]


def times_of(d: Draft, *wanted: Does) -> tuple[Array, Array]:
    """(start, place in the nest) of calls of those sorts, tasks or not, by start."""
    place = np.flatnonzero(np.isin(d.nest.does, wanted))
    start = d.events.start[d.nest.event[place]] - d.begin
    ranked = np.argsort(start, kind="stable")
    return start[ranked], place[ranked]


@dataclass(frozen=True)
class Told:
    """What a `cuda_sync` event tells of a call: streams as their numbers, NONE where not given."""

    stream: int  # the one that waits, or is waited for by the host
    source: int  # the one whose event is waited for
    record: float | None  # when that event was recorded


def told_waits(d: Draft) -> dict[int, Told]:
    """What the trace tells of the synchronising calls of a step, by the event of the call."""
    e, calls = d.events, d.nest.event
    told = np.flatnonzero(e.what == What.WAIT)
    call = join(e.correlation[told], e.correlation[calls], calls)
    record = join(e.waits_for_record[told], e.correlation[calls], calls)
    found = {}
    for w, c, r in zip(told.tolist(), call.tolist(), record.tolist(), strict=True):
        if c != NONE:
            at = None if r == NONE else float(e.start[r]) - d.begin
            found[c] = Told(int(e.place[w]), _source(d, w), at)
    return found


def _source(d: Draft, told: int) -> int:
    stream = int(d.events.waits_for_stream[told])
    key = (d.events.streams[d.events.place[told]][0], str(stream))
    return d.events.streams.index(key) if stream != NO_ID and key in d.events.streams else NONE


def ready_times(d: Draft, source: Array, target: Array) -> Array:
    """When each piece of work could have started: launched, its stream and its events done."""
    work, of = d.device.work, d.device.host
    ready = np.where(is_follower(work.stream), np.roll(work.end, 1), 0.0)
    known = of != NONE
    ready[known] = np.maximum(ready[known], d.host.end[of[known]])
    np.maximum.at(ready, target, work.end[source])
    return np.minimum(ready, work.start)
