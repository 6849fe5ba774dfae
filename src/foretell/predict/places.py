"""A plan whose stages are placed freely, predicted: simulated and told like any other."""

from __future__ import annotations

import numpy as np

from foretell.graph import Kind, Phase
from foretell.plan import Plan
from foretell.plan.memory import USABLE
from foretell.plan.place_costs import Prices
from foretell.plan.place_graph import lower_places
from foretell.plan.place_memory import constant, peaks
from foretell.plan.stage_placement import acts, places
from foretell.simulate import Timeline, simulate


def played(plan: Plan, prices: Prices) -> Timeline:
    """The step as it runs."""
    return simulate(lower_places(plan, prices.workload, prices.cluster, prices))


def held(plan: Plan, prices: Prices) -> tuple[float, float, dict[str, float]]:
    """Bytes of the rank with the least room left, how many are missing there, and what they are."""
    cluster = prices.cluster
    found = places(plan, prices.workload, cluster.size)
    rows = acts(plan, found)
    most = peaks(prices, found, rows)
    over = [m - d.memory * USABLE for m, d in zip(most, cluster.devices, strict=False)]
    worst = int(np.argmax(over))
    trains = any(act.kind != "F" for row in rows for act in row)
    weights = constant(prices, found, worst, trains=False)
    rest = constant(prices, found, worst, trains=trains) - weights
    parts = {"parameters": weights, "gradients and optimizer": rest}
    parts["activations"] = most[worst] - weights - rest
    return most[worst], max(over[worst], 0.0), parts


def spent(timeline: Timeline) -> dict[str, float]:
    """Seconds of the busiest rank by what they go into; they make the step."""
    graph, took = timeline.graph, timeline.end - timeline.start
    kernels = graph.kind == Kind.KERNEL
    ranks = _ranks(timeline)
    busy = [float(took[kernels & mine].sum()) for mine in ranks]
    mine = ranks[int(np.argmax(busy))]
    update = float(took[mine & (graph.phase == Phase.UPDATE)].sum())
    compute = max(busy) - update
    talk = float(took[mine & (graph.kind == Kind.COLLECTIVE)].sum())
    rest = max(timeline.seconds - compute - update, 0.0)  # what messages do not hide behind work
    return {
        "compute_s": compute,
        "exchange_s": 0.0,  # what a stage exchanges inside is in its compute
        "reduce_s": min(talk, rest),
        "update_s": update,
        "idle_s": rest - talk if rest - talk > 1e-12 else 0.0,  # below that it is rounding
    }


def _ranks(timeline: Timeline) -> list[np.ndarray[tuple[int], np.dtype[np.bool_]]]:
    """Which tasks hold a lane of each rank: a sharded block counts for all of its ranks."""
    graph = timeline.graph
    lane_rank = graph.lanes.rank
    out = []
    for rank in np.unique(lane_rank).tolist():
        mine = lane_rank[graph.lane] == rank
        held_here = graph.held.task[lane_rank[graph.held.lane] == rank]
        mine[held_here] = True
        out.append(mine)
    return out
