"""Fixed schedules from the literature, as orders of blocks in the same harness as the search.

    gpipe         all forwards, then all backwards                        one pipeline
    1f1b          p - s forwards, then backward and forward in turn       one pipeline
    1f1b+         1f1b with sharded blocks as extra steps (Tessel)        m, nn, mllm …
    interleaved   Megatron's order over several rounds                    loop
    chimera       both directions, p micro-batches in flight              x
    hanayo        waves, backward first                                   wave
    zb-h1, zb-h2  zero bubble at 1x and 2x the memory of 1f1b             v with split backward
    zb-v, v-half, v-min  building blocks at 1, 1/2, 1/3 of that memory    wave with split backward
    dualpipe, dualpipev  DeepSeek's eight phases                          x, wave, both split

Each says by an error why a placement is not its own. Memory is what the order needs: it is
compared with the capacity afterwards, like anyone's.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import inf
from typing import NamedTuple

from foretell.errors import InputError
from foretell.search.schedule.integer_problem import ticks
from foretell.search.schedule.problem import Problem
from foretell.search.schedule.replay import Item, Starts, deepest, end, ordered, peaks, replay

# The pipelines inside a placement: stages in order of forward, each with its backward blocks.
#
# Fixed schedules are written for stages, not for blocks. A placement has pipelines when its forward
# blocks form lines, and backward goes back over the same devices.


class Stage(NamedTuple):
    """One stage: its forward block, its backward (or input gradient), its weight gradient."""

    devices: tuple[int, ...]
    forward: int
    backward: int | None = None
    weight: int | None = None

    @property
    def device(self) -> int:
        return self.devices[0]

    @property
    def is_sharded(self) -> bool:
        return len(self.devices) > 1


Pipe = list[Stage]


def pipes(problem: Problem) -> list[Pipe]:
    """Every pipeline of a placement; an error where its forward blocks form no lines."""
    follow = _followers(problem)
    firsts = [
        i
        for i in _of_kind(problem, "F")
        if not any(_is_forward(problem, w.on) for w in problem.after[i])
    ]
    found = [_pipe(problem, first, follow) for first in firsts]
    covered = [s.forward for pipe in found for s in pipe]
    if len(set(covered)) < len(covered) or len(covered) < len(_of_kind(problem, "F")):
        raise refuse(problem, "forward blocks branch or join")
    return found


def pipe(problem: Problem, *, sharded: bool = False, split: bool | None = None) -> Pipe:
    """The only pipeline of a placement, if it is as a schedule needs it."""
    found = pipes(problem)
    if len(found) > 1:
        raise refuse(problem, f"there are {len(found)} pipelines")
    require(problem, found[0], sharded=sharded, split=split)
    return found[0]


def require(problem: Problem, stages: Pipe, *, sharded: bool, split: bool | None) -> None:
    """Raise unless the stages are as a schedule needs them."""
    for stage in stages:
        if stage.is_sharded and not sharded:
            raise refuse(problem, f"block {problem.blocks[stage.forward].id} is on several devices")
        if stage.backward is None and not (stage.is_sharded and sharded):
            raise refuse(problem, f"block {problem.blocks[stage.forward].id} has no backward")
        if split is not None and not stage.is_sharded and (stage.weight is not None) != split:
            raise refuse(problem, f"backward is {'not ' if split else ''}split into two gradients")


def refuse(problem: Problem, why: str) -> InputError:
    """A schedule does not apply to this placement."""
    name = f"`{problem.name}`" if problem.name else "the placement"
    return InputError(
        f"this schedule does not fit {name}: {why}",
        hint="`foretell schedule` without a method searches one for any placement",
    )


def merge(problem: Problem, orders: Sequence[Sequence[Item]]) -> list[Item]:
    """One order out of the orders of all devices, each block after what it waits for."""
    at = [0] * len(orders)
    done: set[Item] = set()
    items: list[Item] = []
    moved = True
    while moved:
        moved = False
        for device, order in enumerate(orders):
            while at[device] < len(order) and _is_next(
                problem, order[at[device]], orders, at, done
            ):
                item = order[at[device]]
                items.append(item)
                done.add(item)
                for d in problem.blocks[item[0]].devices:
                    at[d] += 1
                moved = True
    if any(a < len(o) for a, o in zip(at, orders, strict=True)):
        raise refuse(problem, "its order waits on itself here")
    return items


def _is_next(
    problem: Problem,
    item: Item,
    orders: Sequence[Sequence[Item]],
    at: Sequence[int],
    done: set[Item],
) -> bool:
    block, m = item
    there = (
        at[d] < len(orders[d]) and orders[d][at[d]] == item for d in problem.blocks[block].devices
    )
    return all((w.on, m) in done for w in problem.after[block]) and all(there)


def _pipe(problem: Problem, first: int, follow: list[list[int]]) -> Pipe:
    line = [first]
    while then := [i for i in follow[line[-1]] if problem.blocks[i].kind == "F"]:
        if len(then) > 1:
            raise refuse(problem, "forward blocks branch or join")
        line.append(then[0])
    back = _backwards(problem, line[-1], follow)
    stages = []
    for i in reversed(line):
        devices = problem.blocks[i].devices
        mirrored = bool(back) and problem.blocks[back[0]].devices == devices
        backward = back.pop(0) if mirrored else None
        stages.append(Stage(devices, i, backward, _weight(problem, backward, follow)))
    if back:
        raise refuse(problem, "backward does not go back over the devices of forward")
    return stages[::-1]


def _backwards(problem: Problem, last: int, follow: list[list[int]]) -> list[int]:
    """The backward blocks after the last forward block, in their order."""
    line, here = [], last
    while then := [i for i in follow[here] if problem.blocks[i].kind in "BI"]:
        if len(then) > 1:
            raise refuse(problem, "backward blocks branch or join")
        here = then[0]
        line.append(here)
    return line


def _weight(problem: Problem, backward: int | None, follow: list[list[int]]) -> int | None:
    if backward is None:
        return None
    return next((i for i in follow[backward] if problem.blocks[i].kind == "W"), None)


def _followers(problem: Problem) -> list[list[int]]:
    follow: list[list[int]] = [[] for _ in problem.blocks]
    for wait in problem.waits:
        follow[wait.on].append(wait.block)
    return follow


def _of_kind(problem: Problem, kind: str) -> list[int]:
    return [i for i, b in enumerate(problem.blocks) if b.kind == kind]


def _is_forward(problem: Problem, block: int) -> bool:
    return problem.blocks[block].kind == "F"


# DualPipe and DualPipeV (DeepSeek-V3 technical report, 2024): eight phases on every device.
#
# Two passes meet on each device: `0` enters at the near end, `1` comes from the far one. With `h`
# devices to the turning point, a device `r` from the near end and `n` micro-batches each way:
#
#     2(h-r-1)   forward 0
#     r+1        forward 0, forward 1
#     h-r-1      input and weight gradients 1, forward 1
#     n-2h+r+1   forward 0, backward 1, forward 1, backward 0
#     h-r-1      backward 1, forward 1, backward 0
#     r+1        backward 1, backward 0
#     h-r-1      a weight gradient put off, input gradient 0
#     r+1        weight gradients put off
#
# Where the original runs a forward and a backward at the same time, here one follows the other.


def dualpipe(problem: Problem, micro_batches: int) -> list[Item]:
    """Two pipelines in opposite directions; each device works as near end for one of them."""
    found = pipes(problem)
    for one in found:
        require(problem, one, sharded=False, split=True)
    num = problem.num_devices
    if (
        len(found) != 2
        or num % 2
        or [s.device for s in found[0]] != [s.device for s in found[1]][::-1]
    ):
        raise refuse(problem, "it is not two pipelines in opposite directions over an even number")
    half, orders = num // 2, []
    for device in range(num):
        sides = [next(s for s in one if s.device == device) for one in found]
        # the near end of a pipeline is the one its forward enters by
        near, far = sides if found[0].index(sides[0]) < half else sides[::-1]
        rank = min(device, num - 1 - device)
        orders.append(_phases(problem, near, far, half, rank, micro_batches))
    return merge(problem, orders)


def dualpipev(problem: Problem, micro_batches: int) -> list[Item]:
    """One pipeline there and back; a device holds a stage of each way."""
    stages = pipe(problem, split=True)
    num = problem.num_devices
    if [s.device for s in stages] != [*range(num), *reversed(range(num))]:
        raise refuse(problem, "stages do not run over the devices there and back, once")
    orders = [
        _phases(problem, stages[d], stages[2 * num - 1 - d], num, d, micro_batches)
        for d in range(num)
    ]
    return merge(problem, orders)


class _Device:
    """The order of one device as it is written down."""

    def __init__(self, stages: tuple[Stage, Stage]) -> None:
        self.stages = stages
        self.next = {(kind, side): 0 for kind in "FI" for side in (0, 1)}
        self.late: deque[Item] = deque()
        self.items: list[Item] = []

    def forward(self, side: int) -> None:
        self.items.append((self.stages[side].forward, self.next["F", side]))
        self.next["F", side] += 1

    def backward(self, side: int, put_off: bool = False) -> None:
        stage, m = self.stages[side], self.next["I", side]
        self.items.append((stage.backward or 0, m))
        self.next["I", side] += 1
        (self.late if put_off else self.items).append((stage.weight or 0, m))

    def weight(self) -> None:
        if self.late:
            self.items.append(self.late.popleft())


def _phases(
    problem: Problem, near: Stage, far: Stage, half: int, rank: int, micro_batches: int
) -> list[Item]:
    main = micro_batches - 2 * half + rank + 1
    if micro_batches < 2 * half:
        raise refuse(problem, f"{micro_batches} micro-batches, it needs {2 * half} or more")
    device, rest = _Device((near, far)), half - rank - 1
    for _ in range(2 * rest):
        device.forward(0)
    for _ in range(rank + 1):
        device.forward(0)
        device.forward(1)
    for _ in range(rest):
        device.backward(1, put_off=True)
        device.weight()
        device.forward(1)
    for _ in range(main):
        device.forward(0)
        device.backward(1)
        device.forward(1)
        device.backward(0)
    for _ in range(rest):
        device.backward(1)
        device.forward(1)
        device.backward(0)
    _cool(device, rank + 1, rest)
    return device.items


def _cool(device: _Device, pairs: int, rest: int) -> None:
    """The last backwards: in the second half of the pairs weight gradients are put off."""
    put_off = False
    for k in range(pairs):
        if k == pairs // 2 and pairs % 2:
            put_off = True
        device.backward(1, put_off)
        if k == pairs // 2 and not pairs % 2:
            put_off = True
        device.backward(0, put_off)
    for _ in range(rest):
        device.weight()
        device.backward(0, put_off=True)
    while device.late:
        device.weight()


# Zero-bubble schedules: backward in two halves, so that weight gradients fill the gaps.
#
# ZB-H1 and ZB-H2 (Qi et al., ICLR 2024) on one stage a device; ZB-V, V-Half and V-Min (Qi et al.,
# NeurIPS 2024) on two, there and back. V-Half and V-Min repeat a building block with the same
# delays between neighbouring devices: down `a`, up `b` in forward, `c` and `d` in backward. On p
# devices it holds about `p (a + b + c + d) / 6` stages, where 1F1B holds 2p: a sum of 6 gives
# V-Half, 4 gives V-Min.


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


# The families, by name.


Baseline = Callable[[Problem, int], list[Item]]


def gpipe(problem: Problem, micro_batches: int) -> list[Item]:
    """All forwards, then all backwards."""
    stages = pipe(problem, sharded=True)
    forward = [(s.forward, m) for m in range(micro_batches) for s in stages]
    return forward + [(b, m) for m in range(micro_batches) for s in stages[::-1] for b in _back(s)]


def one_f_one_b(problem: Problem, micro_batches: int) -> list[Item]:
    """As many forwards as stages lie ahead, then one backward and one forward in turn."""
    stages = pipe(problem)
    _one_stage_a_device(problem, stages)
    return merge(problem, _1f1b(problem, stages, micro_batches))


def one_f_one_b_plus(problem: Problem, micro_batches: int) -> list[Item]:
    """1F1B of the plain stages, and each sharded block as a step of its own for all devices.

    The shorter of two ways to place those steps: by the time at which 1F1B alone would need them,
    or as soon as all devices are free.
    """
    stages = pipe(problem, sharded=True)
    plain = [s for s in stages if not s.is_sharded]
    if not plain or len(plain) == len(stages):
        raise refuse(problem, "it has no stages of both kinds, plain and sharded")
    _one_stage_a_device(problem, plain)
    orders = _1f1b(problem, plain, micro_batches)
    ways = (_by_time(problem, stages, orders), _by_turn(problem, stages, orders))
    return min(ways, key=lambda items: end(_starts(problem, items), problem.seconds))


def interleaved(problem: Problem, micro_batches: int) -> list[Item]:
    """Megatron's interleaved 1F1B: groups of p micro-batches through each round in turn."""
    stages = pipe(problem)
    num, rounds = problem.num_devices, len(stages) // problem.num_devices
    if rounds < 2 or [s.device for s in stages] != list(range(num)) * rounds:
        raise refuse(problem, "stages do not loop over the devices")
    if micro_batches % num:
        raise refuse(problem, f"{micro_batches} micro-batches are not a multiple of {num} devices")
    orders = [_looped(stages, d, num, rounds, micro_batches) for d in range(num)]
    return merge(problem, orders)


