"""What lies between kernels, and what calls cost that run none.

    launch kernel   how long the tiny kernel itself runs, one after another
    launch stream   from one kernel's start to the next one's, in a stream that is never empty
    launch graph    the same as nodes of one replayed graph; host_seconds is one node's share
    launch memset   as stream, with a fill instead of a kernel
    host.item …     host_seconds of calls that wait, allocate or switch modes

The gap a stream leaves is `stream` less `kernel`; that of a graph is `graph` less `kernel`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator

import torch

from foretell.pytorch.bench.call import Place
from foretell.pytorch.bench.case import Case, case
from foretell.pytorch.bench.clock import (
    Measured,
    busy,
    device_kernels,
    issue_seconds,
    mark,
    profile,
    quartiles,
    split,
)

_COUNT = 200
_AHEAD = 20_000_000  # cycles to sleep, some 10 ms, so that the host is ahead of the device


def time_launches(place: Place) -> list[tuple[Case, Measured]]:
    """Intervals and plain calls; to be called before any profiler runs."""
    x = place.randn(1024)
    found = [(_asked(f"host.{n}", "-", calls=1), _issued(c, place)) for n, c in _calls(x).items()]
    if place.is_cuda:
        found.append((_asked("launch", "stream"), _interval(lambda: x.add_(1.0), _COUNT)))
        found.append((_asked("launch", "memset"), _interval(x.zero_, _COUNT)))
        found.append((_asked("launch", "graph"), _interval(_graph(x).replay, 1)))
    return found


def kernel_rows(place: Place) -> Iterator[tuple[Case, Measured]]:
    """How long the tiny kernel of the intervals runs; a profiler runs."""
    if not place.is_cuda:
        return
    x = place.randn(1024)
    with profile() as profiler:
        mark()
        for _ in range(_COUNT):
            x.add_(1.0)
        mark()
        torch.cuda.synchronize()
    took = [busy([kernel]) for kernel in split(device_kernels(profiler))[0].kernels]
    low, middle, high = quartiles(took)
    yield _asked("launch", "kernel"), Measured(middle, (high - low) / middle, 1)


def _asked(op: str, layout: str, **shape: int) -> Case:
    return case(op, "forward", "fp32", layout, **(shape or {"n": 1024, "count": _COUNT}))


def _calls(x: torch.Tensor) -> dict[str, Callable[[], object]]:
    def autocast() -> None:
        with torch.autocast(x.device.type, torch.bfloat16):
            pass

    return {
        "item": x[0].item,
        "empty_tensor": lambda: torch.empty_like(x),
        "autocast_enter_exit": autocast,
        "add_": lambda: x.add_(1.0),
        "zero_": x.zero_,
        "size": x.size,
    }


def _issued(call: Callable[[], object], place: Place) -> Measured:
    return Measured(math.nan, 0.0, 0, issue_seconds(call, place, 100))


def _graph(x: torch.Tensor) -> torch.cuda.CUDAGraph:
    """`_COUNT` small kernels captured."""
    x.add_(1.0)
    torch.cuda.synchronize()
    made = torch.cuda.CUDAGraph()
    with torch.cuda.graph(made):
        for _ in range(_COUNT):
            x.add_(1.0)
    return made


def _interval(run: Callable[[], object], calls: int) -> Measured:
    """Device and host seconds a kernel, with the device kept behind the host."""
    device, host = [], []
    for _ in range(12):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(_AHEAD)
        first.record()
        start = time.perf_counter()
        for _ in range(calls):
            run()
        host.append((time.perf_counter() - start) / _COUNT)
        last.record()
        torch.cuda.synchronize()
        device.append(first.elapsed_time(last) * 1e-3 / _COUNT)
    low, middle, high = quartiles(device[2:])
    return Measured(middle, (high - low) / middle, 1, quartiles(host[2:])[1])
