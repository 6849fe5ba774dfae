"""Pipeline stages placed freely: any layers on any ranks, several stages a rank or ranks a stage.

A plan says it in `stages`, one group of texts a stage, in the order of forward: the ranks, then the
layers (`block*8`: the next eight of that name), then what is done another way:

    0-3 embedding / 0 block*8 recompute / 1 block*8 / … / 0-3 head

A stage on several ranks is split over them as tensor parallelism splits it. The layers of all
stages together are the model once, or several times: then these are copies of it, each with its own
part of the batch (two pipelines in opposite directions). `actions` has a row a rank: `3F0`, `3B0`.

Layers are priced for the very ranks of a stage: as many ways split as it has ranks, over the links
between them, at the pace of the slowest of their devices. Backward is told apart: the gradient of
the input (with what is run again) and that of the weights, whose matmuls can wait.

    forward    what backward will need is taken at its start; what only forward needs goes after it
    backward   what was dropped is made again for its time; what forward kept goes at its end

Where backward is split, what is kept goes with the weight gradient, its last reader. A stage
without backward keeps nothing. Offloaded, it is there only while forward or backward runs.

In the program of a step ranks with the same actions are one. A stage on several ranks holds the
lanes of all of them; messages leave on lanes of their own, one for each direction.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from foretell.cluster import Cluster
from foretell.cost import collective
from foretell.errors import InputError, unknown
from foretell.graph.graph import group_text, ranks_of
from foretell.plan.check import layer_reads
from foretell.plan.costs import ROUNDING, USABLE, Costs, layer_parts
from foretell.plan.framework import running
from foretell.plan.layer_cost import blocks_of
from foretell.plan.plan import Names, Plan
from foretell.plan.prices import StageColumns, StageLayers, priced_stages, rank_update
from foretell.plan.program import (
    BACKWARD,
    FORWARD,
    WEIGHT,
    Buffer,
    Message,
    Piece,
    Program,
    ResolvedStep,
    StageTasks,
)
from foretell.portable import product
from foretell.workload import Layer, Workload
from foretell.workload.workload import BYTES

WAYS = {
    "recompute": "keeps inputs of layers alone and runs forward again",
    "offload": "what it keeps waits in the host's memory",
    "frozen": "its weights are not trained",
}
_LAYERS = re.compile(r"(.+?)(?:\*(\d+))?")
_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")
_OPS = {"F": "forward", "B": "backward", "I": "backward", "W": "weight gradients"}
_WAYS_OF = {"F": FORWARD, "B": BACKWARD, "I": BACKWARD, "W": WEIGHT}


@dataclass(frozen=True)
class StagePlacement:
    """One stage: its ranks, how often each layer of the workload runs there, and how."""

    ranks: tuple[int, ...]
    times: tuple[int, ...]
    ways: tuple[str, ...] = ()

    def texts(self, workload: Workload) -> tuple[str, ...]:
        """The stage as a plan writes it."""
        pairs = zip(workload.layers, self.times, strict=True)
        layers = [f"{x.name}*{n}" if x.times > 1 else x.name for x, n in pairs if n]
        return (group_text(self.ranks), *layers, *self.ways)


class StageSpec(NamedTuple):
    """One stage in a plan's own words, before any model is looked at."""

    ranks: tuple[int, ...]
    layers: tuple[tuple[str, int], ...]  # names, and how often in a row; 0: the one of that name
    ways: tuple[str, ...]


class Action(NamedTuple):
    """What a rank does next: a stage's forward, backward, or one of its gradients."""

    stage: int
    kind: str  # F, B, I or W
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


class Edge(NamedTuple):
    """Stage `then` reads what layers of stage `first` hand it."""

    first: int
    then: int
    layers: tuple[int, ...]  # whose outputs travel


