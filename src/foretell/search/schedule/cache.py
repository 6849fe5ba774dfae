"""Schedules found before, one file each, by what was asked.

The key is the fingerprint of the problem and every option that shapes the answer, with the version
of the search: a new version never reads an old answer. Files appear whole or not at all, and what
is read is checked like any schedule; a file that is broken or wrong counts as missing.
"""

import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from foretell.errors import InputError
from foretell.io import read_json, write_text
from foretell.search.schedule.problem import Problem
from foretell.search.schedule.schedule import Schedule, wrong

VERSION = 3  # one more whenever the search may answer differently


def folder() -> Path:
    """Where schedules are kept unless another place is named."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "foretell" / "schedules"


def key(problem: Problem, micro_batches: int, **options: Any) -> str:
    """The name of the file that would hold the answer to a question."""
    asked = json.dumps([VERSION, problem.fingerprint, micro_batches, options], sort_keys=True)
    return hashlib.sha256(asked.encode()).hexdigest()[:40]


def fetch(where: Path, name: str, problem: Problem) -> Schedule | None:
    """A schedule found before, or None."""
    try:
        found = read_json(where / f"{name}.json")
        starts = tuple(tuple(map(float, row)) for row in found.pop("starts"))
        order = tuple((int(block), int(m)) for block, m in found.pop("order"))
        schedule = Schedule(problem, starts, order, **found)
        fault = wrong(problem, starts, order)
    except (InputError, ValueError, TypeError, KeyError, AttributeError, OverflowError):
        return None
    return None if fault else replace(schedule, is_cached=True)


def store(where: Path, name: str, schedule: Schedule) -> None:
    """Keep a schedule; a folder that cannot be written is left alone."""
    kept = (
        "period",
        "unroll",
        "lower_bound",
        "makespan_bound",
        "proven_unroll",
        "method",
        "search_cpu",
        "stopped",
    )
    found = {"starts": schedule.starts, "order": schedule.order} | {
        k: getattr(schedule, k) for k in kept
    }
    try:
        where.mkdir(parents=True, exist_ok=True)
        write_text(where / f"{name}.json", json.dumps(found))
    except (OSError, InputError):
        return
