"""Unlike blocks partitioned into pipeline stages so that the slowest stage is as fast as can be.

With t the seconds of each block (forward and backward, and the layers between blocks with the block
before them), b[k][j] the least that the busiest of k stages has of the first j blocks:

    b[1][j] = Σ t[:j]        b[k][j] = min over i < j of max( b[k−1][i], Σ t[i:j] )      → `cut`

Every stage has a block at least. Of cuts that are equally good the earliest stages have least.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from foretell.cluster import Cluster
from foretell.errors import InfeasibleError
from foretell.plan.check import check
from foretell.plan.costs import costs, layer_seconds
from foretell.plan.layouts import Array
from foretell.plan.plan import Plan
from foretell.plan.stages import blocks_of
from foretell.workload import Workload


def cut(seconds: Sequence[float], stages: int) -> tuple[int, ...]:
    """How many blocks each stage has."""
    n = len(seconds)
    if not 1 <= stages <= n:
        raise InfeasibleError(
            f"{n} blocks for {stages} stages", hint=f"pp is between 1 and {n} here"
        )
    total = np.concatenate([[0.0], np.cumsum(seconds)])
    least, came = total.copy(), []
    least[0] = np.inf
    for _ in range(1, stages):
        worst = np.maximum(least[:, None], total[None, :] - total[:, None])
        worst[np.tril_indices(n + 1)] = np.inf  # a stage without blocks
        came.append(np.argmin(worst, axis=0))
        least = worst.min(axis=0)
    ends = [n]
    for back in reversed(came):
        ends.append(int(back[ends[-1]]))
    return tuple(np.diff([0, *reversed(ends)]).tolist())


def is_uneven(workload: Workload) -> bool:
    """Whether blocks differ, so that dealing them out by number is not split work."""
    return sum(layer.is_block for layer in workload.layers) > 1


def with_cuts(plans: Sequence[Plan], workload: Workload, cluster: Cluster) -> list[Plan]:
    """The plans, and behind them those that blocks which differ can be cut by time for.

    Both are kept: with few micro-batches a pipeline fills and drains for much of a step, and then
    stages that are equally busy are not always best.
    """
    mine = [p for p in plans if p.pp > 1 and p.chunks == 1 and not p.layers]
    if not mine or not is_uneven(workload):
        return list(plans)
    took = _blocks([check(p, workload, cluster) for p in mine], workload, cluster)
    known: dict[tuple[int, bytes], tuple[int, ...]] = {}
    more = []
    for column, plan in enumerate(mine):
        key = (plan.pp, took[:, column].tobytes())
        if key not in known:
            known[key] = cut(took[:, column].tolist(), plan.pp)
        if known[key] != blocks_of(plan, workload):
            more.append(plan.but(layers=known[key]))
    return [*plans, *more]


def _blocks(plans: Sequence[Plan], workload: Workload, cluster: Cluster) -> Array:
    """Seconds of every block for every plan; what is no block counts with the one before it."""
    priced = costs(plans, workload, cluster)
    rows: list[Array] = []
    ahead = np.zeros(len(plans))  # what stands before the first block
    for at, layer in enumerate(workload.layers):
        once = np.sum(layer_seconds(priced, at, workload), axis=0)
        if layer.is_block:
            rows += [once + ahead, *[once] * (layer.times - 1)]
            ahead = np.zeros(len(plans))
        elif rows:
            rows[-1] = rows[-1] + once * layer.times
        else:
            ahead = ahead + once * layer.times
    return np.array(rows)