def chimera(problem: Problem, micro_batches: int) -> list[Item]:
    """Two pipelines in opposite directions, p micro-batches in flight, backward first."""
    found = pipes(problem)
    for one in found:
        require(problem, one, sharded=False, split=False)
    ways = [[s.device for s in one] for one in found]
    if len(ways) != 2 or ways[0] != ways[1][::-1]:
        raise refuse(problem, "it is not two pipelines in opposite directions")
    return _dispatched(problem, micro_batches, problem.num_devices)


def hanayo(problem: Problem, micro_batches: int) -> list[Item]:
    """Waves over the devices, p micro-batches in flight, backward first."""
    stages = pipe(problem, split=False)
    num = problem.num_devices
    rounds, there = len(stages) // num, list(range(num))
    waves = [d for r in range(rounds) for d in (there, there[::-1])[r % 2]]
    if rounds < 2 or [s.device for s in stages] != waves:
        raise refuse(problem, "stages do not run over the devices in waves")
    return _dispatched(problem, micro_batches, num)


BASELINES: dict[str, Baseline] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "1f1b+": one_f_one_b_plus,
    "interleaved": interleaved,
    "chimera": chimera,
    "hanayo": hanayo,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "zb-v": zb_v,
    "v-half": v_half,
    "v-min": v_min,
    "dualpipe": dualpipe,
    "dualpipev": dualpipev,
}


