"""A schedule as `foretell schedule --json` prints it, made ready to be drawn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from foretell.errors import InputError

KEYS = ("blocks", "makespan", "period")


def is_schedule(value: Any) -> bool:
    """Whether a value looks like the answer of `foretell schedule`."""
    return isinstance(value, Mapping) and all(key in value for key in KEYS)


def drawn(answer: Mapping[str, Any], name: str) -> dict[str, Any]:
    """What a drawing needs: blocks with their ends, the device count, the part that repeats."""
    try:
        blocks = [_block(b) for b in answer["blocks"]]
        devices = 1 + max((d for b in blocks for d in b["devices"]), default=0)
        period, makespan = float(answer["period"]), float(answer["makespan"])
        unroll = int(answer.get("unroll", 1))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"`{name}` is no schedule: {error!r}") from None
    if any(b["end"] is None for b in blocks):
        _close(blocks, devices, makespan)
    return {
        "name": str(answer.get("name") or name),
        "devices": devices,
        "micro_batches": int(answer.get("micro_batches", 0)),
        "period": period,
        "makespan": makespan,
        "repetend": _repetend(blocks, period, unroll),
        "peak_memory": [float(p) for p in answer.get("peak_memory", [])],
        "says": _says(answer),
        "blocks": blocks,
    }


def _block(found: Mapping[str, Any]) -> dict[str, Any]:
    end = found.get("end")
    return {
        "block": found["block"],
        "micro_batch": int(found["micro_batch"]),
        "start": float(found["start"]),
        "end": None if end is None else float(end),
        "kind": str(found.get("kind", "")),
        "devices": [int(d) for d in found["devices"]],
    }


def _close(blocks: list[dict[str, Any]], devices: int, makespan: float) -> None:
    """Give blocks without an end one: a block lasts at most until its device starts the next.

    The shortest stay seen of a block is taken for all its micro-batches.
    """
    longest: dict[Any, float] = {}
    for device in range(devices):
        mine = sorted((b for b in blocks if device in b["devices"]), key=lambda b: b["start"])
        ends = [*(b["start"] for b in mine[1:]), makespan]
        for block, end in zip(mine, ends, strict=True):
            stay = end - block["start"]
            longest[block["block"]] = min(longest.get(block["block"], stay), stay)
    for block in blocks:
        block["end"] = block["start"] + longest[block["block"]]


def _repetend(blocks: list[dict[str, Any]], period: float, unroll: int) -> list[float] | None:
    """When the steady part begins and ends: one period from which on every block returns."""
    starts = {(b["block"], b["micro_batch"]): b["start"] for b in blocks}
    firsts: dict[Any, float] = {}
    for (block, m), start in starts.items():
        later = starts.get((block, m + unroll))
        if later is not None and abs(later - start - period) <= 1e-9 * max(period, 1.0):
            firsts[block] = min(firsts.get(block, start), start)
    if not period or len(firsts) < len({b["block"] for b in blocks}):
        return None
    begin = max(firsts.values())
    return [begin, begin + period]


def _says(answer: Mapping[str, Any]) -> str:
    proven = "proven minimal" if answer.get("proven") else "not proven minimal"
    per = float(answer.get("per_micro_batch", answer["period"]))
    bubble = answer.get("bubble")
    idle = f", {100 * float(bubble):.1f} % of the makespan a bubble" if bubble is not None else ""
    return (
        f"{per:g} a micro-batch ({proven}), makespan {float(answer['makespan']):g}{idle}; "
        "the frame holds the part that repeats"
    )
