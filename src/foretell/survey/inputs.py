"""The inputs of a report: files of several kinds and specs, recognized and read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretell.cluster import Cluster
from foretell.errors import InputError
from foretell.graph.file import is_graph_file
from foretell.io import decode, is_there, open_file, read_json, read_lines

if TYPE_CHECKING:
    from foretell.plan import Plan
    from foretell.survey.planned import Model, PlanPage

_HEAD = 4096
_ENDINGS = (".py", ".graph", ".txt", ".json", ".jsonl", ".gz", ".toml", ".plan", ".zip", ".tar")
_ANSWERS = (b'"makespan"', b'"step_s"', b'"predicted_s"', b'"ndevs"')


@dataclass(frozen=True)
class Inputs:
    """Paths and specs, sorted by what they are."""

    steps: tuple[Path, ...] = ()  # graphs and traces
    answers: tuple[Path, ...] = ()  # what other commands printed with --json
    plans: tuple[Path, ...] = ()
    specs: tuple[str, ...] = ()

    @classmethod
    def of(cls, texts: Iterable[str]) -> Inputs:
        """Tell files from specs, and files by what they hold."""
        found: dict[str, list[Any]] = {"steps": [], "answers": [], "plans": [], "specs": []}
        for text in texts:
            found[kind_of_input(text)].append(
                text if kind_of_input(text) == "specs" else Path(text)
            )
        return cls(**{key: tuple(values) for key, values in found.items()})


def is_script(text: str) -> bool:
    """Whether a text names a Python file, or a function in one (`train.py:make`)."""
    file = text.rpartition(":")[0] if ".py:" in text else text
    return file.endswith(".py") and is_there(file)


def kind_of_input(text: str) -> str:
    """The kind of an argument: a step, an answer, a plan or a spec."""
    path = Path(text)
    if is_script(text):
        return "steps"
    if not is_there(text):
        if "/" in text or path.suffix in _ENDINGS:
            raise InputError(f"there is no file `{text}`")
        return "specs"
    if path.is_dir() or is_graph_file(path):
        return "steps"
    if path.suffix in (".plan", ".toml"):
        return "plans"
    return _by_content(path)


def _by_content(path: Path) -> str:
    if path.suffix not in (".json", ".jsonl"):
        return "steps"
    with open_file(path) as file:
        head = file.read(_HEAD)
    if b'"traceEvents"' in head or b'"schemaVersion"' in head:
        return "steps"
    if any(key in head for key in _ANSWERS):
        return "answers"
    return "plans" if _is_plan(path) else "steps"


def _is_plan(path: Path) -> bool:
    from foretell.plan import load

    try:
        return bool(path.stat().st_size < 2**20 and load(path))
    except InputError:
        return False


def read_answer(path: Path) -> Any:
    """A JSON answer, or a list of them where there is one a line."""
    if path.suffix == ".jsonl":
        return [decode(raw, Any, f"line {k} of `{path}`") for k, raw in read_lines(path)]
    return read_json(path, what="answer")


@dataclass(frozen=True)
class Sections:
    """Parts of a page made from answers and plans."""

    oracle: list[dict[str, Any]] = field(default_factory=list)
    plans: list[dict[str, Any]] = field(default_factory=list)
    schedules: list[dict[str, Any]] = field(default_factory=list)
    pages: list[PlanPage] = field(default_factory=list)  # plans that are predicted
    runs: list[dict[str, Any]] = field(default_factory=list)  # measured beside predicted


@dataclass(frozen=True)
class PlanContext:
    """Where plans stand, and what they were made for, where that is known."""

    cluster: Cluster | None = None
    model: Model | None = None

    def add(self, found: Sections, plan: Plan, name: str, answer: Any = None) -> None:
        """Draw a plan; with machines and a model, its step too."""
        from foretell.report.drawings import drawn_plan
        from foretell.survey.planned import gradient_bytes, page_of

        sizes = None
        if self.cluster is not None and self.model is not None:
            sizes = gradient_bytes(plan, self.model, self.cluster)
            found.pages.append(page_of(plan, self.model, self.cluster, name))
        found.plans.append(drawn_plan(plan, name, self.cluster, answer, sizes))


def sections_of(
    inputs: Inputs, cluster: Cluster | None = None, model: Model | None = None
) -> Sections:
    """Everything to draw from the answers and plans among the inputs."""
    from foretell.plan import load as load_plan

    found, place = Sections(), PlanContext(cluster, model)
    for path in inputs.answers:
        _add_answer(found, read_answer(path), path, place)
    for path in inputs.plans:
        place.add(found, load_plan(path), path.name)
    return found


def _add_answer(found: Sections, value: Any, path: Path, place: PlanContext) -> None:
    from foretell.plan import Plan
    from foretell.report import drawings, layouts
    from foretell.report.answers import RunAnswer, of

    if drawings.is_schedule(value):
        found.schedules.append(drawings.drawn_schedule(value, path.name))
    elif isinstance(value, dict) and {"measured_s", "predicted_s"} <= set(value):
        run = of(value, RunAnswer, path.name)
        times = {"measured_s": run.measured_s, "predicted_s": run.predicted_s}
        found.runs.append({"what": path.name, **times})
    elif isinstance(value, dict) and "predicted_s" in value and isinstance(value.get("plan"), str):
        place.add(found, Plan.parse(value["plan"]), path.name, value)
    elif isinstance(value, dict) and "ndevs" in value:
        found.schedules.append(drawings.drawn_schedule(_schedule_of(value, path), path.name))
    elif (rows := layouts.layouts(value, path.name)) is not None:
        found.oracle.append(rows)
    else:
        raise InputError(
            f"`{path}` holds nothing a report could show",
            hint="give a trace, a graph, a plan, or what schedule, oracle, plan or predict print",
        )


def _schedule_of(value: Any, path: Path) -> dict[str, Any]:
    """A placement's schedule, searched for."""
    from foretell.search.schedule import read, schedule

    return schedule(read(value, where=f"placement `{path}`")).answer()
