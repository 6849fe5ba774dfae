"""Batches copied to the device from pinned memory, on a stream of their own, without waiting.

The host's call then only starts the copy (staging through pageable memory goes), the copy runs at
the rate of the bus on its own lane while the device still computes, and the first kernel that was
issued behind the copy waits for it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foretell.cost.price import COPY_START
from foretell.graph.edit import Edit
from foretell.graph.graph import NONE, Array, Graph, Kind, matches
from foretell.whatif.base import DoesNotApply, Setting, WhatIf
from foretell.whatif.calls import issued, launch_of, usual_launch
from foretell.whatif.machine import bus_rate, copies
from foretell.whatif.remove_sync import ON_HOST, without_wait

_CALL = 1e-5  # seconds of a cudaMemcpyAsync from pinned memory where a step shows no launch


@dataclass(frozen=True)
class AsyncCopies(WhatIf):
    """Copy batches to the device without waiting, beside what it computes."""

    name = "async-copies"
    source = (
        "PyTorch tutorial on pinned memory and non_blocking copies; Daydream (Zhu et al., ATC 2020)"
    )
    assumes = (
        "the loader pins batches on a thread of its own; copies run at the rate of the bus",
        "the first kernel issued behind a copy is the first that needs it",
    )
    code = "DataLoader(…, pin_memory=True); batch.to('cuda', non_blocking=True)"

    def apply(self, graph: Graph, setting: Setting) -> Graph:
        moved = copies(graph, "h2d")
        if not len(moved):
            raise DoesNotApply("the step copies nothing from the host to the device")
        with graph.edit(str(self)) as edit:
            _unhook(edit, moved)
            _shorten(edit, moved, setting)
            _free_host(edit, moved)
        return edit.graph


def _unhook(edit: Edit, moved: Array) -> None:
    """Put copies on a lane of their own; who came behind them waits for them."""
    graph = edit.before
    following = _next_kernel(graph, moved)
    known = following != NONE
    edit.wait(following[known], moved[known], kind="event")
    for rank in np.unique(graph.rank[moved]).tolist():
        lane = edit.lane("copies to the device", rank=rank, kind="copy")
        edit.set(moved[graph.rank[moved] == rank], lane=lane)


def _next_kernel(graph: Graph, moved: Array) -> Array:
    """The next task that is no such copy on the lane of each copy, NONE behind the last."""
    found = np.full(len(moved), NONE, np.int64)
    for lane in np.unique(graph.lane[moved]).tolist():
        rows = np.flatnonzero(graph.lane[moved] == lane)
        others = issued(graph, np.setdiff1d(np.flatnonzero(graph.lane == lane), moved))
        at = np.searchsorted(graph.order[others], graph.order[moved[rows]])
        inside = at < len(others)
        found[rows[inside]] = others[at[inside]]
    return found


def _shorten(edit: Edit, moved: Array, setting: Setting) -> None:
    """Copies from pageable memory take what the bus needs, if that is less."""
    graph = edit.before
    pageable = moved[matches(graph, "name", "*Pageable*")[moved] & (graph.bytes[moved] > 0)]
    if len(pageable):
        bus = COPY_START + graph.bytes[pageable] / bus_rate(graph, setting)
        edit.set(pageable, seconds=np.minimum(graph.seconds[pageable], bus))


def _free_host(edit: Edit, moved: Array) -> None:
    """The host starts the copies and goes on."""
    graph = edit.before
    calls = launch_of(graph, moved)
    calls = np.unique(calls[calls != NONE])
    usual = usual_launch(graph, _CALL)
    edit.set(calls, seconds=np.minimum(graph.seconds[calls], usual), gap=0.0)
    waits = _returns(graph, calls)
    if len(waits):
        without_wait(edit, waits)


def _returns(graph: Graph, calls: Array) -> Array:
    """The synchronisations right behind calls, for the same operator: their blocking halves."""
    host = np.flatnonzero(np.isin(graph.kind, ON_HOST))
    host = host[np.lexsort((graph.order[host], graph.lane[host]))]
    place = np.full(graph.size, NONE, np.int64)
    place[host] = np.arange(len(host))
    found = []
    for call in calls.tolist():
        behind = host[place[call] + 1 : place[call] + 4]
        same = (graph.lane[behind] == graph.lane[call]) & (graph.layer[behind] == graph.layer[call])
        found += behind[same & (graph.kind[behind] == Kind.SYNC)].tolist()
    return np.unique(np.array(found, np.int64))
