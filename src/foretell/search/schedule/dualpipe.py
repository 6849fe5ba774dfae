"""DualPipe and DualPipeV (DeepSeek-V3 technical report, 2024): eight phases on every device.

Two passes meet on each device: `0` enters at the near end, `1` comes from the far one. With `h`
devices to the turning point, a device `r` from the near end and `n` micro-batches each way:

    2(h-r-1)   forward 0
    r+1        forward 0, forward 1
    h-r-1      input and weight gradients 1, forward 1
    n-2h+r+1   forward 0, backward 1, forward 1, backward 0
    h-r-1      backward 1, forward 1, backward 0
    r+1        backward 1, backward 0
    h-r-1      a weight gradient put off, input gradient 0
    r+1        weight gradients put off

Where the original runs a forward and a backward at the same time, here one follows the other.
"""

from collections import deque

from foretell.search.schedule.pipes import Stage, merge, pipe, pipes, refuse, require
from foretell.search.schedule.problem import Problem
from foretell.search.schedule.replay import Item


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
