"""From an order to start times: every block as soon as its devices and what it waits for allow.

A list of (block, micro-batch) that puts every block after what it waits for fixes the order on
every device, and with it the memory; starting everything as early as that order allows shortens
the ends of a schedule without a look at memory. The same pass runs on whole ticks and on real
seconds.
"""

from collections.abc import Sequence

from foretell.search.schedule.repetend import Repetend
from foretell.search.schedule.ticks import Ticks

Item = tuple[int, int]  # block, micro-batch
Starts = list[list[float]]  # by block, by micro-batch


def unroll(repetend: Repetend, num_blocks: int, micro_batches: int) -> list[Item]:
    """All blocks of so many micro-batches in the order in which the pattern starts them."""
    size, period = repetend.unroll, repetend.period
    return [
        (block, m)
        for _, block, m in sorted(
            (repetend.start[block * size + m % size] + period * (m // size), block, m)
            for block in range(num_blocks)
            for m in range(micro_batches)
        )
    ]


def replay(
    items: Sequence[Item],
    time: Sequence[float],
    devices: Sequence[Sequence[int]],
    after: Sequence[Sequence[tuple[int, float]]],
) -> Starts:
    """The earliest start of everything, in this order on every device."""
    num = 1 + max(m for _, m in items)
    starts: Starts = [[-1.0] * num for _ in time]
    free = [0.0] * (1 + max(d for ds in devices for d in ds))
    for block, m in items:
        start = max(free[d] for d in devices[block])
        for on, lag in after[block]:
            assert starts[on][m] >= 0, f"block {block} of {m} is put before {on}, which it needs"
            start = max(start, starts[on][m] + time[on] + lag)
        starts[block][m] = start
        for d in devices[block]:
            free[d] = start + time[block]
    return starts


def end(starts: Sequence[Sequence[float]], time: Sequence[float]) -> float:
    """When the last block ends."""
    return max(s + t for row, t in zip(starts, time, strict=True) for s in row)


def longest_idle(starts: Sequence[Sequence[float]], ticks: Ticks) -> float:
    """The longest that a device waits between its first block and its last."""
    waits = [0.0]
    for on in ticks.by_device:
        if on:
            first = min(starts[i][0] for i in on)
            last = max(starts[i][-1] + ticks.time[i] for i in on)
            work = sum(ticks.time[i] for i in on) * len(starts[0])
            waits.append(last - first - work)
    return max(waits)


def peaks(items: Sequence[Item], held: Sequence[Sequence[tuple[int, int, int]]]) -> list[int]:
    """The most that each device holds in this order."""
    found = []
    for rows in held:
        rise, change = {i: r for i, r, _ in rows}, {i: c for i, _, c in rows}
        now = most = 0
        for block, _ in items:
            if block in rise:
                most = max(most, now + rise[block])
                now += change[block]
        found.append(most)
    return found


def fits(
    items: Sequence[Item],
    held: Sequence[Sequence[tuple[int, int, int]]],
    capacity: Sequence[int | None],
) -> bool:
    """Whether no device ever holds more than it can."""
    pairs = zip(peaks(items, held), capacity, strict=True)
    return all(room is None or peak <= room for peak, room in pairs)
