"""Every planner asked, every answer priced alike, the fastest plan that fits taken.

The oracle searches degrees, schedules and memory; placement searches mixed devices, uneven shares
and gradient synchronisation; fusion searches kernels and buckets. What each finds is priced by the
one evaluator (→ `foretell.search.evaluate`), so that the default is never slower than any of them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import ClassVar

from foretell.cluster import Cluster
from foretell.errors import ForetellError
from foretell.search.evaluate import repredicted
from foretell.search.fusion.planner import Fusing
from foretell.search.oracle.planner import Oracle
from foretell.search.placement.planner import Placing
from foretell.search.planner import Planned, Planner, Progress, silent
from foretell.workload import Workload


@dataclass(frozen=True)
class Joint(Planner):
    """Ask the oracle, placement and fusion, and take the plan with the shortest predicted step."""

    name: ClassVar[str] = "joint"
    source: ClassVar[str] = "our own: the methods of ParaDL, TAG and DisCo, priced by one evaluator"
    evaluations: int = 200  # of the fusion search

    def plan(self, workload: Workload, cluster: Cluster, progress: Progress = silent) -> Planned:
        """The fastest of what all planners find; those that find nothing say why in the notes."""
        began = time.process_time()
        found: list[tuple[str, Planned]] = []
        failed: list[tuple[str, ForetellError]] = []
        stopped = False
        for planner in (Oracle(), Placing(), Fusing(evaluations=self.evaluations)):
            best = min((one.predicted for _, one in found), default=float("nan"))
            try:
                progress(f"asking {planner.name}", best)
                one = planner.plan(workload, cluster)
                found.append((planner.name, repredicted(one, workload, cluster)))
            except ForetellError as error:
                failed.append((planner.name, error))
            except KeyboardInterrupt:
                if not found:
                    raise
                stopped = True
            stopped = stopped or (bool(found) and found[-1][1].stopped)
            if stopped:
                break
        if not found:
            raise failed[0][1]
        chosen = _chosen(found, failed, time.process_time() - began)
        return replace(chosen, stopped=stopped)


def _chosen(
    found: list[tuple[str, Planned]], failed: list[tuple[str, ForetellError]], cpu: float
) -> Planned:
    """The fastest answer, with what all of them compared and cost."""
    name, best = min(found, key=lambda item: item[1].predicted)
    baselines = {f"{other}: {k}": v for other, one in found for k, v in one.baselines.items()}
    baselines |= {other: one.predicted for other, one in found}
    others = [one.prediction for other, one in found if other != name and one.prediction]
    others += [prediction for _, one in found for prediction in one.alternatives]
    notes = (f"found by {name}", *best.notes)
    notes += tuple(f"{other} found no plan: {error.message}" for other, error in failed)
    return replace(
        best,
        baseline=found[0][1].baseline,
        baselines=baselines,
        bound=None,
        evaluations=sum(one.evaluations for _, one in found),
        cpu=cpu,
        notes=notes,
        alternatives=tuple(sorted(others, key=lambda p: p.step)),
    )
