"""Built-in workloads on one device, and their data-parallel scaling, compared with measured runs.

    timm      full train steps of image models on an RTX 3090, AMP and channels last (PyTorch 1.12)
    h200      seven models on one H200, fp32, tf32 and AMP, and their peak memory (torch 2.11);
              `fitted` with the host's speed from one of the runs
    nvidia    DeepLearningExamples on one V100 or A100 (PyTorch): samples/s
    lambda    ResNet-50 on one of many boards: samples/s
    AMP pairs the same on one device in mixed precision over fp32 or TF32
    scaling   DeepLearningExamples on 4 to 16 devices: step over the step on one
    torchtitan  Llama 3.1 on 8 to 512 H100 in up to four dims, bf16 and fp8, from one of the runs

Nothing is fitted to a row here. A model counts where a built-in family makes it (names are read by
`foretell_lab.validate.workload_names`), or, of timm's, where its step was captured.
"""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from foretell.cluster import load as cluster_of
from foretell.cost import price
from foretell.graph import Graph, Kind
from foretell.plan import Plan
from foretell.predict import predict
from foretell.simulate import simulate
from foretell.simulate.memory import peak_bytes
from foretell.workload import load
from foretell_lab.validate import paradl, titan
from foretell_lab.validate import timm as timm_rows
from foretell_lab.validate.eager import Eager, eager
from foretell_lab.validate.workload_names import (
    BOARDS,
    H200,
    MACHINES,
    board_of,
    nvidia_spec,
)


@dataclass(frozen=True)
class Row:
    """One measured step and what was predicted; seconds, bytes, or a ratio of steps."""

    source: str
    name: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Relative error."""
        return self.predicted / self.measured - 1


def report(truth: Path) -> dict[str, Any]:
    """Errors of every source, as values and as text."""
    found = {name: list(source(truth)) for name, source in SOURCES.items()}
    values = {name: summary(rows) for name, rows in found.items()}
    lines = [
        f"{name:12} {v['rows']:5.0f} rows  mean {v['mean']:6.1%}  median {v['median']:6.1%}  "
        f"p90 {v['p90']:6.1%}  worst {v['worst']:6.1%}  bias {v['bias']:+6.1%}"
        for name, v in values.items()
    ]
    paper = paradl.report(truth)
    text = "\n".join([*lines, *_left_out(truth), "", paper.pop("text")])
    return {"sources": values, "paradl": paper, "text": text}


def _left_out(truth: Path) -> Iterator[str]:
    """Models of timm's table that nothing is predicted of, by reason."""
    why: dict[str, list[str]] = {}
    for row in timm_rows.predictions(truth):
        if not row.predicted:
            why.setdefault(row.source, []).append(row.model)
    for reason, names in why.items():
        yield f"timm, {len(names)} left out: {reason}: {', '.join(names)}"


def summary(rows: Iterable[Row]) -> dict[str, float]:
    """Mean, median, 90th percentile and worst of what is wrong, and its direction."""
    errors = np.array([row.error for row in rows])
    wrong = np.abs(errors)
    return {
        "rows": float(len(wrong)),
        "mean": float(wrong.mean()),
        "median": float(np.median(wrong)),
        "p90": float(np.quantile(wrong, 0.9)),
        "worst": float(wrong.max()),
        "bias": float(np.median(errors)),
    }


def timed(
    spec: str, run: Eager, batch: float, machine: str, host: float = 1.0
) -> tuple[float, float]:
    """Seconds of a step on one device, and the most memory it holds.

    `host` is how many times as long as priced its host takes.
    """
    timeline = simulate(_slower(_priced(spec, run, batch, machine), host))
    return timeline.seconds, peak_bytes(timeline)


def _priced(spec: str, run: Eager, batch: float, machine: str) -> Graph:
    return price(eager(load(spec), run, batch=batch), cluster_of(machine))


def _slower(graph: Graph, times: float) -> Graph:
    if times == 1:
        return graph
    mine = np.flatnonzero(graph.kind == Kind.HOST)
    with graph.edit(f"host:times={times:g}") as edit:
        edit.set(mine, seconds=graph.seconds[mine] * times)
    return edit.graph


