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
from collections.abc import Callable
from dataclasses import replace
from math import inf

from foretell.search.schedule.integer_problem import ticks
from foretell.search.schedule.pipelines import (
    Pipe,
    Stage,
    dualpipe,
    dualpipev,
    merge,
    pipe,
    pipes,
    refuse,
    require,
)
from foretell.search.schedule.problem import Problem
from foretell.search.schedule.replay import Item, Starts, deepest, end, ordered, replay
from foretell.search.schedule.zero_bubble import v_half, v_min, zb_h1, zb_h2, zb_v

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
