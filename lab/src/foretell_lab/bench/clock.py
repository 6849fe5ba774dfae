"""Times calls as a training step would see them.

On a GPU the time of a call is what its kernels occupy, read from the same instrument that writes
traces (CUPTI, through torch's profiler), so that a measured table and a trace speak of one thing:
launch gaps do not count, and the number of kernels comes for free. Before each repetition the
second-level cache is filled with other data, half of it dirty, and then the tensors a step would
just have written are written again; the rest of the operands is cold, as in a step.

    | evict | refresh | mark | kernels of the call | mark | evict | …            (→ `_record`)

Marks are spin kernels; what lies between two of them belongs to one repetition. The second spins
for a known number of cycles more, so that its duration tells the clock the call ran at.
On a CPU the time of a call is the wall clock around it.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from foretell.errors import ForetellError
from foretell_lab.bench.call import Call, Place, use_precision
from foretell_lab.bench.case import Case, work

# What an operator raises where it does not run here: unsupported formats, shapes, or too little
# memory (torch.OutOfMemoryError is a RuntimeError). Anything else is a bug of ours.
UNSUPPORTED = (RuntimeError, NotImplementedError)

_MARK = "spin_kernel"  # the kernel of torch.cuda._sleep
_PROBE = 20_000  # cycles of the mark that reads the clock, some 10 µs
_LONG_WORK, _LONGEST_REST = 5e-3, 0.05  # seconds
_WAKE = 200_000_000  # cycles, some 100 ms: an idle device clocks down and takes a while to return
_REPEATS, _REPEATS_SHORT = 10, 15
_MANY = 3e-4  # seconds of issuing: dozens of launches
_SHORT = 5e-4  # seconds; shorter calls are repeated more often


@dataclass(frozen=True)
class Ready:
    """A warmed-up case, with the readings of its first calls."""

    case: Case
    call: Call
    repeats: int
    once: float = 0.0  # seconds of one call, waited for


@dataclass(frozen=True)
class Measured:
    """What one case took: medians over its repetitions."""

    seconds: float  # that its kernels occupy the device
    spread: float  # between the quartiles, as a share of the median
    kernels: int
    host: float = math.nan  # seconds the host needs to issue it, where that was timed
    kernel: str = ""  # the longest kernel
    clock: float = math.nan  # hertz, from the timestamps after the call


@dataclass(frozen=True)
class Kernel:
    """One kernel, copy or fill that ran on the device."""

    name: str
    start: int  # nanoseconds
    end: int


@dataclass
class Span:
    """What ran between two marks, and how much longer the second mark took than the first."""

    kernels: list[Kernel]
    probe: float = 0.0  # negative until the second mark is seen


def warm(case: Case, call: Call, place: Place, longest: float) -> Ready:
    """Run a call until it is warm; raise where it takes too long to repeat."""
    call.run()
    synchronize(place)
    once = _seconds(call.run, place)
    if once > longest:
        raise RuntimeError(f"takes {once:.3g} s, more than {longest:.3g} s")
    return Ready(case, call, _REPEATS_SHORT if once < _SHORT else _REPEATS, once)


def issue_seconds(run: Callable[[], object], place: Place, count: int = 16) -> float:
    """Median time until a call returns, issued back to back as in a step.

    Calls of many launches are waited for, since a full queue would hold the host up.
    """
    took: list[float] = []
    for _ in range(count):
        start = time.perf_counter()
        run()
        took.append(time.perf_counter() - start)
        if took[-1] > _MANY:
            synchronize(place)
    synchronize(place)
    return statistics.median(took)


class WallClock:
    """Times calls by the wall clock, for devices that finish before they return."""

    def __init__(self, place: Place) -> None:
        self.place = place

    def measure(self, ready: Sequence[Ready]) -> list[Measured | str]:
        """What each call took, or why it could not be measured."""
        return [self._one(r) for r in ready]

    def _one(self, ready: Ready) -> Measured | str:
        use_precision(ready.case.dtype)
        try:
            took = [_seconds(ready.call.run, self.place) for _ in range(ready.repeats)]
        except UNSUPPORTED as why:
            return str(why)
        return Measured(statistics.median(took), _spread(took), 0)


class KernelClock:
    """Times calls by the kernels they run on a CUDA device."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.cache = torch.cuda.get_device_properties(place.device).L2_cache_size
        count = int(1.25 * self.cache) // 4
        self._source, self._sink = place.randn(count), place.randn(count)

    def measure(self, ready: Sequence[Ready]) -> list[Measured | str]:
        """What each call took, or why it could not be measured."""
        torch.cuda._sleep(_WAKE)
        with profile() as profiler:
            done = [self._record(r) for r in ready]
            torch.cuda.synchronize()
        spans = split(device_kernels(profiler))
        if len(spans) != sum(count for count, _ in done):
            return ["the profiler lost kernels"] * len(ready)
        return list(_assigned(done, spans))

    def _record(self, ready: Ready) -> tuple[int, str]:
        """Repeat one call between marks; how often, and what stopped it."""
        use_precision(ready.case.dtype)
        evicts = work(ready.case).bytes < 8 * self.cache  # larger calls evict themselves
        for i in range(ready.repeats):
            self._freshen(ready.call, evicts)
            mark()
            try:
                ready.call.run()
            except UNSUPPORTED as why:
                mark()
                return i + 1, str(why)
            mark(_PROBE)
        self._rest(ready.repeats * ready.once)
        return ready.repeats, ""

    def _rest(self, worked: float) -> None:
        """Idle after long work, whose power pulls the clock down for whatever comes next."""
        if worked > _LONG_WORK:
            torch.cuda.synchronize()
            time.sleep(min(worked, _LONGEST_REST))

    def _freshen(self, call: Call, evicts: bool) -> None:
        """Fill the cache with other data, then write what a step has just written."""
        with torch.no_grad():
            if evicts:
                self._sink.copy_(self._source)
            for tensor in call.fresh:
                tensor.mul_(1.0)


