"""Many plans as columns: their cells to price, the ranks of each axis, and layers split into
stages.

A kernel's shape depends on how a layer is split and on the micro-batch, not on how many replicas or
stages there are: ten thousand layouts have some hundred different cells.

Layers split to pipeline stages: first, middle and last, for many layouts at once.

The first stage has what stands before the blocks (the embedding), the last what stands behind them
(the head; where chunks go there and back that is the first one too); blocks are split in a row and
evenly by number, the earlier stages taking what is left over. Blocks of a network of images differ,
and so do its stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from foretell.plan.check import micro_batches
from foretell.plan.framework import Running, running
from foretell.plan.order import last_stage
from foretell.plan.plan import Plan
from foretell.plan.plan import blocks_of as blocks_of
from foretell.workload import Workload

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
        """Some of the plans, with the columns that are known already."""
        found = Layouts(tuple(self.plans[i] for i in rows.tolist()))
        known = self.__dict__
        if "columns" in known:
            found.__dict__["columns"] = {name: c[rows] for name, c in self.columns.items()}
        if "runs" in known:
            found.__dict__["runs"] = tuple(self.runs[i] for i in rows.tolist())
        return found


def layouts(plans: Sequence[Plan]) -> Layouts:
    """Columns of plans that `check` has passed."""
    return Layouts(tuple(plans))


FIRST, MIDDLE, LAST = 0, 1, 2


@dataclass(frozen=True)
class Shares:
    """How often each layer runs on first, middle and last stage: kinds × layers × plans."""

    times: Array
    middles: Array  # how many middle stages each plan has


def shares(workload: Workload, plans: Layouts) -> Shares:
    """The layers of each kind of stage.

    Where blocks differ, the middle stages of a plan count as all alike, by their mean.
    """
    keys = [(p.pp, p.layers, last_stage(p)) for p in plans.plans]
    alike = dict(zip(keys, plans.plans, strict=True))
    dealt = {key: _kinds(p, workload) for key, p in alike.items()}
    times = np.stack([dealt[key] for key in keys], axis=2)
    return Shares(times, np.maximum(plans.column("pp") - 2, 0.0))


def _kinds(plan: Plan, workload: Workload) -> Array:
    """Times of each layer on the first, a middle and the last stage; one stage is the first."""
    every = np.array([layers_of(plan, workload, stage) for stage in range(plan.pp)])
    none = np.zeros(len(workload.layers))
    last = every[-1] if plan.pp > 1 else none
    inner = every[1:-1]
    if not len(inner):
        return np.stack([every[0], none, last])
    even = sum(layer.is_block for layer in workload.layers) == 1
    return np.stack([every[0], inner.max(axis=0) if even else inner.mean(axis=0), last])


def layers_of(plan: Plan, workload: Workload, stage: int) -> list[float]:
    """How often each layer runs on one stage: blocks in a row, others where the one before is."""
    counts = blocks_of(plan, workload)
    low, total, end = sum(counts[:stage]), sum(counts), last_stage(plan)
    high, out, at = low + counts[stage], [], 0
    for layer in workload.layers:
        if layer.is_block:
            mine = min(high, at + layer.times) - max(low, at)
            out.append(float(max(mine, 0)))
            at += layer.times
        else:
            inside = stage == end if at == total else low < at <= high
            home = stage == 0 if at == 0 else inside
            out.append(float(layer.times) if home else 0.0)
    return out