def _back(stage: Stage) -> list[int]:
    return [b for b in (stage.backward, stage.weight) if b is not None]


def _one_stage_a_device(problem: Problem, stages: Pipe) -> None:
    if len({s.device for s in stages}) < len(stages):
        raise refuse(problem, "a device has several stages")


def _1f1b(problem: Problem, stages: Pipe, micro_batches: int) -> list[list[Item]]:
    orders: list[list[Item]] = [[] for _ in range(problem.num_devices)]
    for place, stage in enumerate(stages):
        ahead = min(micro_batches, len(stages) - place)
        order = [(stage.forward, m) for m in range(ahead)]
        for m in range(micro_batches):
            order += [(b, m) for b in _back(stage)]
            if m + ahead < micro_batches:
                order.append((stage.forward, m + ahead))
        orders[stage.device] = order
    return orders


def _without_sharded(problem: Problem) -> Problem:
    """The placement as if what passes through sharded blocks passed at once."""
    wide = {i for i, b in enumerate(problem.blocks) if len(b.devices) > 1}
    waits = set(problem.waits)
    for i in problem.order:
        if i in wide:
            before = [w for w in waits if w.block == i]
            after = [w for w in waits if w.on == i]
            waits |= {replace(a, on=b.on) for a in after for b in before}
            waits -= {*before, *after}
    return replace(problem, waits=tuple(sorted(waits, key=lambda w: (w.block, w.on))))


