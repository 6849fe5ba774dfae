"""Layers dealt out to pipeline stages: first, middle and last, for many layouts at once.

The first stage has what stands before the blocks (the embedding), the last what stands behind them
(the head); blocks are dealt out evenly, the earlier stages taking what is left over.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foretell.plan.layouts import Array, Layouts
from foretell.plan.plan import Plan
from foretell.workload import Workload

FIRST, MIDDLE, LAST = 0, 1, 2


@dataclass(frozen=True)
class Shares:
    """How often each layer runs on first, middle and last stage: kinds × layers × plans."""

    times: Array
    middles: Array  # how many middle stages each plan has


def blocks_of(plan: Plan, workload: Workload) -> tuple[int, ...]:
    """Blocks of each stage."""
    if plan.layers:
        return plan.layers
    each, rest = divmod(workload.num_blocks, plan.pp)
    return tuple(each + (stage < rest) for stage in range(plan.pp))


def shares(workload: Workload, plans: Layouts) -> Shares:
    """The layers of each kind of stage."""
    counts = [blocks_of(plan, workload) for plan in plans.plans]
    total = workload.num_blocks
    first = np.array([c[0] for c in counts], float)
    last = np.array([c[-1] for c in counts], float)
    middle = np.array([max(c[1:-1], default=0) for c in counts], float)
    pp = plans.column("pp")
    times = np.zeros((3, len(workload.layers), len(plans)))
    before = True
    for at, layer in enumerate(workload.layers):
        if layer.is_block:
            before = False
            share = layer.times / total
            times[:, at] = np.stack([first, middle, last]) * share
        else:
            times[FIRST if before else LAST, at] = layer.times
    alone = pp == 1  # one stage is first and last at once
    times[FIRST][:, alone] = np.array([layer.times for layer in workload.layers])[:, None]
    times[MIDDLE][:, pp <= 2] = 0.0
    times[LAST][:, alone] = 0.0
    return Shares(times, np.maximum(pp - 2, 0.0))


def layers_of(plan: Plan, workload: Workload, stage: int) -> list[float]:
    """How often each layer runs on one stage."""
    counts, out, before = blocks_of(plan, workload), [], True
    for layer in workload.layers:
        if layer.is_block:
            before = False
            out.append(layer.times * counts[stage] / workload.num_blocks)
        else:
            mine = stage == (0 if before else plan.pp - 1)
            out.append(float(layer.times) if mine else 0.0)
    return out
