"""A traced step as it would run without the profiler.

The profiler spends time on the host for every operator and every call it records. That cost is
taken off the tasks that bore it: so much an event that the step played in a row takes what an
un-profiled step is known to take, or, where nobody timed one, what such an event usually costs.
A step the host does not hold up takes the same either way, and then the usual cost is taken too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foretell.baseline.steady import steady_seconds
from foretell.graph.columns import Array, Kind
from foretell.graph.graph import Graph
from foretell.trace import Trace

# Seconds an event: the median over eight host-bound steps on an H200 host (torch 2.11) of
# (profiled - un-profiled) / events; the middle half lies between 1.0 and 1.6 µs.
USUAL = 1.4e-6
MOST = 6e-6  # no host is that slow at it; beyond this something else differs
LEAST_LEFT = 0.2  # of a task's time: events cannot have been all of it
CLOSE = 0.005  # how near to the known time is near enough


@dataclass(frozen=True, eq=False)
class Baseline:
    """A step without the profiler, and how far the graph is from what was timed."""

    graph: Graph
    seconds: float  # a step, steps in a row; as timed where somebody did
    played: float  # the same from the graph
    event: float  # seconds taken off for each event
    note: str

    def predicted(self, after: Graph) -> float:
        """Seconds of a changed step, corrected by what the graph misses of this one."""
        return steady_seconds(after) * self.seconds / self.played


def unprofiled(trace: Trace, real: float | None = None) -> Baseline:
    """The step of a trace less the profiler's cost; `real` is the time of an un-profiled step."""
    usual = cheaper(trace, USUAL)
    played = steady_seconds(usual)
    if real is None:
        note = f"profiler's cost estimated at {USUAL * 1e6:.1f} µs an event"
        return Baseline(usual, played, played, USUAL, note)
    if abs(played / real - 1) < CLOSE or steady_seconds(cheaper(trace, MOST)) > real:
        note = "un-profiled step given; the device, not the host, holds it up"
        return Baseline(usual, real, played, USUAL, note)
    event = _solved(trace, real)
    graph = cheaper(trace, event)
    note = f"un-profiled step given: {event * 1e6:.2f} µs an event taken off"
    return Baseline(graph, real, steady_seconds(graph), event, note)


def cheaper(trace: Trace, event: float) -> Graph:
    """The step with so many seconds an event taken off its host tasks, time first, then gap."""
    graph = trace.graph
    host = np.flatnonzero(np.isin(graph.kind, (Kind.HOST, Kind.LOAD)))
    cost = event * trace.recorded[host].sum(axis=1)
    seconds, gap = graph.seconds[host], graph.gap[host]
    short = _less(seconds, cost)
    with graph.edit("unprofiled") as edit:
        edit.set(host, seconds=short, gap=_less(gap, cost - (seconds - short)))
    return edit.graph


def _less(times: Array, cost: Array) -> Array:
    found: Array = np.maximum(times - cost, LEAST_LEFT * times)
    return found


def _solved(trace: Trace, real: float) -> float:
    """The cost an event at which the step takes `real`; zero where it is shorter all the same."""
    low, high = 0.0, MOST
    for _ in range(12):
        middle = (low + high) / 2
        if steady_seconds(cheaper(trace, middle)) > real:
            low = middle
        else:
            high = middle
    return (low + high) / 2
