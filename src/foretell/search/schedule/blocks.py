"""The blocks of placed stages: times, memory, waits, choices and messages.

A stage is a forward block and, where something before it or in it is trained, a backward block or
two gradients. `block_id` ties a block to its stage, `folded` ranks to the devices of the problem.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from foretell.errors import InfeasibleError
from foretell.plan.place_costs import Prices, bill, message, room
from foretell.plan.place_graph import seconds
from foretell.plan.place_memory import change, constant
from foretell.plan.places import Edge, Place
from foretell.search.schedule.links import Price
from foretell.search.schedule.problem import Block, Choice, Wait

Decide = Literal["no", "yes", "auto"]
_KINDS = "FBIW"


def stage_of(block: Block) -> int:
    """The stage that a block belongs to."""
    return block.id // len(_KINDS)


def block_id(stage: int, kind: str) -> int:
    """The id of a stage's block of that kind."""
    return len(_KINDS) * stage + _KINDS.index(kind)


def has_block(prices: Prices, place: Place) -> bool:
    """Whether a stage keeps what can be dropped or moved: blocks do, ends hardly anything."""
    return any(n and prices.workload.layers[i].is_block for i, n in enumerate(place.times))


def folded(found: Sequence[Place]) -> tuple[tuple[int, ...], ...]:
    """Ranks that are in the same stages, together."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in sorted({r for p in found for r in p.ranks}):
        mine = tuple(s for s, p in enumerate(found) if rank in p.ranks)
        groups.setdefault(mine, []).append(rank)
    return tuple(map(tuple, groups.values()))


def trained(found: Sequence[Place], links: Sequence[Edge]) -> set[int]:
    """Stages that have a backward: those trained, and those behind them."""
    out = {s for s, p in enumerate(found) if "frozen" not in p.ways}
    while more := {e.then for e in links if e.first in out} - out:
        out |= more
    return out


def kinds(place: Place, trains: bool, split: bool) -> str:
    """The blocks a stage has."""
    if not trains:
        return "F"
    return "FIW" if split and "frozen" not in place.ways else "FB"


def block_of(
    prices: Prices, place: Place, stage: int, kind: str, devices: tuple[int, ...], trains: bool,
    split: bool,
) -> Block:  # fmt: skip
    paid = bill(prices, place)
    by = change(kind, paid, place.ways, trains=trains, split=split and "frozen" not in place.ways)
    took = seconds(prices, place, kind, paid)
    name = " ".join(place.texts(prices.workload)[1:])
    return Block(block_id(stage, kind), kind, devices, took, by.start, by.end, name)


def free(prices: Prices, found: Sequence[Place], rank: int, trains: bool) -> float:
    """Bytes a rank has for what micro-batches keep."""
    held = constant(prices, found, rank, trains=trains)
    if held > room(prices, rank):
        raise InfeasibleError(
            f"rank {rank} would hold {held / 2**30:.1f} GiB of weights and optimizer state, it has "
            f"{room(prices, rank) / 2**30:.1f}",
            hint="spread its layers over more ranks: shape m, or a larger cluster",
        )
    return room(prices, rank) - held


def waits(blocks: Sequence[Block], links: Sequence[Edge]) -> list[Wait]:
    place = {b.id: i for i, b in enumerate(blocks)}
    out = [Wait(place[block_id(e.then, "F")], place[block_id(e.first, "F")]) for e in links]
    for i, block in enumerate(blocks):
        s = stage_of(block)
        if block.kind == "W":
            out.append(Wait(i, place[block_id(s, "I")]))
        elif block.kind != "F":
            behind = [e.then for e in links if e.first == s]
            ids = [block_id(b, k) for b in behind for k in "BI" if block_id(b, k) in place]
            out += [Wait(i, place[j]) for j in ids or [block_id(s, "F")]]
    return out


def choices(
    prices: Prices, found: Sequence[Place], where: Sequence[tuple[int, ...]], back: set[int],
    split: bool, recompute: Decide, offload: Decide,
) -> tuple[Choice, ...]:  # fmt: skip
    """For every stage that keeps something: the same blocks, and less kept."""
    out = []
    for way, asked in (("recompute", recompute), ("offload", offload)):
        for s in sorted(back if asked == "auto" else ()):
            place = found[s]
            if way in place.ways or not has_block(prices, place):
                continue
            other = replace(place, ways=(*place.ways, way))
            blocks = [
                block_of(prices, other, s, kind, where[s], True, split)
                for kind in kinds(place, True, split)
            ]
            out.append(Choice(f"{way} {s}", tuple(blocks)))
    return tuple(out)


def price(prices: Prices, found: Sequence[Place], links: Sequence[Edge]) -> Price:
    """Seconds of the message between two blocks: forward along a link, backward against it."""
    layers = {(e.first, e.then): e.layers for e in links}

    def seconds_of(first: Block, then: Block) -> float:
        a, b = stage_of(first), stage_of(then)
        moved = layers.get((a, b)) or layers.get((b, a)) or ()
        return message(prices, found[a], found[b], moved) if a != b else 0.0

    return seconds_of
