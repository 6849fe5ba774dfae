"""What a step on ranks of unequal speed is made of: runs of layers, and what bench found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from foretell.plan import Plan
from foretell.plan.check import layer_groups, layers_of, micro_batches_of_groups, rank_samples
from foretell_lab.emulation.prices import Prices


@dataclass(frozen=True, eq=False)
class RankSpeed:
    """What bench found of some ranks on some links."""

    prices: Prices
    stretch: Sequence[float]  # wall seconds of each rank for a core second of the profile
    act: float = 0.0  # core seconds that a forward or backward of layers apart adds to their own


class Piece(NamedTuple):
    """A run of layers as a step is made of it."""

    samples: list[dict[int, int]]  # of each micro-batch: rank, samples
    layers: frozenset[str]  # empty: the whole model
    parameters: dict[str, int]  # bytes, as the model has them
    handed: float  # bytes a sample that it sends on

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(self.samples[0])


def parts(plan: Plan, profile: dict[str, Any]) -> list[Piece]:
    """The runs of a plan; of data parallelism one."""
    sizes: dict[str, int] = profile["parameters"]
    if not plan.groups:
        each = -(-plan.global_batch // plan.dp)
        shares = dict(enumerate(plan.shares or (each,) * plan.dp))
        return [Piece([shares], frozenset(), dict(sizes), 0.0)]
    found, names = layer_groups(plan), list(profile["handed"])
    out = []
    for run, where in zip(found, layers_of(found, names, profile["model"]), strict=True):
        mine = [names[i] for i in where]
        held = {p: b for p, b in sizes.items() if any(p.startswith(f"{n}.") for n in mine)}
        split = rank_samples(run.samples, micro_batches_of_groups(plan))
        out.append(Piece(split, frozenset(mine), held, float(profile["handed"][mine[-1]])))
    return out
