"""The current step: without the profiler, steps in a row, what binds it, and its 80 % interval.

Recording makes the host slower, and unevenly: calls that fall on a cold cache or a full buffer take
several times as long, most of all in a GPU-bound step, where the host sleeps and wakes.
The quicker calls of a kind show what one costs when nothing is in the way. So a call is taken to
last no longer than a fast one of its kind, times a factor that is the same for all: the one with
which the step simulated in a row takes what an un-profiled step is known to take (or is guessed to,
from the number of events), or, where it is GPU-bound, what the factor usually is. In a row means on
the same lanes, so that the host runs ahead of the device or waits for it as it would.

For the interval three unknowns are varied one by one, both ways: how fast the host is without the
profiler, what changed kernels really take, and what the what-ifs themselves leave out. Their
effects on the step add up as independent errors do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from foretell import portable
from foretell.cost.kernel import passes
from foretell.errors import InputError
from foretell.graph.build import replicate
from foretell.graph.graph import Array, Graph, Kind
from foretell.simulate import simulate
from foretell.trace import Trace
from foretell.trace.operators import is_call, operators

COPIES = 3  # the first fills the queues, the last two are steady
TIMES = ("seconds", "gap", "priority")  # what an edit may change and the structure still holds


@lru_cache(4)  # time, interval and bottleneck of one step are computed in a row
def steady_seconds(step: Graph, copies: int = COPIES) -> float:
    """Seconds from the end of one step to the end of the next."""
    if not step.size:
        return 0.0
    row = _in_a_row(step, copies)
    ends = simulate(row, engine="compiled").end.reshape(copies, step.size).max(axis=1)
    return float(ends[-1] - ends[-2])


def _in_a_row(step: Graph, copies: int) -> Graph:
    """The step several times over; its structure is made once, for all edits that leave it alone.

    An interval simulates one step five times with other times: laying it out takes longer.
    """
    row: Graph | None = step.cache.get(f"row of {copies}")
    if row is None:
        row = step.cache[f"row of {copies}"] = replicate(step, copies, over="micro_batch")
        return row
    with row.edit() as edit:
        known = {name: np.tile(step.column(name), copies) for name in TIMES}
        edit.set(np.arange(row.size), **known)
    return edit.graph


_HOST: dict[str, float] = passes()["host"]
USUAL = _HOST["usual"]  # un-profiled host time over capped calls
SPREAD = _HOST["spread"]  # of ln of that
AGAIN = _HOST["again"]  # spread of ln of the host's speed from one run to the next
QUICK = _HOST["quick"]  # quantile of the calls of a kind that nothing was in the way of
EVENT = _HOST["event"]  # seconds of recording one
LEAST, MOST = 0.4, 4.0  # beyond these something else differs
KIND = 4  # calls of a kind from which on the fast ones are typical
CLOSE = 0.005  # how near to the known time is near enough
POOR = 0.02  # of a step: a replay that is farther off gets a warning
FINE = 0.01  # share of a step below which idle time of the device cannot be known
PROBE, FEELS = 0.85, 0.05  # a host that much faster shortens a CPU-bound step by this share


@dataclass(frozen=True, eq=False)
class Baseline:
    """A step without the profiler, and how far the graph is from what was timed."""

    graph: Graph
    seconds: float  # a step, steps in a row; as timed where it was
    simulated: float  # the same from the graph
    factor: float  # what the host's quick calls were multiplied by
    sigma: float  # spread of ln of that factor: near zero where the known time tells it
    note: str
    replay_error: float = 0.0  # how far the profiled step, simulated unchanged, is from measured

    def predicted(self, after: Graph) -> float:
        """Seconds of a changed step, corrected by what the graph misses of this one.

        What is missed is time in which the device is idle: a step that idles less misses less.
        """
        seconds = steady_seconds(after)
        missed = self.seconds / self.simulated - 1
        waits = (_waiting(after, seconds) + FINE) / (_waiting(self.graph, self.simulated) + FINE)
        return seconds * (1 + missed * min(waits, 1.0))


def unprofiled(trace: Trace, real: float | None = None) -> Baseline:
    """The step of a trace less the profiler's cost.

    `real` is the time of an un-profiled step; where it is not given, what the trace says of it.
    Where the step replays far from what was measured, every interval is widened, with a note.
    """
    known, source = real, "given"
    if known is None:
        known, source = trace.real, "timed with the trace"
    if known is None:
        source = f"estimated, {EVENT * 1e6:.1f} µs less for each recorded event"
        found = _fit_host(trace, _estimated_seconds(trace), source, SPREAD)
    else:
        found = _fit_host(trace, known, source, AGAIN)
    off = replay_error(trace)
    found = replace(found, replay_error=off)
    if abs(off) <= POOR:
        return found
    note = f"{found.note}; simulated unchanged, the step is {off:+.1%} off its measurement"
    return replace(found, sigma=max(found.sigma, abs(off)), note=f"{note}: intervals are wider")


def replay_error(trace: Trace) -> float:
    """How far the simulated step, unchanged, is from the measured one; a share of that."""
    measured = float(trace.graph.facts["measured"])
    return (simulate(trace.warm).seconds - trace.found) / measured - 1 if measured > 0 else 0.0


def usual_factor(trace: Trace) -> float:
    """What un-profiled host calls usually take of capped ones.

    A profiler that has run stays in the process and makes later launches slower, un-profiled ones
    too: a trace that is not the first of its process comes from such a one.
    """
    return USUAL * (_HOST["lingers"] if trace.graph.facts.get("profiled_before") else 1.0)


def _fit_host(trace: Trace, real: float, source: str, sigma: float) -> Baseline:
    known = usual_factor(trace)
    usual = with_host_factor(trace, known)
    simulated = steady_seconds(usual)
    if real <= 0 or simulated <= 0:
        raise InputError(
            f"a step of {real:g} s, {simulated:g} s when simulated",
            hint="the trace has to hold a whole step, and its time has to be above zero",
        )
    if abs(simulated / real - 1) < CLOSE or _is_gpu_bound(trace, known, real):
        note = f"step time without the profiler: {source}; the GPU hides the profiler's overhead"
        return Baseline(usual, real, simulated, known, SPREAD, note)
    factor = _solve_factor(trace, real)
    graph = with_host_factor(trace, factor)
    simulated = steady_seconds(graph)
    note = (
        f"step time without the profiler: {source}; a CPU call takes {factor:.2f} × as long as "
        "the fast ones of its kind"
    )
    if simulated < real * (1 - POOR):
        note += f"; the recorded tasks explain {simulated / real:.0%} of it: intervals are wider"
        sigma = max(sigma, float(portable.log(min(real / simulated, MOST))))
    return Baseline(graph, real, simulated, factor, sigma, note)


def _waiting(step: Graph, seconds: float) -> float:
    """The share of a step in which its busiest device lane does nothing."""
    device = np.isin(step.kind, (Kind.KERNEL, Kind.COPY))
    if not device.any() or seconds <= 0:
        return 1.0
    spent = np.bincount(step.lane[device], (step.seconds + step.gap)[device])
    return max(0.0, 1 - float(spent.max()) / seconds)


def _estimated_seconds(trace: Trace) -> float:
    """A step with the usual cost of an event taken off every host task."""
    graph = trace.graph
    host = np.flatnonzero(graph.kind == Kind.HOST)
    cost = EVENT * trace.recorded[host].sum(axis=1)
    with graph.edit("unprofiled") as edit:
        edit.set(host, seconds=np.maximum(graph.seconds[host] - cost, 0.2 * graph.seconds[host]))
    return steady_seconds(edit.graph)


def with_host_factor(trace: Trace, factor: float) -> Graph:
    """The step with every host call capped at a fast one of its kind, times a factor."""
    graph = trace.graph
    # Loading is one long task, of which the profiler records hardly anything: it stays.
    host = np.flatnonzero(graph.kind == Kind.HOST)
    with graph.edit("unprofiled") as edit:
        share = factor * _capped_shares(graph)
        edit.set(host, seconds=share * graph.seconds[host], gap=share * graph.gap[host])
    return edit.graph


@lru_cache(2)  # a factor is looked for in a dozen tries
def _capped_shares(graph: Graph) -> Array:
    """Share of each host task that is left when its call is capped at a fast one.

    A call is one into the driver, or all that an operator does between such calls: its pieces are
    not alike, so they are judged together.
    """
    host = np.flatnonzero(graph.kind == Kind.HOST)
    spent = graph.seconds[host] + graph.gap[host]
    driver = is_call(graph)[host]
    own = operators(graph)[host]
    own[driver] = own.max(initial=0) + 1 + np.arange(int(driver.sum()))
    member = np.unique(own, return_inverse=True)[1].reshape(-1)
    whole = np.bincount(member, spent)
    last = np.zeros(len(whole), np.int64)
    last[member] = (
        host  # the last piece is the operator's own: before it may come one that calls it
    )
    whose = np.unique(graph.op[last], return_inverse=True)[1].reshape(-1)
    left = _capped(whole, whose) / np.where(whole > 0, whole, 1.0)
    found: Array = left[member]
    return found


def _capped(times: Array, whose: Array) -> Array:
    """Times capped at the fast ones of their kind, where there are enough calls."""
    order = np.lexsort((times, whose))
    count = np.bincount(whose)
    first = np.cumsum(count) - count
    quick = times[order][first + np.floor(QUICK * (count - 1)).astype(np.int64)]
    most = np.where(count >= KIND, quick, np.inf)
    found: Array = np.minimum(times, most[whose])
    return found


def _is_gpu_bound(trace: Trace, usual: float, real: float) -> bool:
    """Whether the step is as long as its kernels, so that the host's speed cannot be inferred."""
    simulated = steady_seconds(with_host_factor(trace, usual))
    if steady_seconds(with_host_factor(trace, LEAST)) > real:
        return True
    faster = steady_seconds(with_host_factor(trace, usual * PROBE))
    is_deaf = 1 - faster / simulated < FEELS
    return is_deaf and simulated > 0.9 * real


