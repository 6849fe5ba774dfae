"""What no schedule can beat, in whole units; every bound holds for repetends of any length.

Let `t_b` be the time of a block, `w_d` the sum of those of device `d`, `c_d` its capacity.

    P ≥ w_d                                                    a device is busy    → `period`
    P ≥ S + (w_d without S)                                                        → `period`
    P ≥ S + Σ_r m_r · |r| / c_d                                memory              → `_residence`
    T ≥ S·N + head(X) + N · Σ_{b∈X} t_b + tail(X)              any X on a device   → `makespan`

`S` is the time of blocks that hold every device: while one runs nothing else does, so those spans
can be cut out of any schedule, and what is left is a schedule in which these blocks take no time.
A residence `r` is memory `m_r` held from the start of the block that takes it to the end of the
one that gives it back (while that one runs, nothing else can take it); `|r|` is the longest way
between.
"""

from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import NamedTuple

from foretell.search.schedule.ticks import Ticks, longest


class Residence(NamedTuple):
    """Memory that one block takes and another gives back."""

    taken: int
    given: int
    amount: int


class _View(NamedTuple):
    """A problem with or without the time of its blocks on every device."""

    cut: int  # time of those blocks, when it was taken out
    time: Sequence[int]
    head: Sequence[int]
    tail: Sequence[int]


def period(ticks: Ticks) -> Fraction:
    """The least units a micro-batch can take in the long run."""
    found = Fraction(max(sum(ticks.units[i] for i in on) for on in ticks.by_device))
    for view in _views(ticks):
        for device in range(len(ticks.capacity)):
            if room := _room(ticks, device):
                found = max(found, view.cut + Fraction(_area(ticks, view, device), room))
    return found


def makespan(ticks: Ticks, micro_batches: int) -> Fraction:
    """The least units in which so many micro-batches can be done."""
    found = Fraction(0)
    for view in _views(ticks):
        base = view.cut * micro_batches
        ways = [h + t + g for h, t, g in zip(view.head, view.time, view.tail, strict=True)]
        found = max(found, Fraction(base + max(ways)))
        for device, on in enumerate(ticks.by_device):
            found = max(found, Fraction(base + _busy(view, on, micro_batches)))
            found = max(found, base + _held(ticks, view, device, micro_batches))
    return found


def residences(ticks: Ticks, device: int) -> list[Residence] | None:
    """Who gives back what whom took on a device; None where a block gives before it is due."""
    reach = ticks.reach
    open_: list[list[int]] = []
    found: list[Residence] = []
    for block, rise, change in ticks.held[device]:
        if rise > max(change, 0):
            found.append(Residence(block, block, rise - max(change, 0)))
        if change > 0:
            open_.append([block, change])
        owed = max(-change, 0)
        for entry in reversed(open_):
            if owed and block in reach[entry[0]]:
                amount = min(owed, entry[1])
                found.append(Residence(entry[0], block, amount))
                entry[1], owed = entry[1] - amount, owed - amount
        if owed:
            return None
        open_ = [entry for entry in open_ if entry[1]]
    return None if open_ else found


def _views(ticks: Ticks) -> Iterator[_View]:
    num = len(ticks.capacity)
    wide = [len(devices) == num for devices in ticks.devices]
    lag_unit = ticks.fine
    for cut in (False, True):
        time = [0 if cut and w else t for w, t in zip(wide, ticks.units, strict=True)]
        taken = sum(ticks.units) - sum(time)
        # a lag may pass while a wide block runs: with those cut out it counts for nothing
        after, followers = (
            [[(j, lag // lag_unit) for j, lag in waits] for waits in side]
            for side in (ticks.after, ticks.followers)
        )
        yield _View(
            taken, time,
            longest(time, after, with_lags=not cut), longest(time, followers, with_lags=not cut),
        )  # fmt: skip


def _busy(view: _View, on: Sequence[int], micro_batches: int) -> int:
    """The least span of some blocks of a device, over all ways to choose those blocks."""
    best = 0
    busy = [i for i in on if view.time[i]]
    for head in {view.head[i] for i in busy}:
        for tail in {view.tail[i] for i in busy}:
            chosen = [i for i in busy if view.head[i] >= head and view.tail[i] >= tail]
            if chosen:
                best = max(best, head + micro_batches * sum(view.time[i] for i in chosen) + tail)
    return best


def _held(ticks: Ticks, view: _View, device: int, micro_batches: int) -> Fraction:
    """The least span in which a device's memory can serve so many micro-batches."""
    found, room = residences(ticks, device), _room(ticks, device)
    if not found or not room:
        return Fraction(0)
    head = min(view.head[r.taken] for r in found)
    tail = min(view.tail[r.given] for r in found)
    return head + Fraction(micro_batches * _area(ticks, view, device), room) + tail


def _room(ticks: Ticks, device: int) -> int:
    """The memory a device has, before anything stays there; 0 where that bounds nothing."""
    room, left = ticks.capacity[device], ticks.left[device]
    return 0 if room is None or left < 0 else room + left


def _area(ticks: Ticks, view: _View, device: int) -> int:
    """The least memory × time that one micro-batch needs on a device."""
    found = residences(ticks, device) or []
    lags = view.cut == 0
    return sum(r.amount * _way(ticks, view.time, r.taken, r.given, lags) for r in found)


def _way(ticks: Ticks, time: Sequence[int], first: int, last: int, lags: bool) -> int:
    """From the start of one block to the end of another that waits for it."""
    best = {first: 0}
    for i in ticks.order:
        ways = [
            best[j] + time[j] + lag // ticks.fine * lags for j, lag in ticks.after[i] if j in best
        ]
        if ways and i != first:
            best[i] = max(ways)
    return best[last] + time[last]
