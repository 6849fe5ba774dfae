"""The host no longer waits for the device: no `.item()`, no synchronize, no blocking copies.

A synchronising call is replaced by nothing on its thread: the untraced time behind it stays, and so
does its place in what one thread hands over to another. Whatever it drained is no longer drained.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from foretell.graph.edit import Edit
from foretell.graph.graph import Array, Graph, Kind, matches
from foretell.whatif.base import DoesNotApply, Setting, WhatIf

ON_HOST = (Kind.HOST, Kind.LOAD, Kind.SYNC)


@dataclass(frozen=True)
class RemoveSync(WhatIf):
    """Take away the calls in which the host waits for the device."""

    name = "remove-sync"
    source = "PyTorch performance tuning guide, needless synchronisation"
    assumes = (
        "nothing the host does next depends on a value it waited for",
        "a full launch queue still holds the host up",
    )
    code = "losses.append(loss.detach())   # and read them every 100 steps"
    call: str = "*"  # which calls: of this op (cudaStreamSynchronize) or for this operator (item)

    def apply(self, graph: Graph, setting: Setting) -> Graph:
        wanted = matches(graph, "op", self.call) | matches(graph, "name", self.call)
        syncs = np.flatnonzero((graph.kind == Kind.SYNC) & wanted)
        if not len(syncs):
            called = "" if self.call == "*" else f" by `{self.call}`"
            raise DoesNotApply(f"the host never waits for the device{called} in this step")
        with graph.edit(str(self)) as edit:
            without_wait(edit, syncs)
        return edit.graph


def without_wait(edit: Edit, syncs: Array) -> None:
    """Put a host task that takes no time in the place of each synchronising call."""
    graph = edit.before
    like: dict[str, Any] = {
        c: graph.column(c)[syncs] for c in ("name", "rank", "lane", "gap", "layer", "phase")
    }
    new = edit.insert(issued_before=syncs, kind="host", op="no_sync", **like)
    number = np.arange(graph.size)
    number[syncs] = new
    is_sync = np.zeros(graph.size, bool)
    is_sync[syncs] = True
    e, on_host = graph.edges, np.isin(graph.kind, ON_HOST)
    # What it waited for on other threads, and who of them waited for it, stays.
    kept = on_host[e.after] & on_host[e.waiting] & (is_sync[e.after] | is_sync[e.waiting])
    launches = is_sync[e.after] & ~on_host[e.waiting]
    rows = np.flatnonzero(kept | launches)
    edit.wait(number[e.waiting[rows]], number[e.after[rows]], lag=e.lags[rows], kind="thread")
    edit.remove(syncs, bridge=False)