def places(plan: Plan, workload: Workload, size: int) -> tuple[StagePlacement, ...]:
    """The stages of a plan, checked against the model and the number of ranks."""
    found = tuple(_place(texts, at, workload) for at, texts in enumerate(plan.stages))
    for at, place in enumerate(found):
        if not place.ranks or max(place.ranks) >= size or len(set(place.ranks)) < len(place.ranks):
            raise InputError(
                f"stage {at} is on ranks {group_text(place.ranks) or 'none'}",
                hint=f"there are ranks 0 to {size - 1}, each named once",
            )
    copies(found, workload)
    return found


def texts(found: Sequence[StagePlacement], workload: Workload) -> Names:
    """Stages as a plan writes them."""
    return tuple(place.texts(workload) for place in found)


def stage_spec(texts: Sequence[str]) -> StageSpec:
    """What the texts of one stage say."""
    ways = tuple(text for text in texts[1:] if text in WAYS)
    found = [_LAYERS.fullmatch(text) for text in texts[1:] if text not in WAYS]
    layers = tuple((one[1], int(one[2] or 0)) for one in found if one)
    return StageSpec(ranks_of(texts[0]), layers, ways)


def _place(texts: tuple[str, ...], at: int, workload: Workload) -> StagePlacement:
    names = {layer.name: i for i, layer in enumerate(workload.layers)}
    ranks, layers, ways = stage_spec(texts)
    times = [0] * len(names)
    for name, many in layers:
        if name not in names:
            raise unknown(f"layer of stage {at}", name, [*names, *WAYS])
        times[names[name]] += many or 1
    if not any(times):
        raise InputError(f"stage {at} has no layers", hint="write 0-3 embedding, or 0 block*8")
    return StagePlacement(ranks, tuple(times), ways)


def copies(found: Sequence[StagePlacement], workload: Workload) -> int:
    """How many whole models the stages make up."""
    many = {
        layer.name: sum(place.times[i] for place in found) / layer.times
        for i, layer in enumerate(workload.layers)
    }
    if len(set(many.values())) > 1 or not all(n >= 1 and n.is_integer() for n in many.values()):
        odd = next((n for n, m in many.items() if m != 1), "")
        layer = next(x for x in workload.layers if x.name == odd)
        raise InputError(
            f"the stages have `{odd}` {many[odd] * layer.times:g} times, "
            f"the model has {layer.times} of them",
            hint="split every layer, as often as the model has it",
        )
    return int(next(iter(many.values())))


def edges(found: Sequence[StagePlacement], workload: Workload) -> list[Edge]:
    """Stage pairs with a message between them, of the forward pass."""
    holder, reads = _holders(found, workload), layer_reads(workload)
    links: dict[tuple[int, int], list[int]] = {}
    for (copy, layer, turn), stage in holder.items():
        for source in reads[layer] if turn == 0 else [layer]:
            last = turn - 1 if turn else workload.layers[source].times - 1
            first = holder[copy, source, last]
            if first != stage:
                links.setdefault((first, stage), []).extend([source, *beside(workload, layer)])
    return [Edge(a, b, tuple(dict.fromkeys(ls))) for (a, b), ls in sorted(links.items())]


def _holders(
    found: Sequence[StagePlacement], workload: Workload
) -> dict[tuple[int, int, int], int]:
    """The stage of each (copy, layer, turn)."""
    seen = [0] * len(workload.layers)
    out = {}
    for stage, place in enumerate(found):
        for layer, many in enumerate(place.times):
            for _ in range(many):
                copy, turn = divmod(seen[layer], workload.layers[layer].times)
                out[copy, layer, turn] = stage
                seen[layer] += 1
    return out


def beside(workload: Workload, layer: int) -> list[int]:
    """What travels along with a layer's input: the encoder's output, as long as it is read."""
    if not _looks_back(workload.layers[layer]):
        return []
    back = [i for i in range(layer) if workload.layers[i].is_block]
    return [i for i in back if not _looks_back(workload.layers[i])][-1:]


def _looks_back(layer: Layer) -> bool:
    return any(op.name.startswith("cross.") for op in layer.ops)


