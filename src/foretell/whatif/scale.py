"""Free-form changes of time: any tasks, any factor."""

from __future__ import annotations

from dataclasses import dataclass

from foretell.errors import InputError
from foretell.graph.graph import Graph
from foretell.graph.select import chosen
from foretell.whatif.base import DoesNotApply, Setting, WhatIf


@dataclass(frozen=True)
class Scale(WhatIf):
    """Make tasks take `times` as long as they do."""

    name = "scale"
    source = "Daydream (Zhu et al., ATC 2020), primitives"
    assumes = ("nothing but the time of the chosen tasks changes",)
    select: str  # which tasks: op=gemm/conv*+phase=backward
    times: float = 0.5  # factor on their time

    def apply(self, graph: Graph, setting: Setting) -> Graph:
        if not 0 <= self.times < float("inf"):
            raise InputError(f"`{self}` scales by {self.times}", hint="use a factor from 0 up")
        tasks = chosen(graph, self.select)
        if not len(tasks):
            raise DoesNotApply(f"`{self}` chooses none of {graph.size} tasks")
        with graph.edit(str(self)) as edit:
            edit.scale(tasks, self.times)
        return edit.graph


@dataclass(frozen=True)
class Faster(WhatIf):
    """Make every task of one op run `times` as fast."""

    name = "faster"
    source = "Daydream (Zhu et al., ATC 2020), primitives"
    assumes = ("the op leaves the same work to those that follow it",)
    op: str  # the op, `*` for any part of its name
    times: float = 2.0  # how many times as fast

    def apply(self, graph: Graph, setting: Setting) -> Graph:
        if not 0 < self.times < float("inf"):
            raise InputError(f"`{self}` runs {self.times} times as fast", hint="use more than 0")
        tasks = graph.select(op=self.op)
        if not len(tasks):
            raise DoesNotApply(f"no task has the op `{self.op}`", hint=_known_ops(graph))
        with graph.edit(str(self)) as edit:
            edit.scale(tasks, 1 / self.times)
        return edit.graph


def _known_ops(graph: Graph) -> str:
    ops = sorted({graph.names[int(k)] for k in set(graph.op.tolist())} - {""})
    return f"its ops: {', '.join(ops[:12])}{' …' if len(ops) > 12 else ''}"