def _starts(problem: Problem, items: list[Item]) -> Starts:
    after = [[(w.on, w.lag) for w in waits] for waits in problem.after]
    return replay(items, problem.seconds, [b.devices for b in problem.blocks], after)


def _by_time(problem: Problem, stages: Pipe, orders: list[list[Item]]) -> list[Item]:
    """Sharded blocks just before the forward, just after the backward, of the stage they serve."""
    bare = _without_sharded(problem)
    items = merge(bare, orders)
    starts = _starts(bare, items)
    keyed = [((starts[block][m], 2, 0), (block, m)) for block, m in items]
    for step, (block, served, is_after) in enumerate(_served(stages)):
        for m, start in enumerate(starts[served]):
            when = start + (problem.seconds[served] if is_after else 0.0)
            keyed.append(((when, 0 if is_after else 1, step), (block, m)))
    return [item for _, item in sorted(keyed)]


def _by_turn(problem: Problem, stages: Pipe, orders: list[list[Item]]) -> list[Item]:
    """Whatever can start first; a sharded forward stays within one micro-batch of its stage."""
    num = 1 + max(m for order in orders for _, m in order)
    wide = {s.forward: 0 for s in stages if s.is_sharded}
    wide |= {s.backward: 0 for s in stages if s.is_sharded and s.backward is not None}
    served = {block: plain for block, plain, is_after in _served(stages) if not is_after}
    left = [deque(order) for order in orders]
    state = _State(problem)
    while len(state.items) < num * len(problem.blocks):
        ready = [(state.start(*order[0]), 1, *order[0]) for order in left if order]
        ready += [
            (state.start(block, m), 0, block, m)
            for block, m in wide.items()
            if m < num and m <= state.done[served.get(block, block)]
        ]
        start, _, block, m = min(ready, default=(inf, 0, 0, 0))
        if start == inf:
            raise refuse(problem, "its order waits on itself here")
        state.run(block, m)
        if block in wide:
            wide[block] += 1
        else:
            left[problem.blocks[block].devices[0]].popleft()
    return state.items