def acts(plan: Plan, found: Sequence[StagePlacement]) -> list[list[Action]]:
    """What each rank does, in order; an error where a rank runs a stage that is not its own."""
    rows = [[_act(text) for text in row] for row in plan.actions]
    for rank, row in enumerate(rows):
        for act in row:
            if act.stage >= len(found) or rank not in found[act.stage].ranks:
                raise InputError(
                    f"rank {rank} runs `{act}`, and has no stage {act.stage}",
                    hint="give every rank a row with the actions of its own stages",
                )
    for place in found:
        for rank in place.ranks:
            if rank >= len(rows) or not rows[rank]:
                raise InputError(f"rank {rank} has a stage and no actions")
    return rows


def _act(text: str) -> Action:
    found = _ACTION.fullmatch(text)
    if not found:
        raise InputError(f"`{text}` is no action of a placed stage", hint="write 3F0, 3B0, 3I0")
    return Action(int(found[1]), found[2], int(found[3]))


def as_degrees(plan: Plan, workload: Workload) -> Plan | None:
    """The same plan in degrees, where its stages are a plain pipeline; None where they are not.

    Programs that know nothing of placed stages read that: pp, tp, layers, actions of each stage.
    """
    found = places(plan, workload, len(plan.actions))
    width, rows = len(found[0].ranks), acts(plan, found)
    ways = {way for place in found for way in place.ways}
    even = all(p.ranks == tuple(range(s * width, (s + 1) * width)) for s, p in enumerate(found))
    again = all(p.ways == ("recompute",) for p in found)
    plain = even and len(found) * width == len(rows) and (not ways or again)
    plain = plain and width <= workload.most("tp")
    if (
        not plain
        or not _is_line(found, workload)
        or {a.kind for row in rows for a in row} != {*"FB"}
    ):
        return None
    counts = tuple(sum(n for _, n in _blocks(place, workload)) for place in found)
    made = plan.but(stages=(), pp=len(found), tp=width, recompute="full" if again else "none")
    rows_of = [rows[place.ranks[0]] for place in found]
    return made.but(
        layers=() if counts == blocks_of(made.but(layers=()), workload) else counts,
        actions=tuple(tuple(f"{a.kind}{a.micro_batch}" for a in row) for row in rows_of),
    )


def _blocks(place: StagePlacement, workload: Workload) -> list[tuple[Layer, int]]:
    return [(x, n) for x, n in zip(workload.layers, place.times, strict=True) if x.is_block and n]


def _is_line(found: Sequence[StagePlacement], workload: Workload) -> bool:
    """Whether blocks of one kind are split in a row, what is no block at the ends."""
    blocks = [i for i, layer in enumerate(workload.layers) if layer.is_block]
    if len(blocks) != 1 or any(layer.after for layer in workload.layers):
        return False
    ends = (found[0].times[: blocks[0]], found[-1].times[blocks[0] + 1 :])
    return all(map(all, ends)) and all(_blocks(place, workload) for place in found)


class PlacedStageCost(NamedTuple):
    """A stage, or every layer once, and one micro-batch: seconds, and bytes of each rank."""

    forward: Any
    inputs: Any  # gradient of the input, with what is run again
    weights: Any  # gradient of the weights
    kept: Any  # from forward to backward
    brief: Any  # while forward runs
    moment: Any  # while backward runs: what was dropped and is made again
    parameters: Any
    trained: Any  # gradients and optimizer state besides
    elements: Any  # of weights that are trained
    tensors: Any  # how many of them there are
    lead: Any  # seconds by which the device has more to do than the host to issue

    @property
    def backward(self) -> Any:
        """Both gradients."""
        return self.inputs + self.weights


_LARGEST = ("brief", "moment")  # of a stage's layers; all else adds up
_TRAINED = ("weights", "trained", "elements", "tensors")


