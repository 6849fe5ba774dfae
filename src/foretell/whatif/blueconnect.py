"""BlueConnect: an all-reduce taken apart by the topology it runs on.

With `inside` ranks a node and b nodes, an all-reduce of S bytes becomes

    reduce-scatter of S           within each node
    all-reduce of S / inside      between nodes, `inside` groups of b ranks at once
    all-gather of S               within each node

Each tier is a channel of its own, so that the stages of successive buckets overlap.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foretell.errors import InputError
from foretell.graph.graph import Array, Graph, group_text
from foretell.whatif.base import DoesNotApply, Setting, WhatIf
from foretell.whatif.collective_cost import Wires, wires
from foretell.whatif.exchange import exchanging_ranks, group_of
from foretell.whatif.stages import Stage, take_apart


@dataclass(frozen=True)
class BlueConnect(WhatIf):
    """Reduce gradients within nodes, then between them, then spread them within nodes."""

    name = "blueconnect"
    assumes = (
        "tiers of the network work at the same time, each on another bucket",
        "ranks of a node that communicate with other nodes at once share its links fairly",
    )
    source = "Cho et al. 2019, BlueConnect (MLSys)"
    code = "reduce_scatter(node); all_reduce(across); all_gather(node)"
    inside: int = 0  # ranks of a node; 0: as the cluster has them

    def apply(self, graph: Graph, setting: Setting) -> Graph:
        old = exchanging_ranks(graph, op="all_reduce")
        group = group_of(graph, old)
        links = wires(graph, setting, len(group))
        inside = self.inside or _inside(links, group)
        if inside < 2 or len(group) % inside:
            raise InputError(
                f"`{self}`: {len(group)} ranks do not make nodes of {inside}",
                hint="name a divisor of the number of ranks",
            )
        with graph.edit(str(self)) as edit:
            take_apart(edit, old, _stages(graph.comm_bytes[old], group, inside, links))
        return edit.graph


def _inside(links: Wires, group: tuple[int, ...]) -> int:
    """Ranks of a node, where the group stands on several alike."""
    levels = links.levels(group) if links.cluster is not None else ()
    if len(levels) < 2:
        raise DoesNotApply(
            f"the {len(group)} ranks meet on one tier of links",
            hint="name a cluster of several nodes with --on, or the ranks of a node: inside=8",
        )
    sizes = set(levels[0].sizes)
    if len(sizes) > 1:
        raise DoesNotApply(f"nodes hold different numbers of ranks: {sorted(sizes)}")
    return int(sizes.pop())


def _stages(size: Array, group: tuple[int, ...], inside: int, links: Wires) -> tuple[Stage, ...]:
    node, count = group[:inside], len(size)
    across = group[::inside]
    where = (group_text(node),) * count
    down = Stage(
        "reduce_scatter", links.seconds("reduce_scatter", size, node), size, True,
        group=where, lane="inside a node",
    )  # fmt: skip
    up = Stage(
        "all_gather", links.seconds("all_gather", size, node), size, True,
        group=where, lane="inside a node back",
    )  # fmt: skip
    if len(across) < 2:
        return (down, up)
    part = size / inside
    took = between_nodes(links, part, group, inside)
    between = (group_text(across),) * count
    return (down, Stage("all_reduce", took, part, True, group=between, lane="between nodes"), up)


def between_nodes(links: Wires, part: Array, group: tuple[int, ...], inside: int) -> Array:
    """An all-reduce between nodes while the other ranks of each node do the same."""
    across = group[::inside]
    if links.cluster is None:
        return links.seconds("all_reduce", part, across)
    from foretell.cost.collective import price

    beside = [group[k::inside] for k in range(1, inside)]
    levels = links.cluster.levels(across, beside)
    found: Array = price("all_reduce", np.asarray(part), levels).seconds
    return found
