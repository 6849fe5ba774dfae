"""Layouts with their step and memory, from what `oracle`, `plan` or `predict` print, for plots.

Any list of objects that say `step_s` is taken, wherever it stands in the file, so that answers of
several commands can be shown side by side.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from foretell.report import words
from foretell.report.answers import LayoutAnswer, of


def rows(value: Any, name: str = "the answer") -> list[dict[str, Any]]:
    """Every layout in a value, alike whichever command printed it."""
    return [_row(of(found, LayoutAnswer, name)) for found in _find_rows(value)]


def layouts(value: Any, name: str) -> dict[str, Any] | None:
    """Layouts and their front; None where there are none."""
    found = rows(value, name)
    return {"name": name, "rows": found, "front": front(found)} if found else None


def front(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Pareto front in time and memory of the layouts that fit on the most devices."""
    most = max((r["gpus"] for r in found), default=0)
    fits = [r for r in found if r["fits"] and r["gpus"] == most and r["peak_bytes"]]
    best, least = [], float("inf")
    for row in sorted(fits, key=lambda r: (r["peak_bytes"], r["step_s"])):
        if row["step_s"] < least:
            best.append(row)
            least = row["step_s"]
    return best


def _find_rows(value: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(value, Mapping):
        if _is_number(value.get("step_s")) and value["step_s"] > 0:
            yield value
            return
        for item in value.values():
            yield from _find_rows(item)
    elif isinstance(value, list):
        for item in value:
            yield from _find_rows(item)


def _row(found: LayoutAnswer) -> dict[str, Any]:
    plan = found.plan
    text = plan if isinstance(plan, str) else ",".join(f"{k}={v}" for k, v in plan.items())
    samples = found.samples_per_s or found.samples_s
    batch = found.global_batch if found.batch is None else found.batch
    counts = (found.gpus, found.devices, found.ranks)
    return {
        "gpus": next((int(n) for n in counts if n is not None), _ranks(text)),
        "strategy": words.strategy(found.strategy) if found.strategy else _strategy(text),
        "step_s": found.step_s,
        "samples_per_s": samples or (batch or 0.0) / found.step_s,
        "peak_bytes": found.peak_bytes or 0.0,
        "fits": not found.missing_bytes if found.fits is None else found.fits,
        "plan": text,
        "says": _limits_text(found),
    }


def _limits_text(found: LayoutAnswer) -> str:
    """The limits of a row, in a line."""
    advice = found.advice or found.findings or found.limits or ""
    items = advice if isinstance(advice, list) else [advice]
    parts = [_finding(i) if isinstance(i, Mapping) else str(i) for i in items]
    return "; ".join(filter(None, parts))


def _finding(found: Mapping[str, Any]) -> str:
    parts = (str(found.get(key, "")) for key in ("name", "evidence", "remedy"))
    return ": ".join(filter(None, parts))


def _degrees(text: str) -> dict[str, int]:
    pairs = (part.partition("=") for part in text.split(","))
    names = ("dp", "tp", "pp", "cp")
    return {k: int(v) for k, _, v in pairs if k in names and v.isdecimal() and len(v) < 10}


def _ranks(text: str) -> int:
    product = 1
    for degree in _degrees(text).values():
        product *= degree
    return product


def _strategy(text: str) -> str:
    return " + ".join(k.upper() for k, v in _degrees(text).items() if v > 1) or "one device"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
