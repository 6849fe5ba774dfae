"""Gathers measured regions into one data set: columns, times and families, in one small file.

first, op, dtype, elements, …   the columns of `foretell.cost.fused_regions.Regions`
measured, spread, kernels       of each region: seconds, quartile spread as a share, kernels
family                          the model each was cut from, or `drawn`
again                           the row that measured the same region before; -1 for none
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from foretell.cost.fused_regions import NODE
from foretell.cost.fusion_class import WORDS
from foretell.pytorch.fused.columns import columns
from foretell.pytorch.fused.measure import read_regions
from foretell.pytorch.fused.region import Region, loads

_WIDE = ("elements", "looped", "inner", "last", "writes", "flops")  # whole numbers up to 2**53


def gather(pairs: Iterable[tuple[str, str]], out: Path) -> int:
    """Join files of regions with files of results; how many regions were measured."""
    regions, rows = [], []
    for path, results in pairs:
        lines = read_regions(path)
        for line in Path(results).read_text().splitlines():
            row = json.loads(line)
            if "s" in row and row["s"] > 0:
                regions.append(loads(lines[row["at"]]))
                rows.append(row)
    save(regions, rows, out)
    return len(rows)


def save(regions: Sequence[Region], rows: Sequence[dict[str, Any]], out: Path) -> None:
    """One compressed file of arrays."""
    alone = [
        row.get("alone") or [math.nan] * len(r.ops) for r, row in zip(regions, rows, strict=True)
    ]
    made = columns(regions, alone)
    arrays: dict[str, Any] = {name: getattr(made, name) for name in NODE}
    arrays |= {name: arrays[name].astype(np.int64) for name in _WIDE}
    arrays["seconds"] = made.seconds.astype(np.float32)
    for name in ("op", "dtype", "across"):
        arrays[name] = arrays[name].astype(np.uint8)
    at = made.first[:-1][np.searchsorted(made.first, made.target, "right") - 1]
    arrays |= {
        "source": (made.source - at).astype(np.uint16),
        "target": (made.target - at).astype(np.uint16),
    }
    arrays |= {"pattern": made.pattern.astype(np.uint8), "first": made.first.astype(np.int32)}
    arrays["edges"] = np.diff(np.searchsorted(made.target, made.first)).astype(np.uint16)
    arrays |= {
        "measured": np.array([r["s"] for r in rows], np.float32),
        "spread": np.array([r["spread"] for r in rows], np.float32),
        "kernels": np.array([r["kernels"] for r in rows], np.uint8),
        "family": np.array([r.family for r in regions]),
        "again": _again(regions),
        "words": np.array(WORDS),
    }
    np.savez_compressed(out, **arrays)


def _again(regions: Sequence[Region]) -> Any:
    seen: dict[str, int] = {}
    found = []
    for i, region in enumerate(regions):
        found.append(seen.get(region.key, -1))
        seen.setdefault(region.key, i)
    return np.array(found, np.int32)
