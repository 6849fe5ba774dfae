"""What would make a layout fit: the change that costs the least time among those that fit.

Tried in all combinations: sharding more, running more again, smaller micro-batches, sequence
parallelism, optimizer state on the host. All are priced at once in closed form.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from itertools import product

import numpy as np

from foretell.cluster import Cluster
from foretell.errors import ForetellError
from foretell.plan import Plan, check, estimate
from foretell.workload import Workload

_MORE = {
    "none": ("none", "selective", "full"),
    "selective": ("selective", "full"),
    "full": ("full",),
}


def remedy(plan: Plan, workload: Workload, cluster: Cluster) -> str:
    """The cheapest change that fits, and what it costs; or by how much the best one still fails."""
    tried = list(_candidates(plan, workload, cluster))
    found = estimate(tried, workload, cluster)
    fits = np.flatnonzero(found.missing == 0)
    if len(fits):
        best = int(fits[np.argmin(found.step[fits])])
        return f"{_changes(plan, tried[best])} fits and takes {found.step[best]:.4g} s a step"
    least = int(np.argmin(found.missing))
    short = found.missing[least] / 2**30
    return f"even {_changes(plan, tried[least])} is {short:.1f} GiB short; use more tp, pp or ranks"


def _candidates(plan: Plan, workload: Workload, cluster: Cluster) -> Iterator[Plan]:
    """Plans that hold less, the plan itself first."""
    shards = range(plan.zero, 4) if plan.dp > 1 else (plan.zero,)
    micros = sorted({max(plan.micro_batch >> k, 1) for k in range(8)}, reverse=True)
    splits = (False, True) if plan.tp > 1 and not plan.sp else (plan.sp,)
    hosts = (plan.offload,) if plan.offload else (False, True)
    for zero, again, micro, sp, offload in product(
        shards, _MORE[plan.recompute], micros, splits, hosts
    ):
        one = plan.but(zero=zero, recompute=again, micro_batch=micro, sp=sp, offload=offload)
        try:
            yield check(one, workload, cluster)
        except ForetellError:
            continue


def _changes(before: Plan, after: Plan) -> str:
    """The fields in which two plans differ, as a person writes them."""
    names = [f.name for f in fields(Plan)]
    differ = [n for n in names if getattr(before, n) != getattr(after, n)]
    words = {True: "yes", False: "no"}
    values = [getattr(after, n) for n in differ]
    texts = [words[v] if isinstance(v, bool) else str(v) for v in values]
    return ",".join(f"{n}={t}" for n, t in zip(differ, texts, strict=True)) or "as it is"