def with_options(spec: str, **options: object) -> str:
    """A spec with further options."""
    more = ",".join(f"{key}={value}" for key, value in options.items())
    return f"{spec}{',' if ':' in spec else ':'}{more}"


def timm(truth: Path) -> Iterator[Row]:
    """Rows of timm's table, from captured or built-in workloads (→ `timm`)."""
    for row in timm_rows.predictions(truth):
        if row.predicted:
            yield Row("timm", row.model, row.measured, row.predicted)


def h200(truth: Path) -> Iterator[Row]:
    """Steps of the variants that are a number format; an error counts from the nearer end."""
    for row, seconds, _ in _h200(truth, 1.0):
        yield Row("h200", _name(row), _nearer(row, seconds), seconds)


def h200_fitted(truth: Path) -> Iterator[Row]:
    """The same with the host's speed from one run that waits for it, which is left out."""
    known = [row for row in _variants(truth) if _name(row) == ANCHOR]
    graph = _priced(*_case_of(known[0]))
    host = known[0]["low_ms"] / 1e3 / float(graph.seconds[graph.kind == Kind.HOST].sum())
    for row, seconds, _ in _h200(truth, host):
        if _name(row) != ANCHOR:
            yield Row("h200 fitted", _name(row), _nearer(row, seconds), seconds)


ANCHOR = "resnet50 amp_bf16"


def h200_memory(truth: Path) -> Iterator[Row]:
    """Peak memory of the same rows."""
    for row, _, peak in _h200(truth, 1.0):
        yield Row("h200 memory", _name(row), row["peak_mib"] * 2.0**20, peak)


def _h200(truth: Path, host: float) -> Iterator[tuple[dict[str, Any], float, float]]:
    for row in _variants(truth):
        yield row, *timed(*_case_of(row), host)


def _variants(truth: Path) -> list[dict[str, Any]]:
    rows = json.loads((truth / "h200" / "truth.json").read_text())["rows"]
    return [row for row in rows if row["variant"] in ("base", "tf32", "amp_bf16", "amp_fp16")]


def _case_of(row: dict[str, Any]) -> tuple[str, Eager, float, str]:
    amp = row["variant"].removeprefix("amp_") if "amp" in row["variant"] else ""
    optimizer = "momentum" if row["optimizer"] == "sgd" else "adam"
    run = Eager.of({"amp": amp, "optimizer": optimizer, "way": "loop"})
    dtype = "tf32" if row["variant"] == "tf32" else "fp32"
    return with_options(H200[row["model"]], dtype=dtype), run, float(row["batch"]), "h200:gpus=1"


def _name(row: dict[str, Any]) -> str:
    return f"{row['model']} {row['variant']}"


def _nearer(row: dict[str, Any], seconds: float) -> float:
    """The end of what was measured that lies nearer."""
    return min(max(seconds, float(row["low_ms"]) / 1e3), float(row["high_ms"]) / 1e3)


def nvidia(truth: Path) -> Iterator[Row]:
    """Samples a second on one device, as seconds a sample."""
    for row, spec, run, batch in _nvidia(truth):
        if row["n_gpus"] == "1":
            machine = f"{MACHINES[row['gpu']][0]}:gpus=1"
            seconds, _ = timed(spec, run, batch, machine)
            name = f"{row['model']} {row['gpu']} {row['precision']}"
            yield Row("nvidia", name, 1 / float(row["value"]), seconds / batch)


def _nvidia(truth: Path) -> Iterator[tuple[dict[str, str], str, Eager, float]]:
    """Rows of PyTorch whose model, machine and batch are known, with what to ask."""
    table = truth / "tables" / "nvidia_deeplearningexamples_throughput.csv"
    for row in rows_of(table):
        spec = nvidia_spec(row["model"])
        if not spec or row["gpu"] not in MACHINES or not row["n_gpus"].isdigit():
            continue
        half = row["precision"].startswith("mixed")
        dtype = "tf32" if row["precision"].startswith("TF32") else "fp32"
        amp = "fp16" if half else ""
        run = Eager.of({"amp": amp, "nhwc": str(half), "flash": "no", "optimizer": "momentum"})
        # The READMEs of ResNet-50 name no batch beside its throughputs: 256 in AMP, 128 in fp32.
        batch = float(row["batch_per_gpu"] or (256 if half else 128))
        yield row, with_options(spec, dtype=dtype), run, batch


