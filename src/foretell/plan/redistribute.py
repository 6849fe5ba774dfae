"""Sends that redistribute a batch which is split one way before and another way behind.

Samples lie in a row; rank i of a set holds the samples from `edges[i]` to `edges[i + 1]`. What a
consumer needs of what a producer holds is where their stretches overlap. `Move` is one stretch; a
rank that has it already moves nothing. `foretell.search.placement.moves` is the
same, compiled, cell by cell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple


class Move(NamedTuple):
    """Samples `first` to `last` go from one rank to another."""

    source: int
    target: int
    first: int
    last: int


def edges(shares: Sequence[int]) -> list[int]:
    """Where each rank's samples begin and end."""
    return [0, *accumulate(shares)]


def reslice(held: Mapping[int, int], wanted: Mapping[int, int]) -> list[Move]:
    """Moves that turn one split into another; both map ranks to samples, in order."""
    (before, behind), moves = (edges([*d.values()]) for d in (held, wanted)), []
    if before[-1] != behind[-1]:
        raise ValueError(f"{before[-1]} samples are held, {behind[-1]} are wanted")
    for i, source in enumerate(held):
        for j, target in enumerate(wanted):
            first, last = max(before[i], behind[j]), min(before[i + 1], behind[j + 1])
            if first < last:
                moves.append(Move(source, target, first, last))
    return moves


def gather(held: dict[int, int], targets: Sequence[int]) -> list[Move]:
    """Moves after which every target has all samples."""
    bounds = edges([*held.values()])
    return [
        Move(source, target, bounds[i], bounds[i + 1])
        for target in targets
        for i, source in enumerate(held)
        if held[source]
    ]


def handed(
    held: Mapping[int, int], wanted: Mapping[int, int], *, from_all: bool, to_all: bool
) -> list[Move]:
    """Moves between ranks that have a part each or, where layers are split over them, all samples.

    From ranks that hold everything each other rank gets an equal part of all of them.
    """
    if not from_all:
        return gather(dict(held), list(wanted)) if to_all else reslice(held, wanted)
    whole, bounds = next(iter(held.values())), edges([*wanted.values()])
    found = []
    for i, target in enumerate(wanted):
        first, last = (0, whole) if to_all else (bounds[i], bounds[i + 1])
        if target in held:
            found += [Move(target, target, first, last)] if first < last else []
            continue
        cuts = [first + (last - first) * k // len(held) for k in range(len(held) + 1)]
        each = zip(held, pairwise(cuts), strict=True)
        found += [Move(source, target, a, b) for source, (a, b) in each if a < b]
    return found


def rewrite(held: dict[int, int], wanted: dict[int, int] | Sequence[int]) -> list[str]:
    """The tasks between two ops as text: `split`, `copy` and `concat`, those that do something."""
    moves = reslice(held, wanted) if isinstance(wanted, dict) else gather(held, wanted)
    lines = []
    for source in dict.fromkeys(m.source for m in moves):
        out = [m for m in moves if m.source == source]
        if len({m[2:] for m in out}) > 1:
            lines.append(f"split {source}: " + " ".join(f"{m.first}-{m.last}" for m in out))
    lines += [
        f"copy {m.source}→{m.target}: {m.first}-{m.last}" for m in moves if m.source != m.target
    ]
    for target in dict.fromkeys(m.target for m in moves):
        into = [m for m in moves if m.target == target]
        if len(into) > 1:
            lines.append(f"concat {target}: {len(into)} parts")
    return lines
