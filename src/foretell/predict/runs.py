"""Measured runs as a person writes them down: a table, a line each.

    workload,on,plan,step_s
    resnet50:image=226,abci:nodes=2,"dp=8,overlap=no,global_batch=512",0.2486

CSV with such a head, or JSON, an object a line. `workload` and `on` may be left to the command.
Instead of `step_s`: `samples_per_s`, or `epoch_s` with `samples` (of an epoch).
"""

from __future__ import annotations

import csv
import io
import math
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import asdict

from foretell.cluster import Cluster
from foretell.cluster import load as load_cluster
from foretell.errors import InputError
from foretell.io import decode, read_lines, read_text
from foretell.plan import check, read
from foretell.predict.fit import Run
from foretell.workload import Workload
from foretell.workload import load as load_workload

_HINT = "each row has workload, on, plan, and step_s (or samples_per_s, or epoch_s and samples)"


class _Row(msgspec.Struct):
    """A line of JSON: what was run, where, how, and how long it took."""

    workload: str = ""
    on: str = ""
    plan: str = ""
    step_s: float | str | None = None
    samples_per_s: float | str | None = None
    epoch_s: float | str | None = None
    samples: float | str | None = None


def table(path: Path, workload: str = "", on: str = "") -> list[Run]:
    """The runs of a table; `workload` and `on` where its rows do not say."""
    rows = _rows(path)
    if not rows:
        raise InputError(f"`{path}` has no runs", hint=_HINT)
    models: dict[str, Workload] = {}
    machines: dict[str, Cluster] = {}
    found = []
    for number, row in enumerate(rows, 1):
        where = f"run {number} of `{path}`"
        model, cluster = row.get("workload") or workload, row.get("on") or on
        if not model or not cluster or not row.get("plan"):
            raise InputError(f"{where} does not say workload, cluster or plan", hint=_HINT)
        models.setdefault(model, load_workload(model, scripts=model == workload))
        machines.setdefault(cluster, load_cluster(cluster))
        plan = check(read(row["plan"]), models[model], machines[cluster])
        seconds = _seconds(row, plan.global_batch, where)
        found.append(Run(models[model], machines[cluster], plan, seconds))
    return found


def _rows(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".csv":
        return _csv_rows(read_text(path, what="table of runs"), path)
    lines = read_lines(path, "table of runs")
    return [asdict(decode(raw, _Row, f"line {k} of `{path}`", _HINT)) for k, raw in lines]


def _csv_rows(text: str, path: Path) -> list[dict[str, Any]]:
    try:
        rows = [dict(row) for row in csv.DictReader(io.StringIO(text), restval="")]
    except csv.Error as error:
        raise InputError(f"`{path}` is no table of runs: {error}", hint=_HINT) from None
    if any(None in row for row in rows):
        raise InputError(f"`{path}` has a row with more fields than its head", hint=_HINT)
    return rows


def _seconds(row: dict[str, Any], batch: int, where: str) -> float:
    """Seconds of a step, however the row tells it."""
    given = {k: _number(row[k], k, where) for k in _TOLD if row.get(k) not in (None, "")}
    if "step_s" in given:
        return given["step_s"]
    if "samples_per_s" in given:
        return batch / given["samples_per_s"]
    if "epoch_s" in given and "samples" in given:
        return given["epoch_s"] * batch / given["samples"]
    raise InputError(f"{where} does not say how long it took", hint=_HINT)


_TOLD = ("step_s", "samples_per_s", "epoch_s", "samples")


def _number(value: Any, name: str, where: str) -> float:
    try:
        found = float(value)
    except (TypeError, ValueError):
        found = math.nan
    if not 0 < found < math.inf:
        raise InputError(f"`{name}` is `{value}` in {where}", hint="write a number above 0")
    return found
