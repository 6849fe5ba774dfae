"""A training step and questions about it: from a trace, a script, a graph file or a model.

step = foretell.Step.from_trace("step.json.gz")
print(step.whatif("amp", "compile"))
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

from foretell.advise import TRIED, Advice, advise, peak, shown
from foretell.advise import Step as _Step
from foretell.api.result import Bar, Plot, Result, Table, bars
from foretell.baseline import Interval, why
from foretell.cluster import Cluster
from foretell.cluster import load as load_cluster
from foretell.cost.price import priced
from foretell.errors import InputError
from foretell.graph import Graph, save
from foretell.graph import load as load_graph
from foretell.report import words
from foretell.report.summary import timeline_summary, timeline_text
from foretell.simulate import Timeline
from foretell.simulate.engine import simulate
from foretell.simulate.timeline import path_seconds
from foretell.whatif import Setting, WhatIf, parse, tried
from foretell.whatif.registry import peak_between

_FUNCTION_OPTIONS = ("batch", "ranks", "optimizer", "autocast", "device")
Progress = Callable[..., None]  # what is being done and, where that is known, the share done
DEFAULT = "h200"  # where captured steps are priced unless a cluster is named
_GPUS = ("/dev/nvidia0", "/dev/kfd")  # there where a driver of NVIDIA or AMD is
_MOST_ROWS = 5  # rows of a table that is not verbose


@dataclass(frozen=True)
class CaptureOptions:
    """How a step is captured; the first five are for functions that make a step."""

    batch: int | None = None
    ranks: int = 1
    optimizer: str | None = None
    autocast: str = ""
    device: str = ""
    tf32: bool | None = None
    share: float | None = None
    kernels_of: str = "h200"  # device whose kernels are chosen
    is_module: bool = False  # the script is a module's name, as with `python -m`
    show: bool = False  # let through what the script prints


def require_torch() -> None:
    """Raise where torch is missing, without loading it."""
    if find_spec("torch") is None:
        raise InputError(
            "running a training script needs torch, which is not installed",
            hint="pip install 'foretell[torch]'",
        )


def is_script(name: str, is_module: bool = False) -> bool:
    """Whether a name is a training script to run unchanged, not a function or description."""
    if is_module:
        return True
    path = Path(name)
    if path.suffix != ".py":
        return False
    if not path.is_file():
        raise InputError(f"there is no file `{name}`", hint="name a training script")
    from foretell.pytorch.intake.request import is_description

    return not is_description(path)


def arguments_for_none(name: str) -> InputError:
    """The error where arguments are given and there is no script to pass them to."""
    return InputError(
        f"arguments for a script, and `{name[:80]}` is no training script",
        hint="they are passed to one: foretell plan train.py --on h100 -- --lr 0.1",
    )


def capture_source(
    source: str,
    args: tuple[str, ...],
    output: Path,
    options: CaptureOptions,
    progress: Callable[..., None],
) -> tuple[Graph, tuple[str, ...]]:
    """The step of a script, a module or a function that makes one; written to `output` too."""
    if not is_script(source, options.is_module):
        if args:
            raise arguments_for_none(source)
        graph = _of_function(source, options, progress)
        save(graph, output)
        return graph, ()
    notes = _of_script(source, args, output, options, progress)
    return load_graph(output), notes


def _of_script(
    source: str,
    args: tuple[str, ...],
    output: Path,
    options: CaptureOptions,
    progress: Callable[..., None],
) -> tuple[str, ...]:
    """Run an unchanged script and record one of its steps."""
    require_torch()
    from foretell.pytorch.intake.launch import capture_script
    from foretell.pytorch.intake.request import Script

    plain = CaptureOptions()
    given = [name for name in _FUNCTION_OPTIONS if getattr(options, name) != getattr(plain, name)]
    if given:
        raise InputError(
            f"--{given[0]} is for functions that make a step, and `{source}` is run unchanged",
            hint=f"set it in the script's own arguments, or name a function: {source}:make",
        )
    return capture_script(
        Script(source, args, options.is_module), output, on=options.kernels_of,
        share=options.share, tf32=options.tf32, show=options.show, progress=progress,
    )  # fmt: skip


def _of_function(source: str, options: CaptureOptions, progress: Callable[..., None]) -> Graph:
    """The step that `train.py:make` describes."""
    try:
        from foretell.pytorch.capture import capture
        from foretell.pytorch.capture.step import find
    except ModuleNotFoundError as error:
        raise InputError(
            f"a capture needs PyTorch: {error}", hint="pip install 'foretell[torch]'"
        ) from None
    parts: Any = find(source, options.batch, options.ranks)
    return capture(
        parts.model, parts.batch, parts.loss, options.optimizer or parts.optimizer,
        on=options.kernels_of, real=parts.real, autocast=options.autocast, tf32=options.tf32,
        share=options.share, device=options.device, progress=progress,
    )  # fmt: skip


def silent(doing: str, share: float | None = None) -> None:
    """No-op progress callback."""


@dataclass(frozen=True, eq=False, repr=False)
class Step(_Step):
    """One training step and the questions it answers."""

    @classmethod
    def load(
        cls,
        source: str | Path,
        cluster: str | Cluster | None = None,
        *,
        args: Sequence[str] = (),
        is_module: bool = False,
        unprofiled: float | None = None,
        progress: Progress = silent,
    ) -> Self:
        """The step of a trace, a graph file or a script, by what `source` is."""
        if not str(source):
            raise InputError("the name of a file is empty", hint="name a trace, graph or script")
        path = Path(source)
        if is_module or path.suffix == ".py" or ".py:" in str(path):
            return cls.from_script(path, cluster, args=args, is_module=is_module, progress=progress)
        return cls.from_file(path, _cluster(cluster), unprofiled)

    @classmethod
    def from_trace(
        cls,
        trace: str | Path,
        cluster: str | Cluster | None = None,
        *,
        unprofiled: float | None = None,
    ) -> Self:
        """The step of a profiler trace, or of a folder with one trace per rank.

        `unprofiled` is the measured time of a step without the profiler in seconds; otherwise what
        `foretell profile` wrote into the trace counts, or an estimate.
        """
        return cls.from_file(Path(trace), _cluster(cluster), unprofiled)

    @classmethod
    def from_graph(cls, graph: Graph | str | Path, cluster: str | Cluster | None = None) -> Self:
        """The step of a graph, or of a graph file; priced where a cluster is named."""
        if not isinstance(graph, Graph):
            return cls.from_trace(graph, cluster)
        on = _cluster(cluster)
        return cls(priced(graph, on, "graph"), on, name="graph")

    @classmethod
    def from_script(
        cls,
        script: str | Path,
        cluster: str | Cluster | None = None,
        *,
        args: Sequence[str] = (),
        is_module: bool = False,
        progress: Progress = silent,
    ) -> Self:
        """The step of a training script, which is run unchanged with `args` until it is found.

        `is_module`: the script is the name of a module, as with `python -m`.
        On a machine with a GPU and without `cluster` the step is profiled; otherwise it is captured
        on fake tensors and priced on `cluster` (one H200 unless named).
        """

        require_torch()
        path = Path(script)
        with tempfile.TemporaryDirectory(prefix="foretell-") as folder:
            runs = is_module or path.suffix == ".py"
            if cluster is None and runs and any(Path(p).exists() for p in _GPUS):
                from foretell.pytorch.intake.request import Script
                from foretell.pytorch.profile.run import profile

                request = Script(str(path), tuple(args), is_module)
                found = profile(request, Path(folder) / "step.json.gz", progress=progress)
                return cls.from_trace(found.trace)
            on = _cluster(cluster or DEFAULT)
            assert on is not None
            options = CaptureOptions(kernels_of=on.devices[0].name, is_module=is_module)
            output = Path(folder) / "captured.graph"
            graph, notes = capture_source(str(path), tuple(args), output, options, progress)
        if cluster is None:
            assumed = f"no GPU is used: the step is captured and priced on one {DEFAULT}"
            notes = (f"{assumed} (--on: another)", *notes)
        return cls(priced(graph, on, path.name), on, name=path.name, remarks=notes)

    def _peak_interval(
        self, peak: float, made: Sequence[WhatIf], measured: float | None
    ) -> tuple[float, float]:
        """Bytes between which the peak lies in 80 % of cases."""
        facts = self.graph.facts
        is_given = measured is not None or "peak_bytes" in facts
        ran_before = bool(facts.get("profiled_before"))
        return peak_between(peak, made, is_given=is_given, ran_before=ran_before)

    def whatif(self, *changes: str | WhatIf, measured_peak: float | None = None) -> WhatIfResult:
        """What `changes`, made together, would do to the step.

        Those that cannot be made are listed as `refused`, with the reason; it is an error only
        where none can. `measured_peak`: bytes at the measured peak of the step, where known.
        """
        if not changes:
            raise InputError("whatif() without a change", hint='name one: step.whatif("amp")')
        parsed = [parse(change) if isinstance(change, str) else change for change in changes]
        changed, made, refused = tried(parsed, self.graph, Setting(self.cluster))
        before, after = simulate(self.graph), simulate(changed)
        predicted = self.predicted(after.graph)
        low, high = self.interval(after.graph, made)
        changed_peak = peak(changed, measured_peak) or 0.0
        return WhatIfResult(
            changes=tuple(str(change) for change in made),
            baseline=self.seconds,
            predicted=predicted,
            low=low,
            high=high,
            baseline_peak=peak(self.graph, measured_peak) or 0.0,
            peak=changed_peak,
            peak_interval=Interval(*self._peak_interval(changed_peak, made, measured_peak)),
            why=why(before.graph, after.graph, (self.seconds, predicted)),
            assumptions=tuple(text for change in made for text in change.assumes),
            notes=tuple(self.notes),
            before=before,
            after=after,
            refused=tuple(refused),
        )

    def advise(self, *changes: str, progress: Progress = silent) -> AdviceResult:
        """Changes tried one by one and ranked by gain: all that apply, or those named."""
        found = advise(self, changes or TRIED, progress)
        plain = shown(self.graph, found) | {"notes": self.notes}
        return AdviceResult(
            found.seconds, found.ranked, found.best, found.refused, tuple(self.notes), plain
        )

    def simulate(self, *, engine: str = "auto") -> Simulation:
        """The step unchanged: how long it takes, where the time goes, and the critical path."""
        known = self.baseline.seconds if self.baseline else None
        return Simulation(simulate(self.graph, engine=engine), self.name, known)

    def report(
        self, path: str | Path, *changes: str, advice: bool = True, progress: Progress = silent
    ) -> Path:
        """Write the page of `foretell report`: bottleneck, what to change first, timelines.

        With `changes` they are shown beside the current step, else the best combination found.
        """
        from foretell.report import write
        from foretell.survey.survey import survey

        found = survey([self], changes, advice=advice, progress=progress)
        write(found.timelines, Path(path), found.content)
        return Path(path)

    def __str__(self) -> str:
        return self.simulate().text()

    def _repr_html_(self) -> str:
        return self.simulate()._repr_html_()

    def __repr__(self) -> str:
        where = f" on {self.cluster.name}" if self.cluster else ""
        took = words.seconds(self.seconds)
        return f"<Step {self.name or 'graph'}: {took}{where}, {self.graph.size:,} tasks>"


def capture(
    model: Any,
    batch: Any,
    loss: Callable[..., Any] | None = None,
    optimizer: Any = None,
    cluster: str | Cluster = DEFAULT,
    **options: Any,
) -> Step:
    """The training step of a PyTorch model on fake tensors: no GPU, no weights, no data.

    Takes what `foretell.pytorch.capture.capture` takes; the step is priced on `cluster`.
    """
    from foretell.pytorch.capture import capture as captured

    on = _cluster(cluster)
    assert on is not None
    graph = captured(model, batch, loss, optimizer, on=on.devices[0].name, **options)
    name = str(graph.facts.get("captured", "captured step"))
    return Step(priced(graph, on, name), on, name=name)


@dataclass(frozen=True, eq=False, repr=False)
class WhatIfResult(Result):
    """What changes would do to a step; seconds and bytes."""

    changes: tuple[str, ...]
    baseline: float
    predicted: float
    low: float  # of the 80 % interval
    high: float
    baseline_peak: float  # bytes; 0 where unknown
    peak: float
    peak_interval: Interval  # 80 %, bytes
    why: str  # the bottleneck before and after
    assumptions: tuple[str, ...]
    notes: tuple[str, ...]
    before: Timeline
    after: Timeline
    refused: tuple[tuple[str, str], ...] = ()  # change, reason

    @property
    def speedup(self) -> float:
        """The baseline over the predicted step."""
        return self.baseline / self.predicted if self.predicted else 1.0

    @property
    def verdict(self) -> str:
        before, after = words.seconds(self.baseline), words.seconds(self.predicted)
        head = (
            f"{' '.join(self.changes)}: {before} → {after} a step, {words.speedup(self.speedup)} "
            f"(80 % interval {words.interval(self.low, self.high)})"
        )
        if not self.peak:
            return f"{head}; its memory is unknown" if self.baseline_peak else head
        return f"{head}; memory {words.size(self.baseline_peak)} → {words.size(self.peak)}"

    def details(self, verbose: bool = False) -> list[str | Table]:
        longest = sorted(self.records(), key=lambda row: -max(row["before_s"], row["after_s"]))
        rows = [
            (words.cut(row["op"], 40), *(words.seconds(row[k]) for k in ("before_s", "after_s")))
            for row in longest[: 20 if verbose else _MOST_ROWS]
        ]
        path = Table(("on the critical path", "before>", "after>"), rows)
        assumed = [f"assumes {text}" for text in dict.fromkeys(self.assumptions)]
        left = [f"{change} could not be tried: {reason}" for change, reason in self.refused]
        if verbose and self.peak:
            sizes = " to ".join(map(words.size, self.peak_interval))
            assumed.insert(0, f"memory: {sizes} in 80 % of cases")
        return [*left, self.why, path, *self.notes, *(assumed if verbose else [])]

    def to_dict(self) -> dict[str, Any]:
        return {
            "changes": list(self.changes),
            "baseline_s": self.baseline,
            "predicted_s": self.predicted,
            "low_s": self.low,
            "high_s": self.high,
            "why": self.why,
            "assumptions": list(self.assumptions),
            "notes": list(self.notes),
            "refused": [{"change": change, "reason": why} for change, why in self.refused],
            "path_before": path_seconds(self.before, "op"),
            "path_after": path_seconds(self.after, "op"),
            "peak_bytes": self.peak or None,
            "peak_low_bytes": self.peak_interval.low or None,
            "peak_high_bytes": self.peak_interval.high or None,
            "baseline_peak_bytes": self.baseline_peak or None,
        }

    def records(self) -> list[dict[str, Any]]:
        before, after = (path_seconds(t, "op") for t in (self.before, self.after))
        return [
            {"op": op, "before_s": before.get(op, 0.0), "after_s": after.get(op, 0.0)}
            for op in dict.fromkeys([*before, *after])
        ]

    def plot(self) -> Plot:
        first = Bar("baseline", self.baseline, words.seconds(self.baseline))
        label = words.seconds(self.predicted)
        then = Bar(" ".join(self.changes), self.predicted, label, self.low, self.high)
        return bars("seconds a step, with the 80 % interval", [first, then])


@dataclass(frozen=True, eq=False, repr=False)
class AdviceResult(Result):
    """Changes to a step ranked by gain, those that do not apply, and the best combination."""

    baseline: float
    ranked: tuple[Advice, ...]
    together: Advice | None
    refused: tuple[tuple[str, str], ...]  # change, reason
    notes: tuple[str, ...]
    plain: dict[str, Any] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        head = f"a step takes {words.seconds(self.baseline)}"
        if self.together is None:
            return f"{head}; none of {len(self.ranked)} changes tried would shorten it"
        best = self.together
        gain = self.baseline / best.seconds if best.seconds else 1.0
        names = " ".join(str(change) for change in best.changes)
        return (
            f"{head}; with {names} it would take {words.seconds(best.seconds)}, "
            f"{words.speedup(gain)} (80 % interval {words.interval(best.low, best.high)})"
        )

    def details(self, verbose: bool = False) -> list[str | Table]:
        columns = ("change", "step>", "80 % interval>", "gain>", "memory>")
        found: list[str | Table] = [Table(columns, [_cells(a) for a in self.ranked])]
        if any(c.name == "batch" for a in self.ranked for c in a.changes):
            found.append("gain of `batch`: time per sample; its step has more samples")
        found += [
            f"{a.changes[0]}: {a.why}" for a in self.ranked[: len(self.ranked) if verbose else 1]
        ]
        if self.together and self.together.code:
            lines = (f"    {line}" for line in self.together.code)
            found += ["", "the best combination in code:", *lines, ""]
        found += self.notes
        if verbose:
            return [
                *found,
                "",
                "does not apply:",
                *(f"{c}: {reason}" for c, reason in self.refused),
            ]
        return [*found, f"{len(self.refused)} more changes do not apply"] if self.refused else found

    def to_dict(self) -> dict[str, Any]:
        return self.plain

    def records(self) -> list[dict[str, Any]]:
        ranked: list[dict[str, Any]] = self.plain["ranked"]
        return [row | {"changes": " ".join(row["changes"])} for row in ranked]

    def plot(self) -> Plot:
        rows = [Bar("baseline", self.baseline, words.seconds(self.baseline))]
        for a in self.ranked:
            name = " ".join(str(change) for change in a.changes)
            rows.append(Bar(name, a.seconds, words.seconds(a.seconds), a.low, a.high))
        return bars("seconds a step, with the 80 % interval", rows)


def _cells(advice: Advice) -> tuple[str, ...]:
    peak = advice.peak_bytes
    return (
        " ".join(map(str, advice.changes)), words.seconds(advice.seconds),
        words.interval(advice.low, advice.high), f"{100 * advice.gain:+.1f} %",
        words.size(peak) if peak else "",
    )  # fmt: skip


@dataclass(frozen=True, eq=False, repr=False)
class Simulation(Result):
    """A simulated step: start, end and cause of every task."""

    timeline: Timeline
    name: str = ""
    unprofiled: float | None = None  # of a trace: seconds in steady state, without the profiler

    @property
    def seconds(self) -> float:
        """How long the simulated tasks take, from a cold start."""
        return self.timeline.seconds

    @property
    def verdict(self) -> str:
        text = f"step {words.seconds(self.seconds)}, {self.timeline.graph.size:,} tasks"
        if self.unprofiled is None:
            return text
        known = words.seconds(self.unprofiled)
        return f"{text}; in steady state and without the profiler: {known}"

    def details(self, verbose: bool = False) -> list[str | Table]:
        return []

    def text(self, verbose: bool = False) -> str:
        return timeline_text(self.to_dict(), self.verdict)

    def to_dict(self) -> dict[str, Any]:
        return timeline_summary(self.timeline)

    def records(self) -> list[dict[str, Any]]:
        """One row a task."""
        graph, names = self.timeline.graph, self.timeline.graph.names
        columns = (graph.op, graph.name, graph.rank, self.timeline.start, self.timeline.end)
        return [
            {"op": names[op], "name": names[name], "rank": rank, "start_s": start, "end_s": end}
            for op, name, rank, start, end in zip(*(c.tolist() for c in columns), strict=True)
        ]

    def plot(self) -> Plot:
        """Every lane over time, and the critical path."""
        from foretell.simulate.show import drawing

        svg = drawing(self.timeline).partition("</svg>")[0] + "</svg>"
        return Plot(
            self.verdict, svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
        )

    def _repr_html_(self) -> str:
        return self.timeline._repr_html_()


def _cluster(cluster: str | Cluster | None) -> Cluster | None:
    return load_cluster(cluster) if isinstance(cluster, str) else cluster