@dataclass(frozen=True)
class Prices:
    """One model on one cluster under one program: what layers take on any ranks."""

    plan: Plan  # checked: micro-batch, program and formats are its own
    workload: Workload
    cluster: Cluster
    _known: dict[object, tuple[Costs, PlacedStageCost]] = field(default_factory=dict, repr=False)
    _alike: dict[object, object] = field(default_factory=dict, repr=False)  # ranks, kind of ranks

    def rates(self, ranks: Sequence[int], *, recompute: bool = False) -> PlacedStageCost:
        """Every layer once, split over these ranks."""
        return self._priced(tuple(ranks), recompute)[1]

    def layers(self, ranks: Sequence[int]) -> Costs:
        """The prices that is made of."""
        return self._priced(tuple(ranks), recompute=False)[0]

    def _priced(self, ranks: tuple[int, ...], recompute: bool) -> tuple[Costs, PlacedStageCost]:
        if (ranks, recompute) not in self._alike:
            names = tuple(self.cluster.devices[r].name for r in ranks)
            self._alike[ranks, recompute] = (self.cluster.levels(ranks), names, recompute)
        alike = self._alike[ranks, recompute]
        if alike not in self._known:
            columns = _columns(self, ranks, recompute)
            self._known[alike] = columns.costs, _by_layer(columns)
        return self._known[alike]


def _columns(prices: Prices, ranks: tuple[int, ...], recompute: bool) -> StageColumns:
    """Every layer as a stage of its own on these ranks."""
    plan = prices.plan.but(
        tp=len(ranks), dp=1, pp=1, stages=(), actions=(), schedule="zb-h1",
        recompute="full" if recompute else "none",
    )  # fmt: skip
    every = np.eye(len(prices.workload.layers)).tolist()
    single_layers = [StageLayers(plan, ranks, once) for once in every]
    return priced_stages(single_layers, prices.workload, prices.cluster)[0].columns


def _by_layer(found: StageColumns) -> PlacedStageCost:
    """What they cost and hold, layer by layer."""
    c, cost, held, workload = found.costs, found.cost, found.memory, found.workload
    every = range(len(workload.layers))
    parts = [layer_parts(c, at, workload) for at in every]
    lead = [a.lead(c.overlap_exponent) + b.lead(c.overlap_exponent) for a, b in parts]
    weights = np.diagonal(found.weight_seconds)
    kept, moment, loss = held.each.copy(), held.workspace.copy(), c.layer_memories[-1]
    # Other actions may come between forward and backward of the loss: what it makes is kept.
    kept[-1], moment[-1] = (loss.kept + loss.gathered)[-1], loss.brief[-1]
    return PlacedStageCost(
        forward=cost.forward,
        inputs=cost.backward - weights,
        weights=weights,
        kept=ROUNDING * kept,
        brief=ROUNDING * found.brief,
        moment=ROUNDING * moment,
        parameters=ROUNDING * held.parameters,
        trained=ROUNDING * (held.gradients + held.optimizers),
        elements=cost.weights + cost.experts,
        tensors=cost.tensors,
        lead=np.array([lead[at][at] for at in every]),
    )


def placed_stage_cost(prices: Prices, place: StagePlacement) -> PlacedStageCost:
    """What a stage costs and holds."""
    r, times = prices.rates(place.ranks, recompute="recompute" in place.ways), np.array(place.times)
    found = {
        name: float(np.max(value * (times > 0)) if name in _LARGEST else product(times, value))
        for name, value in r._asdict().items()
    }
    if "frozen" in place.ways:
        found |= dict.fromkeys(_TRAINED, 0.0)
    return PlacedStageCost(**found)


def room(prices: Prices, rank: int) -> float:
    """Bytes a device has for tensors beside what the framework itself holds."""
    return float(prices.cluster.devices[rank].memory) * USABLE - _runtime(prices)


def _runtime(prices: Prices) -> float:
    return float(ROUNDING * running(prices.plan).profile.runtime)