def scaling(truth: Path) -> Iterator[Row]:
    """The step on several devices over the step on one, both measured in one README."""
    found = list(_nvidia(truth))
    key = _system
    alone = {key(row): float(row["value"]) for row, *_ in found if row["n_gpus"] == "1"}
    for row, spec, run, batch in found:
        ranks = int(row["n_gpus"])
        machine = MACHINES[row["gpu"]][1]
        if ranks > 1 and key(row) in alone and ranks <= cluster_of(machine).size:
            measured = ranks * alone[key(row)] / float(row["value"])
            predicted = data_parallel(spec, run, batch, machine, ranks)
            yield Row("scaling", f"{row['model']} {ranks} × {machine}", measured, predicted)


def pairs(truth: Path) -> Iterator[Row]:
    """How many times as fast a model is in AMP, both measured in one README, on one device."""
    steps = {row.name: row for row in nvidia(truth)}
    for name, after in steps.items():
        model, mixed, _ = name.partition(" mixed")
        if not mixed:
            continue
        for before in (steps.get(f"{model} {word}") for word in ("FP32", "TF32")):
            if before is not None:
                measured = before.measured / after.measured
                yield Row("AMP pairs", name, measured, before.predicted / after.predicted)


def _system(row: dict[str, str]) -> tuple[str, ...]:
    return tuple(row[k] for k in ("model", "gpu", "precision", "batch_per_gpu", "unit"))


def data_parallel(spec: str, run: Eager, batch: float, machine: str, ranks: int) -> float:
    """How many times as long as on one device a data-parallel step takes."""
    stack = "ddp-amp" if run.amp else "ddp"
    dtype = run.amp or load(spec).dtype
    steps = []
    for dp in (1, ranks):
        plan = Plan(dp=dp, framework=stack, dtype=dtype, global_batch=int(batch) * dp)
        steps.append(predict(plan, load(spec), cluster_of(f"{machine}:gpus={dp}")).step)
    return steps[1] / steps[0]


def boards(truth: Path) -> Iterator[Row]:
    """ResNet-50 on one board, the median of runs that say the same; channels first."""
    table: dict[tuple[str, bool, float], list[float]] = {}
    path = truth / "tables" / "lambda_gpu_benchmark.csv.gz"
    for row in csv.DictReader(gzip.decompress(path.read_bytes()).decode().splitlines()):
        board = board_of(row["gpu"])
        if board and row["n_gpus"] == "1" and row["metric"] == "throughput_total":
            key = (board, not row["precision"].startswith("FP32"), float(row["batch_per_gpu"]))
            table.setdefault(key, []).append(float(row["value"]))
    for (board, half, batch), values in sorted(table.items()):
        run = Eager.of({"amp": "fp16" if half else "", "way": "loop"})
        dtype = "tf32" if BOARDS[board] and not half else "fp32"
        spec = with_options("resnet50", dtype=dtype)
        seconds, _ = timed(spec, run, batch, f"{board}:gpus=1")
        yield Row("lambda", f"{board} {batch:g}", 1 / float(np.median(values)), seconds / batch)


def rows_of(path: Path) -> list[dict[str, str]]:
    """The rows of a table."""
    with path.open() as file:
        return list(csv.DictReader(file))


def torchtitan(truth: Path) -> Iterator[Row]:
    """Llama on up to 512 H100, sharded, split and in fp8, from one run of 8 (→ `titan`)."""
    for name, measured, predicted in titan.predicted():
        yield Row("torchtitan", name, measured, predicted)


SOURCES: dict[str, Callable[[Path], Iterator[Row]]] = {
    "timm": timm,
    "h200": h200,
    "h200 fitted": h200_fitted,
    "h200 memory": h200_memory,
    "nvidia": nvidia,
    "AMP pairs": pairs,
    "scaling": scaling,
    "lambda": boards,
    "torchtitan": torchtitan,
}
