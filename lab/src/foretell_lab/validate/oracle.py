"""Layouts and their memory predicted from the model alone, compared with runs of others.

Nothing is tuned to a row or a model: the numbers of a framework profile are the same for all rows
of a source.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from foretell.cluster import load as load_cluster
from foretell.errors import ForetellError
from foretell.predict.predict import distances, interval
from foretell.workload import load
from foretell_lab.validate import peaks, workloads
from foretell_lab.validate.layouts import SOURCES, Row, predicted

Array = npt.NDArray[np.float64]
NEAR = 1.03  # a layout this near to the best counts as found


def report(truth: Path) -> dict[str, Any]:
    """Errors of every source, as values and as text."""
    found = {name: predicted(list(source(truth))) for name, source in SOURCES.items()}
    rows, left = _memory(truth)
    values = {name: summary(np.array([r.error for r in some])) for name, some in found.items()}
    values["memory"] = summary(np.array([e for _, e in rows])) | {"left_out": left}
    values["vtrain"] |= ranking(found["vtrain"])
    for name, some in found.items():
        values[name]["interval_holds"] = _held(some)
    more = workloads.report(truth)
    text = "\n".join([*_lines(values), *_left_out(truth), more["text"]])
    return {"sources": values | more["sources"], "paradl": more["paradl"], "text": text}


def summary(errors: Array) -> dict[str, float]:
    """Mean, median, 90th percentile and worst of what is wrong."""
    wrong = np.abs(errors)
    return {
        "rows": len(wrong),
        "mean": float(wrong.mean()),
        "median": float(np.median(wrong)),
        "p90": float(np.quantile(wrong, 0.9)),
        "worst": float(wrong.max()),
        "accuracy": float(1 - wrong.mean()),  # as the ParaDL paper counts
    }


def ranking(rows: list[Row]) -> dict[str, float]:
    """How well layouts of one model on one number of ranks are put in order."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.request.group, []).append(row)
    orders, found = [], []
    for some in groups.values():
        real = np.array([r.request.measured for r in some])
        predicted_seconds = np.array([r.predicted for r in some])
        orders.append(spearman(real, predicted_seconds))
        found.append(real[predicted_seconds.argmin()] <= NEAR * real.min())
    return {
        "groups": len(groups),
        "spearman_mean": float(np.mean(orders)),
        "spearman_least": float(np.min(orders)),
        "best_found": float(np.mean(found)),
    }


def spearman(a: Array, b: Array) -> float:
    """Correlation of ranks; equal values share theirs."""
    return float(np.corrcoef(_ranks(a), _ranks(b))[0, 1])


def _ranks(values: Array) -> Array:
    _, which, count = np.unique(values, return_inverse=True, return_counts=True)
    middle = np.cumsum(count) - (count - 1) / 2
    out: Array = middle[which]
    return out


def _held(rows: list[Row]) -> float:
    """The share of measurements inside the interval that is stated."""
    inside = []
    for r in rows:
        workload, cluster = load(r.request.workload), load_cluster(r.request.on)
        away = distances(r.request.plan, workload, cluster, host=0.0)
        low, high = interval(r.predicted, away)
        inside.append(low <= r.request.measured <= high)
    return float(np.mean(inside))


def _memory(truth: Path) -> tuple[list[tuple[peaks.Run, float]], int]:
    """The error of every run that can be asked about; how many cannot."""
    runs, left = peaks.runs(truth)
    found = []
    for run in runs:
        try:
            found.append((run, peaks.predicted(run) / run.measured - 1))
        except ForetellError:
            left += 1
    return found, left


def _lines(values: dict[str, dict[str, float]]) -> Iterator[str]:
    for name, v in values.items():
        yield (
            f"{name:10} {v['rows']:5.0f} rows  mean {v['mean']:6.1%}  median {v['median']:6.1%}  "
            f"p90 {v['p90']:6.1%}  worst {v['worst']:6.1%}"
        )
    v = values["vtrain"]
    yield (
        f"vtrain, order within {v['groups']:.0f} groups: Spearman {v['spearman_mean']:.3f} mean, "
        f"{v['spearman_least']:.3f} least; best found or within 3 % in {v['best_found']:.0%}"
    )
    held = ", ".join(f"{n} {v['interval_holds']:.0%}" for n, v in values.items() if n != "memory")
    yield f"the 80 % interval holds: {held}"


def _left_out(truth: Path) -> Iterator[str]:
    """Runs whose memory nothing is predicted of, by reason."""
    for why, many in peaks.left_out(truth).items():
        yield f"memory, {many} runs left out: they {why}"
