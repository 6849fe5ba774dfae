"""Times compiled regions, and each of their ops alone, as a training step would see them.

What counts is what the kernels occupy, read from the profiler's own instrument as `bench.clock`
does. Before each repetition the second-level cache is filled with other data, half of it dirty,
and the region's first entry is written again. Inductor's choice among its candidate configurations
is left to it, but each candidate is timed by fifteen cold runs instead of hundreds, all issued
before the first begins.
The clock of a CPU: → `host_clock`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from foretell_lab.bench.clock import (
    Kernel,
    busy,
    device_kernels,
    mark,
    profile,
    quartiles,
    split,
)

Tensor = Any
Run = Callable[[], object]
_SHORT, _LONG = 21, 5  # repetitions below and above a millisecond
_QUEUED = 2_000_000  # cycles, some millisecond: the host issues every run of a candidate meanwhile
_ALONE = 5
_LARGE = 8  # calls that move this many caches evict them themselves
# The kernel that draws seeds for a compiled dropout: a step draws them once for all its regions.
_SEEDS = "random_from_to"


@dataclass(frozen=True)
class Reading:
    """Median seconds over repetitions, the spread between quartiles as a share, and kernels."""

    seconds: float
    spread: float
    kernels: int
    names: tuple[str, ...] = ()  # of the kernels, shortened
    parts: tuple[
        float, ...
    ] = ()  # median seconds of each kernel, where every repetition ran as many


class DeviceClock:
    """Collects calls while a profiler runs; `read` then tells what each took."""

    def __init__(self, cache: int) -> None:
        self.cache = cache
        count = int(1.25 * cache) // 4
        self._source, self._sink = (torch.randn(count, device="cuda") for _ in range(2))
        self._counts: list[int] = []
        self._profiler: Any = None

    def __enter__(self) -> DeviceClock:
        self._counts = []
        torch.cuda._sleep(20_000_000)  # an idle device clocks down: some 10 ms to wake it
        self._profiler = profile()
        self._profiler.__enter__()
        return self

    def __exit__(self, *why: object) -> None:
        torch.cuda.synchronize()
        self._profiler.__exit__(None, None, None)

    def record(self, run: Run, fresh: Tensor | None, moved: float, repeats: int = _SHORT) -> None:
        """Repeat a call between marks."""
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        repeats = min(repeats, _LONG) if time.perf_counter() - start > 1e-3 else repeats
        for _ in range(repeats):
            self._freshen(fresh, moved < _LARGE * self.cache)
            mark()
            run()
            mark()
        self._counts.append(repeats)

    def _freshen(self, fresh: Tensor | None, evicts: bool) -> None:
        if evicts:
            self._sink.copy_(self._source)
        if fresh is not None:
            fresh.mul_(1.0)

    def read(self) -> list[Reading]:
        """What each recorded call took; nothing where the profiler lost kernels."""
        spans = split(device_kernels(self._profiler))
        if len(spans) != sum(self._counts):
            return []
        found, at = [], 0
        for count in self._counts:
            part = spans[at : at + count]
            ran = [[k for k in span.kernels if _SEEDS not in k.name] for span in part]
            names = tuple(k.name[:48] for k in ran[-1])
            took = _reading([busy(kernels) for kernels in ran], names)
            found.append(replace(took, parts=_parts(ran)))
            at += count
        return found


def _parts(ran: list[list[Kernel]]) -> tuple[float, ...]:
    if len({len(kernels) for kernels in ran}) != 1:
        return ()
    return tuple(
        statistics.median((k.end - k.start) * 1e-9 for k in same) for same in zip(*ran, strict=True)
    )


def _reading(took: list[float], names: tuple[str, ...]) -> Reading:
    middle = statistics.median(took)
    low, _, high = quartiles(took) if len(took) > 3 else (middle, middle, middle)
    return Reading(middle, (high - low) / middle if middle else 0.0, len(names), names)


def wake() -> None:
    """Start the profiler once, which takes seconds, before it is this process's turn."""
    with profile():
        torch.zeros(1, device="cuda").add_(1.0)
        torch.cuda.synchronize()


def quicken(turn: Any = None) -> None:
    """Let Inductor choose among candidates by fifteen cold runs of each instead of hundreds.

    Where several processes use the device, `turn` is the lock that a choice holds.
    """
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    scrap = torch.zeros(64 << 18, dtype=torch.int32, device="cuda")  # 64 MiB, as Inductor flushes

    def bench(self: Any, launcher: Any, *args: Any, **kwargs: Any) -> float:
        if launcher.n_spills is not None and launcher.n_spills > 16:  # as Inductor does
            return float("inf")
        kwargs.pop("with_profiler", None)
        stream = torch.cuda.current_stream().cuda_stream
        with turn or nullcontext():
            return _by_events(lambda: launcher(*args, **kwargs, stream=stream), scrap)

    CachingAutotuner.bench = bench


def _by_events(run: Run, scrap: Tensor, repeats: int = 15) -> float:
    run()
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    torch.cuda._sleep(_QUEUED)  # else a slow host is what is timed, and the choice is a lot drawn
    for start, end in pairs:
        scrap.zero_()
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return float(statistics.median(start.elapsed_time(end) for start, end in pairs))
