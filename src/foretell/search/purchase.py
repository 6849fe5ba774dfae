"""How many of which GPUs train so many tokens by a day, and what that costs.

The step of each number of each kind of GPU is the best of the oracle's layouts, simulated. A job
that fails once in M seconds and takes C to write a checkpoint does best with one every √(2·C·M)
seconds (Young 1974, Daly 2006) and loses to checkpoints, repeated work and restarts

    C/√(2·C·M) + √(2·C·M)/(2·M) + R/M            → `goodput`
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from foretell.cluster import Cluster
from foretell.errors import ForetellError, InfeasibleError
from foretell.plan.costs import with_cuts
from foretell.predict import Prediction
from foretell.search.oracle.space import Space, choose, layouts, per_node
from foretell.workload import Workload

DAY, HOUR = 86400.0, 3600.0
SIMULATED = 8  # layouts of each offer


@dataclass(frozen=True)
class Offer:
    """One number of one kind of GPU, and what a run on them takes and costs."""

    device: str
    gpus: int
    prediction: Prediction
    seconds: float  # of the whole run, what failures cost included
    money: float  # of the whole run; 0 where no price is known
    goodput: float  # of the seconds, the share that goes into new steps

    @property
    def days(self) -> float:
        """Days of the run."""
        return self.seconds / DAY


def offers(
    workload: Workload,
    clusters: Sequence[Callable[[int], Cluster]],
    sizes: Sequence[int],
    *,
    tokens: float,
    batch: int,
    progress: Callable[[str], None] = lambda words: None,
) -> list[Offer]:
    """Every number of every kind of GPU on which the model fits, the cheapest first."""
    found, why = [], "no number of GPUs divides the batch"
    for sized in clusters:
        for gpus in sizes:
            cluster = sized(gpus)
            progress(f"{gpus} × {cluster.devices[0].name}")
            try:
                found.append(_offer(workload, cluster, gpus, tokens, batch))
            except ForetellError as error:
                why = error.message
    if not found:
        raise InfeasibleError(why, hint="allow more GPUs, or another batch")
    return sorted(found, key=lambda o: (o.money or o.seconds * o.gpus, o.seconds, o.device))


def _offer(workload: Workload, cluster: Cluster, gpus: int, tokens: float, batch: int) -> Offer:
    plans = layouts(workload, gpus, batch, per_node(cluster), Space())
    plans = with_cuts(plans, workload, cluster)
    best = choose(plans, workload, cluster, most=SIMULATED).best
    good = goodput(best, cluster)
    seconds = tokens / (batch * workload.tokens) * best.step / good
    money = seconds / HOUR * cluster.price
    return Offer(cluster.devices[0].name, gpus, best, seconds, money, good)


def goodput(found: Prediction, cluster: Cluster) -> float:
    """The share of a long run that goes into new steps."""
    rates = _reliability()
    mean: float = rates["failures"]["gpu_hours"] * HOUR / cluster.size
    held = found.memory.get("parameters", 0.0) + found.memory.get("optimizers", 0.0)
    copies = max(found.plan.dp, 1) if not found.plan.zero else 1
    written = held * cluster.size / copies
    took = written / (rates["checkpoint"]["bytes_per_node_s"] * cluster.num_nodes)
    every = math.sqrt(2 * max(took, 1.0) * mean)
    lost = took / every + every / (2 * mean) + rates["failures"]["restart_s"] / mean
    return float(1 / (1 + lost))


@cache
def _reliability() -> dict[str, Any]:
    text = files("foretell.search").joinpath("reliability.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def chosen(found: Sequence[Offer], days: float) -> Offer:
    """The cheapest offer that ends in time."""
    fast = [offer for offer in found if not days or offer.days <= days]
    if not fast:
        least = min(found, key=lambda offer: offer.seconds)
        raise InfeasibleError(
            f"no offer ends in {days:g} days: {least.gpus} × {least.device} takes "
            f"{least.days:.1f} days",
            hint="allow more GPUs (--gpus 8..8192), or more days",
        )
    return fast[0]
