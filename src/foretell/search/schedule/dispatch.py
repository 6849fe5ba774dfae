"""Schedules without search: always start next what can start first, by a rule where several can.

Memory is kept as a banker would: a block that takes some starts only if every micro-batch already
begun on that device can still be finished. So nothing ever waits for memory that cannot come back.
"""

from collections.abc import Callable, Iterator, Sequence

from foretell.search.schedule.replay import Item, fits
from foretell.search.schedule.ticks import Ticks

Rule = Callable[[Ticks, int, int], tuple[int, ...]]  # of (block, micro-batch): smaller goes first


def deepest(ticks: Ticks, block: int, m: int) -> tuple[int, ...]:
    """Backward before forward; what nothing waits for fills the gaps."""
    return (not ticks.followers[block], -ticks.head[block], m)


def _oldest(ticks: Ticks, block: int, m: int) -> tuple[int, ...]:
    """One micro-batch as far as it goes, then the next."""
    return (m, ticks.head[block])


def _critical(ticks: Ticks, block: int, m: int) -> tuple[int, ...]:
    """What has the longest way to go."""
    return (-ticks.tail[block], m)


RULES: tuple[Rule, ...] = (deepest, _oldest, _critical)


def dispatch(ticks: Ticks, micro_batches: int) -> Iterator[list[Item]]:
    """One order for each rule, as far as it ends and fits."""
    for rule in RULES:
        items = ordered(ticks, micro_batches, rule)
        if items is not None and fits(items, ticks.held, ticks.capacity):
            yield items


def ordered(ticks: Ticks, micro_batches: int, rule: Rule) -> list[Item] | None:
    """The order that a rule leads to, or None where it gets stuck."""
    bank = [_Account(ticks, d) for d in range(len(ticks.capacity))]
    free = [0] * len(bank)
    next_ = [0] * len(ticks.time)  # micro-batch that each block runs next
    ends: list[list[int]] = [[] for _ in ticks.time]
    items: list[Item] = []
    while len(items) < micro_batches * len(ticks.time):
        best: tuple[int, tuple[int, ...], int] | None = None
        for block, m in enumerate(next_):
            ready = _ready(ticks, block, m, ends) if m < micro_batches else None
            if ready is None or not all(bank[d].allows(block, m) for d in ticks.devices[block]):
                continue
            start = max(ready, *(free[d] for d in ticks.devices[block]))
            best = min(best or (start + 1, (), 0), (start, rule(ticks, block, m), block))
        if best is None:
            return None
        start, _, block = best
        items.append((block, next_[block]))
        ends[block].append(start + ticks.time[block])
        for d in ticks.devices[block]:
            free[d] = start + ticks.time[block]
            bank[d].run(block, next_[block])
        next_[block] += 1
    return items


def _ready(ticks: Ticks, block: int, m: int, ends: Sequence[Sequence[int]]) -> int | None:
    """When all that a block waits for has ended; None where that is not known yet."""
    latest = 0
    for on, lag in ticks.after[block]:
        if len(ends[on]) <= m:
            return None
        latest = max(latest, ends[on][m] + lag)
    return latest


class _Account:
    """What one device has promised to the micro-batches begun on it."""

    def __init__(self, ticks: Ticks, device: int) -> None:
        self.room = ticks.capacity[device]
        self.rows = {i: k for k, (i, _, _) in enumerate(ticks.held[device])}
        self.claims = _claims(ticks, device)
        self.state: dict[int, int] = {}  # rows done, of each micro-batch begun and not finished
        self.promised = 0

    def allows(self, block: int, m: int) -> bool:
        """Whether the block may run now."""
        if self.room is None or block not in self.rows or m in self.state:
            return True
        return self.promised + self.claims[0] <= self.room

    def run(self, block: int, m: int) -> None:
        """Note that the block runs."""
        if block not in self.rows:
            return
        done = self.state.pop(m, 0)
        self.promised -= self.claims[done] if done else 0
        if done + 1 < len(self.rows):
            self.state[m] = done + 1
            self.promised += self.claims[done + 1]


def _claims(ticks: Ticks, device: int) -> list[int]:
    """The most a micro-batch will hold on the device once so many of its rows are done."""
    now, levels = 0, []
    for _, rise, change in ticks.held[device]:
        levels.append(max(now, now + rise))
        now += change
    levels.append(now)
    return [max(levels[k:]) for k in range(len(levels))]
