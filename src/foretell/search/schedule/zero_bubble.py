"""Zero-bubble schedules: backward in two halves, so that weight gradients fill the gaps.

ZB-H1 and ZB-H2 (Qi et al., ICLR 2024) on one stage a device; ZB-V, V-Half and V-Min (Qi et al.,
NeurIPS 2024) on two, there and back. V-Half and V-Min repeat a building block with the same delays
between neighbouring devices: down `a`, up `b` in forward, `c` and `d` in backward. On p devices it
holds about `p (a + b + c + d) / 6` stages, where 1F1B holds 2p: a sum of 6 gives V-Half, 4 gives
V-Min.
"""

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from foretell.search.schedule.integer_problem import ticks
from foretell.search.schedule.pipelines import Pipe, Stage, merge, pipe, refuse
from foretell.search.schedule.problem import Problem
from foretell.search.schedule.replay import Item, deepest, end, ordered, peaks, replay

_RING = 6  # forward, input and weight gradient of two stages


def zb_h1(problem: Problem, micro_batches: int) -> list[Item]:
    """1F1B, where stage s puts off its weight gradients by s micro-batches: p in flight."""
    stages = _one_a_device(problem)
    orders: list[list[Item]] = [[] for _ in range(problem.num_devices)]
    for late, stage in enumerate(stages):
        ahead = min(micro_batches, len(stages) - late)
        order = [(stage.forward, m) for m in range(ahead)]
        for m in range(micro_batches + late):
            if m < micro_batches:
                order.append((stage.backward or 0, m))
            if m - late >= 0:
                order.append((stage.weight or 0, m - late))
            if m + ahead < micro_batches:
                order.append((stage.forward, m + ahead))
        orders[stage.device] = order
    return merge(problem, orders)


def zb_h2(problem: Problem, micro_batches: int) -> list[Item]:
    """Up to 2p - 1 micro-batches in flight; weight gradients wherever a device would wait."""
    stages = _one_a_device(problem)
    holds = max(problem.blocks[s.forward].memory for s in stages)
    room = problem.limited(holds * (2 * len(stages) - 1) if holds > 0 else None)
    items = ordered(ticks(room, micro_batches), micro_batches, deepest)
    if items is None:
        raise refuse(problem, "its order waits on itself here")
    return items


def zb_v(problem: Problem, micro_batches: int) -> list[Item]:
    """Forwards until the first gradient comes back, then all six kinds in turn."""
    stages = _there_and_back(problem)
    num = problem.num_devices
    if micro_batches < 2 * num - 1:
        raise refuse(problem, f"{micro_batches} micro-batches, it needs {2 * num - 1} or more")
    orders = [
        _v_order(stages[d], stages[2 * num - 1 - d], d, num, micro_batches) for d in range(num)
    ]
    return merge(problem, orders)


def v_half(problem: Problem, micro_batches: int) -> list[Item]:
    """The building block at half the memory of 1F1B."""
    return _built(problem, micro_batches, 6)


def v_min(problem: Problem, micro_batches: int) -> list[Item]:
    """The building block at a third of the memory of 1F1B."""
    return _built(problem, micro_batches, 4)


class _Delays(NamedTuple):
    """Between neighbouring devices, and extra ones where the line turns."""

    down: int
    up: int
    back_down: int
    back_up: int
    turns: tuple[int, ...]


def _one_a_device(problem: Problem) -> Pipe:
    stages = pipe(problem, split=True)
    if len({s.device for s in stages}) < len(stages):
        raise refuse(problem, "a device has several stages")
    return stages


def _there_and_back(problem: Problem) -> Pipe:
    stages, num = pipe(problem, split=True), problem.num_devices
    if [s.device for s in stages] != [*range(num), *reversed(range(num))]:
        raise refuse(problem, "stages do not run over the devices there and back, once")
    return stages


