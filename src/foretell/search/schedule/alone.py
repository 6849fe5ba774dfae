"""One micro-batch on its own: an order that fits into memory, or how much is missing and where.

Micro-batches one after the other are always a schedule, so one that cannot run alone is the only
way for a problem to have none.
"""

from collections.abc import Sequence
from typing import Any

from foretell.errors import InfeasibleError
from foretell.search.schedule.repetend import Repetend
from foretell.search.schedule.replay import Item, end, fits, peaks, replay
from foretell.search.schedule.solver import Budget, solve, solver
from foretell.search.schedule.ticks import Ticks

_LIMIT = 5.0  # deterministic seconds; one micro-batch of any placement we met takes milliseconds


def alone(ticks: Ticks) -> Repetend:
    """Micro-batches one after the other, as a pattern."""
    for order in (ticks.order, _depth_first(ticks)):
        items = [(block, 0) for block in order]
        if fits(items, ticks.held, ticks.capacity):
            return _pattern(ticks, items)
    for device in range(len(ticks.capacity)):
        _require(ticks, device)
    starts = _search(ticks, None)
    if starts is None:
        raise _too_small(ticks, peaks([(i, 0) for i in ticks.order], ticks.held))
    return _pattern(ticks, [(i, 0) for i in sorted(range(len(starts)), key=starts.__getitem__)])


def _pattern(ticks: Ticks, items: list[Item]) -> Repetend:
    starts = replay(items, ticks.time, ticks.devices, ticks.after)
    period = int(end(starts, ticks.time))
    return Repetend(period, 1, tuple(int(row[0]) for row in starts))


def _depth_first(ticks: Ticks) -> list[int]:
    """Follow each branch as far as it goes before the next is begun: the least is held at once."""
    left = [len(waits) for waits in ticks.after]
    stack = [i for i in reversed(ticks.order) if not left[i]]
    done: list[int] = []
    while stack:
        done.append(i := stack.pop())
        for j, _ in ticks.followers[i]:
            left[j] -= 1
            if not left[j]:
                stack.append(j)
    return done


def _require(ticks: Ticks, device: int) -> None:
    """Raise unless the device alone could hold one micro-batch in some order."""
    room = ticks.capacity[device]
    if room is None or peaks([(i, 0) for i in ticks.order], ticks.held)[device] <= room:
        return
    starts = _search(ticks, device)
    order = sorted(range(len(ticks.time)), key=(starts or ticks.head).__getitem__)
    need = peaks([(i, 0) for i in order], ticks.held)
    if need[device] > room:
        raise _too_small(ticks, need, device)


def _search(ticks: Ticks, device: int | None) -> list[int] | None:
    """Starts of one micro-batch that fit every device, or that need least of one."""
    cp = solver().CpModel()
    total = sum(ticks.time) + sum(lag for waits in ticks.after for _, lag in waits)
    start = [cp.new_int_var(0, total, "") for _ in ticks.time]
    for i, waits in enumerate(ticks.after):
        for j, lag in waits:
            cp.add(start[i] >= start[j] + ticks.time[j] + lag)
    before = _orders(cp, ticks, start)
    for d, room in enumerate(ticks.capacity):
        if device is None and room is not None:
            _hold(cp, ticks.held[d], before, room)
    if device is not None:
        most = cp.new_int_var(0, sum(r for _, r, _ in ticks.held[device]), "")
        _hold(cp, ticks.held[device], before, most)
        cp.minimize(most)
    status, engine = solve(cp, Budget(_LIMIT), _LIMIT)
    return [engine.value(s) for s in start] if status in ("best", "found") else None


def _orders(cp: Any, ticks: Ticks, start: list[Any]) -> dict[tuple[int, int], Any]:
    before: dict[tuple[int, int], Any] = {}
    for a, b in sorted({(a, b) for on in ticks.by_device for a in on for b in on if a < b}):
        before[a, b] = cp.new_bool_var("")
        before[b, a] = ~before[a, b]
        for x, y in ((a, b), (b, a)):
            cp.add(start[y] >= start[x] + ticks.time[x]).only_enforce_if(before[x, y])
    return before


def _hold(
    cp: Any, held: Sequence[tuple[int, int, int]], before: dict[tuple[int, int], Any], room: Any
) -> None:
    for block, rise, _ in held:
        if rise > 0:
            earlier = sum(c * before[i, block] for i, _, c in held if i != block and c)
            cp.add(earlier + rise <= room)


def _too_small(ticks: Ticks, need: list[int], device: int | None = None) -> InfeasibleError:
    rooms = [n if r is None else r for n, r in zip(need, ticks.capacity, strict=True)]
    if device is None:
        device = max(range(len(need)), key=lambda d: need[d] - rooms[d])
    stays = max(ticks.left[device], 0)
    wanted, has = (need[device] + stays) * ticks.memory_unit, ticks.limits[device]
    what = "what all micro-batches leave behind" if stays else "one micro-batch"
    return InfeasibleError(
        f"device {device} needs memory {wanted:g} for {what}, it has {has:g}",
        hint=f"give it at least {wanted:g}, or place fewer blocks there",
    )
