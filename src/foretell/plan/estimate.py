"""Seconds of a step in closed form, for thousands of layouts at once.

With F and B the forward and backward of a stage (what is run again included), m micro-batches, p
stages and c the time to hand a tensor on:

    period   max over k of ( Σ of the last k stages (F + B) + 2c(k−1) ) / k          → `_period`
    pipe     Σ over stages (F + B) + 2c(p−1) + (m−1)·period                          → `_pipe`
    step     pipe + reduction of gradients that is not hidden + update

k stages in a row hold k micro-batches, which bounds how often a new one can start (1F1B); in GPipe
it is the slowest forward and the slowest backward, each no shorter than a hand-over. Where weight
gradients are apart, stages wait for the first forward alone. Chunks taken in turns divide what a
stage waits at both ends. `foretell.plan.lower` makes the graph of the
same step; tests hold the two together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from foretell.cluster import Cluster
from foretell.errors import InputError
from foretell.plan.check import check, placed
from foretell.plan.costs import Costs, Stage, costs, stage
from foretell.plan.layouts import Array
from foretell.plan.memory import peaks
from foretell.plan.order import is_split
from foretell.plan.plan import Plan
from foretell.plan.reduction_and_update import reduction, sends, tying, updating
from foretell.plan.stages import FIRST, LAST, MIDDLE, shares
from foretell.workload import Workload


@dataclass(frozen=True)
class Estimate:
    """Columns, an entry a plan; seconds and bytes."""

    step: Array
    compute: Array  # kernels of the busiest stage, all micro-batches
    host: Array  # what the host adds to them
    talk: Array  # exchanges inside layers, waiting for the slowest included
    bubble: Array  # stages waiting for each other
    send: Array  # tensors passed between stages, where they are waited for
    reduce: Array  # gradients (and sharded parameters) not hidden behind compute
    update: Array
    flops: Array  # of the matrix units, all ranks, nothing counted twice
    peak: Array  # bytes of the fullest rank
    missing: Array  # bytes by which that is too much; 0 where it fits


def estimate(plans: Sequence[Plan], workload: Workload, cluster: Cluster) -> Estimate:
    """Seconds and bytes of every plan; plans that cannot be raise as in `check`."""
    if any(p.groups for p in plans):
        raise InputError(
            "layers on ranks of their own (`groups`) have no closed form",
            hint="`foretell predict` lowers and simulates them",
        )
    if not any(p.placement for p in plans):
        return _estimate(plans, workload, cluster)
    apart = [placed(p, cluster) for p in plans]
    found = [_estimate([plan], workload, machines) for plan, machines in apart]
    names = [f.name for f in fields(Estimate)]
    return Estimate(**{n: np.concatenate([getattr(e, n) for e in found]) for n in names})


def _estimate(plans: Sequence[Plan], workload: Workload, cluster: Cluster) -> Estimate:
    """The same for plans whose ranks are the cluster's, in order."""
    c = costs([check(p, workload, cluster) for p in plans], workload, cluster)
    dealt = shares(workload, c.plans)
    stages = [stage(c, dealt.times[kind], workload, cluster) for kind in (FIRST, MIDDLE, LAST)]
    hop = sends(c, workload, cluster)
    pipe, period = _pipe(c, stages, dealt.middles, hop)
    reduce, update = _ends(c, stages, dealt.times[FIRST], workload, cluster)
    peak, missing = peaks(c, workload, cluster)
    m = c.plans.column("micro_batches")
    busiest = np.argmax([s.forward + s.backward for s in stages], axis=0)
    rows = np.arange(len(c.plans))
    column = {
        name: np.stack([getattr(s, name) for s in stages])[busiest, rows] * m
        for name in ("compute", "host", "talk")
    }
    send = (m - 1) * np.maximum(period - np.max([s.both for s in stages], axis=0), 0.0)
    send = send + 2 * hop * (c.plans.column("pp") - 1)
    bubble = np.maximum(pipe - sum(column.values()) - send, 0.0)
    return Estimate(
        step=pipe + reduce + update,
        **column,
        bubble=bubble,
        send=send,
        reduce=reduce,
        update=update,
        flops=np.full(len(rows), workload.flops()) * c.plans.column("global_batch"),
        peak=peak,
        missing=missing,
    )


def _pipe(c: Costs, stages: list[Stage], middles: Array, hop: Array) -> tuple[Array, Array]:
    """The time from first forward to last backward, and the period between micro-batches."""
    first, middle, last = (s.both for s in stages)
    m, pp, chunks = (c.plans.column(n) for n in ("micro_batches", "pp", "chunks"))
    total = first + middles * middle + last
    period = _period(first, middle, last, middles, hop)
    flushed = np.array([p.schedule == "gpipe" and not p.actions for p in c.plans.plans])
    if flushed.any():
        period = np.where(flushed, _flushed_period(stages, hop), period)
    apart = np.array([is_split(p) for p in c.plans.plans])
    if apart.any():
        period = np.where(apart, np.max([first, middle, last], axis=0), period)
    wait = total - np.maximum(period, first) + 2 * hop * (pp - 1)
    if apart.any():
        wait = np.where(apart, _filling(stages, middles) + hop * (pp - 1), wait)
    wait = np.where(pp > 1, wait, 0.0)
    steady = m * np.where(pp > 1, np.maximum(period, first), first)
    return steady + wait / chunks, period


def _filling(stages: list[Stage], middles: Array) -> Array:
    """Seconds until the last stage begins, where weight gradients fill all other bubbles."""
    first, middle, last = (s.forward for s in stages)
    out: Array = first + middles * middle + last - np.max([first, middle, last], axis=0)
    return out


def _flushed_period(stages: list[Stage], hop: Array) -> Array:
    """Seconds between micro-batches where all forwards come first: no round trip is waited for."""
    ahead = np.max([s.forward for s in stages], axis=0)
    back = np.max([s.backward for s in stages], axis=0)
    out: Array = np.maximum(ahead, hop) + np.maximum(back, hop)
    return out


def _period(first: Array, middle: Array, last: Array, middles: Array, hop: Array) -> Array:
    """Seconds between micro-batches: the worst of one stage, all but the first, and all."""
    k = 1 + middles
    back = (last + middles * middle + 2 * hop * middles) / k
    whole = (first + last + middles * middle + 2 * hop * k) / (k + 1)
    alone = last == 0
    out: Array = np.where(alone, first, np.max([first, middle, last, back, whole], axis=0))
    return out


def _ends(
    c: Costs, stages: list[Stage], first: Array, workload: Workload, cluster: Cluster
) -> tuple[Array, Array]:
    """Reduction that is not hidden, and the update, of the stage where they take longest."""
    updates = [updating(c, s, cluster) for s in stages]
    # The first stage ends last: it starts to reduce when its last backward is done.
    ends = reduction(c, stages[FIRST], first, workload, cluster) + tying(c, workload, cluster)
    return ends, np.max(updates, axis=0)
