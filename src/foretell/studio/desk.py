"""The session: loaded steps, saved scenarios, running searches.

Shared by all tabs; what a tab has ticked is its own. Everything goes through one lock, and nothing
is held by name of a file: steps and scenarios have numbers.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from foretell.advise import Step
from foretell.cluster import Cluster
from foretell.cost import price
from foretell.errors import ForetellError, InputError
from foretell.graph.graph import Graph
from foretell.studio.child import call
from foretell.survey.survey import changed, outcome
from foretell.whatif import parse

MOST_STEPS, MOST_SCENARIOS = 32, 200
LONGEST = 300  # letters of a name


@dataclass(frozen=True)
class Scenario:
    """A step with changes, kept to be compared."""

    number: int
    title: str
    step: str
    found: dict[str, Any]


@dataclass(eq=False)
class Desk:
    """Everything the studio holds."""

    folder: Path
    steps: dict[str, Step] = field(default_factory=dict)
    scenarios: list[Scenario] = field(default_factory=list)
    rankings: dict[tuple[str, str], str] = field(default_factory=dict)  # step, cluster: its job
    lock: threading.RLock = field(default_factory=threading.RLock)
    _numbers: Any = field(default_factory=lambda: itertools.count(1))
    _saved: Any = field(default_factory=lambda: itertools.count(1))
    _placed: dict[tuple[str, str], Step] = field(default_factory=dict)

    def add(self, step: Step) -> str:
        """Put a step on the desk; its number."""
        with self.lock:
            if len(self.steps) >= MOST_STEPS:
                self.steps.pop(next(iter(self.steps)))
            key = str(next(self._numbers))
            self.steps[key] = step
            return key

    def step(self, key: str | None) -> Step:
        """The step of a number."""
        with self.lock:
            if key not in self.steps:
                raise InputError("no step is loaded", hint="load a trace, a graph or a workload")
            return self.steps[key]

    def on(self, key: str | None, cluster: Cluster | None) -> Step:
        """The step of a number, priced on a cluster where one is chosen and it has no prices."""
        step = self.step(key)
        if cluster is None:
            return step
        place = (str(key), cluster.fingerprint())
        with self.lock:
            found = self._placed.get(place)
        if found is not None:
            return found
        # Outside of the lock: other requests go on meanwhile.
        graph = step.graph if step.baseline else price(step.graph, cluster)
        with self.lock:
            if len(self._placed) >= MOST_STEPS:
                self._placed.clear()
            return self._placed.setdefault(place, replace(step, graph=graph, cluster=cluster))

    def save(self, title: str, key: str, found: dict[str, Any]) -> Scenario:
        """Keep an outcome to be compared."""
        return self.keep(title, self.step(key).name, found)

    def keep(self, title: str, of: str, found: dict[str, Any]) -> Scenario:
        """Keep an outcome of a step or a model, to be compared."""
        with self.lock:
            made = Scenario(next(self._saved), title[:120], of[:LONGEST], found)
            self.scenarios = [*self.scenarios, made][-MOST_SCENARIOS:]
            return made

    def forget(self, numbers: Sequence[int]) -> None:
        """Take scenarios away."""
        with self.lock:
            self.scenarios = [s for s in self.scenarios if s.number not in set(numbers)]


def open_file(
    desk: Desk, path: Path, name: str, cluster: Cluster | None = None, real: float | None = None
) -> str:
    """Load a file onto the desk under a name for people; it is read in a process of its own.

    `real` is the measured time of a step without the profiler, in seconds.
    """
    step = replace(call(Step.from_file, path, cluster, real), name=name)
    _warm(step)
    return desk.add(step)


def _warm(step: Step) -> None:
    """Ask once what loads tables and loops, before a person waits for them."""
    predicted(step, ())
    with suppress(ForetellError):
        predicted(step, (str(parse("amp")),))


def build_step(desk: Desk, workload: str, plan: str, cluster: Cluster) -> str:
    """Put the step of a workload under a plan on the desk."""
    graph = call(_lower, workload, plan, cluster)
    return desk.add(Step(graph, cluster, name=f"{workload} {plan}".strip()[:LONGEST]))


def _lower(workload: str, plan: str, cluster: Cluster) -> Graph:
    from foretell.plan import Plan, lower
    from foretell.workload import load as load_workload

    return lower(Plan.parse(plan or "dp=1"), load_workload(workload, files=False), cluster)


@lru_cache(512)
def predicted(step: Step, specs: tuple[str, ...], *, memory: bool = False) -> dict[str, Any]:
    """The outcome of changes to a step; earlier answers are cached."""
    return outcome(step, specs, changed(step, specs), memory=memory)