class _Count:
    """The order of one device as it is written down: the next micro-batch of each block."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self.next: dict[int, int] = {}

    def run(self, *blocks: int | None) -> None:
        for block in blocks:
            if block is not None:
                self.items.append((block, self.done(block)))
                self.next[block] = self.done(block) + 1

    def done(self, block: int | None) -> int:
        return self.next.get(-1 if block is None else block, 0)


def _v_order(near: Stage, far: Stage, device: int, num: int, micro_batches: int) -> list[Item]:
    """The order of ZB-V on one device, as torch.distributed.pipelining writes it too."""
    count = _Count()
    count.run(*[near.forward] * (2 * (num - device) - 1))
    count.run(*[far.forward, near.forward] * device)
    count.run(*[far.forward, far.backward, far.weight] * (num - device))
    while count.done(far.forward) < micro_batches:
        if count.done(near.forward) < micro_batches:
            count.run(near.forward)
        count.run(near.backward, near.weight, far.forward, far.backward, far.weight)
    count.run(*[near.backward, far.backward] * device)
    count.run(*[near.backward, near.weight] * (num - device))
    for weight in (far.weight, near.weight):
        count.run(*[weight] * (micro_batches - count.done(weight)))
    return count.items


def _built(problem: Problem, micro_batches: int, total: int) -> list[Item]:
    """Of building blocks with this sum of delays those that hold least; the shortest of them."""
    stages, num = _there_and_back(problem), problem.num_devices
    whole = ticks(problem, micro_batches)
    best: tuple[tuple[int, float], list[Item]] | None = None
    for starts in _blocks(stages, num, total):
        items = _repeat(starts, micro_batches)
        length = end(replay(items, whole.time, whole.devices, whole.after), whole.time)
        cost = (max(peaks(items, whole.held)), length)
        if best is None or cost < best[0]:
            best = (cost, items)
    if best is None:
        raise refuse(problem, f"no building block fits {num} devices")
    return best[1]


def _blocks(stages: Pipe, num: int, total: int) -> Iterator[dict[int, int]]:
    """Starts of every block of one micro-batch, for delays that never meet in the ring."""
    steps = range(1, total - 2)
    for down, up, back_down in product(steps, steps, steps):
        back_up = total - down - up - back_down
        if back_up < 1 or abs(down + back_up - up - back_down) > 1:
            continue  # else one end of the pipeline holds more than the other
        for turns in product(range(_RING), repeat=3):
            starts = _place(stages, num, _Delays(down, up, back_down, back_up, turns))
            if starts is not None:
                yield starts
                break


def _place(stages: Pipe, num: int, delays: _Delays) -> dict[int, int] | None:
    first = (num - 1) * delays.down + 1 + delays.turns[0]
    second = first + (num - 1) * delays.up + 1 + delays.turns[1]
    third = second + (num - 1) * delays.back_down + 1 + delays.turns[2]
    starts: dict[int, int] = {}
    for d in range(num):
        there, back = stages[d], stages[2 * num - 1 - d]
        far = num - 1 - d
        times = [
            (there.forward, d * delays.down),
            (back.forward, first + far * delays.up),
            (back.backward, second + d * delays.back_down),
            (there.backward, third + far * delays.back_up),
        ]
        taken = {t % _RING for _, t in times}
        if len(taken) < len(times):
            return None
        starts |= {block: t for block, t in times if block is not None}
        free = [r for r in range(_RING) if r not in taken]
        starts |= _weights([(back.weight, times[2][1]), (there.weight, times[3][1])], free)
    return starts


def _weights(due: list[tuple[int | None, int]], free: list[int]) -> dict[int, int]:
    """Weight gradients in the free places of the ring, each the first after its input gradient."""
    found = {}
    for block, after in due:
        place = min(free, key=lambda r: (r - after - 1) % _RING)
        free.remove(place)
        found[block or 0] = after + 1 + (place - after - 1) % _RING
    return found


def _repeat(starts: dict[int, int], micro_batches: int) -> list[Item]:
    placed = [
        (s + _RING * m, block, m) for block, s in starts.items() for m in range(micro_batches)
    ]
    return [(block, m) for _, block, m in sorted(placed)]
