"""Full train steps of timm's models on an RTX 3090, predicted from captured or built-in workloads.

`tables/timm_steps.xz` holds the steps of timm's own benchmark, captured on fake tensors by
`benchmarks/timm_steps.py`; what could not be captured comes from a built-in family where one makes
the model (→ `workload_names`). Steps have PyTorch 1.12's operators, prices are
those of any captured graph.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import as_file, files
from pathlib import Path

from foretell.cluster import load as cluster_of
from foretell.cost import price
from foretell.simulate import simulate
from foretell.workload import load
from foretell_lab.validate import steps
from foretell_lab.validate.eager import Eager, eager
from foretell_lab.validate.workload_names import timm_spec

MACHINE = "3090:gpus=1"
RUN = Eager(amp="fp16", nhwc=True, flash=False, optimizer="momentum", way="loop")
_ALIKE = 0.015  # parameters of a captured or built-in model may differ by this share


@dataclass(frozen=True)
class Prediction:
    """One row of the table: seconds measured and predicted, and from what; 0 where from nothing."""

    model: str
    measured: float
    predicted: float
    source: str  # captured, built-in, or why there is none


def predictions(truth: Path) -> Iterator[Prediction]:
    """Every row of the table."""
    known = captured()
    for row in _rows(truth / "tables" / "timm_train_rtx3090.csv"):
        name, measured = row["model"], float(row["value"]) / 1e3
        if name in known.seconds and _is_alike(known.parameters[name], row):
            yield Prediction(name, measured, known.seconds[name], "captured")
        elif seconds := built_in(row):
            yield Prediction(name, measured, seconds, "built-in")
        else:
            yield Prediction(name, measured, 0.0, known.missing.get(name, "not captured"))


def built_in(row: Mapping[str, str]) -> float:
    """Seconds of the step where a family makes the model, 0 where none does."""
    spec = timm_spec(row["model"])
    if not spec:
        return 0.0
    spec += f"{',' if ':' in spec else ':'}image={row['seq_or_img']}"
    if not _is_alike(load(spec).parameters, row):
        return 0.0
    graph = eager(load(spec), RUN, batch=float(row["batch_per_gpu"]))
    return simulate(price(graph, cluster_of(MACHINE))).seconds


@dataclass(frozen=True)
class Captured:
    """Steps that ship with the package, by model."""

    seconds: Mapping[str, float]
    parameters: Mapping[str, float]
    missing: Mapping[str, str]


@cache
def captured() -> Captured:
    """All captured steps, priced."""
    with as_file(files("foretell_lab.validate") / "tables" / "timm_steps.xz") as path:
        found = steps.load(path)
    seconds = {n: simulate(g).seconds for n, g in steps.priced(found, cluster_of(MACHINE))}
    return Captured(seconds, {n: s.parameters for n, s in found.models.items()}, found.missing)


def _is_alike(parameters: float, row: Mapping[str, str]) -> bool:
    return abs(parameters / float(row["params"]) - 1) <= _ALIKE


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return [row for row in csv.DictReader(file) if row["metric"] == "step_time"]
