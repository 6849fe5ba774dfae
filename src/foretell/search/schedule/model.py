"""Problems from models: blocks of a workload on a cluster, with real times, memory, messages.

    found = model(workload, cluster, "m", micro_batches=16)
    schedule(found.problem, 16), found.plan(that)

Ranks that always work together are one device of the problem. A stage is a forward block and,
where something before it or in it is trained, a backward block or two gradients. Recompute and
offload of each stage are choices that `choose` decides; messages are priced by their links.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf
from typing import Literal, TypedDict

from foretell.cluster import Cluster
from foretell.errors import InfeasibleError, InputError
from foretell.plan import Plan, check
from foretell.plan.stage_placement import (
    Action,
    Edge,
    Prices,
    StagePlacement,
    change,
    constant,
    copies,
    edges,
    message,
    placed_stage_cost,
    room,
    seconds,
    texts,
)
from foretell.search.schedule.arrange import Asked, arrange, arrangements
from foretell.search.schedule.problem import (
    Block,
    Choice,
    Mode,
    Overlap,
    Price,
    Problem,
    Wait,
    linked,
)
from foretell.search.schedule.schedule import Schedule
from foretell.workload import Workload

_PLACING = 0.3  # share of a time limit after which no further shape is placed


class Options(TypedDict, total=False):
    """What else is asked of a problem, and not of where its stages are."""

    split: bool  # gradients of inputs and of weights apart
    recompute: Decide
    offload: Decide
    overlap: Overlap


@dataclass(frozen=True)
class Model:
    """A problem and what its blocks and devices stand for."""

    problem: Problem
    shape: str
    prices: Prices
    places: tuple[StagePlacement, ...]
    ranks: tuple[tuple[int, ...], ...]  # of each device

    @property
    def copies(self) -> int:
        """Samples that one micro-batch of the problem stands for, in micro-batches of the plan."""
        return copies(self.places, self.prices.workload)

    def chosen(self, names: Sequence[str]) -> Model:
        """The model once some choices are taken."""
        ways = {int(n.split()[1]): n.split()[0] for n in names}
        found = tuple(
            replace(p, ways=tuple(sorted({*p.ways, ways[s]}))) if s in ways else p
            for s, p in enumerate(self.places)
        )
        return replace(self, problem=self.problem.choosing(names), places=found)

    def plan(self, found: Schedule) -> Plan:
        """The plan of a schedule of this problem: it lowers, predicts and runs like any other."""
        workload = self.prices.workload
        rows: list[tuple[str, ...]] = [()] * self.prices.cluster.size
        for device, ranks in enumerate(self.ranks):
            row = tuple(
                str(a) for a in (_act(found, s.block, s.micro_batch) for s in found.on(device)) if a
            )
            for rank in ranks:
                rows[rank] = row
        batch = self.prices.plan.micro_batch * found.micro_batches * self.copies
        return self.prices.plan.but(
            stages=texts(self.places, workload), actions=tuple(rows), schedule="actions",
            global_batch=batch, recompute="none", model=workload.fingerprint(),
        )  # fmt: skip


def _act(found: Schedule, block: int, micro_batch: int) -> Action | None:
    """The action of a block; messages belong to no action."""
    one = found.problem.blocks[block]
    return None if one.kind == "C" else Action(stage_of(one), one.kind, micro_batch)


def model(
    workload: Workload,
    cluster: Cluster,
    shape: str = "v",
    *,
    plan: Plan | None = None,
    micro_batches: int = 8,
    mode: Mode = "train",
    split: bool = False,
    recompute: Decide = "auto",
    offload: Decide = "no",
    frozen: Sequence[str] = (),
    overlap: Overlap = "beside",
) -> Model:
    """The problem of a shape; `plan` says program, formats and micro-batch."""
    asked = _asked(workload, cluster, plan, micro_batches, mode, recompute, frozen)
    try:
        found = arrange(shape, asked)
    except InfeasibleError:
        if recompute != "auto" or mode == "infer":
            raise
        found = arrange(shape, replace(asked, recompute=True))
    return problem_of(
        found, asked, shape, split=split, recompute=recompute, offload=offload, overlap=overlap
    )


def models(
    workload: Workload,
    cluster: Cluster,
    *,
    plan: Plan | None = None,
    micro_batches: int = 8,
    mode: Mode = "train",
    split: bool = False,
    recompute: Decide = "auto",
    offload: Decide = "no",
    frozen: Sequence[str] = (),
    overlap: Overlap = "beside",
    ends: float | None = None,
) -> list[Model]:
    """The problems of all shapes that fit; of the first ones where time runs out at `ends`."""
    asked = _asked(workload, cluster, plan, micro_batches, mode, recompute, frozen)
    tries = [asked]
    if recompute == "auto" and mode == "train":
        tries.append(replace(asked, recompute=True))
    options: Options = {
        "split": split, "recompute": recompute, "offload": offload, "overlap": overlap,
    }  # fmt: skip
    out: dict[str, Model] = {}
    latest = inf if ends is None else time.monotonic() + (ends - time.monotonic()) * _PLACING
    for one in tries:
        for shape, found in arrangements(one):
            with suppress(InfeasibleError):
                out.setdefault(shape, problem_of(found, one, shape, **options))
            if out and time.monotonic() > latest:
                break
    if not out:
        raise InfeasibleError(
            f"no placement of `{workload.name}` fits into the memory of `{cluster.name}`",
            hint="take more ranks, a smaller micro-batch, or recompute",
        )
    return list(out.values())


def _asked(
    workload: Workload, cluster: Cluster, plan: Plan | None, micro_batches: int, mode: Mode,
    recompute: Decide, frozen: Sequence[str],
) -> Asked:  # fmt: skip
    given = plan or Plan()
    degrees = [f"{k}={v}" for k, v in given.degrees().items() if v > 1]
    if degrees or given.stages or given.actions:
        raise InputError(
            f"a schedule places stages itself, and the plan says {' '.join(degrees) or 'stages'}",
            hint="give only what the search does not decide: micro_batch, framework, precision",
        )
    micro = given.micro_batch or 1
    batch = micro * micro_batches
    # one rank stands for all: what is checked is the batch, the format and the program
    filled = check(given.but(micro_batch=micro, global_batch=batch), workload, cluster.subset([0]))
    is_train = mode == "train"
    again = recompute == "yes" or given.recompute != "none"
    prices = Prices(filled.but(recompute="none"), workload, cluster)
    return Asked(prices, micro_batches, is_train, again and is_train, tuple(frozen))


def problem_of(
    found: tuple[StagePlacement, ...],
    asked: Asked,
    shape: str,
    *,
    split: bool = False,
    recompute: Decide = "no",
    offload: Decide = "no",
    overlap: Overlap = "beside",
) -> Model:
    """The problem of stages that are placed."""
    prices, links = asked.prices, edges(found, asked.workload)
    if offload == "yes" and asked.trains:
        found = tuple(
            replace(p, ways=(*p.ways, "offload")) if has_block(prices, p) else p for p in found
        )
    ranks = folded(found)
    device = {r: d for d, group in enumerate(ranks) for r in group}
    back = trained(found, links) if asked.trains else set()
    where = [tuple(sorted({device[r] for r in p.ranks})) for p in found]
    blocks = [
        block_of(prices, p, s, kind, where[s], s in back, split)
        for s, p in enumerate(found)
        for kind in kinds(p, s in back, split)
    ]
    bare = Problem(
        tuple(blocks),
        tuple(waits(blocks, links)),
        len(ranks),
        tuple(min(free(prices, found, r, bool(back)) for r in group) for group in ranks),
        mode="train" if back else "infer",
        name=f"{shape}: {asked.workload.name}",
        choices=choices(prices, found, where, back, split, recompute, offload),
    )
    priced = linked(bare, price(prices, found, links), overlap=overlap)
    return Model(priced, shape, prices, found, ranks)


# The blocks of placed stages: times, memory, waits, choices and messages.
#
# A stage is a forward block and, where something before it or in it is trained, a backward block or
# two gradients. `block_id` ties a block to its stage, `folded` ranks to the devices of the problem.


Decide = Literal["no", "yes", "auto"]
_KINDS = "FBIW"


def stage_of(block: Block) -> int:
    """The stage that a block belongs to."""
    return block.id // len(_KINDS)


def block_id(stage: int, kind: str) -> int:
    """The id of a stage's block of that kind."""
    return len(_KINDS) * stage + _KINDS.index(kind)


