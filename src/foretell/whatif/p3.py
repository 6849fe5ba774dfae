"""P3: gradients cut into slices, and the slices that the next step needs first sent first.

As `foretell.whatif.parameter_server`, but every tensor is cut into slices of at most `slice_k`
thousand numbers, split over servers in turn, and a link takes the waiting slice whose layer comes
first in the forward pass. So the first layers' parameters are back early, though their gradients
were ready last.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foretell.errors import InputError
from foretell.graph.graph import Array, Graph
from foretell.memory.tape import Tape
from foretell.whatif.base import DoesNotApply, Setting, WhatIf
from foretell.whatif.collective_cost import wires
from foretell.whatif.exchange import check_alike
from foretell.whatif.gradients import gradients
from foretell.whatif.memory_effect import without_state
from foretell.whatif.parameter_server import Pieces, group_named, serve, server_count
from foretell.whatif.skew import SKEW, straggler_delay

MOST = 200_000  # slices: more than any model of a trace makes, and few enough to simulate


@dataclass(frozen=True)
class P3(WhatIf):
    """Push and pull gradients in slices, first layers first, through parameter servers."""

    name = "p3"
    assumes = (
        "servers stand on machines of their own, with a link like a rank's each",
        "servers add and update in no time; a slice costs nothing but its bytes and one start",
    )
    source = "Jayarajan et al. 2019, Priority-based Parameter Propagation (MLSys)"
    code = "MXNET_KVSTORE_USEP3=1 MXNET_KVSTORE_SLICE_THRESHOLD=50000"
    ranks: int = 0  # how many devices; 0: those that exchange gradients now
    servers: int = 0  # how many servers; 0: as many as ranks
    slice_k: float = 50.0  # thousand numbers of a slice: the paper's choice
    skew: float = SKEW  # relative spread of a rank's step: servers wait for the slowest

    def apply(self, graph: Graph, setting: Setting) -> Graph:
        if not 0 < self.slice_k < float("inf"):
            raise InputError(f"`{self}` has slices of {self.slice_k} thousand", hint="use 50")
        group = group_named(self, graph, self.ranks)
        servers = server_count(self, self.servers, group)
        found = gradients(graph)
        check_alike(found)
        pieces = slices(found[0].bytes, self.slice_k * 4e3, servers)
        with graph.edit(str(self)) as edit:
            links = wires(graph, setting, len(group))
            serve(edit, found, pieces, group, links, straggler_delay(graph, len(group), self.skew))
        return edit.graph

    def hold(self, tape: Tape) -> Tape:
        return without_state(tape)


def slices(bytes: Array, most: float, servers: int) -> Pieces:
    """Slices of each gradient, split in turn; what is ready last is needed first."""
    parts = np.maximum(np.ceil(bytes / most), 1).astype(np.int64)
    if parts.sum() > MOST:
        raise DoesNotApply(f"{parts.sum()} slices are more than {MOST}", hint="use larger slices")
    gradient = np.repeat(np.arange(len(bytes)), parts)
    server = np.arange(len(gradient)) % servers
    return Pieces(gradient, server, (bytes / parts)[gradient], gradient)
