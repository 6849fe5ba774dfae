"""What the host spends on each kind of call, forward and backward, plain and under autocast.

A chain of calls on tiny tensors is issued while the device keeps up easily, so its time is the
host's alone: Python, dispatch, autograd's record keeping, allocation and launches. Backward walks
the chain in the engine, so a call's share is its nodes, with the gradients of its parameters kept.

    forward    time of the chain / calls                                            (→ `_once`)
    backward   (backward of the chain − backward of an empty one) / calls

Rows are named `host.linear` and so on; dtype amp_bf16 is under autocast, casts included. All is
timed before any profiler has run, since a profiler slows launches even after it has stopped;
kernels are counted afterwards. Layout `profiled` is the same under torch's profiler: what a trace
says the host took, against what it takes.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from foretell.pytorch.bench.call import Place, use_precision
from foretell.pytorch.bench.case import Case, case
from foretell.pytorch.bench.chains import LENGTH, Chain, chain, empty, kinds
from foretell.pytorch.bench.clock import (
    UNSUPPORTED,
    Measured,
    device_kernels,
    mark,
    profile,
    quartiles,
    split,
    synchronize,
)

_ROUNDS, _REPEATS, _WARM = 4, 8, 2  # rounds lie apart, so that one disturbance spoils one
_DIRECTIONS = ("forward", "backward")
_DTYPES = ("fp32", "amp_bf16")

Within = Callable[[], AbstractContextManager[Any]]
Key = tuple[str, str]  # kind, dtype
Times = tuple[list[float], list[float]]  # forward, backward


@dataclass(frozen=True)
class Timed:
    """Seconds of every chain, and of an empty one backward."""

    chains: dict[Key, Times | str]
    nothing: list[float]


def time_chains(place: Place, ends: float, only: Sequence[str] = ()) -> Timed:
    """Time chains of every kind until time is up; to be called before any profiler runs."""
    use_precision("fp32")
    keys = [(kind, dtype) for kind in only or kinds() for dtype in _DTYPES]
    found: dict[Key, Times | str] = {key: ([], []) for key in keys}
    nothing: list[float] = []
    for _ in range(_ROUNDS):
        nothing += _times(empty(place), place, nullcontext)[1]
        for key in (k for k in keys if time.monotonic() < ends):
            found[key] = _longer(found[key], _try_times(key, place))
    for key in (k for k in keys if found[k] == ([], [])):
        found[key] = "no time was left"
    return Timed(found, nothing)


def time_profiled(place: Place, ends: float, only: Sequence[str] = ()) -> Timed:
    """The same while torch's profiler records operators, shapes and kernels as for a trace."""
    with torch.profiler.profile(record_shapes=True):
        return time_chains(place, ends, only)


def rows(place: Place, timed: Timed, layout: str = "-") -> Iterator[tuple[Case, Measured | str]]:
    """Host seconds a call of each kind; counts kernels, so a profiler runs."""
    nothing = statistics.median(timed.nothing)
    alone = case("host.empty", "backward", "fp32", layout, calls=1)
    yield alone, _measured(timed.nothing, 0.0, 1, 0.0)
    counts = _kernel_counts(place, [k for k, t in timed.chains.items() if not isinstance(t, str)])
    for key, times in timed.chains.items():
        for i, direction in enumerate(_DIRECTIONS):
            asked = case(f"host.{key[0]}", direction, key[1], layout, calls=LENGTH)
            if isinstance(times, str):
                yield asked, times
                continue
            yield asked, _measured(times[i], nothing if i else 0.0, LENGTH, counts[key][i])


def _measured(times: Sequence[float], nothing: float, calls: int, kernels: float) -> Measured:
    low, middle, high = quartiles(times)
    spread = (high - low) / middle if middle else 0.0
    return Measured(math.nan, spread, round(kernels), max(0.0, middle - nothing) / calls)


def _longer(known: Times | str, more: Times | str) -> Times | str:
    if isinstance(known, str) or isinstance(more, str):
        return known if isinstance(known, str) else more
    return known[0] + more[0], known[1] + more[1]


def _try_times(key: Key, place: Place) -> Times | str:
    try:
        return _times(chain(key[0], place), place, _within(key[1], place))
    except UNSUPPORTED as why:
        return str(why)


def _within(dtype: str, place: Place) -> Within:
    kind = "cuda" if place.is_cuda else "cpu"
    return (lambda: torch.autocast(kind, torch.bfloat16)) if dtype == "amp_bf16" else nullcontext


def _times(calls: Chain, place: Place, within: Within) -> Times:
    took = [_once(calls, place, within) for _ in range(_WARM + _REPEATS)][_WARM:]
    return [there for there, _ in took], [back for _, back in took]


def _once(calls: Chain, place: Place, within: Within) -> tuple[float, float]:
    """Seconds to issue the chain, and its backward."""
    calls.forget()
    entered = calls.enter()
    synchronize(place)
    start = time.perf_counter()
    with within():
        out = calls.flow(entered)
    there = time.perf_counter() - start
    gradient = torch.ones_like(out)
    synchronize(place)
    start = time.perf_counter()
    out.backward(gradient)
    return there, time.perf_counter() - start


def _kernel_counts(place: Place, keys: Sequence[Key]) -> dict[Key, tuple[float, float]]:
    """Kernels a call launches forward and backward; zero where no profiler sees them."""
    if not place.is_cuda:
        return dict.fromkeys(keys, (0.0, 0.0))
    with profile() as profiler:
        for kind, dtype in keys:
            _marked(chain(kind, place), _within(dtype, place))
        torch.cuda.synchronize()
    counts = [len(span.kernels) / LENGTH for span in split(device_kernels(profiler))]
    return {key: (counts[2 * i], counts[2 * i + 1]) for i, key in enumerate(keys)}


def _marked(calls: Chain, within: Within) -> None:
    entered = calls.enter()
    mark()
    with within():
        out = calls.flow(entered)
    mark()
    gradient = torch.ones_like(out)
    mark()
    out.backward(gradient)
    mark()
