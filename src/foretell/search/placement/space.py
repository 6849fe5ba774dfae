"""A placement, and all that a group may choose: a set of devices and how its replicas agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple

import numpy as np

from foretell.search.placement.problem import (
    ALL_REDUCE,
    FACTORS,
    NO_SERVER,
    PS,
    SHARDED,
    SPLIT,
    WAYS,
    Problem,
)

EVEN, PROPORTIONAL, BALANCED = range(3)  # how samples are split
MODES = ("even", "proportional", "balanced")
FUSE = 25 * 2**20  # bytes of gradients in one message, at most: PyTorch DDP's default


class Action(NamedTuple):
    """Where a group runs and how its replicas agree."""

    devices: int  # a candidate set of the fleet
    way: int  # of `problem.WAYS`
    server: int = NO_SERVER  # place of its parameter server; where none, split


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
    """Tied groups follow their leader; on a single rank there is nothing to agree on.

    Only those serve who are there; of places that are alike the first is named first.
    """
    chosen = placement.actions
    is_split = {server for _, _, server in chosen} == {NO_SERVER}
    if is_split and not problem.ties and problem.lone.isdisjoint(chosen):
        return placement
    alike: dict[int, int] = {}
    out = []
    for group in problem.groups:
        devices, way, server = chosen[group.leader]
        if (devices, way, NO_SERVER) in problem.lone:
            out.append(Action(devices, ALL_REDUCE))
        elif way == PS and server != NO_SERVER:
            out.append(Action(devices, way, _served(problem, devices, server, alike)))
        else:
            out.append(Action(devices, way))
    return replace(placement, actions=tuple(out))


def _served(problem: Problem, devices: int, server: int, alike: dict[int, int]) -> int:
    """A server under the first free name of its cell; nothing where it is not of these devices."""
    t = problem.tables
    cell = int(t.cell_of[server])
    if not t.member[devices, cell]:
        return NO_SERVER
    if server not in alike:
        used = sum(int(t.cell_of[other]) == cell for other in alike)
        alike[server] = int(np.searchsorted(t.cell_of, cell)) + used
    return alike[server]


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


def servers(problem: Problem, now: Placement, devices: int) -> list[int]:
    """Places of a set that may serve: those that do, and of each cell one more, which is as any."""
    named, t = {action.server for action in now.actions}, problem.tables
    found = []
    for cell in problem.fleet.sets[devices]:
        mine = np.flatnonzero(t.cell_of == cell).tolist()
        found += [place for place in mine if place in named]
        found += [place for place in mine if place not in named][:1]
    return found


def with_servers(problem: Problem, group: int) -> list[Action]:
    """Every choice a group has, each parameter server by name."""
    found = []
    for action in actions(problem, group):
        cells = problem.tables.member[action.devices][problem.tables.cell_of]
        places = np.flatnonzero(cells).tolist() if action.way == PS else [NO_SERVER]
        found += [action._replace(server=place) for place in places]
    return found


def text(problem: Problem, placement: Placement, served: Sequence[int] = ()) -> str:
    """A placement for a reader: one line for each run of groups that choose the same."""
    placement = canonical(problem, placement)
    lines, first = [], 0
    for g in range(1, len(placement.actions) + 1):
        if g < len(placement.actions) and placement.actions[g][:2] == placement.actions[first][:2]:
            continue
        action = placement.actions[first]
        names = problem.groups[first].units[0].name, problem.groups[g - 1].units[-1].name
        where = problem.fleet.title(action.devices)
        way = f", {WAYS[action.way]}" if problem.tables.size[action.devices] > 1 else ""
        on = _serving(problem, served[first:g])
        lines.append(f"{' … '.join(dict.fromkeys(names))}: {where}{way}{on}")
        first = g
    extra = f"{placement.micros} micro-batches, " if placement.micros > 1 else ""
    size = placement.fuse / 2**20
    sent = f"messages up to {size:g} MiB" if 0 < size < inf else "one message a group"
    sent = sent if size < inf else "one message a segment"
    lines.append(f"{extra}samples {MODES[placement.mode]}, {sent}")
    return "\n".join(lines)


def _serving(problem: Problem, served: Sequence[int]) -> str:
    """Who serves some groups, in words; numbers of ranks would follow the order of a file."""
    counts: dict[str, int] = {}
    for place in sorted({place for place in served if place >= 0}):
        kind = int(problem.tables.kind[problem.tables.cell_of[place]])
        name = problem.fleet.kinds[kind].name
        counts[name] = counts.get(name, 0) + 1
    return f" by {' + '.join(f'{n} {name}' for name, n in counts.items())}" if counts else ""
