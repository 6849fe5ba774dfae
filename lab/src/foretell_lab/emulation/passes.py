"""One rank by itself, clocked again with every round: what one moment says is a tenth off.

A model that is made anew lies elsewhere in memory, a core runs as fast as its neighbours let it,
and both change within minutes. So each round begins with a pass over all models, as it goes over
all configurations, and a profile is the median of its passes, number by number.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from foretell_lab.emulation import table

PASSES = "passes.jsonl"


def add(folder: Path, found: dict[str, Any]) -> None:
    """Keep one pass of a model, and make its profile again of all there are."""
    with (folder / PASSES).open("a") as file:
        file.write(json.dumps(found) + "\n")
    profiles = table.read(folder / table.PROFILES) or {}
    profiles[found["model"]] = middle(_passes(folder, found["model"]))
    table.write(folder / table.PROFILES, profiles)


def count(folder: Path, model: str) -> int:
    """How often a model was clocked; once where only its profile is left."""
    known = model in (table.read(folder / table.PROFILES) or {})
    return max(len(_passes(folder, model)), int(known))


def middle(values: Sequence[Any]) -> Any:
    """The median of each number in values of one shape; what is no number is the first's."""
    first = values[0]
    if isinstance(first, dict):
        return {key: middle([value[key] for value in values]) for key in first}
    if isinstance(first, list):
        return [middle(each) for each in zip(*values, strict=True)]
    return median(values) if isinstance(first, float) else first


def _passes(folder: Path, model: str) -> list[Any]:
    path = folder / PASSES
    lines = path.read_text().splitlines() if path.exists() else []
    return [one for one in map(json.loads, lines) if one["model"] == model]
