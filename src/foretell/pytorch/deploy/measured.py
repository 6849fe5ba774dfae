"""A measured step of a run as a graph that plays to itself, in the words of a foretold one.

    forward, backward, optimizer   of the first rank of every stage, which stands for the others as
                                   in a plan that is lowered (→ foretell.plan.lower)
    all_reduce, …                  its messages, from when they were begun to when they were done

So `foretell compare` lays what was foretold beside it: each task waits for the beginning by as long
as it was measured to begin late, and runs for as long as it ran. No torch is needed to read it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from foretell.errors import InputError
from foretell.graph import Builder, Graph
from foretell.pytorch.deploy import run_files

Piece = tuple[str, float, float]  # op, begun, done: seconds of the clock that ranks share
_OWN = {"F": "forward", "B": "backward", "I": "backward", "W": "backward"}  # of a pipeline
_COMPUTE = ("forward", "backward", "optimizer")


def of_marks(begun: float, marks: Iterable[tuple[str, float]]) -> list[Piece]:
    """The pieces between marks: `forward` and `update` at their ends, `gradient …` as they come,
    `ready` when there is nothing left to wait for."""
    found: list[Piece] = []
    before = begun
    for name, at in marks:
        word = name.split()[0]
        if word == "gradient" and found and found[-1][0] == "backward":
            found[-1] = ("backward", found[-1][1], at)
        elif word == "gradient" or (word == "ready" and found and found[-1][0] == "forward"):
            found.append(("backward", before, at))
        elif word in ("forward", "update"):
            found.append(("optimizer" if word == "update" else word, before, at))
        before = at
    return found


def of_actions(ran: Iterable[tuple[str, float, float]]) -> list[Piece]:
    """The pieces of a pipeline: `3F0` is a forward."""
    return [(_OWN[action.lstrip("0123456789")[0]], start, end) for action, start, end in ran]


def graph(folder: Path) -> Graph:
    """The step that the ranks of a run wrote down last."""
    first: dict[int, dict[str, Any]] = {}
    for found in run_files.results(folder).values():
        first.setdefault(found.get("stage", 0), found)
    if not any(found.get("pieces") for found in first.values()):
        raise InputError(
            f"`{folder}` has no step to compare", hint="run it again: foretell run … -o FOLDER"
        )
    builder = Builder()
    zero = min(piece[1] for found in first.values() for piece in found["pieces"])
    begin = builder.task(kind="host", op="begin", name="begin", seconds=0.0)
    for stage, found in sorted(first.items()):
        _put(builder, begin, stage, found["pieces"], zero)
    return builder.graph(plan=run_files.asked(folder).plan)


def _put(builder: Builder, begin: int, stage: int, pieces: list[Piece], zero: float) -> None:
    compute = builder.lane("compute", rank=stage, kind="compute")
    free: list[tuple[float, int]] = []  # lanes of messages, and until when each is taken
    for op, start, end in sorted(pieces, key=lambda piece: piece[1]):
        lane, kind = compute, "host"
        if op not in _COMPUTE:
            kind = "collective"
            known = next((k for k, (until, _) in enumerate(free) if until <= start), len(free))
            if known == len(free):
                name = f"collectives {known}" if known else "collectives"
                free.append((0.0, builder.lane(name, rank=stage, kind="comm")))
            free[known] = (end, free[known][1])
            lane = free[known][1]
        task = builder.task(kind=kind, op=op, name="", rank=stage, lane=lane, seconds=end - start,
                            source="measured")  # fmt: skip
        builder.wait(task, begin, lag=start - zero)
