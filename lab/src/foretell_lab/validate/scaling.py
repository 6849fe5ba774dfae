"""Data parallelism from one trace, compared with published throughputs on 2 to 16 devices.

The trace is ResNet-50 on one V100 (batch 32, PyTorch); the rows are ResNet-50 v1.5 in FP32 on DGX-1
and DGX-2 (NVIDIA/DeepLearningExamples), by PyTorch and other frameworks that all-reduce with NCCL.
A row's truth is the step on n devices over the step on one, n · throughput(1) / throughput(n): the
trace's own speed does not enter. The batch is that of the row where it is stated, else `BATCH`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from foretell.baseline import Baseline, unprofiled
from foretell.cluster import load
from foretell.trace import read
from foretell.whatif import Setting, applied, parse
from foretell_lab.validate.scaling_tables import mxnet, pollux, rows_of

TRACE = "traces/kineto/resnet50_num_workers_4.worker0.1623212756351.pt.trace.json.gz"
TRACED = 32.0  # samples a step of the trace
BATCH = 112.0  # of the rows that state theirs in FP32 on a V100 of 16 GB
MACHINES = {
    "V100 16GB": "dgx-1-v100",
    "V100 32GB": "dgx-1-v100-32",
    "V100 32GB (DGX-2)": "dgx-2",
}


@dataclass(frozen=True)
class Row:
    """One system on several devices: how many times as long as on one a step takes."""

    framework: str
    machine: str
    ranks: int
    batch: float
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Relative error of the step on several devices, that on one being right."""
        return self.predicted / self.measured - 1


def report(truth: Path) -> dict[str, Any]:
    """Every row as values and as text."""
    step = unprofiled(read(truth / TRACE))
    found = [_predicted(step, *row) for row in _measured(truth)]
    others = [*pollux(truth), *mxnet(truth)]
    groups = sorted({r.group for r in others})
    lines = [_summary("trace", [r.error for r in found])]
    lines += [_summary(g, [r.error for r in others if r.group == g]) for g in groups]
    text = "\n".join([*map(_line, found), "", *lines, "", NOTE])
    rows = [vars(r) | {"error": r.error} for r in found]
    rows += [vars(r) | {"error": r.error} for r in others]
    return {"rows": rows, "text": text}


NOTE = """\
trace: from a trace of the same model; the spread of ranks (`foretell.whatif.skew`) is fitted to
these rows, so their median says nothing; the other groups were not used for anything
pollux, mxnet: from the step on one device or node and the model's size alone, layers all alike
pollux, several nodes: one flow of AWS's network, 10 of a node's 50 Gb/s"""


def _summary(name: str, errors: list[float]) -> str:
    size = np.abs(errors)
    return (
        f"{name:22} {len(size):4} rows  median |error| {np.median(size):5.1%}  "
        f"bias {np.median(errors):+6.1%}  worst {size.max():5.1%}"
    )


def _measured(truth: Path) -> Iterator[tuple[str, str, int, float, float]]:
    """Framework, machine, ranks, batch and relative step of every row that has one device too."""
    rows = rows_of(truth / "tables" / "nvidia_deeplearningexamples_throughput.csv")
    mine = [r for r in rows if _is_wanted(r)]
    alone = {_system(r): float(r["value"]) for r in mine if r["n_gpus"] == "1"}
    for r in mine:
        ranks = int(r["n_gpus"])
        if ranks > 1 and _system(r) in alone:
            batch = float(r["batch_per_gpu"] or BATCH)
            ratio = ranks * alone[_system(r)] / float(r["value"])
            yield r["framework"], MACHINES[r["gpu"]], ranks, batch, ratio


def _is_wanted(row: dict[str, str]) -> bool:
    name = row["model"].rsplit("/", 1)[-1].lower()
    is_model = name in ("resnet50v1.5", "rn50v1.5")
    is_single = row["precision"].startswith("FP32") and row["n_gpus"].isdigit()
    return is_model and is_single and row["gpu"] in MACHINES


def _system(row: dict[str, str]) -> tuple[str, ...]:
    return row["framework"], row["gpu"], row["precision"], row["batch_per_gpu"]


def _predicted(
    step: Baseline, framework: str, machine: str, ranks: int, batch: float, measured: float
) -> Row:
    setting = Setting(load(machine))
    larger = [parse(f"batch:times={batch / TRACED!r}")]
    spread = [*larger, parse(f"data-parallel:ranks={ranks}")]
    one, many = (step.predicted(applied(w, step.graph, setting)) for w in (larger, spread))
    return Row(framework, machine, ranks, batch, measured, many / one)


def _line(r: Row) -> str:
    return (
        f"{r.framework:12} {r.ranks:3} × {r.machine:14} batch {r.batch:4.0f}  over one: "
        f"{r.measured:.3f}, told {r.predicted:.3f} {r.error:+6.1%}"
    )
