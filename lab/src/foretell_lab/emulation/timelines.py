"""A measured step of the laboratory as a graph that simulates to itself, to be compared.

Every piece waits for the beginning by as long as it was measured to begin late, and runs for as
long as it ran. Messages of all ranks are one task, from when the last rank had begun it to when the
last was done, as in a predicted step.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from foretell.graph import Builder, Graph, save
from foretell_lab.emulation import table
from foretell_lab.emulation.predicted import Busy, Known, graph
from foretell_lab.emulation.step import MESSAGES, Knobs
from foretell_lab.emulation.table import Config

_JOINED = ("all_reduce", "reduce", "broadcast", "all_gather")
Piece = dict[str, Any]


def measured(notes: list[list[Piece]], config: Config) -> Graph:
    """The graph of a measured step, from what each rank noted."""
    builder = Builder()
    zero = min(piece["start"] for rank in notes for piece in rank)
    begin = builder.task(kind="host", op="begin", name="begin", seconds=0.0)
    for rank, rows in enumerate(notes):
        lane = builder.lane(f"rank {rank}", rank=rank, kind="compute")
        own = [piece for piece in rows if piece["op"] not in _JOINED]
        for piece in sorted(own, key=lambda p: p["start"]):
            _put(builder, begin, piece, zero, rank=rank, lane=lane, kind="host")
    lanes = [builder.lane(f"messages {k}", rank=0, kind="comm") for k in range(MESSAGES)]
    free = [0.0] * MESSAGES
    for piece in _messages(notes):
        turn = min(range(MESSAGES), key=lambda k: free[k])
        free[turn] = piece["end"]
        size = float(piece["bytes"])
        _put(builder, begin, piece, zero, rank=0, lane=lanes[turn], kind="collective",
             comm_bytes=size)  # fmt: skip
    return builder.graph(config=str(config))


def _put(builder: Builder, begin: int, piece: Piece, zero: float, **columns: Any) -> None:
    task = builder.task(
        op=piece["op"], name=piece["name"], seconds=piece["end"] - piece["start"],
        source="measured", **columns,
    )  # fmt: skip
    builder.wait(task, begin, lag=piece["start"] - zero)


def _messages(notes: list[list[Piece]]) -> Iterator[Piece]:
    """Each message once, in the order they were begun; three at once never run, so some waited."""
    found: dict[str, list[Piece]] = {}
    for rows in notes:
        for piece in rows:
            if piece["op"] in _JOINED:
                found.setdefault(piece["name"], []).append(piece)
    joined = [
        same[0] | {"start": max(p["start"] for p in same), "end": max(p["end"] for p in same)}
        for same in found.values()
    ]
    ends: list[float] = []
    for piece in sorted(joined, key=lambda p: p["start"]):
        busy = sorted(ends)[-MESSAGES:]
        start = max(piece["start"], busy[0]) if len(busy) == MESSAGES else piece["start"]
        ends.append(piece["end"])
        yield piece | {"start": min(start, piece["end"])}


def write(folder: Path, known: Known, knobs: Knobs | None = None) -> list[Path]:
    """Two graphs for every noted configuration, predicted and measured in its last round."""
    place: Path = folder / "timelines"
    found: dict[Path, None] = {}
    place.mkdir(exist_ok=True)
    rows = table.by_config(table.rows(folder))
    for line in (folder / table.NOTES).read_text().splitlines():
        noted = json.loads(line)
        config = Config(**{k: noted[k] for k in ("model", "plan", "network", "ranks", "threads")})
        busy = Busy.of([r for r in rows[config] if r.round == noted["round"]] or rows[config])
        name = f"{config.model}-{config.plan}-{config.network}-{config.ranks}".replace("/", "_")
        for what, made in (
            ("predicted", graph(known, config, busy, knobs)),
            ("measured", measured(noted["ranks_notes"], config)),
        ):
            path = place / f"{name}.{what}.graph"
            found[path] = None
            save(made, path)
    return list(found)