def _solve_factor(trace: Trace, real: float) -> float:
    """The factor at which the step takes `real`."""
    low, high = LEAST, MOST
    for _ in range(12):
        middle = (low + high) / 2
        if steady_seconds(with_host_factor(trace, middle)) < real:
            low = middle
        else:
            high = middle
    return (low + high) / 2


BUSY = 0.97  # share of the step from which on a busy device is the bottleneck
DEVICE = (Kind.KERNEL, Kind.COPY)
WIRE = (Kind.COLLECTIVE, Kind.SEND)


@dataclass(frozen=True)
class Shares:
    """Busy and idle time of one rank in steady state: seconds, and shares of the step."""

    seconds: float
    kernels: float  # seconds of device work
    host: float  # seconds of host work
    wire: float  # seconds of communication
    idle: float  # share of the step in which the device is idle

    @property
    def bottleneck(self) -> str:
        """The bottleneck: host, device or network."""
        if not self.kernels:
            return "host"
        if self.idle < 1 - BUSY:
            return "device"
        if self.wire > self.idle * self.seconds and self.wire > self.host:
            return "network"
        return "host" if self.host > 0.9 * self.seconds or self.idle > 0.15 else "device"


def shares(graph: Graph, seconds: float | None = None) -> Shares:
    """Where a step goes when steps follow one another; `seconds` is its time where it is known."""
    if not graph.size:
        return Shares(0.0, 0.0, 0.0, 0.0, 0.0)
    seconds = steady_seconds(graph) if seconds is None else seconds
    mine = graph.rank == graph.rank[0]
    work = {
        name: float(graph.seconds[mine & np.isin(graph.kind, kinds)].sum())
        for name, kinds in (("kernels", DEVICE), ("wire", WIRE))
    }
    host = mine & np.isin(graph.kind, (Kind.HOST, Kind.LOAD))
    spent = float(graph.seconds[host].sum() + graph.gap[host].sum())
    idle = max(0.0, 1 - work["kernels"] / seconds) if seconds else 0.0
    return Shares(seconds, work["kernels"], spent, work["wire"], idle)


