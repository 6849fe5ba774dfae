"""What every planner is: a frozen dataclass that looks for the plan with the shortest step.

Its fields are its options, its docstring is its help, `str()` is its spec. The same question gets
the same answer: a planner has a seed where it draws, and no clock decides what it finds unless a
limit of time is among its options.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from foretell.cluster import Cluster
from foretell.plan import Plan
from foretell.predict import Prediction
from foretell.spec import Spec
from foretell.workload import Workload


@dataclass(frozen=True)
class Planned:
    """A plan that was found, and the baselines it was compared with."""

    plan: Plan
    predicted: float  # seconds of its step
    baseline: float  # of what people do without a planner
    baselines: Mapping[str, float]  # all that was compared, by name
    bound: float | None  # seconds no plan of the space can be below, where that is known
    evaluations: int  # plans that were priced or simulated
    cpu: float  # seconds the search took
    notes: tuple[str, ...] = field(default=())
    low: float = 0.0  # the 80 % interval of the predicted step
    high: float = 0.0
    prediction: Prediction | None = None  # of the plan: its memory and breakdown
    alternatives: tuple[Prediction, ...] = ()  # other plans that fit, fastest first
    stopped: bool = False  # Ctrl-C ended the search: the best plan so far


Progress = Callable[[str, float], None]  # what is being done, and the best step so far


def silent(words: str, best: float) -> None:
    """No-op progress callback."""


@dataclass(frozen=True)
class Planner(Spec):
    """A way to look for a plan."""

    source: ClassVar[str] = ""  # where the method comes from

    def plan(self, workload: Workload, cluster: Cluster, progress: Progress = silent) -> Planned:
        """The best plan found."""
        raise NotImplementedError
