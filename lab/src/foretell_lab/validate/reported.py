"""Runs reported in public, each with the question it is asked as (`tables/reported_runs.csv`).

Where they stand, how they were asked and what came out blind is in `tables/reported_runs.toml`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import as_file, files
from typing import Any

from foretell.cluster import Cluster, load
from foretell.cluster.read import loads
from foretell_lab.validate.layouts import table

# What PyTorch's allocator reserves of what tensors take, the median of whole steps on one H200
# (benchmarks/measured/llm_steps_h200.json: 1.00 to 1.31).
RESERVED = 1.07
# Bytes that nvidia-smi counts besides: context, NCCL channels, libraries (plan/costs.py: USABLE)
OUTSIDE = 3 * 2.0**30
_TABLES = files("foretell_lab.validate").joinpath("tables")


@dataclass(frozen=True)
class Run:
    """One measured run: workload, cluster and plan as a user writes them."""

    model: str
    system: str
    plan: str
    seconds: float
    peak: float  # bytes measured; 0 where that was not done


@cache
def _said() -> dict[str, Any]:
    return tomllib.loads(_TABLES.joinpath("reported_runs.toml").read_text("utf-8"))


def sources() -> dict[str, dict[str, Any]]:
    """Address, what it is, how it was asked and the blind figures of every source."""
    found: dict[str, dict[str, Any]] = _said()["source"]
    return found


def runs(source: str) -> Iterator[Run]:
    """The rows of one source."""
    with as_file(_TABLES.joinpath("reported_runs.csv")) as path:
        rows = table(path)
    is_whole = sources()[source].get("memory") == "nvidia-smi"
    for r in rows:
        if r["source"] == source:
            peak = float(r["peak_mib"] or 0) * 2**20
            peak = (peak - OUTSIDE) / RESERVED if peak and is_whole else peak
            yield Run(r["model"], r["system"], r["plan"], float(r["seconds"]), peak)


@cache
def cluster(system: str) -> Cluster:
    """A cluster as the table names it: one of its own files, or a preset with options."""
    own = _said()["clusters"]
    return loads(own[system]) if system in own else load(system)


def is_fitted(source: str) -> bool:
    """Whether fits of intervals take a source: not where no plan can say what it ran."""
    return bool(sources().get(source, {}).get("fitted", True))


def first(source: str) -> dict[str, dict[str, float]]:
    """Figures of the first answer, before anything was changed; of other tables none."""
    if source not in sources():
        return {}
    names = ("rows", "median", "bias", "p90", "inside")
    return {"first": dict(zip(names, sources()[source]["blind"], strict=True))}


def blind(source: str) -> str:
    """The same in words."""
    if source not in sources():
        return ""
    v = {name: 100 * share for name, share in first(source)["first"].items()}
    figures = f"median {v['median']:.1f} %, bias {v['bias']:+.1f} %, 90 % below {v['p90']:.1f} %"
    covered = f"{v['rows'] / 100:g} rows, {figures}, {v['inside']:.0f} % in the interval"
    return f"Asked blind, before anything was changed: {covered}."
