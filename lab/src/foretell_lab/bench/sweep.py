"""Many cases measured within a time limit, so that a run cut short is still of use.

Cases of one operator and shape stay together, because ratios between formats and layouts are what
is asked of the table; such groups are shuffled so that every prefix of the list covers every
operator in proportion. Some groups come a second time, far from the first: how well figures repeat.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from foretell_lab.bench.call import Place
from foretell_lab.bench.case import Case, Size, floor, held
from foretell_lab.bench.clock import (
    UNSUPPORTED,
    Measured,
    Ready,
    clock_for,
    issue_seconds,
    release,
    synchronize,
    warm,
)
from foretell_lab.bench.ops import build

Group = list[Case]
Report = Callable[[Case, Measured | str], None]
_CHUNK = 96  # cases a profiler run covers
_CHUNK_SECONDS = 4.0
_ISSUED = 6  # cases of one kind whose issue is timed: it hardly depends on sizes
_QUICK = 2e-3  # seconds on the device; longer calls are left out there
_REPEATED = 40  # groups that come twice in the whole list: a hundred cases and more


@dataclass
class Budget:
    """What a sweep may use."""

    ends: float  # on time.monotonic
    longest: float = 0.04  # seconds a single call may take
    memory: float = 4e9  # bytes the cases of one chunk may hold together
    rates: dict[str, float] = field(
        default_factory=dict
    )  # measured ceilings, by format and `bytes`

    def part(self, share: float) -> Budget:
        """The same budget, with a share of the time that is left."""
        now = time.monotonic()
        return replace(self, ends=now + share * (self.ends - now))

    def has_room(self, case: Case) -> bool:
        """Whether a case can be expected to fit."""
        return held(case) < self.memory and (
            not self.rates or floor(case, self.rates) < self.longest / 3
        )


def ordered(cases: Sequence[Case], seed: int = 0) -> list[Group]:
    """Groups of one operator and shape, spread evenly, the sample of repeats among them."""
    shuffle = random.Random(seed)
    by_op: dict[str, dict[tuple[tuple[str, Size], ...], Group]] = {}
    for case in cases:
        by_op.setdefault(case.op, {}).setdefault(case.shape, []).append(case)
    placed: list[tuple[float, Group]] = []
    for groups in by_op.values():
        mine = list(groups.values())
        shuffle.shuffle(mine)
        placed += [((i + shuffle.random()) / len(mine), group) for i, group in enumerate(mine)]
    placed.sort(key=lambda pair: pair[0])
    return _with_repeats([group for _, group in placed])


def _with_repeats(groups: list[Group]) -> list[Group]:
    """Every n-th group of the first half again, half a list later; at most six cases of each."""
    half = len(groups) // 2
    step = max(1, half // _REPEATED)
    out = list(groups[:half])
    for i, group in enumerate(groups[half:]):
        out.append(group)
        if i % step == step - 1 and i < half:
            out.append(groups[i][:6])
    return out


def shard(groups: Sequence[Group], index: int, count: int) -> list[Group]:
    """The part of the list that one of several runs measures."""
    return list(groups[index::count])


def time_issue(cases: Sequence[Case], place: Place, budget: Budget) -> dict[Case, float]:
    """Host seconds to issue a sample of cases; to be called before any profiler runs.

    Calls through the autograd engine are left out: what starts the engine would count as theirs.
    """
    found: dict[Case, float] = {}
    for case in _sample(cases):
        if time.monotonic() > budget.ends:
            return found
        if not budget.has_room(case) or floor(case, budget.rates) > _QUICK:
            continue
        try:
            call = build(case, place)
            if not call.uses_engine:
                call.run()
                synchronize(place)
                found[case] = issue_seconds(call.run, place)
        except UNSUPPORTED:
            synchronize(place)  # the sweep will say why
    release(place)
    return found


def _sample(cases: Sequence[Case]) -> list[Case]:
    """The first few cases of every operator, direction, format and layout, operators mixed."""
    seen: dict[tuple[str, str, str, str], int] = {}
    chosen = []
    for case in cases:
        kind = case.op, case.direction, case.dtype, case.layout
        seen[kind] = seen.get(kind, 0) + 1
        if seen[kind] <= _ISSUED:
            chosen.append(case)
    return chosen


def sweep(cases: Iterable[Case], place: Place, budget: Budget, report: Report) -> None:
    """Measure case after case until all are done or the time is up."""
    clock, waiting = clock_for(place), iter(cases)
    gc.freeze()
    while time.monotonic() < budget.ends:
        chunk, refused, more = _chunk(waiting, place, budget)
        for case, why in refused:
            report(case, why)
        for ready, found in zip(chunk, clock.measure(chunk), strict=True):
            report(ready.case, found)
        del chunk
        release(place)
        if not more:
            return


def _chunk(
    cases: Iterator[Case], place: Place, budget: Budget
) -> tuple[list[Ready], list[tuple[Case, str]], bool]:
    """As many cases as one profiler run takes: warmed up, refused, and whether more are left."""
    ready: list[Ready] = []
    refused: list[tuple[Case, str]] = []
    started, used = time.monotonic(), 0.0
    for case in cases:
        if not budget.has_room(case):
            refused.append((case, "too large for this device or the time"))
            continue
        try:
            ready.append(warm(case, build(case, place), place, budget.longest))
        except UNSUPPORTED as why:
            synchronize(place)  # a device that lost its context raises again here, and ends the run
            refused.append((case, _first_line(why)))
        used += held(case)
        now = time.monotonic()
        is_full = len(ready) >= _CHUNK or used > budget.memory or now - started > _CHUNK_SECONDS
        if is_full or now > budget.ends:
            return ready, refused, now < budget.ends
    return ready, refused, False


def _first_line(why: Any) -> str:
    return str(why).strip().splitlines()[0][:160] if str(why).strip() else type(why).__name__