def why(before: Graph, after: Graph, seconds: tuple[float, float] | None = None) -> str:
    """The bottleneck before and after, as a sentence; `seconds` are both step times, if known."""
    known = seconds or (None, None)
    first, second = shares(before, known[0]), shares(after, known[1])
    gain = 1 - second.seconds / first.seconds if first.seconds else 0.0
    moved = _work_changes(first, second)
    bound = _bottlenecks(first, second)
    if abs(gain) < 0.02 and moved:
        return f"no gain: {bound}; {moved}, off the critical path"
    return f"{bound}; {moved}" if moved else bound


def _bottlenecks(first: Shares, second: Shares) -> str:
    """The bottleneck before and after."""
    (kind, what, before), (other, then, after) = _bottleneck_words(first), _bottleneck_words(second)
    if kind != other:
        return f"{kind} ({what} {before}) → {other} ({then} {after})"
    changed = before if before == after else f"{before} → {after}"
    return f"still {kind} ({what} {changed})"


def _bottleneck_words(found: Shares) -> tuple[str, str, str]:
    """What bounds a step, and the share that says so."""
    if found.bottleneck == "device":
        return "GPU-bound", "GPU busy", f"{100 * (1 - found.idle):.0f} %"
    if found.bottleneck == "network":
        return "communication-bound", "communication", f"{100 * found.wire / found.seconds:.0f} %"
    return "CPU-bound", "GPU idle", f"{100 * found.idle:.0f} %"


