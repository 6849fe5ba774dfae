"""What every what-if is: a frozen dataclass that makes one graph from another.

Its fields are its options, its docstring is its help, `str()` is its spec. It changes *time* or it
changes *work*, never both by accident. One that does not apply raises `DoesNotApply` and has
changed nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from foretell.errors import InputError
from foretell.graph.graph import Graph
from foretell.spec import Spec

if TYPE_CHECKING:
    from foretell.cluster import Cluster
    from foretell.memory.tape import Tape


class DoesNotApply(InputError):
    """A what-if finds nothing in this graph that it could change."""


@dataclass(frozen=True)
class Setting:
    """What a what-if may know besides the graph."""

    cluster: Cluster | None = None  # where the step runs; None where that was not said


@dataclass(frozen=True)
class WhatIf(Spec):
    """A change a user could make to a step."""

    assumes: ClassVar[tuple[str, ...]] = ()  # the assumptions, printed with each answer
    source: ClassVar[str] = ""  # where the idea or its model comes from
    code: ClassVar[str] = ""  # the line of PyTorch that does it

    def apply(self, graph: Graph, setting: Setting) -> Graph:
        """The graph with the change made, its history signed with this spec."""
        raise NotImplementedError

    def hold(self, tape: Tape) -> Tape:
        """What the change makes of the tensors the step holds; the same unless a what-if says."""
        return tape
