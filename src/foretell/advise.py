"""What to change first: every change that applies to a step, tried, ranked, and combined.

A change that alters the batch is judged by the time a sample takes. The combination is found by
taking one of the best first and adding, in the order of their own gains, whatever still helps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Self

from foretell.baseline import Baseline, Interval, interval, unprofiled, why
from foretell.cluster import Cluster
from foretell.cost.price import priced
from foretell.errors import ForetellError
from foretell.graph.file import is_graph_file
from foretell.graph.file import load as load_graph
from foretell.graph.graph import Graph
from foretell.simulate import Timeline, simulate
from foretell.simulate.memory import peak_bytes as peak_of_buffers
from foretell.whatif import WHATIFS, Setting, WhatIf, ordered, parse, peak_bytes
from foretell.whatif.batch import Batch
from foretell.whatif.registry import together

# What is tried: changes of one machine that a line or two of PyTorch make.
TRIED = (
    "amp:dtype=bf16", "tf32", "compile", "cuda-graph", "channels-last", "fused-optimizer",
    "foreach-optimizer", "flash-attention", "loader:workers=4", "async-copies", "remove-sync",
    "batch:times=2", "checkpoint", "metaflow", "reconstructed-batchnorm", "gist:bits=8", "vdnn",
)  # fmt: skip
# Of these only one makes sense at a time.
RIVALS = (
    frozenset({"fused-optimizer", "foreach-optimizer"}),
    frozenset({"tf32", "amp"}),
    frozenset({"compile", "metaflow", "reconstructed-batchnorm"}),
)
FOLLOWED = frozenset({"amp", "compile", "tf32", "channels-last"})  # by buffers of a captured step
WORTH = 0.01  # a gain below this is none
TRADES = frozenset({"batch", "checkpoint", "vdnn", "gist"})  # of memory: not combined unasked
STARTS = 4  # how many of the best changes a combination is grown from


@dataclass(frozen=True, eq=False)
class Step:
    """One training step: its graph, the cluster it runs on, and its time without the profiler."""

    graph: Graph
    cluster: Cluster | None
    baseline: Baseline | None = None  # of a trace: steps in a row, without the profiler
    name: str = ""
    remarks: tuple[str, ...] = ()  # notes on how it was read, captured or profiled
    measured: Timeline | None = None  # of a trace: the step with the profiler

    @classmethod
    def from_file(
        cls, path: Path, cluster: Cluster | None = None, real: float | None = None
    ) -> Self:
        """The step in a graph or a trace; `real` is the time of an un-profiled step, for traces."""
        if not path.is_dir() and is_graph_file(path):
            return cls(priced(load_graph(path), cluster, path.name), cluster, name=path.name)
        from foretell.trace import read

        trace = read(path)
        if "measured" not in trace.graph.facts:  # dependencies without times
            return cls(priced(trace.graph, cluster, path.name), cluster, name=path.name)
        found = unprofiled(trace, real)
        measured = Timeline(trace.graph, trace.start, trace.end)
        return cls(found.graph, cluster, found, path.name, tuple(trace.notes), measured)

    @property
    def seconds(self) -> float:
        """How long it takes."""
        return self.baseline.seconds if self.baseline else self.predicted(self.graph)

    @property
    def notes(self) -> list[str]:
        """Notes on how the time is known."""
        return [self.baseline.note] if self.baseline else []

    @property
    def setting(self) -> Setting:
        """The setting of what-ifs: the cluster."""
        return Setting(self.cluster)

    def predicted(self, after: Graph) -> float:
        """How long it would take as another graph."""
        return self.baseline.predicted(after) if self.baseline else simulate(after).seconds

    def interval(self, after: Graph, changes: Sequence[WhatIf]) -> Interval:
        """The 80 % interval of its time as a graph that changes made."""
        host = self.baseline.sigma if self.baseline else 0.0
        return interval(after, self.predicted, host=host, spread=together(changes))


@dataclass(frozen=True)
class Advice:
    """One change, or several made together, and what it would do."""

    changes: tuple[WhatIf, ...]
    seconds: float
    low: float
    high: float
    gain: float  # of the time a sample takes
    peak_bytes: float | None
    why: str

    @property
    def name(self) -> str:
        """Its changes as text."""
        return " ".join(map(str, self.changes))

    @property
    def does(self) -> str:
        """The first sentence of the help of each of its changes."""
        return " ".join((type(c).__doc__ or "").partition("\n")[0] for c in self.changes)

    @property
    def code(self) -> list[str]:
        """The lines of PyTorch that do it."""
        return [change.code for change in self.changes if change.code]


@dataclass(frozen=True)
class Recommendations:
    """Changes tried, best first; those that do not apply and why; and the best combination.

    `path` leads to the best combination one change at a time, the most useful first.
    """

    seconds: float
    ranked: tuple[Advice, ...]
    refused: tuple[tuple[str, str], ...]
    best: Advice | None
    path: tuple[Advice, ...] = ()

    @property
    def first(self) -> Advice | None:
        """The change to make first: of the best combination, or the best that is worth making."""
        worth = (a for a in self.ranked if a.gain >= WORTH)
        return self.path[0] if self.path else next(worth, None)


def advise(
    step: Step,
    specs: Sequence[str] = TRIED,
    progress: Callable[[str], None] = lambda spec: None,
) -> Recommendations:
    """Try changes on a step and rank them by what they gain."""
    found, refused = [], []
    for spec in specs:
        progress(spec)
        try:
            found.append(_tried(step, (parse(spec),)))
        except ForetellError as error:
            refused.append((spec, error.message))
        except Exception as error:  # one change must not end the answer about all the others
            refused.append((spec, f"could not be tried ({type(error).__name__}: {error})"))
    ranked = tuple(sorted(found, key=lambda a: (-a.gain, str(a.changes[0]))))
    best = _together(step, ranked, progress)
    path = _path(step, ranked, best)
    _made.cache_clear()  # graphs are large
    return Recommendations(step.seconds, ranked, tuple(refused), best, path)


@lru_cache(4)  # combinations share what they begin with
def _made(step: Step, changes: tuple[WhatIf, ...]) -> Graph:
    """The step with changes made, the last of them on top of the others."""
    *first, last = changes
    return last.apply(_made(step, tuple(first)) if first else step.graph, step.setting)


def _tried(step: Step, changes: tuple[WhatIf, ...]) -> Advice:
    after = _made(step, changes)
    seconds = step.predicted(after)
    low, high = step.interval(after, changes)
    return Advice(
        changes, seconds, low, high, gain(step, changes, seconds), peak(after),
        why(step.graph, after, (step.seconds, seconds)),
    )  # fmt: skip


def peak(graph: Graph, measured: float | None = None) -> float | None:
    """Peak memory in bytes: of a trace from its tensors, else from buffers; None where unknown.

    `measured` is the peak of the unchanged step, where known. Buffers of a captured step follow few
    what-ifs: after others that change memory its peak is unknown.
    """
    found = peak_bytes(graph, measured)
    if found is not None:
        return found
    return None if untracked_ops(graph) else peak_of_buffers(simulate(graph)) or None


def untracked_ops(graph: Graph) -> list[str]:
    """Changes made to a graph that alter memory, which buffers of a captured step do not follow."""
    made = (spec.partition(":")[0] for spec in graph.history)
    known = (name for name in made if name in WHATIFS and name not in FOLLOWED)
    return [name for name in known if WHATIFS[name].hold is not WhatIf.hold]


def gain(step: Step, changes: Sequence[WhatIf], seconds: float) -> float:
    """By what share changes shorten the time per sample."""
    samples = 1.0
    for change in changes:
        samples *= change.times if isinstance(change, Batch) else 1.0
    return 1 - seconds / samples / step.seconds if step.seconds else 0.0


def _together(
    step: Step, ranked: Sequence[Advice], progress: Callable[[str], None]
) -> Advice | None:
    """The best combination of what PyTorch has a line for, grown from each of the best changes.

    None where nothing helps. Changes without such a line are ranked, not combined.
    """
    useful = [a for a in ranked if a.gain >= WORTH and a.code]
    useful = [a for a in useful if a.changes[0].name not in TRADES]
    found = [_grown(step, first, useful, progress) for first in useful[:STARTS]]
    return max(found, key=lambda a: a.gain, default=None)


def _grown(
    step: Step, best: Advice, useful: Sequence[Advice], progress: Callable[[str], None]
) -> Advice:
    """A change and whatever still helps beside it."""
    for advice in useful:
        chosen = (*best.changes, *advice.changes)
        names = [c.name for c in chosen]
        if len(set(names)) < len(names) or any(len(r.intersection(names)) > 1 for r in RIVALS):
            continue
        progress(" ".join(map(str, chosen)))
        tried = _in_order(step, chosen)
        if tried is not None and tried.gain > best.gain + WORTH:
            best = tried
    return best


def _path(step: Step, ranked: Sequence[Advice], best: Advice | None) -> tuple[Advice, ...]:
    """The best combination change by change, in the order of their own gains."""
    if best is None:
        return ()
    alone = [a for a in ranked if a.changes[0] in best.changes]
    found = alone[:1]
    for k in range(2, len(alone)):
        changes = tuple(a.changes[0] for a in alone[:k])
        if (both := _in_order(step, changes)) is not None:
            found.append(both)
    return (*found, best) if len(alone) > 1 else tuple(found)


def _in_order(step: Step, changes: tuple[WhatIf, ...]) -> Advice | None:
    """Changes in canonical order; None where they do not go together."""
    try:
        return _tried(step, tuple(ordered(changes)))
    except Exception:  # each was tried alone: together they do not go
        return None


def shown(graph: Graph, found: Recommendations) -> dict[str, object]:
    """Recommendations as plain values."""
    return {
        "baseline_s": found.seconds,
        "baseline_peak_bytes": peak(graph),
        "ranked": [_plain(a) for a in found.ranked],
        "together": _plain(found.best) if found.best else None,
        "path": [_plain(a) for a in found.path],
        "refused": [{"change": spec, "reason": reason} for spec, reason in found.refused],
    }


def _plain(advice: Advice) -> dict[str, object]:
    return {
        "changes": [str(change) for change in advice.changes],
        "does": advice.does,
        "predicted_s": advice.seconds,
        "low_s": advice.low,
        "high_s": advice.high,
        "gain": advice.gain,
        "peak_bytes": advice.peak_bytes,
        "why": advice.why,
        "code": advice.code,
    }
