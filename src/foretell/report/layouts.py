"""Layouts with their step and memory, from what `oracle`, `plan` or `predict` print, for plots.

Any list of objects that say `step_s` is taken, wherever it stands in the file, so that answers of
several commands can be shown side by side.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_COUNTS = ("gpus", "devices", "ranks")


def rows(value: Any) -> list[dict[str, Any]]:
    """Every layout in a value, alike whoever printed it."""
    return [_row(found) for found in _found(value)]


def layouts(value: Any, name: str) -> dict[str, Any] | None:
    """Layouts and their front; None where there are none."""
    found = rows(value)
    return {"name": name, "rows": found, "front": front(found)} if found else None


def front(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of the layouts that fit on the most devices: those that none beats in time and memory."""
    most = max((r["gpus"] for r in found), default=0)
    fits = [r for r in found if r["fits"] and r["gpus"] == most and r["peak_bytes"]]
    best, least = [], float("inf")
    for row in sorted(fits, key=lambda r: (r["peak_bytes"], r["step_s"])):
        if row["step_s"] < least:
            best.append(row)
            least = row["step_s"]
    return best


def _found(value: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(value, Mapping):
        if _is_number(value.get("step_s")) and value["step_s"] > 0:
            yield value
            return
        for item in value.values():
            yield from _found(item)
    elif isinstance(value, list):
        for item in value:
            yield from _found(item)


def _row(found: Mapping[str, Any]) -> dict[str, Any]:
    plan = found.get("plan", "")
    text = plan if isinstance(plan, str) else ",".join(f"{k}={v}" for k, v in plan.items())
    samples = next(
        (found[k] for k in ("samples_per_s", "samples_s") if _is_number(found.get(k))), 0
    )
    batch = found.get("batch", found.get("global_batch", 0))
    if not samples and _is_number(batch):
        samples = batch / found["step_s"]
    return {
        "gpus": next((int(found[k]) for k in _COUNTS if _is_number(found.get(k))), _ranks(text)),
        "strategy": str(found.get("strategy") or _strategy(text)),
        "step_s": float(found["step_s"]),
        "samples_per_s": float(samples),
        "peak_bytes": float(found.get("peak_bytes") or 0.0),
        "fits": bool(found.get("fits", not found.get("missing_bytes", 0))),
        "plan": text,
        "says": _says(found),
    }


def _says(found: Mapping[str, Any]) -> str:
    """What the row says of its limits, in a line."""
    told = found.get("advice") or found.get("findings") or found.get("limits") or ""
    items = told if isinstance(told, list) else [told]
    words = [_finding(i) if isinstance(i, Mapping) else str(i) for i in items]
    return "; ".join(filter(None, words))


def _finding(found: Mapping[str, Any]) -> str:
    parts = (str(found.get(key, "")) for key in ("name", "evidence", "remedy"))
    return ": ".join(filter(None, parts))


def _degrees(text: str) -> dict[str, int]:
    pairs = (part.partition("=") for part in text.split(","))
    return {k: int(v) for k, _, v in pairs if k in ("dp", "tp", "pp", "cp") and v.isdigit()}


def _ranks(text: str) -> int:
    product = 1
    for degree in _degrees(text).values():
        product *= degree
    return product


def _strategy(text: str) -> str:
    return "+".join(k for k, v in _degrees(text).items() if v > 1) or "one device"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
