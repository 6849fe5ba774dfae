"""A longer step out of a short one: the events of a trace again and again, within one step."""

import gzip
import json
from pathlib import Path
from typing import Any

_NUMBERED = ("correlation", "External id", "Sequence number")  # what ties events to each other


def longer(trace: Path, output: Path, events: int) -> int:
    """Write a trace whose one step has at least so many events; how many it has."""
    page = json.loads(gzip.decompress(trace.read_bytes()))
    given = page.pop("traceEvents")
    timed = [e for e in given if "ts" in e and not _is_step(e)]
    begin = min(e["ts"] for e in timed)
    span = max(e["ts"] + e.get("dur", 0) for e in timed) - begin + 10
    copies = -(-events // len(timed))
    step = next(e for e in given if _is_step(e))
    found = [e for e in given if "ts" not in e]
    found.append({**step, "ts": begin, "dur": copies * span})
    for k in range(copies):
        found += [_later(e, k, span) for e in timed]
    with gzip.open(output, "wt", compresslevel=4) as file:
        json.dump({**page, "traceEvents": found}, file)
    return len(found)


def _is_step(event: dict[str, Any]) -> bool:
    return str(event.get("name", "")).startswith("ProfilerStep")


def _later(event: dict[str, Any], times: int, span: float) -> dict[str, Any]:
    """The same event `times` spans later, with numbers of its own."""
    more = times * 10_000_000
    found = {**event, "ts": event["ts"] + times * span}
    args = event.get("args")
    if isinstance(args, dict):
        own = {key: int(args[key]) + more for key in _NUMBERED if key in args}
        found["args"] = {**args, **own}
    if event.get("ph") in ("s", "f"):
        found["id"] = int(event["id"]) + more
    return found
