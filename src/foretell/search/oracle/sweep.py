"""All layouts of a space priced at once: columns of time, memory and money, and their front.

The closed form prices thousands of layouts a second (→ `foretell.plan.estimate`); what cannot fit
is kept with the bytes it lacks, never ranked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial

import numpy as np

from foretell.cluster import Cluster
from foretell.errors import InfeasibleError
from foretell.graph.columns import Array
from foretell.plan import Plan
from foretell.plan.estimate import Estimate, estimate
from foretell.pool import Alone, Pool
from foretell.workload import Workload

CHUNK = 4096  # layouts priced at a time: bounds memory, and progress is reported between
LEAST = 512  # layouts worth sending to a worker: fewer take less time than the way there
HOUR = 3600.0


@dataclass(frozen=True, eq=False)
class Swept:
    """Layouts and what each would do, in the order they were asked."""

    plans: tuple[Plan, ...]
    found: Estimate
    price: float  # money per hour for the cluster; 0 where it is unknown

    @property
    def fits(self) -> Array:
        """Which layouts fit in memory."""
        mask: Array = self.found.missing == 0
        return mask

    @property
    def money(self) -> Array:
        """Money of one step."""
        cost: Array = self.found.step * self.price / HOUR
        return cost

    def best(self) -> int:
        """The fastest layout that fits, or an error with the bytes that are missing."""
        if not self.plans:
            raise InfeasibleError(
                "no layout has that many devices", hint="another number of devices, or a batch "
                "that more of them divide",
            )  # fmt: skip
        if not self.fits.any():
            least = int(np.argmin(self.found.missing))
            raise InfeasibleError(
                f"none of {len(self.plans)} layouts fits: `{self.plans[least]}` lacks "
                f"{self.found.missing[least] / 2**30:.1f} GiB a device, the others more",
                hint="more devices, a smaller batch, or offload=yes",
            )
        return int(np.argmin(np.where(self.fits, self.found.step, np.inf)))

    def front(self) -> list[int]:
        """Layouts that no other beats in time, memory and money at once, fastest first."""
        mine = np.flatnonzero(self.fits)
        mine = mine[np.lexsort((self.found.peak[mine], self.found.step[mine]))]
        peaks = self.found.peak[mine]
        least = np.minimum.accumulate(np.concatenate([[np.inf], peaks[:-1]]))
        return [int(i) for i in mine[peaks < least]]


def sweep(
    plans: Sequence[Plan],
    workload: Workload,
    cluster: Cluster,
    progress: Callable[[int, int], None] = lambda done, all_: None,
    pool: Pool | None = None,
) -> Swept:
    """Price layouts on a cluster."""
    many, pool = len(plans), pool or Alone()
    size = CHUNK if pool.size == 1 else min(CHUNK, max(LEAST, many // (4 * pool.size)))
    chunks = [plans[start : start + size] for start in range(0, many, size)]
    work = partial(estimate, workload=workload, cluster=cluster)
    parts = pool.map(work, chunks, lambda done, _: progress(min(done * size, many), many))
    names = [f.name for f in fields(Estimate)]
    joined = {n: np.concatenate([getattr(p, n) for p in parts] or [np.zeros(0)]) for n in names}
    return Swept(tuple(plans), Estimate(**joined), cluster.price)