def message(
    prices: Prices, first: StagePlacement, then: StagePlacement, layers: Sequence[int]
) -> float:
    """Seconds until the ranks of one stage have what another hands them."""
    missing = [r for r in then.ranks if r not in first.ranks]
    if not missing:
        return 0.0
    held = prices.layers(first.ranks).layer_memories
    size = float(sum(held[i].output_bytes[0] for i in layers))
    if len(missing) > len(first.ranks):
        group = prices.cluster.levels((first.ranks[0], *missing))
        return float(collective.price("broadcast", size, group).seconds)
    pairs = list(zip(first.ranks, missing, strict=False))
    groups = [
        prices.cluster.levels(pair, pairs[:at] + pairs[at + 1 :]) for at, pair in enumerate(pairs)
    ]
    return max(float(collective.price("send", size, group).seconds) for group in groups)


def offloading(prices: Prices, rank: int, size: float) -> float:
    """Seconds to move bytes between a device and its host."""
    return size / prices.cluster.host_bandwidth(rank)


def updating(prices: Prices, rank: int, mine: Sequence[StagePlacement]) -> float:
    """Seconds of the optimizer on one rank, for all its stages together; tied weights once."""
    paid = [placed_stage_cost(prices, place) for place in mine]
    elements, tensors, lead = (
        sum(getattr(one, name) for one in paid) for name in ("elements", "tensors", "lead")
    )
    for rates, layer, share in _tied_on_rank(prices, [p for p in mine if "frozen" not in p.ways]):
        elements, tensors = elements - share * float(rates.elements[layer]), tensors - 1
    device, learned = prices.cluster.devices[rank], prices.cluster.calibration
    return rank_update(device, learned, running(prices.plan), elements, tensors, lead)


def tying(prices: Prices, ranks: Sequence[int], elements: float) -> float:
    """Seconds to add up the gradients of weights that several ranks have."""
    plan = prices.plan
    width = BYTES[plan.grad_dtype or running(plan).grad_dtype]
    group = prices.cluster.levels(tuple(ranks))
    return float(collective.price("all_reduce", elements * width, group).seconds)


class MemoryChange(NamedTuple):
    """Bytes that a block adds on its ranks when it starts, and when it ends."""

    start: float
    end: float


def memory_change(
    kind: str, paid: PlacedStageCost, ways: Sequence[str], *, trains: bool, split: bool
) -> MemoryChange:
    """What one block of a stage does to the memory of its ranks."""
    away = "offload" in ways and trains
    kept = paid.kept if trains else 0.0
    if kind == "F":
        return MemoryChange(kept + paid.brief, -paid.brief - (kept if away else 0.0))
    back = paid.moment + (kept if away else 0.0)
    if kind == "W":
        return MemoryChange(0.0, -kept)
    if kind == "I" and split:
        return MemoryChange(back, -paid.moment)
    return MemoryChange(back, -kept - paid.moment)


def constant(prices: Prices, found: Sequence[StagePlacement], rank: int, *, trains: bool) -> float:
    """Bytes of weights, and of what training keeps beside them, on one rank."""
    mine = [place for place in found if rank in place.ranks]
    total = 0.0
    for place in mine:
        paid = placed_stage_cost(prices, place)
        total += paid.parameters + (paid.trained if trains else 0.0)
    for rates, layer, share in _tied_on_rank(prices, mine):
        held = rates.parameters[layer] + (rates.trained[layer] if trains else 0.0)
        total -= float(held * share)
    return total


def _tied_on_rank(
    prices: Prices, mine: Sequence[StagePlacement]
) -> Iterator[tuple[PlacedStageCost, int, float]]:
    """Tied weights whose layers meet on a rank, split alike: the layer, and their share of it."""
    workload = prices.workload
    for kept, other in workload.tied:
        first, last = (_layer(workload, name) for name in (kept, other))
        for a in mine:
            for b in mine:
                if a.times[first] and b.times[last] and a.ranks == b.ranks:
                    r = prices.rates(b.ranks)
                    share = tied_elements(workload, other) / len(b.ranks) / r.elements[last]
                    yield r, last, float(min(share, 1.0))


