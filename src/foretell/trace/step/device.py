"""What streams did: kernels, copies and fills, who launched them, and what the device adds itself.

    turnaround   between two kernels that are both waiting in the queue: the gap behind the first
    latency      between the return of a launch and the start of its kernel on an idle stream

Both are measured where the trace shows them pure, and their median stands in everywhere else.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foretell.graph.columns import NONE, Array
from foretell.trace.decode import NO_ID
from foretell.trace.events import Events, What
from foretell.trace.runs import highest_before, is_follower, median, quantile

WORK = (What.KERNEL, What.COPY, What.FILL)
# A turnaround or latency above this many medians (and this long) has another cause than the device:
# on an H200 99 % of 10 000 queued kernels follow within 2.6 µs, median 1.2 µs.
_TIMES, _LONG = 4.0, 5e-6
_NO_TURNAROUND, _NO_LATENCY = 1e-6, 1e-6  # where a trace shows none: the H200 medians, rounded


@dataclass(frozen=True, eq=False)
class Work:
    """All device work of a trace in order of stream and start."""

    event: Array
    stream: Array
    start: Array
    end: Array
    call: Array  # the event of the call that launched it, NONE where the trace has none

    def __len__(self) -> int:
        return len(self.event)


def device_work(events: Events) -> Work:
    """All device work and the calls that launched it, by correlation."""
    event = np.flatnonzero(events.is_(*WORK))
    ranked = np.lexsort((events.end[event], events.start[event], events.place[event]))
    event = event[ranked]
    calls = np.flatnonzero((events.what == What.CALL) & (events.correlation != NO_ID))
    call = join(events.correlation[event], events.correlation[calls], calls)
    start, end = _on_host_clock(events, event, call)
    return Work(event, events.place[event], start, end, call)


def join(wanted: Array, keys: Array, values: Array) -> Array:
    """The value whose key is wanted, NONE where there is none; the first of equal keys."""
    ranked = np.argsort(keys, kind="stable")
    keys, values = keys[ranked], values[ranked]
    at = np.searchsorted(keys, wanted)
    found = np.full(len(wanted), NONE, np.int64)
    inside = at < len(keys)
    hit = np.flatnonzero(inside)[keys[at[inside]] == wanted[inside]]
    hit = hit[wanted[hit] != NO_ID]
    found[hit] = values[at[hit]]
    return found


def _on_host_clock(events: Events, event: Array, call: Array) -> tuple[Array, Array]:
    """Start and end of device work; moved where its clock runs before the host's.

    Nothing starts before the call that launches it. A few stamps that say so are noise; more than
    one in a hundred means the clocks differ, by as much as the earliest hundredth says.
    """
    start, end = events.start[event], events.end[event]
    launched = call != NONE
    if launched.sum() >= 100:
        early = quantile(start[launched] - events.start[call[launched]], 0.01)
        if early < 0:
            return start - early, end - early
    return start, end


@dataclass(frozen=True, eq=False)
class Pace:
    """What the device adds to the work of one step, one value a piece of work."""

    seconds: Array  # run time, less what overlaps the work before it on the same stream
    gap: Array  # turnaround behind it
    lag: Array  # latency before it
    is_prompt: Array  # its stream was idle when it was launched, and it started at once


def pace(work: Work, call_start: Array, call_end: Array) -> Pace:
    """Run times, turnarounds and latencies; calls that are not known are NaN."""
    same = is_follower(work.stream)
    before = highest_before(work.end, work.stream)  # when the stream was last busy before this
    # On one stream only the end of a kernel can overlap the next (a programmatic launch): count
    # the time from the end of the one before.
    seconds = np.maximum(work.end - np.maximum(work.start, before), 0.0)
    wait = work.start - before
    queued = same & (np.isnan(call_end) | (call_end + _LONG < before))
    turnaround = typical(wait[queued & (wait >= 0)], _NO_TURNAROUND)
    pure = queued & (wait >= 0) & (wait <= limit(turnaround))
    gap = np.full(len(work), turnaround)
    gap[np.flatnonzero(pure) - 1] = wait[pure]
    idle = ~np.isnan(call_end) & (before <= call_end)
    delay = np.maximum(work.start - call_end, 0.0)
    latency = typical(delay[idle & (delay > 0)], _NO_LATENCY)
    prompt = idle & (delay <= limit(latency))
    lag = np.where(prompt, delay, latency)
    return Pace(seconds, gap, lag, prompt)


def typical(values: Array, otherwise: float) -> float:
    """The median where there are enough values to have one."""
    return median(values) if len(values) >= 5 else otherwise


def limit(value: float) -> float:
    """The most that still counts as a turnaround or latency of that typical length."""
    return max(_TIMES * value, _LONG)
