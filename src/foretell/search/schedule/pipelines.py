"""The pipelines inside a placement: stages in order of forward, each with its backward blocks.

Fixed schedules are written for stages, not for blocks. A placement has pipelines when its forward
blocks form lines, and backward goes back over the same devices.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from foretell.errors import InputError
from foretell.search.schedule.problem import Problem
from foretell.search.schedule.replay import Item


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