def tied_elements(workload: Workload, name: str) -> float:
    """How many numbers a tied weight has."""
    return workload.weights.get(name, 0.0)


def _layer(workload: Workload, weight: str) -> int:
    names = [layer.name for layer in workload.layers]
    return names.index(weight.split("/")[0])


def peaks(
    prices: Prices, found: Sequence[StagePlacement], rows: Sequence[Sequence[Action]]
) -> list[float]:
    """The most bytes each rank holds, in the order of its actions."""
    trains = any(act.kind != "F" for row in rows for act in row)
    back = {act.stage for row in rows for act in row if act.kind != "F"}
    split = {act.stage for row in rows for act in row if act.kind == "W"}
    bills = [placed_stage_cost(prices, place) for place in found]
    out = []
    for rank, row in enumerate(rows):
        now = most = constant(prices, found, rank, trains=trains) if row else 0.0
        for act in row:
            s = act.stage
            by = memory_change(
                act.kind, bills[s], found[s].ways, trains=s in back, split=s in split
            )
            most = max(most, now + by.start, now + by.start + by.end)
            now += by.start + by.end
        out.append(most)
    return out


def seconds(prices: Prices, place: StagePlacement, kind: str, paid: PlacedStageCost) -> float:
    """How long one block of a stage takes; offloading hides behind it as far as it can."""
    took: float = {"F": paid.forward, "B": paid.backward, "I": paid.inputs, "W": paid.weights}[kind]
    if "offload" in place.ways and kind != "W":
        return max(took, offloading(prices, place.ranks[0], paid.kept))
    return took


