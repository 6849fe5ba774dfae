"""Many plans as columns, and the few different cells among them that need a price.

A kernel's shape depends on how a layer is split and on the micro-batch, not on how many replicas or
stages there are: ten thousand layouts have some hundred different cells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from foretell.plan.check import micro_batches
from foretell.plan.framework import Running, running
from foretell.plan.plan import Plan

Array = npt.NDArray[np.float64]
Rows = npt.NDArray[np.intp]

_PLAIN = ("dp", "tp", "pp", "cp", "ep", "filter", "channel", "zero", "micro_batch", "global_batch")
_SPATIAL = ("height", "width", "depth")
# Of experts: ranks that split each, the same under sequence parallelism, and the tensor-parallel
# ranks that have experts of their own, each with its part of the sequence.
_EXPERTS = ("etp", "esp", "eseq")
SPLIT = ("tp", "sp", "cp", "ep", *_EXPERTS, "filter", "channel", *_SPATIAL)


@dataclass(frozen=True, eq=False)
class Layouts:
    """Checked plans, one entry a plan in every column."""

    plans: tuple[Plan, ...]

    def __len__(self) -> int:
        return len(self.plans)

    def column(self, name: str) -> Array:
        """A field of the plans, or a degree."""
        return self.columns[name]

    @cached_property
    def columns(self) -> dict[str, Array]:
        """Every number a price may need, by name."""
        found = {name: np.array([getattr(p, name) for p in self.plans], float) for name in _PLAIN}
        found["sp"] = np.array([p.tp if p.sp else 1 for p in self.plans], float)
        found["etp"] = np.array([p.etp or p.tp for p in self.plans], float)
        found["esp"] = np.where(found["sp"] > 1, found["etp"], 1.0)
        found["eseq"] = found["tp"] / found["etp"]
        found["chunks"] = np.array([p.chunks for p in self.plans], float)
        found["sharing"] = np.array([p.sharing * p.cp for p in self.plans], float)
        found["micro_batches"] = np.array([micro_batches(p) for p in self.plans], float)
        for i, axis in enumerate(_SPATIAL):
            found[axis] = np.array([(*p.spatial, 1, 1, 1)[i] for p in self.plans], float)
        return found

    @cached_property
    def runs(self) -> tuple[Running, ...]:
        """The framework profile of each plan, in its precision."""
        return tuple(running(p) for p in self.plans)

    def cells(self) -> tuple[Layouts, Rows]:
        """Plans that differ in what a layer costs, and for each plan which of them it is."""
        number: dict[int, int] = {}
        code = np.array([number.setdefault(id(r), len(number)) for r in self.runs], float)
        keys = np.stack([code, *(self.columns[n] for n in (*SPLIT, "micro_batch"))], axis=1)
        _, first, which = np.unique(keys, axis=0, return_index=True, return_inverse=True)
        return Layouts(tuple(self.plans[i] for i in first)), which.reshape(-1)

    def degrees(self) -> dict[str, Array]:
        """The degree of each axis that splits a tensor."""
        return {axis: self.columns[axis] for axis in SPLIT}

    def by_profile(self) -> list[tuple[Running, Rows]]:
        """Rows that one framework runs in one precision."""
        rows: dict[int, list[int]] = {}
        for i, run in enumerate(self.runs):
            rows.setdefault(id(run), []).append(i)
        return [(self.runs[some[0]], np.array(some)) for some in rows.values()]

    def take(self, rows: Rows) -> Layouts:
        """Some of the plans."""
        return Layouts(tuple(self.plans[i] for i in rows.tolist()))


def layouts(plans: Sequence[Plan]) -> Layouts:
    """Columns of plans that `check` has passed."""
    return Layouts(tuple(plans))
