"""Stages placed one by one, for programs that know a line of stages: which ranks, which layers.

A program whose stages are a line takes such a plan where every stage is on the same number of ranks
beside each other, in one direction, and without branches; what it cannot have is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from foretell.errors import InputError
from foretell.graph.graph import group_text
from foretell.plan.plan import Names, Plan
from foretell.plan.program import order
from foretell.plan.stage_placement import StageSpec, stage_spec


class Line(NamedTuple):
    """A pipeline: the place of each stage in it, and the ranks that share a stage."""

    places: tuple[int, ...]
    width: int
    stages: tuple[StageSpec, ...]
    actions: Names  # of each place

    @property
    def size(self) -> int:
        return max(self.places) + 1

    @property
    def is_loop(self) -> bool:
        """Whether stages go round the places in turn."""
        full = len(self.places) % self.size == 0
        return full and all(p == s % self.size for s, p in enumerate(self.places))


def line(plan: Plan, program: str) -> Line:
    """The line of stages of a plan; an error that says why it is none."""
    stages = tuple(stage_spec(texts) for texts in plan.stages)
    width = len(stages[0].ranks)
    for s, one in enumerate(stages):
        first = one.ranks[0]
        if one.ranks != tuple(range(first, first + width)) or first % width:
            raise _refused(
                program, f"stage {s} on ranks {group_text(one.ranks)}, the first on {width}"
            )
        if set(one.ways) - {"recompute"}:
            raise _refused(program, f"stage {s}, done as {', '.join(one.ways)}")
    names = [name for one in stages for name, times in one.layers if not times]
    if len(set(names)) < len(names):
        raise _refused(program, "two copies of the model")
    rows = tuple(plan.actions[r] for r in range(0, len(plan.actions), width))
    return Line(tuple(one.ranks[0] // width for one in stages), width, stages, rows)


def _refused(program: str, what: str) -> InputError:
    return InputError(
        f"{program} has a line of equal stages, and no words for {what}",
        hint="run the plan with `foretell run`, or schedule with --shape v",
    )


def recompute(found: Line, program: str) -> str:
    """`full` where every stage runs again, `none` where none does."""
    again = {bool(one.ways) for one in found.stages if any(times for _, times in one.layers)}
    if len(again) > 1:
        raise _refused(program, "recompute of some stages")
    return "full" if True in again else "none"


def usual(found: Line, micro_batches: int) -> str:
    """1f1b or interleaved, where the actions are in that order; nothing where they are in another.

    Stages have to go round the ranks in turn.
    """
    if not found.is_loop:
        return ""
    chunks = len(found.stages) // found.size
    name = "interleaved" if chunks > 1 else "1f1b"
    plain = Plan(pp=found.size, chunks=chunks, schedule=name)
    rows = tuple(tuple(_cells(plain, r, micro_batches)) for r in range(found.size))
    return name if rows == found.actions else ""


def _cells(plan: Plan, rank: int, micro_batches: int) -> Iterator[str]:
    yield from order(plan, micro_batches).rows()[rank]


def count(plan: Plan, stage: int) -> int:
    """Layers of a stage of a plan in degrees: those of its rank, split over its chunks."""
    rank, chunk = stage % plan.pp, stage // plan.pp
    return plan.layers[rank] // plan.chunks + (chunk < plan.layers[rank] % plan.chunks)


def stage_modules(plan: Plan) -> list[list[str]]:
    """The modules of each stage of a plan in degrees whose layers are not even."""
    num, at, out = plan.pp * plan.chunks, 0, []
    for stage in range(num):
        many = count(plan, stage)
        mine = [f"layers.{k}" for k in range(at, at + many)]
        ends = _ENDS["input"] * (stage == 0), _ENDS["head"] * (stage == num - 1)
        out.append([*ends[0], *mine, *ends[1]])
        at += many
    return out


def modules(found: Line) -> list[list[str]]:
    """The modules of each stage by name: those of the plan, blocks numbered through.

    A plan for a built-in model says embedding, block and head; torchtitan's models say
    tok_embeddings, layers.0 … and norm, output.
    """
    at: dict[str, int] = {}
    out = []
    for one in found.stages:
        mine: list[str] = []
        for name, times in one.layers:
            mine += _ENDS.get(name, [] if times else [name])
            stem, _, number = name.rpartition(".") if name[-1:].isdigit() else ("layers", "", "0")
            for _ in range(times):
                at[name] = at.get(name, int(number) - 1) + 1
                mine.append(f"{stem}.{at[name]}" if stem else f"{at[name]}")
        out.append(mine)
    return out


_ENDS = {
    "input": ["tok_embeddings"],
    "embedding": ["tok_embeddings"],
    "head": ["norm", "output"],
}
