"""Deep gradient compression: only the largest of the gradients are sent, as values and places.

Each all-reduce of S bytes over n ranks becomes

    sparsify     PASSES·S / memory rate, on the stream that computes
    all-gather   n·ratio·S·(value + index) / value bytes: every rank needs what all others chose
    scatter      (S + 3·n·chosen) / memory rate: zeros, then the chosen of all ranks added in
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foretell.errors import InputError
from foretell.graph.graph import Graph
from foretell.memory.tape import Tape
from foretell.whatif.base import Setting, WhatIf
from foretell.whatif.bucket_copies import KERNEL, memory_rate
from foretell.whatif.calls import call_seconds
from foretell.whatif.collective_cost import wires
from foretell.whatif.exchange import exchanging_ranks, group_of
from foretell.whatif.memory_effect import with_gradients
from foretell.whatif.stages import Stage, take_apart

# Times the memory of a gradient is read or written (algorithm 4 of the paper): u = m·u + g and
# v = v + u take three each, the mask reads v, and masking u and v reads and writes both.
PASSES = 11
KERNELS = 8  # of which those passes are made, with the sampled threshold
AFTER = 9  # host operators behind the choice: values read, momentum cleared, zeros, added in
INDEX = 4.0  # bytes of a place, as of a value


@dataclass(frozen=True)
class Dgc(WhatIf):
    """Send only `ratio` of the gradients, the largest, with momentum correction."""

    name = "dgc"
    assumes = (
        "a sampled threshold finds the largest gradients; values and places take 4 bytes each",
        "the host waits to learn how many they are (`nonzero`), once a bucket",
        "the model still learns as well with so few gradients",
    )
    source = "Lin et al. 2018, Deep Gradient Compression (ICLR)"
    code = "model.register_comm_hook(state, dgc_hook)   # a hook of your own"
    ratio: float = 0.001  # share of the gradients that is sent

    def apply(self, graph: Graph, setting: Setting) -> Graph:
        if not 0 < self.ratio <= 1:
            raise InputError(f"`{self}` sends {self.ratio} of the gradients", hint="use 0.001")
        old = exchanging_ranks(graph, op="all_reduce")
        group = group_of(graph, old)
        links, rate = wires(graph, setting, len(group)), memory_rate(graph, setting)
        size = graph.comm_bytes[old]
        chosen = len(group) * self.ratio * size * (1 + INDEX / 4.0)
        host = np.full(len(old), call_seconds(graph))  # of an operator that Python calls
        first = Stage(
            "sparsify", KERNELS * KERNEL + PASSES * size / rate, PASSES * size,
            host=KERNELS * host, is_awaited=True,
        )  # fmt: skip
        sent = Stage("all_gather", links.seconds("all_gather", chosen, group), chosen, True)
        moved = size + 3 * chosen
        last = Stage("scatter", KERNEL + moved / rate, moved, host=AFTER * host)
        with graph.edit(str(self)) as edit:
            take_apart(edit, old, (first, sent, last))
        return edit.graph

    def hold(self, tape: Tape) -> Tape:
        return with_gradients(tape, 2.0)  # momentum and what was not sent yet
