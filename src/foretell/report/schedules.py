"""A schedule as `foretell schedule --json` prints it, made ready to be drawn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from msgspec.structs import asdict

from foretell.graph.columns import Kind, Phase
from foretell.report.answers import Schedule, of
from foretell.simulate.timeline import Timeline

MOST_BLOCKS = 4000  # drawn of a pipeline
KEYS = ("blocks", "makespan", "period")


def is_schedule(value: Any) -> bool:
    """Whether a value looks like the answer of `foretell schedule`."""
    return isinstance(value, Mapping) and all(key in value for key in KEYS)


def drawn(answer: Mapping[str, Any], name: str) -> dict[str, Any]:
    """What a drawing needs: blocks with their ends, the device count, the part that repeats."""
    found = of(answer, Schedule, name)
    blocks = [asdict(b) for b in found.blocks]
    if any(b["end"] is None for b in blocks):
        _close(blocks, found.makespan)
    return {
        "name": found.name or name,
        "devices": 1 + max((d for b in found.blocks for d in b.devices), default=0),
        "micro_batches": found.micro_batches,
        "period": found.period,
        "makespan": found.makespan,
        "repetend": _repetend(blocks, found.period, found.unroll),
        "peak_memory": found.peak_memory,
        "says": _says(found),
        "blocks": blocks,
    }


def pipeline(line: Timeline) -> dict[str, Any]:
    """The pipeline of a simulated step: what each rank computes, micro-batch by micro-batch."""
    graph = line.graph
    ranks = np.unique(graph.rank).tolist()
    kinds = {int(Phase.FORWARD): "F", int(Phase.LOSS): "F", int(Phase.BACKWARD): "B"}
    blocks: list[dict[str, Any]] = []
    for device, rank in enumerate(ranks):
        mine = np.flatnonzero((graph.rank == rank) & (graph.kind == Kind.KERNEL))
        for i in mine[np.argsort(line.start[mine], kind="stable")].tolist():
            kind, batch = kinds.get(int(graph.phase[i]), ""), int(graph.micro_batch[i])
            if not kind:
                continue
            last = blocks[-1] if blocks else None
            same = last and (last["kind"], last["micro_batch"]) == (kind, batch)
            if last and same and last["devices"] == [device]:
                last["end"] = float(line.end[i])
                continue
            blocks.append(
                {"block": device, "micro_batch": batch, "kind": kind, "devices": [device],
                 "start": float(line.start[i]), "end": float(line.end[i])}
            )  # fmt: skip
    return {
        "name": "pipeline", "devices": len(ranks), "blocks": blocks[:MOST_BLOCKS], "repetend": None,
        "period": 0.0, "makespan": line.seconds, "unit": "s",
        "micro_batches": 1 + max((b["micro_batch"] for b in blocks), default=-1),
    }  # fmt: skip


def _close(blocks: list[dict[str, Any]], makespan: float) -> None:
    """Give blocks without an end one: a block lasts at most until its device starts the next.

    The shortest stay seen of a block is taken for all its micro-batches.
    """
    longest: dict[Any, float] = {}
    by_device: dict[int, list[dict[str, Any]]] = {}
    for block in sorted(blocks, key=lambda b: b["start"]):
        for device in set(block["devices"]):
            by_device.setdefault(device, []).append(block)
    for mine in by_device.values():
        ends = [*(b["start"] for b in mine[1:]), makespan]
        for block, end in zip(mine, ends, strict=True):
            stay = end - block["start"]
            longest[block["block"]] = min(longest.get(block["block"], stay), stay)
    for block in blocks:
        block["end"] = block["start"] + longest.get(block["block"], 0.0)


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


def _says(found: Schedule) -> str:
    proven = "proven minimal" if found.proven else "not proven minimal"
    per = found.period if found.per_micro_batch is None else found.per_micro_batch
    bubble = found.bubble
    idle = f", {100 * bubble:.1f} % of the makespan a bubble" if bubble is not None else ""
    return (
        f"{per:g} a micro-batch ({proven}), makespan {found.makespan:g}{idle}; "
        "the frame holds the part that repeats"
    )
