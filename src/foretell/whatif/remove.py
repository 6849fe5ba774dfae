"""Free-form changes of work: tasks taken away, tasks put in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from foretell.errors import InputError
from foretell.graph.graph import NONE, Array, Graph, Kind, WaitKind
from foretell.graph.select import chosen
from foretell.whatif.base import DoesNotApply, Setting, WhatIf


@dataclass(frozen=True)
class Remove(WhatIf):
    """Take tasks away, and with a device task the host call that launched it."""

    name = "remove"
    source = "Daydream (Zhu et al., ATC 2020), primitives"
    assumes = ("who waited for a removed task waits for what that task waited for",)
    select: str  # which tasks
    launches: bool = True  # whether their launches go with them

    def apply(self, graph: Graph, setting: Setting) -> Graph:
        tasks = chosen(graph, self.select)
        if not len(tasks):
            raise DoesNotApply(f"`{self}` chooses none of {graph.size} tasks")
        with graph.edit(str(self)) as edit:
            edit.remove(tasks)
            if self.launches:
                edit.remove(launches_of(graph, tasks))
        return edit.graph


@dataclass(frozen=True)
class Insert(WhatIf):
    """Put a task of the same lane behind each chosen one, and let what followed wait for it."""

    name = "insert"
    source = "Daydream (Zhu et al., ATC 2020), primitives"
    assumes = ("a new task takes the same lane as the one before it",)
    after: str  # behind which tasks
    seconds: float = 1e-5  # how long each new task takes
    op: str = "inserted"  # what to call it

    def apply(self, graph: Graph, setting: Setting) -> Graph:
        if not 0 <= self.seconds < float("inf"):
            raise InputError(f"`{self}` takes {self.seconds} seconds")
        tasks = chosen(graph, self.after)
        if not len(tasks):
            raise DoesNotApply(f"`{self}` chooses none of {graph.size} tasks")
        like: dict[str, Any] = {
            c: graph.column(c)[tasks] for c in ("kind", "lane", "rank", "layer", "phase")
        }
        with graph.edit(str(self)) as edit:
            new = edit.insert(after=tasks, op=self.op, seconds=self.seconds, **like)
            waiting, order = _followers(graph, tasks)
            edit.wait(waiting, new[order])
        return edit.graph


def launches_of(graph: Graph, tasks: Array) -> Array:
    """The host calls whose only work was to launch some of these tasks."""
    e = graph.edges
    gone = np.zeros(graph.size, bool)
    gone[tasks] = True
    from_host = graph.kind[e.after] == Kind.HOST
    launch = (e.kinds == WaitKind.LAUNCH) & from_host
    launched, stays = np.zeros(graph.size, bool), np.zeros(graph.size, bool)
    launched[e.after[launch & gone[e.waiting]]] = True
    stays[e.after[launch & ~gone[e.waiting]]] = True
    return np.flatnonzero(launched & ~stays)


def _followers(graph: Graph, tasks: Array) -> tuple[Array, Array]:
    """Successors of some tasks: (successor, position of the task)."""
    place = np.full(graph.size, NONE)
    place[tasks] = np.arange(len(tasks))
    e = graph.edges
    mine = place[e.after] != NONE
    return e.waiting[mine], place[e.after[mine]]