def has_block(prices: Prices, place: StagePlacement) -> bool:
    """Whether a stage keeps what can be dropped or moved: blocks do, ends hardly anything."""
    return any(n and prices.workload.layers[i].is_block for i, n in enumerate(place.times))


def folded(found: Sequence[StagePlacement]) -> tuple[tuple[int, ...], ...]:
    """Ranks that are in the same stages, together."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in sorted({r for p in found for r in p.ranks}):
        mine = tuple(s for s, p in enumerate(found) if rank in p.ranks)
        groups.setdefault(mine, []).append(rank)
    return tuple(map(tuple, groups.values()))


def trained(found: Sequence[StagePlacement], links: Sequence[Edge]) -> set[int]:
    """Stages that have a backward: those trained, and those behind them."""
    out = {s for s, p in enumerate(found) if "frozen" not in p.ways}
    while more := {e.then for e in links if e.first in out} - out:
        out |= more
    return out


def kinds(place: StagePlacement, trains: bool, split: bool) -> str:
    """The blocks a stage has."""
    if not trains:
        return "F"
    return "FIW" if split and "frozen" not in place.ways else "FB"


def block_of(
    prices: Prices, place: StagePlacement, stage: int, kind: str, devices: tuple[int, ...],
    trains: bool, split: bool,
) -> Block:  # fmt: skip
    paid = placed_stage_cost(prices, place)
    by = change(kind, paid, place.ways, trains=trains, split=split and "frozen" not in place.ways)
    took = seconds(prices, place, kind, paid)
    name = " ".join(place.texts(prices.workload)[1:])
    return Block(block_id(stage, kind), kind, devices, took, by.start, by.end, name)


def free(prices: Prices, found: Sequence[StagePlacement], rank: int, trains: bool) -> float:
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
    prices: Prices, found: Sequence[StagePlacement], where: Sequence[tuple[int, ...]],
    back: set[int], split: bool, recompute: Decide, offload: Decide,
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


def price(prices: Prices, found: Sequence[StagePlacement], links: Sequence[Edge]) -> Price:
    """Seconds of the message between two blocks: forward along a link, backward against it."""
    layers = {(e.first, e.then): e.layers for e in links}

    def seconds_of(first: Block, then: Block) -> float:
        a, b = stage_of(first), stage_of(then)
        moved = layers.get((a, b)) or layers.get((b, a)) or ()
        return message(prices, found[a], found[b], moved) if a != b else 0.0

    return seconds_of
