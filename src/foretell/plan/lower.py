"""From a plan to the task graph of its step, priced, ready to be simulated.

Ranks that do the same at the same time are one: of every stage the graph has one rank, which stands
for all its data, tensor and context-parallel ranks; collectives are priced for the whole group. A
rank has a lane for compute, one for collectives, and one for each direction it sends in.

    F of a stage   after what the stage before sent
    B of a stage   after what the stage behind sent back; on the last, after its own F
    gradients      reduced when the last backward is done, or bucket by bucket while it runs
    update         when the gradients of every stage are there: their common norm is clipped first

Ranks that do not do the same (`shares`, `sync`, `groups`) are written one by one (→ group_graph).
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from foretell.cluster import Cluster
from foretell.errors import unknown
from foretell.graph import Graph
from foretell.graph.groups import group_text
from foretell.plan.chains import Spans, write_stages
from foretell.plan.check import check, placed
from foretell.plan.costs import Costs, costs
from foretell.plan.ends import sends
from foretell.plan.finish import write_buffers, write_end
from foretell.plan.group_graph import lower_groups
from foretell.plan.group_rows import is_apart
from foretell.plan.pieces import DETAILS
from foretell.plan.place_graph import lower_places
from foretell.plan.plan import Plan
from foretell.plan.sheet import Sheet, sheet
from foretell.whatif import Setting, applied, parse
from foretell.workload import Workload


def lower(plan: Plan, workload: Workload, cluster: Cluster, *, detail: str = "stage") -> Graph:
    """The graph of one step; `detail` says how much of a stage one task is: `stage` or `layer`."""
    if detail not in DETAILS:
        raise unknown("detail", detail, DETAILS)
    if plan.stages:
        return lower_places(plan, workload, cluster)
    plan, cluster = placed(plan, cluster)
    plan = check(plan, workload, cluster)
    if is_apart(plan):
        return lower_groups(plan, workload, cluster)
    return written(costs([plan], workload, cluster), workload, cluster, detail)


def written(priced: Costs, workload: Workload, cluster: Cluster, detail: str = "stage") -> Graph:
    """The graph of the first of some checked plans, whose prices are known already."""
    page = sheet(priced, workload, cluster)
    spans = write_stages(page, detail)
    _hand_over(page, spans)
    write_end(page, spans)
    write_buffers(page, spans)
    plan = page.plan
    each = float(plan.ranks // plan.pp)
    graph = page.draft.graph(workload=workload.name, plan=str(plan), ranks_each=each)
    return applied([parse(text) for text in plan.whatifs], graph, Setting(cluster))


def _hand_over(page: Sheet, spans: Spans) -> None:
    """What stages send each other, forwards down and backwards up, chunk after chunk."""
    _, stages, chunks, _ = spans.first.shape
    places = [(s, chunk) for chunk in range(chunks) for s in range(stages)]
    if stages > 1:
        seconds = float(sends(page.costs, page.workload, page.cluster)[0])
        for here, there in pairwise(places):
            _send(page, spans, 0, here, there, seconds)
            _send(page, spans, 1, there, here, seconds)
    end, chunk = places[-1]
    page.draft.wait(spans.first[1, end, chunk], spans.last[0, end, chunk])


def _send(
    page: Sheet,
    spans: Spans,
    way: int,
    here: tuple[int, int],
    there: tuple[int, int],
    seconds: float,
) -> None:
    """Every micro-batch of one way between two neighbours."""
    made = spans.last[way, *here]
    ranks = page.rank(here[0]), page.rank(there[0])
    ids = page.draft.tasks(
        len(made),
        kind="send",
        op="send",
        rank=ranks[0],
        lane=page.lanes[here[0]][3 if way else 2],
        seconds=seconds,
        comm_bytes=_handed(page),
        phase="communicate",
        micro_batch=np.arange(len(made)),
        group=group_text(ranks),
        order=made,  # messages leave in the order in which they are made
        source="formula",
    )
    page.draft.wait(ids, made)
    page.draft.wait(spans.first[way, *there], ids)


def _handed(page: Sheet) -> float:
    block = next(i for i, layer in enumerate(page.workload.layers) if layer.is_block)
    return float(page.costs.holdings[block].handed[0])
