"""Layers split to pipeline stages: first, middle and last, for many layouts at once.

The first stage has what stands before the blocks (the embedding), the last what stands behind them
(the head; where chunks go there and back that is the first one too); blocks are split in a row and
evenly by number, the earlier stages taking what is left over. Blocks of a network of images differ,
and so do its stages.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foretell.plan.layouts import Array, Layouts
from foretell.plan.order import last_stage
from foretell.plan.plan import Plan
from foretell.plan.segments import blocks_of as blocks_of
from foretell.workload import Workload

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
