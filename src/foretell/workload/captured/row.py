"""One forward call of a recorded step, and what is found out about it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from foretell.cost.aten import Call, Dims
from foretell.graph import Phase
from foretell.workload.captured.sizes import made_by


@dataclass
class Row:
    """One forward call."""

    key: str
    op: str
    path: str  # of the module it ran in
    phase: Phase
    dtype: str
    call: Call
    tasks: list[int]
    after: tuple[int, ...] = ()  # rows whose results it uses
    back: list[int] = field(default_factory=list)  # tasks of its backward
    kept: float = 0.0  # bytes of what it made that is there until the backward
    live: bool = False  # depends on the batch
    learned: bool = False  # depends on the batch and on parameters: not to be had from the batch
    weights: list[tuple[str, float]] = field(default_factory=list)  # paths and elements
    tied: list[tuple[str, float]] = field(default_factory=list)  # those another call has already
    reads: list[float] = field(default_factory=list)  # elements of all parameters it reads
    sources: frozenset[int] = frozenset()  # rows that are no pointwise work, through those that are
    through: bool = False  # pointwise, or a norm of single heads

    @property
    def out(self) -> Dims:
        """The sizes of what it makes."""
        return made_by(self.call)

    @property
    def size(self) -> float:
        return float(math.prod(self.out))
