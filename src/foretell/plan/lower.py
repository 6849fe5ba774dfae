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
from foretell.cost import collective
from foretell.errors import unknown
from foretell.graph import Graph
from foretell.graph.groups import group_text
from foretell.plan.chains import Spans, write_stages
from foretell.plan.check import settled
from foretell.plan.ends import sends
from foretell.plan.finish import write_buffers, write_end
from foretell.plan.group_graph import lower_groups
from foretell.plan.group_rows import is_apart
from foretell.plan.pieces import DETAILS
from foretell.plan.place_graph import lower_places
from foretell.plan.plan import Plan
from foretell.plan.sheet import Priced, Sheet, priced, sheet
from foretell.whatif import Setting, applied, parse
from foretell.workload import Workload


def lower(plan: Plan, workload: Workload, cluster: Cluster, *, detail: str = "stage") -> Graph:
    """The graph of one step; `detail` says how much of a stage one task is: `stage` or `layer`."""
    if detail not in DETAILS:
        raise unknown("detail", detail, DETAILS)
    if plan.stages:
        return lower_places(plan, workload, cluster)
    plan, cluster = settled(plan, workload, cluster)
    if is_apart(plan):
        return lower_groups(plan, workload, cluster)
    return written(priced(plan, workload, cluster), detail)


def written(found: Priced, detail: str = "stage") -> Graph:
    """The graph of a plan whose prices are known already."""
    page = sheet(found)
    spans = write_stages(page, detail)
    _hand_over(page, spans)
    write_end(page, spans)
    write_buffers(page, spans)
    plan = page.plan
    each = float(len(page.stages[0].ranks))
    graph = page.draft.graph(workload=page.workload.name, plan=str(plan), ranks_each=each)
    return applied([parse(text) for text in plan.whatifs], graph, Setting(page.cluster))


def _hand_over(page: Sheet, spans: Spans) -> None:
    """What stages send each other, one part of the model to the next and back."""
    places = spans.order.places
    hops: dict[tuple[int, int], float] = {}
    for here, there in pairwise(places):
        ends = here[0], there[0]
        if here[0] == there[0]:
            page.draft.wait(spans.first[0, *there], spans.last[0, *here])
            page.draft.wait(spans.first[1, *here], spans.last[1, *there])
            continue
        if ends not in hops:
            hops[ends] = hop(page, *ends)
        _send(page, spans, 0, here, there, hops[ends])
        _send(page, spans, 1, there, here, hops[ends])
    end, chunk = places[-1]
    page.draft.wait(spans.first[1, end, chunk], spans.last[0, end, chunk])
    if spans.order.is_split:
        page.draft.wait(spans.first[2].reshape(-1), spans.last[1].reshape(-1))


def hop(page: Priced, here: int, there: int) -> float:
    """Seconds to hand a micro-batch from one stage to another: of the rank that has most to do.

    Where they have unlike replicas, each sends to or receives from several of the other's.
    """
    if page.is_even:
        return float(sends(page.stages[here].costs, page.workload, page.cluster)[0])
    size = max(_handed(page, here), _handed(page, there))
    return float(collective.price("send", np.array([size]), page.apart(here, there)).seconds[0])


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
    ranks = page.stages[here[0]].rank, page.stages[there[0]].rank
    ids = page.draft.tasks(
        len(made),
        kind="send",
        op="send",
        rank=ranks[0],
        lane=page.lanes[here[0]][3 if _is_up(way, here, there) else 2],
        seconds=seconds,
        comm_bytes=_handed(page, here[0]),
        phase="communicate",
        micro_batch=np.arange(len(made)),
        group=group_text(ranks),
        order=made,  # messages leave in the order in which they are made
        source="formula",
    )
    page.draft.wait(ids, made)
    page.draft.wait(spans.first[way, *there], ids)


def _is_up(way: int, here: tuple[int, int], there: tuple[int, int]) -> bool:
    """Whether a message goes to a stage before its own; around the ends as its way goes."""
    if here[1] == there[1]:
        return there[0] < here[0]
    return way == 1


def _handed(page: Priced, stage: int) -> float:
    """Bytes a stage sends on of one micro-batch."""
    block = next(i for i, layer in enumerate(page.workload.layers) if layer.is_block)
    return float(page.stages[stage].costs.holdings[block].handed[0])