@dataclass(frozen=True)
class PlacedStep(ResolvedStep):
    """A checked plan of placed stages, with its prices and what each rank does."""

    prices: Prices
    found: tuple[StagePlacement, ...]
    rows: list[list[Action]]

    @classmethod
    def of(cls, plan: Plan, prices: Prices) -> PlacedStep:
        """The step of a checked plan."""
        found = places(plan, prices.workload, prices.cluster.size)
        return cls(plan, prices.workload, prices.cluster, prices, found, acts(plan, found))

    @property
    def advice(self) -> str:
        """What to do where it does not fit."""
        return "let more stages recompute, or spread them wider"

    @cached_property
    def kinds(self) -> set[tuple[int, str]]:
        """What is done of each stage."""
        return {(act.stage, act.kind) for row in self.rows for act in row}

    @cached_property
    def trained(self) -> set[int]:
        """Stages that have a backward."""
        return {stage for stage, kind in self.kinds if kind != "F"}

    @cached_property
    def links(self) -> list[Edge]:
        """Messages between stages."""
        return edges(self.found, self.workload)

    @cached_property
    def leaders(self) -> dict[int, int]:
        """The rank that stands for each: the first with the same actions."""
        first: dict[tuple[Action, ...], int] = {}
        return {r: first.setdefault(tuple(row), r) for r, row in enumerate(self.rows) if row}

    @cached_property
    def groups(self) -> list[list[int]]:
        """Of each stage: the ranks that stand for its own."""
        return [sorted({self.leaders[r] for r in place.ranks}) for place in self.found]

    @cached_property
    def bills(self) -> list[PlacedStageCost]:
        """What each stage costs and holds."""
        return [placed_stage_cost(self.prices, place) for place in self.found]

    def program(self, detail: str) -> Program:
        """The program of the step; a stage is one task whatever the detail."""
        out = Program()
        names = (("compute", "compute"), ("send on", "comm"), ("send back", "comm"))
        lanes = {
            rank: [out.lane(rank, *name) for name in names]
            for rank in dict.fromkeys(self.leaders.values())
        }
        self._add_stages(out, lanes)
        self._add_messages(out, lanes)
        if self.trained:
            self._add_end(out, lanes)
        for rank in lanes:
            size = constant(self.prices, self.found, rank, trains=bool(self.trained))
            out.buffers.append(Buffer(rank, "parameter", "weights and their state", size))
            out.buffers.append(Buffer(rank, "other", "program", _runtime(self.prices)))
        for s, place in enumerate(self.found):
            for rank in self.groups[s]:
                out.buffers += self._activations(rank, s, "offload" in place.ways)
        return out

    def _activations(self, rank: int, s: int, is_offloaded: bool) -> list[Buffer]:
        """What a rank holds of each micro-batch of a stage: for its backward, and for a moment."""
        paid, name = self.bills[s], "kept for the backward"
        brief = Buffer(rank, "workspace", "forward", paid.brief, s, FORWARD, FORWARD)
        if s not in self.trained:
            return [brief]
        kept = Buffer(rank, "activation", name, paid.kept, s)
        some = [kept]
        if is_offloaded:
            some = [kept._replace(last=FORWARD), kept._replace(first=BACKWARD)]
        back = Buffer(rank, "workspace", "backward", paid.moment, s, BACKWARD, BACKWARD)
        return [*some, brief, back]

    def priced_layers(self) -> list[tuple[tuple[int, ...], Costs, Sequence[float]]]:
        """Of every stage its ranks, the prices of all layers, and how often each runs there."""
        again = [np.full(1, 2 * ("recompute" in one.ways)) for one in self.found]
        return [
            (one.ranks, replace(self.prices.layers(one.ranks), again=rerun), one.times)
            for one, rerun in zip(self.found, again, strict=True)
        ]

    def _add_stages(self, out: Program, lanes: dict[int, list[int]]) -> None:
        """The actions of every stage, in one order for all ranks."""
        numbers: dict[tuple[int, str], int] = {}
        mine: list[list[tuple[int, int, int, int]]] = [[] for _ in self.found]
        for at, act in enumerate(self.in_order()):
            key, place = (act.stage, act.kind), self.found[act.stage]
            if key not in numbers:
                took = seconds(self.prices, place, act.kind, self.bills[act.stage])
                name = " ".join(place.texts(self.workload)[1:])
                numbers[key] = len(out.chains)
                out.chains.append([Piece("kernel", _OPS[act.kind], took, name)])
            mine[act.stage].append((numbers[key], _WAYS_OF[act.kind], act.micro_batch, at))
        for group, rows in zip(self.groups, mine, strict=True):
            chain, way, micro, order = np.array(rows, np.int64).reshape(-1, 4).T
            held = tuple(lanes[rank][0] for rank in group)
            nowhere = np.zeros(len(rows), np.int64)
            out.stages.append(
                StageTasks(group[0], held, held[0], chain, way, nowhere, micro, order)
            )

    def in_order(self) -> list[Action]:
        """All actions, each after what it needs and as every rank of its stage has it."""
        at, done = dict.fromkeys(self.leaders.values(), 0), dict[Action, None]()
        moved = True
        while moved:
            moved = False
            for rank in at:
                while act := self._next(rank, at):
                    group = self.groups[act.stage]
                    if any(self._next(r, at) != act for r in group):
                        break
                    if not all(need in done for need in self._needs(act)):
                        break
                    done[act] = None
                    at |= {r: at[r] + 1 for r in group}
                    moved = True
        for rank in at:
            if act := self._next(rank, at):
                raise InputError(
                    f"rank {rank} waits for ever before `{act}`",
                    hint="an action comes after what it needs, in one order on all ranks of its "
                    "stage",
                )
        return list(done)

    def _next(self, rank: int, at: dict[int, int]) -> Action | None:
        row = self.rows[rank]
        return row[at[rank]] if at[rank] < len(row) else None

    def _needs(self, act: Action) -> list[Action]:
        """What comes before an action."""
        s, m = act.stage, act.micro_batch
        if act.kind == "F":
            return [Action(e.first, "F", m) for e in self.links if e.then == s]
        if act.kind == "W":
            return [Action(s, "I", m)]
        behind = [e.then for e in self.links if e.first == s]
        back = [Action(b, k, m) for b in behind for k in "BI" if (b, k) in self.kinds]
        return [*back, Action(s, "F", m)]

    def _add_messages(self, out: Program, lanes: dict[int, list[int]]) -> None:
        """What stages send each other, and whose backward follows its own forward.

        Beside compute: placed stages run under PyTorch's pipelining, which waits for what it
        receives.
        """
        for link in self.links:
            ways = [(FORWARD, link.first, link.then)]
            if {link.first, link.then} <= self.trained:
                ways.append((BACKWARD, link.then, link.first))
            for way, here, there in ways:
                first, then = self.found[here], self.found[there]
                took, rank = message(self.prices, first, then, link.layers), self.groups[here][0]
                one = Message(way, (here, 0), (there, 0))
                if took:
                    group = group_text((first.ranks[0], then.ranks[0]))
                    lane = lanes[rank][1 + way]
                    one = one._replace(seconds=took, rank=rank, lane=lane, group=group)
                out.messages.append(one)
        behind = {link.first for link in self.links if link.then in self.trained}
        out.turns += [(s, 0) for s in sorted(self.trained - behind)]

    def _add_end(self, out: Program, lanes: dict[int, list[int]]) -> None:
        """Gradients of what several stages hold are added up; then every rank updates."""
        last = {rank: self.rows[rank][-1].stage for rank in lanes}
        behind = []
        for stages, elements in self._shared():
            ranks = [self.found[s].ranks[0] for s in stages]
            if len(set(ranks)) < 2 or not elements:
                continue
            first = [self.leaders[r] for r in ranks]
            wires = tuple(dict.fromkeys(lanes[r][1] for r in first))
            took = tying(self.prices, ranks, elements)
            behind.append(
                out.end(
                    "collective", "all_reduce", first[0], wires, took,
                    "communicate", stages=tuple(last[r] for r in first), group=group_text(ranks),
                )
            )  # fmt: skip
        for rank, mine in lanes.items():
            own = [place for place in self.found if rank in place.ranks]
            if took := updating(self.prices, rank, own):
                out.end(
                    "kernel", "optimizer", rank, (mine[0],), took, "update",
                    stages=tuple(last.values()), behind=tuple(behind),
                )  # fmt: skip

    def _shared(self) -> list[tuple[list[int], float]]:
        """Stages with the same weights, and how many a rank: copies of the model, and tied ones."""
        found, workload = self.found, self.workload
        each = len(found) // copies(found, workload)
        out = [
            ([k + c * each for c in range(len(found) // each)], self.bills[k].elements)
            for k in range(each if len(found) > each else 0)
        ]
        for kept, other in workload.tied:
            pair = [_layer(workload, name) for name in (kept, other)]
            ends = [next(s for s, p in enumerate(found) if p.times[at]) for at in pair]
            if found[ends[0]].ranks != found[ends[1]].ranks:
                size = tied_elements(workload, other) / min(len(found[e].ranks) for e in ends)
                out.append((ends, size))
        return out

    def memory(self) -> tuple[float, float, dict[str, float]]:
        """Bytes of the fullest rank, how many are missing there, and what they are."""
        most = peaks(self.prices, self.found, self.rows)
        over = [m - room(self.prices, rank) for rank, m in enumerate(most)]
        worst, program = int(np.argmax(over if max(over) > 0 else most)), _runtime(self.prices)
        weights = constant(self.prices, self.found, worst, trains=False)
        rest = constant(self.prices, self.found, worst, trains=bool(self.trained)) - weights
        parts = {"parameters": weights, "gradients and optimizer": rest}
        parts |= {"activations": most[worst] - weights - rest, "program": program}
        return most[worst] + program, max(over[worst], 0.0), parts

    @property
    def work(self) -> float:
        """What of a training step's work is done: a third where there is no backward."""
        return 1.0 if self.trained else 1 / 3
