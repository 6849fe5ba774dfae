"""Steps measured in many variants: `truth.json` of a folder of traces, `h200` if not another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from foretell.errors import InputError


def variants(truth: Path, name: str = "h200") -> dict[str, dict[str, Any]]:
    """The rows of every model that could be measured, by variant."""
    path = truth / name / "truth.json"
    try:
        rows = json.loads(path.read_text())["rows"]
    except (OSError, ValueError, KeyError):
        raise InputError(f"no measured variants at `{path}`") from None
    models: dict[str, dict[str, Any]] = {}
    for row in (r for r in rows if "error" not in r):
        models.setdefault(row["model"], {})[row["variant"]] = row
    return models