def _work_changes(first: Shares, second: Shares) -> str:
    """Which work grew or shrank, by more than a hundredth of the step."""
    words = []
    for name, a, b in (
        ("kernels", first.kernels, second.kernels),
        ("host work", first.host, second.host),
        ("communication", first.wire, second.wire),
    ):
        if abs(b - a) > 0.01 * first.seconds:
            words.append(f"{name} {_milli(a)} → {_milli(b)}")
    return ", ".join(words)


def _milli(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


FOUR_IN_FIVE = 1.2816  # standard deviations either side
TOGETHER: float = passes()["width"]["together"]  # of errors of different kernels: some cancel


class Interval(NamedTuple):
    """Seconds between which a step lies in 80 % of cases."""

    low: float
    high: float


def interval(
    after: Graph, seconds: Callable[[Graph], float], *, host: float = 0.0, spread: float = 0.0
) -> Interval:
    """The interval of a step that `seconds` predicts.

    `host` is the spread of ln of the host's speed, `spread` what the what-ifs leave open.
    """
    predicted = seconds(after)
    if not predicted:
        return Interval(0.0, 0.0)
    widths = [
        FOUR_IN_FIVE * float(np.sqrt(spread**2 + sum(e**2 for e in both)))
        for both in effects(after, seconds, host)
    ]
    return Interval(
        predicted * float(portable.exp(-widths[0])), predicted * float(portable.exp(widths[1]))
    )


def effects(
    after: Graph, seconds: Callable[[Graph], float], host: float
) -> list[tuple[float, float]]:
    """ln of the step's ratio with host and kernels faster, then slower, by their spreads."""
    predicted = seconds(after)

    def effect(varied: Graph | None) -> float:
        return 0.0 if varied is None else float(portable.log(seconds(varied) / predicted))

    return [
        (effect(_host(after, sign * host)), effect(_device(after, sign))) for sign in (-1.0, 1.0)
    ]


def _host(after: Graph, sigma: float) -> Graph | None:
    """The step with a host faster or slower by so much."""
    host = np.flatnonzero(np.isin(after.kind, (Kind.HOST, Kind.LOAD)))
    if not len(host) or not sigma:
        return None
    with after.edit("host") as edit:
        factor = portable.exp(sigma)
        edit.set(host, seconds=after.seconds[host] * factor, gap=after.gap[host] * factor)
    return edit.graph


def _device(after: Graph, sign: float) -> Graph | None:
    """The step with tasks shorter or longer by their own spread."""
    unsure = np.flatnonzero(after.sigma > 0)
    if not len(unsure):
        return None
    with after.edit("prices") as edit:
        factor = portable.exp(sign * TOGETHER * np.minimum(after.sigma[unsure], 1.0))
        edit.set(unsure, seconds=after.seconds[unsure] * factor)
    return edit.graph
