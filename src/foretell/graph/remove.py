"""A graph less some of its tasks, numbered anew, with what hung on them given to others.

Who waited for a task that goes waits for what that task waited for (`bridged`, lags added up); a
buffer whose last user goes dies with what that user waited for; one whose maker goes was never
made.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from foretell.graph.columns import NONE, Array, WaitKind, frozen, is_default
from foretell.graph.graph import Graph
from foretell.graph.tables import Buffers, Edges, edges
from foretell.graph.verify import verify


def without(graph: Graph, gone: Array, cut: Array) -> Graph:
    """The graph less the tasks `gone`; those that are `cut` too leave no waits behind."""
    keep = ~gone
    number = np.cumsum(keep) - 1
    origin = graph.origin if graph.origin is not None else np.arange(graph.size)
    e = _less(graph.edges, cut)
    order = _order(graph, e)
    return replace(
        graph,
        size=int(keep.sum()),
        columns=_kept_columns(graph, keep),
        edges=_kept_edges(e, keep, number, order),
        held=_kept_rows(graph.held, keep, number),
        drained=_kept_rows(graph.drained, keep, number),
        used=_kept_rows(graph.used, keep, number),
        buffers=_kept_buffers(graph, keep, number, order),
        origin=frozen(origin[keep]),
        cache={},
    )


def _less(e: Edges, cut: Array) -> Edges:
    """Edges less those of tasks that leave no waits behind."""
    if not cut.any():
        return e
    stays = ~(cut[e.waiting] | cut[e.after])
    columns = (c[stays] for c in (e.waiting, e.after, e.lags, e.kinds))
    return edges(len(cut), *columns)


def _order(graph: Graph, less: Edges) -> Array:
    """All tasks, each after those it waits for; at least by the edges that do not just vanish."""
    order = _sorted(graph.edges)
    if len(order) < graph.size and less is not graph.edges:
        order = _sorted(less)
    if len(order) < graph.size:
        verify(replace(graph, edges=less, cache={}))  # says which tasks wait on each other
    return order


def _sorted(e: Edges) -> Array:
    if (e.after < e.waiting).all():
        return np.arange(len(e.start) - 1, dtype=np.int32)  # as the loop's: it is compiled for one
    from foretell.graph.wiring import topological

    no_order = frozen(np.zeros(len(e.start), np.int64))
    return topological(e.start, e.after, no_order, e.after[:0])


def _kept_columns(graph: Graph, keep: Array) -> dict[str, Array]:
    columns = {name: values[keep] for name, values in graph.columns.items()}
    if "order" in columns:  # places close ranks; what shared a place still does
        columns["order"] = np.unique(columns["order"], return_inverse=True)[1].reshape(-1)
    return {name: frozen(v) for name, v in columns.items() if not is_default(name, v)}


def _kept_rows(table: Any, keep: Array, number: Array) -> Any:
    if not len(table):
        return table
    rows = table.take(keep[table.task])
    return rows.replace(task=number[rows.task])


def _kept_edges(e: Edges, keep: Array, number: Array, order: Array) -> Edges:
    from foretell.graph.wiring import bridged

    stays = keep[e.waiting] & keep[e.after]
    columns = [c[stays] for c in (e.waiting, e.after, e.lags, e.kinds)]
    more = bridged(e.start, e.after, e.lags, ~keep, order)
    kinds = np.full(len(more[0]), WaitKind.DATA, np.uint8)
    waiting, after, lag, kind = (
        np.concatenate(pair) for pair in zip(columns, [*more, kinds], strict=True)
    )
    return edges(int(keep.sum()), number[waiting], number[after], lag, kind)


def _kept_buffers(graph: Graph, keep: Array, number: Array, order: Array) -> Buffers:
    b = graph.buffers
    if not len(b):
        return b
    b = b.take((b.born == NONE) | keep[b.born])
    dies = _heirs(graph.edges, b, keep, order)
    renumber = np.append(number, NONE)  # NONE stays NONE
    return b.replace(born=renumber[b.born], dies=renumber[dies])


def _heirs(e: Edges, b: Buffers, keep: Array, order: Array) -> Array:
    """The task each buffer dies with: the nearest kept one that its last user waited for.

    Nearest is latest in `order`; never one before its maker, which is the heir where there is none.
    """
    place = np.empty(len(order) + 1, np.int64)
    place[order] = np.arange(len(order))
    place[NONE] = -1
    latest = _latest_wait(e, place, order)
    dies = b.dies.astype(np.int64)
    while True:  # ends: every round goes back in the order, or to the maker
        lost = np.flatnonzero((dies != NONE) & ~keep[dies])
        if not len(lost):
            return dies
        born, heir = b.born[lost], latest[dies[lost]]
        is_heir = (place[heir] >= place[born]) & (place[heir] < place[dies[lost]])
        dies[lost] = np.where(is_heir, heir, born)


def _latest_wait(e: Edges, place: Array, order: Array) -> Array:
    """For each task, the last of its waits in an order; NONE where it waits for nothing."""
    latest = np.full(len(order), -1, np.int64)
    has = np.flatnonzero(np.diff(e.start))
    if len(has):
        latest[has] = np.maximum.reduceat(place[e.after], e.start[has])
    return np.where(latest < 0, NONE, order[latest])