class _State:
    """How far a schedule has come."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.items: list[Item] = []
        self.ends: dict[Item, float] = {}
        self.free = [0.0] * problem.num_devices
        self.done = [0] * len(problem.blocks)

    def start(self, block: int, m: int) -> float:
        """When a block could start; never, as long as what it waits for has not run."""
        waits = [self.ends.get((w.on, m), inf) + w.lag for w in self.problem.after[block]]
        return max(*waits, *(self.free[d] for d in self.problem.blocks[block].devices), 0.0)

    def run(self, block: int, m: int) -> None:
        end_ = self.start(block, m) + self.problem.seconds[block]
        self.items.append((block, m))
        self.ends[block, m] = end_
        self.done[block] += 1
        for d in self.problem.blocks[block].devices:
            self.free[d] = end_


def _served(stages: Pipe) -> list[tuple[int, int, bool]]:
    """Each sharded block, the plain block it serves, and whether it comes after that one."""
    found: list[tuple[int, int, bool]] = []
    pending: Pipe = []
    last = stages[0]
    for stage in stages:
        if stage.is_sharded:
            pending.append(stage)
            continue
        last = stage
        found += [(s.forward, stage.forward, False) for s in pending]
        # backward goes on from the input gradient: weight gradients may wait
        found += [(b, stage.backward or 0, True) for b in _backs(pending)]
        pending = []
    # a head on all devices: between the last forward and its backward
    found += [(s.forward, last.forward, True) for s in pending]
    return found + [(b, last.forward, True) for b in _backs(pending)]


def _backs(stages: Pipe) -> list[int]:
    return [s.backward for s in stages[::-1] if s.backward is not None]


def _looped(stages: Pipe, device: int, num: int, rounds: int, micro_batches: int) -> list[Item]:
    def place(k: int, back: bool) -> Item:
        turn, m = k % (num * rounds) // num, k // (num * rounds) * num + k % num
        stage = stages[(rounds - 1 - turn if back else turn) * num + device]
        return (-1 if stage.backward is None else stage.backward, m) if back else (stage.forward, m)

    total = rounds * micro_batches
    ahead = min(total, (num - device - 1) * 2 + (rounds - 1) * num + 1)
    order = [place(k, False) for k in range(ahead)]
    weights = {s.backward: s.weight for s in stages if s.weight is not None}
    for k in range(total):
        block, m = place(k, True)
        order += [(b, m) for b in (block, weights.get(block)) if b is not None]
        if k + ahead < total:
            order.append(place(k + ahead, False))
    return order


def _dispatched(problem: Problem, micro_batches: int, in_flight: int) -> list[Item]:
    """Backward first, with so many passes through the devices in flight."""
    holds = max(
        sum(b.memory for b in problem.blocks if d in b.devices and b.memory > 0)
        for d in range(problem.num_devices)
    )
    passes = sum(1 for i in range(len(problem.blocks)) if not problem.after[i])
    room = problem.limited(holds * in_flight / passes if holds else None)
    items = ordered(ticks(room, micro_batches), micro_batches, deepest)
    if items is None:
        raise refuse(problem, "its order waits on itself here")
    return items
