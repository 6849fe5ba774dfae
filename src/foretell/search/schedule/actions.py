"""A schedule as what each device does in turn: `3F0`, `3B0`, `3I0`, `3W0`.

Stages are the forward blocks, numbered in the order of forward. A backward block belongs to the
stage on its devices whose followers' backwards it waits for (or whose forward, for the last). The
lists are what `torch.distributed.pipelining` runs and what torchtitan reads from a file.
"""

from collections.abc import Sequence

from foretell.errors import InputError
from foretell.search.schedule.problem import Problem
from foretell.search.schedule.schedule import Schedule


def actions(schedule: Schedule) -> tuple[tuple[str, ...], ...]:
    """The actions of each device, in order."""
    stages = stage_of(schedule.problem)
    blocks = schedule.problem.blocks
    return tuple(
        tuple(
            f"{stages[s.block]}{blocks[s.block].kind}{s.micro_batch}" for s in schedule.on(device)
        )
        for device in range(schedule.problem.num_devices)
    )


def after(problem: Problem) -> tuple[tuple[int, ...], ...]:
    """The stages that each stage takes its input from."""
    stages = stage_of(problem)
    forward = _forward(problem)
    return tuple(
        tuple(sorted({stages[w.on] for w in problem.after[block] if w.on in forward}))
        for block in sorted(forward, key=lambda b: stages[b])
    )


def copies(problem: Problem) -> tuple[tuple[int, ...], ...]:
    """Stages that hold the same parameters: the k-th of every separate pipeline of equal length."""
    lines = _lines(after(problem))
    if len(lines) < 2 or len({len(line) for line in lines}) > 1:
        return ()
    return tuple(zip(*lines, strict=True))


def stage_of(problem: Problem) -> dict[int, int]:
    """The stage of each block, by place in the problem."""
    found = {block: stage for stage, block in enumerate(_numbered(problem))}
    follow = _followers(problem, found)
    for block in problem.order:
        if problem.blocks[block].kind in "BIW":
            found[block] = _stage(problem, block, found, follow)
        elif problem.blocks[block].kind != "F":
            raise InputError(
                f"block {problem.blocks[block].id} is communication that holds its devices",
                hint="give messages as lags: the runtime sends them beside the compute",
            )
    return found


def _numbered(problem: Problem) -> list[int]:
    """The forward blocks as they are listed, where that is an order of forward."""
    listed = [i for i, b in enumerate(problem.blocks) if b.kind == "F"]
    is_order = all(w.on < w.block for w in problem.waits if {w.on, w.block} <= set(listed))
    return listed if is_order else [b for b in problem.order if b in set(listed)]


def _stage(
    problem: Problem, block: int, found: dict[int, int], follow: dict[int, frozenset[int]]
) -> int:
    """The stage whose backward a block is."""
    kind, devices = problem.blocks[block].kind, set(problem.blocks[block].devices)
    waits = [w.on for w in problem.after[block]]
    if kind == "W":
        return found[next(w for w in waits if problem.blocks[w].kind == "I")]
    on = frozenset(found[w] for w in waits if problem.blocks[w].kind in "BI")
    own = [w for w in waits if problem.blocks[w].kind == "F"]
    taken = {found[b] for b in found if problem.blocks[b].kind in "BI"}
    for place in [*own, *(b for b in follow if follow[b] == on)]:
        is_here = set(problem.blocks[place].devices) == devices
        if is_here and follow[place] == on and found[place] not in taken:
            return found[place]
    raise InputError(
        f"backward block {problem.blocks[block].id} belongs to no forward block",
        hint="let backward go back over the devices of forward",
    )


def _followers(problem: Problem, stages: dict[int, int]) -> dict[int, frozenset[int]]:
    forward = _forward(problem)
    return {
        b: frozenset(stages[w.block] for w in problem.waits if w.on == b and w.block in forward)
        for b in forward
    }


def _forward(problem: Problem) -> set[int]:
    return {i for i, b in enumerate(problem.blocks) if b.kind == "F"}


def _lines(befores: Sequence[Sequence[int]]) -> list[list[int]]:
    """Stages by the separate pipeline they are in."""
    found = list(range(len(befores)))
    for stage, ones in enumerate(befores):
        for one in ones:
            old, new = max(found[stage], found[one]), min(found[stage], found[one])
            found = [new if f == old else f for f in found]
    return [[s for s, f in enumerate(found) if f == name] for name in sorted(set(found))]