def _assigned(done: Sequence[tuple[int, str]], spans: Sequence[Span]) -> Iterable[Measured | str]:
    at = 0
    for count, why in done:
        yield why or _summed(spans[at : at + count])
        at += count


def _summed(spans: Sequence[Span]) -> Measured:
    took = [busy(span.kernels) for span in spans]
    kernels = int(statistics.median(len(span.kernels) for span in spans))
    longest = max(spans[-1].kernels, key=lambda k: k.end - k.start, default=Kernel("", 0, 0))
    clock = _PROBE / statistics.median(span.probe for span in spans)
    seconds = statistics.median(took)
    return Measured(seconds, _spread(took), kernels, kernel=longest.name, clock=clock)


def busy(span: Sequence[Kernel]) -> float:
    """Seconds during which at least one kernel runs."""
    total, until = 0, 0
    for kernel in sorted(span, key=lambda k: k.start):
        total += max(0, kernel.end - max(kernel.start, until))
        until = max(until, kernel.end)
    return total * 1e-9


def split(kernels: Sequence[Kernel]) -> list[Span]:
    """What lies between the first and second mark, the third and fourth, and so on."""
    spans: list[Span] = []
    inside = False
    for kernel in sorted(kernels, key=lambda k: k.start):
        if _MARK in kernel.name:
            inside = not inside
            if inside:
                spans.append(Span([]))
            spans[-1].probe += (kernel.end - kernel.start) * (-1e-9 if inside else 1e-9)
        elif inside:
            spans[-1].kernels.append(kernel)
    return spans[:-1] if inside else spans


def mark(cycles: int = 1) -> None:
    """Put a mark on the stream."""
    torch.cuda._sleep(cycles)


def profile() -> Any:
    """A profiler that sees kernels and nothing else."""
    return torch.autograd.profiler.profile(use_device="cuda", use_kineto=True, use_cpu=False)


def device_kernels(profiler: Any) -> list[Kernel]:
    """Every kernel, copy and fill a profiler saw on the device."""
    cuda = torch.autograd.DeviceType.CUDA
    return [
        Kernel(event.name(), event.start_ns(), event.start_ns() + event.duration_ns())
        for event in profiler.kineto_results.events()
        if event.device_type() == cuda and not event.name().endswith(" Sync")
    ]


def clock_for(place: Place) -> WallClock | KernelClock:
    """The clock of a device."""
    return KernelClock(place) if place.is_cuda else WallClock(place)


def synchronize(place: Place) -> None:
    """Wait until the device is idle."""
    if place.is_cuda:
        torch.cuda.synchronize()


def release(place: Place) -> None:
    """Give back what calls held, and the allocator's cache where it holds most of the memory."""
    gc.collect()
    if place.is_cuda:
        _, total = torch.cuda.mem_get_info()
        if torch.cuda.memory_reserved() > 0.6 * total:
            torch.cuda.empty_cache()


def _seconds(run: Callable[[], object], place: Place) -> float:
    start = time.perf_counter()
    run()
    synchronize(place)
    return time.perf_counter() - start


def _spread(took: Sequence[float]) -> float:
    if len(took) < 4:
        return 0.0
    low, middle, high = quartiles(took)
    return (high - low) / middle if middle else 0.0


def quartiles(took: Sequence[float]) -> tuple[float, float, float]:
    """First quartile, median and third quartile."""
    low, middle, high = statistics.quantiles(took, n=4)
    return low, middle, high


def place_for(name: str) -> Place:
    """A device by name; `auto` is the GPU where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ForetellError(
            "no CUDA device here", hint="pass `--device cpu`, or run where a GPU is"
        )
    return Place(torch.device(name))
