"""Each strategy against the number of devices: the best layout of each, and where each ends.

Weak scaling keeps the samples of a device, strong scaling those of a step. Cost is given beside
time: what more devices save, and what they cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from foretell import portable
from foretell.cluster import Cluster
from foretell.errors import InputError
from foretell.plan import Plan
from foretell.plan.collective_breakdown import by_collective
from foretell.plan.partition import with_cuts
from foretell.pool import Pool
from foretell.search.oracle.limits import Finding, findings
from foretell.search.oracle.space import Space, layouts, strategy
from foretell.search.oracle.sweep import HOUR, Swept, sweep
from foretell.workload import Workload

ALIKE = 0.01  # of a step: layouts nearer than this are as fast as each other
PARTS = ("compute", "host", "talk", "bubble", "send", "reduce", "update")


@dataclass(frozen=True)
class Row:
    """The best layout of one strategy on so many devices."""

    gpus: int
    strategy: str
    batch: int
    plan: Plan
    step: float
    parts: dict[str, float]
    peak: float
    missing: float
    utilisation: float
    money: float  # of a step; 0 where it is unknown
    layouts: int  # that were looked at
    findings: tuple[Finding, ...]
    collectives: dict[str, float]  # seconds by name, hidden or not

    @property
    def exposed(self) -> float:
        """Seconds of the step that wait for messages."""
        return sum(self.parts[name] for name in ("talk", "reduce", "send"))

    @property
    def hidden(self) -> float:
        """Seconds of messages behind compute."""
        return max(sum(self.collectives.values()) - self.exposed, 0.0)

    @property
    def samples(self) -> float:
        """Samples a second."""
        return self.batch / self.step

    def epoch(self, samples: int) -> float:
        """Seconds for so many samples."""
        return samples / self.samples


def counts(text: str) -> list[int]:
    """`1..64` → 1, 2, 4 … 64; `8,12,48` as it stands; `1..48` ends with 48."""
    if ".." not in text:
        return [_whole(part, text) for part in text.split(",")]
    first, _, last = text.partition("..")
    low, high = _whole(first, text), _whole(last, text)
    if low > high:
        raise InputError(f"`{text}` goes from {low} to {high}", hint="write the smaller one first")
    found, n = [], low
    while n < high:
        found.append(n)
        n *= 2
    return [*found, high]


def _whole(part: str, text: str) -> int:
    if not part.strip().isdigit() or int(part) < 1:
        raise InputError(f"`{text}` is no number of devices", hint="write 1..1024 or 8,16,48")
    return int(part)


def scaling(
    workload: Workload,
    cluster: Callable[[int], Cluster],
    gpus: Iterable[int],
    batch: Callable[[int], int],
    space: Space | None = None,
    progress: Callable[[str], None] = lambda words: None,
    pool: Pool | None = None,
) -> list[Row]:
    """The best layout of every strategy for each number of devices."""
    rows = []
    for n in gpus:
        machines, samples = cluster(n), batch(n)
        plans = layouts(workload, n, samples, per_node(machines), space or Space())
        plans = with_cuts(plans, workload, machines)
        tell = _telling(progress, n)
        tell(0, len(plans))
        if plans:
            swept = sweep(plans, workload, machines, tell, pool)
            rows += _best(swept, workload, machines, n, samples)
    return rows


def _telling(progress: Callable[[str], None], gpus: int) -> Callable[[int, int], None]:
    return lambda done, all_: progress(f"{gpus} devices: {done} of {all_} layouts")


def per_node(cluster: Cluster) -> int:
    return max(1, max(len(cluster.node(0).devices), 1))


def _best(swept: Swept, workload: Workload, cluster: Cluster, gpus: int, batch: int) -> list[Row]:
    names = np.array([strategy(p) for p in swept.plans])
    rows = []
    for name in dict.fromkeys(names.tolist()):
        mine = np.flatnonzero(names == name)
        fitting = mine[swept.fits[mine]]
        # Of a strategy that fits nowhere, the layout that lacks least.
        at = (
            fitting[np.argmin(swept.found.step[fitting])]
            if len(fitting)
            else mine[np.argmin(swept.found.missing[mine])]
        )
        rows.append(_row(swept, int(at), workload, cluster, gpus, batch, name, len(mine)))
    return sorted(rows, key=_rank)


def _rank(row: Row) -> tuple[bool, int, int, float, str]:
    """Fastest first; of those as fast as each other the plainest."""
    about = round(float(portable.log(row.step)) / ALIKE) if row.step else 0
    plain = row.strategy.count("+") + row.plan.zero
    return row.missing > 0, about, plain, row.step, row.strategy


def _row(
    swept: Swept, at: int, workload: Workload, cluster: Cluster, gpus: int, batch: int, name: str,
    looked: int,
) -> Row:  # fmt: skip
    f, plan = swept.found, swept.plans[at]
    step = float(f.step[at])
    peak = sum(d.peak(plan.dtype or workload.dtype) for d in cluster.devices)
    return Row(
        gpus, name, batch, plan, step, {p: float(getattr(f, p)[at]) for p in PARTS},
        float(f.peak[at]), float(f.missing[at]), float(f.flops[at]) / (step * peak),
        step * swept.price / HOUR, looked,
        tuple(findings(plan, f, at, workload, cluster)), by_collective(plan, workload, cluster),
    )  # fmt: skip


def front(rows: Sequence[Row]) -> list[Row]:
    """Rows that no other beats in time, memory and cost a sample at once, fastest first.

    Cost is money where prices are known, device-seconds where not.
    """
    mine = [row for row in rows if not row.missing]
    known = all(row.money for row in mine)

    def marks(row: Row) -> tuple[float, float, float]:
        cost = row.money / row.batch if known else row.gpus / row.samples
        return 1 / row.samples, row.peak, cost

    def beats(a: Row, b: Row) -> bool:
        return marks(a) != marks(b) and all(x <= y for x, y in zip(marks(a), marks(b), strict=True))

    kept = [row for row in mine if not any(beats(other, row) for other in mine)]
    return sorted(kept, key=lambda row: (1 / row.samples, row.gpus, row.strategy))


def more_or_less(rows: Sequence[Row]) -> list[str]:
    """What each further step in devices saves in time and costs in money, of the best layouts."""
    best: dict[int, Row] = {}
    for row in rows:
        if not row.missing and (row.gpus not in best or row.samples > best[row.gpus].samples):
            best[row.gpus] = row
    found = []
    for fewer, more in zip(sorted(best), sorted(best)[1:], strict=False):
        a, b = best[fewer], best[more]
        time = 1 - a.samples / b.samples
        cost = (b.gpus / b.samples) / (a.gpus / a.samples) - 1
        verb = "save" if time >= 0 else "lose"
        found.append(
            f"{more - fewer} more devices ({fewer} → {more}) {verb} {abs(time):.0%} of the time "
            f"and cost {abs(cost):.0%} {'more' if cost >= 0 else 'less'} a sample"
        )
    return found
