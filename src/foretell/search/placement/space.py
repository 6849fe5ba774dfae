"""A placement, and all that a group may choose: a set of devices and how its replicas agree."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple

from foretell.search.placement.problem import (
    ALL_REDUCE,
    FACTORS,
    PS,
    SHARDED,
    SPLIT,
    WAYS,
    Problem,
)

EVEN, PROPORTIONAL, BALANCED = range(3)  # how samples are dealt out
MODES = ("even", "proportional", "balanced")
FUSE = 25 * 2**20  # bytes of gradients in one message, at most: PyTorch DDP's default


class Action(NamedTuple):
    """Where a group runs and how its replicas agree."""

    devices: int  # a candidate set of the fleet
    way: int  # of `problem.WAYS`


@dataclass(frozen=True)
class Placement:
    """A choice for every group, and three for the whole step."""

    actions: tuple[Action, ...]
    micros: int = 1  # micro-batches: segments on sets of their own are pipeline stages
    fuse: float = FUSE
    mode: int = BALANCED

    def but(self, groups: tuple[int, ...] | range, action: Action) -> Placement:
        """The same with another choice for some groups."""
        chosen = list(self.actions)
        for g in groups:
            chosen[g] = action
        return replace(self, actions=tuple(chosen))


def uniform(problem: Problem, action: Action, **more: float) -> Placement:
    """One choice for all groups."""
    return Placement((action,) * len(problem.groups), **more)  # type: ignore[arg-type]


def canonical(problem: Problem, placement: Placement) -> Placement:
    """Tied groups follow their leader; on a single rank there is nothing to agree on."""
    if not problem.ties and problem.lone.isdisjoint(placement.actions):
        return placement
    out = []
    for group in problem.groups:
        action = placement.actions[group.leader]
        out.append(Action(action.devices, ALL_REDUCE) if action in problem.lone else action)
    return replace(placement, actions=tuple(out))


def actions(
    problem: Problem,
    group: int,
    *,
    ways: tuple[int, ...] = (ALL_REDUCE, PS, SHARDED, FACTORS, SPLIT),
) -> list[Action]:
    """Every choice a group has."""
    t = problem.tables
    found = []
    for s in range(len(t.size)):
        for way in ways:
            alone = t.size[s] == 1
            if way == SPLIT:
                possible = t.split_forward[0, s, group] < float("inf")
            elif way == FACTORS:
                possible = t.factors[s, group] > 0 and t.size[s] <= t.batch
            else:
                possible = t.size[s] <= t.batch and (not alone or way == ALL_REDUCE)
            if possible:
                found.append(Action(s, way))
    return found


def text(problem: Problem, placement: Placement) -> str:
    """A placement for a reader: one line for each run of groups that choose the same."""
    placement = canonical(problem, placement)
    lines, first = [], 0
    for g in range(1, len(placement.actions) + 1):
        if g < len(placement.actions) and placement.actions[g] == placement.actions[first]:
            continue
        action = placement.actions[first]
        names = problem.groups[first].units[0].name, problem.groups[g - 1].units[-1].name
        where = problem.fleet.title(action.devices)
        way = f", {WAYS[action.way]}" if problem.tables.size[action.devices] > 1 else ""
        lines.append(f"{' … '.join(dict.fromkeys(names))}: {where}{way}")
        first = g
    extra = f"{placement.micros} micro-batches, " if placement.micros > 1 else ""
    size = placement.fuse / 2**20
    sent = f"messages up to {size:g} MiB" if 0 < size < inf else "one message a group"
    sent = sent if size < inf else "one message a segment"
    lines.append(f"{extra}samples {MODES[placement.mode]}, {sent}")
    return "\n".join(lines)
