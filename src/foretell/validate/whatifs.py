"""What-ifs from one trace, held against the same change made and timed.

`h200/` has, for each model, a trace of the plain step and the un-profiled times of many variants. A
row's truth is an interval (two ways of timing it); an error counts from the nearer end.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from foretell.baseline import unprofiled
from foretell.errors import InputError
from foretell.trace import read
from foretell.whatif import WHATIFS, Setting, applied, parse

# What each measured variant is called here.
SPECS = {
    "tf32": ("tf32",),
    "amp_bf16": ("amp:dtype=bf16",),
    "amp_fp16": ("amp:dtype=fp16",),
    "opt_foreach": ("foreach-optimizer",),
    "opt_fused": ("fused-optimizer",),
    "batch_x2": ("batch:times=2",),
    "batch_half": ("batch:times=0.5",),
    "checkpoint": ("checkpoint",),
    "cudagraph": ("cuda-graph",),
    "nhwc": ("channels-last",),
    "compile": ("compile",),
    "amp_bf16+fused": ("amp:dtype=bf16", "fused-optimizer"),
    "amp_bf16+cudagraph": ("amp:dtype=bf16", "cuda-graph"),
    "amp_bf16+nhwc": ("amp:dtype=bf16", "channels-last"),
    "amp_bf16+compile": ("amp:dtype=bf16", "compile"),
}


@dataclass(frozen=True)
class Row:
    """One variant of one model: what was measured and what was foretold."""

    model: str
    variant: str
    low: float
    high: float
    predicted: float

    @property
    def error(self) -> float:
        """Relative error, from the nearer end of what was measured."""
        return self.predicted / min(max(self.predicted, self.low), self.high) - 1


def report(truth: Path) -> dict[str, Any]:
    """Every row that can be foretold, as values and as text; the others are counted."""
    known = _known(truth)
    found = [row for model in sorted(known) for row in _rows(truth, known[model])]
    missing = sorted({v for rows in known.values() for v in rows if v != "base"} - _able())
    text = "\n".join([*_lines(found), f"not foretold yet: {', '.join(missing) or 'nothing'}"])
    return {"rows": [vars(r) | {"error": r.error} for r in found], "missing": missing, "text": text}


def _able() -> set[str]:
    """The variants for which all what-ifs are there."""
    return {v for v, specs in SPECS.items() if all(s.partition(":")[0] in WHATIFS for s in specs)}


def _known(truth: Path) -> dict[str, dict[str, Any]]:
    path = truth / "h200" / "truth.json"
    try:
        rows = json.loads(path.read_text())["rows"]
    except (OSError, ValueError, KeyError):
        raise InputError(f"no measured variants at `{path}`") from None
    models: dict[str, dict[str, Any]] = {}
    for row in rows:
        models.setdefault(row["model"], {})[row["variant"]] = row
    return models


def _rows(truth: Path, rows: dict[str, Any]) -> Iterator[Row]:
    base = rows["base"]
    trace = read(truth / "h200" / f"{base['model']}.base.json.gz")
    step = unprofiled(trace, base["median_ms"] / 1e3)
    for variant in sorted(_able() & set(rows)):
        changes = [parse(spec) for spec in SPECS[variant]]
        seconds = step.predicted(applied(changes, step.graph, Setting()))
        low, high = rows[variant]["low_ms"] / 1e3, rows[variant]["high_ms"] / 1e3
        yield Row(base["model"], variant, low, high, seconds)


def _lines(rows: list[Row]) -> Iterator[str]:
    for r in rows:
        yield (
            f"{r.model:20} {r.variant:12} measured {1e3 * r.low:6.1f}–{1e3 * r.high:6.1f} ms  "
            f"foretold {1e3 * r.predicted:6.1f}  {r.error:+6.1%}"
        )
    yield ""
    for variant in sorted({r.variant for r in rows}):
        yield _summary(variant, [r for r in rows if r.variant == variant])
    yield _summary("all", rows)


def _summary(name: str, rows: list[Row]) -> str:
    errors = np.abs([r.error for r in rows])
    worst = rows[int(errors.argmax())]
    return (
        f"{name:12} {len(rows):3} rows  median {np.median(errors):5.1%}  "
        f"worst {errors.max():5.1%} ({worst.model} {worst.variant})"
    )
