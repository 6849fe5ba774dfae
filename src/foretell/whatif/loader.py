"""Batches made by worker processes ahead of time instead of by the step itself.

What moves to the workers is all of the loading: reading, decoding, transforming and putting samples
together. Each of `workers` makes a whole batch, so batches come at most every

    seconds of loading · SLOWER / workers

and a step waits for its batch only where that is longer than the rest of it. What stays with the
step is to take a batch over: FETCH to get its handle out of a queue and, as batches travel in
shared memory, TOUCH a page that it reads for the first time and FREE a page of the batch before
(nothing a page where batches are pinned: a thread of their own does that). While workers are busy
the host's other work takes CROWDED longer, as they share clock, cache and memory; it was not seen
to matter how many of them are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foretell.errors import InputError
from foretell.graph.edit import Edit
from foretell.graph.graph import Array, Graph, Kind, LaneKind, matches
from foretell.whatif.base import DoesNotApply, Setting, WhatIf
from foretell.whatif.machine import copies

# Constants are medians over three models fed JPEGs by 0, 2, 4 and 8 workers on a 16-core host of an
# H200 (torch 2.11), batches of 19 MB; none comes from the pair of traces the tests compare it with.
PAGE = 4096.0  # bytes
FETCH = 8e-5  # seconds
TOUCH, FREE = 2.4e-7, 4.7e-7  # seconds a page
# A worker has one thread to put samples together, and copies them to shared memory. From steps that
# two workers hold up, the mean of them: 1.15, 1.28 and 1.47 of what the step itself took to load.
SLOWER = 1.28
CROWDED = 0.12  # of host time, while some worker is busy: 4 to 28 %, no more with 8 than with 2
BY_WORKERS = "*MultiProcessing*"  # how a trace names an iterator that has workers


@dataclass(frozen=True)
class Loader(WhatIf):
    """Let worker processes make the batches."""

    name = "loader"
    source = "PyTorch documentation, torch.utils.data (num_workers)"
    assumes = (
        "a worker takes for a batch what the step takes now, and cores and storage allow for all",
        "batches come over in shared memory; busy workers slow the host's other work down a little",
    )
    code = "DataLoader(…, num_workers=4)"
    workers: int = 4  # how many

    def apply(self, graph: Graph, setting: Setting) -> Graph:
        if self.workers < 1:
            raise InputError(f"`{self}` has {self.workers} workers", hint="use 1 or more")
        loads = np.flatnonzero((graph.kind == Kind.LOAD) & _on_thread(graph))
        if not len(loads):
            raise DoesNotApply("the step loads no data, or the trace does not show it")
        if matches(graph, "name", BY_WORKERS)[loads].any():
            raise DoesNotApply(
                "workers load the data of this step already; what a batch takes them is not traced",
                hint="profile with num_workers=0",
            )
        with graph.edit(str(self)) as edit:
            for rank in np.unique(graph.rank[loads]).tolist():
                _by_workers(edit, loads[graph.rank[loads] == rank], rank, self.workers)
        return edit.graph


def _on_thread(graph: Graph) -> Array:
    """Which tasks hold a thread that does other things too."""
    return np.isin(graph.lane, graph.lanes.of_kind(LaneKind.HOST))


def _by_workers(edit: Edit, loads: Array, rank: int, workers: int) -> None:
    graph = edit.before
    busy = float(graph.seconds[loads].sum()) * SLOWER
    lane = edit.lane("loader", rank=rank, kind="loader")
    new = edit.insert(
        len(loads), kind="load", op="load", name="by workers", phase="load", lane=lane, rank=rank,
        seconds=graph.seconds[loads] * SLOWER / workers, issued_before=loads,
    )  # fmt: skip
    edit.wait(loads, new, kind="thread")
    edit.set(loads, seconds=_taken_over(graph, rank) / len(loads), name="by workers")
    _crowd(edit, loads, rank, busy)


def _taken_over(graph: Graph, rank: int) -> float:
    """Seconds the step spends to take a batch over."""
    moved = copies(graph, "h2d")
    moved = moved[(graph.rank[moved] == rank) & ~matches(graph, "name", "*Pinned*")[moved]]
    pages = float(np.ceil(graph.bytes[moved] / PAGE).sum())
    return FETCH + pages * (TOUCH + FREE)


def _crowd(edit: Edit, loads: Array, rank: int, busy: float) -> None:
    """Slow the host's other work down while workers are busy beside it."""
    graph = edit.before
    on_host = np.isin(graph.kind, (Kind.HOST, Kind.SYNC)) & (graph.rank == rank)
    tasks = np.setdiff1d(np.flatnonzero(on_host), loads)
    rest = _rest(graph, rank, busy / SLOWER)
    share = min(1.0, busy / rest) if rest > 0 else 1.0  # of the time that some worker is busy
    for column in ("seconds", "gap"):
        edit.scale(tasks, 1 + CROWDED * share, column)


def _rest(graph: Graph, rank: int, loading: float) -> float:
    """About how long the step takes without its loading: the host's threads hand over in turn."""
    mine = (graph.rank == rank) & (graph.lane >= 0)
    took = np.bincount(graph.lane[mine], (graph.seconds + graph.gap)[mine], len(graph.lanes))
    host = np.isin(np.arange(len(took)), graph.lanes.of_kind(LaneKind.HOST))
    return float(max(took[host].sum() - loading, took[~host].max(initial=0.0)))
