"""The oracle as a planner: all layouts of a space priced, the best ones simulated."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import ClassVar

from foretell.cluster import Cluster
from foretell.plan.costs import with_cuts
from foretell.pool import Pool
from foretell.search.kit import Planned, Planner, Progress, silent
from foretell.search.oracle.space import (
    Space,
    by_strategy,
    choose,
    layouts,
    per_node,
    strategy,
    sweep,
)
from foretell.workload import Workload

ALTERNATIVES = 8  # next-best layouts that are kept
USUAL = ("data", "fsdp")  # what people do without a planner, where it fits


@dataclass(frozen=True)
class Oracle(Planner):
    """Try every product of parallel degrees and take the layout with the shortest step."""

    name: ClassVar[str] = "oracle"
    source: ClassVar[str] = "Kahira et al., ParaDL, HPDC 2021; closed forms here are simulated too"
    batch: int = 0  # samples of a step; the workload's on each device where 0
    simulate: int = 48  # layouts simulated at most
    dtype: str = ""
    framework: str = ""

    def plan(
        self, workload: Workload, cluster: Cluster, progress: Progress = silent,
        pool: Pool | None = None,
    ) -> Planned:  # fmt: skip
        begin = time.process_time()
        batch = self.batch or workload.batch * cluster.size
        plans = layouts(workload, cluster.size, batch, per_node(cluster), self.space())
        plans = with_cuts(plans, workload, cluster)
        progress(f"{len(plans)} layouts", float("inf"))
        found = choose(plans, workload, cluster, most=self.simulate, pool=pool)
        swept = sweep(plans, workload, cluster, pool=pool)
        fastest = by_strategy(swept, workload, cluster)
        baselines = {name: one.prediction.step for name, one in fastest.items() if one.fits}
        baselines[strategy(found.best.plan)] = found.best.step
        usual = next((baselines[n] for n in USUAL if n in baselines), max(baselines.values()))
        progress("done", found.best.step)
        notes = (f"{found.fitting} of {found.layouts} layouts fit; gap {100 * found.gap:.1f} %",)
        return Planned(
            found.best.plan.but(model=workload.fingerprint()), found.best.step, usual, baselines,
            found.bound, found.layouts, time.process_time() - begin, notes,
            alternatives=found.others[:ALTERNATIVES],
        )  # fmt: skip

    def space(self) -> Space:
        """The layouts that are compared."""
        return Space(dtype=self.dtype, framework=self.framework)


@dataclass(frozen=True)
class ParaDL(Oracle):
    """ParaDL's own choice: the best closed form of its strategies, without ZeRO and recompute."""

    name: ClassVar[str] = "paradl"
    source: ClassVar[str] = "Kahira et al., ParaDL, HPDC 2021"
    simulate: int = 1  # the one that is chosen, so that it has the step of `predict`

    def space(self) -> Space:
        """Data, spatial, filter and channel parallelism, pipelines, and data beside each."""
        return Space(
            dtype=self.dtype, framework=self.framework, recompute=("none",), zero=(0,),
            chunks=(1,), schedules=("gpipe",),
        )  # fmt: skip

    def own(self) -> Planner:
        """The oracle: as many layouts of a larger space in closed form, the best simulated."""
        return Oracle(batch=self.batch, dtype=self.dtype, framework=self.framework)
