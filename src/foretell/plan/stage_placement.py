"""Pipeline stages placed freely: any layers on any ranks, several stages a rank or ranks a stage.

A plan says it in `stages`, one group of texts a stage, in the order of forward: the ranks, then the
layers (`block*8`: the next eight of that name), then what is done another way:

    0-3 embedding / 0 block*8 recompute / 1 block*8 / … / 0-3 head

A stage on several ranks is split over them as tensor parallelism splits it. The layers of all
stages together are the model once, or several times: then these are copies of it, each with its own
part of the batch (two pipelines in opposite directions). `actions` has a row a rank: `3F0`, `3B0`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from foretell.errors import InputError, unknown
from foretell.graph.groups import group_text, ranks_of
from foretell.plan.layouts import blocks_of
from foretell.plan.plan import Names, Plan
from foretell.workload import Layer, Workload

WAYS = {
    "recompute": "keeps inputs of layers alone and runs forward again",
    "offload": "what it keeps waits in the host's memory",
    "frozen": "its weights are not trained",
}
_LAYERS = re.compile(r"(.+?)(?:\*(\d+))?")
_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")


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
    """Edges between stages in forward: reader, writer and tensors."""
    holder = _holders(found, workload)
    links: dict[tuple[int, int], list[int]] = {}
    for (copy, layer, turn), stage in holder.items():
        for source in _sources(workload, layer) if turn == 0 else [layer]:
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


def _sources(workload: Workload, layer: int) -> list[int]:
    """The layers that one reads; the model's input is none."""
    after = workload.layers[layer].after
    if not after:
        return [layer - 1] if layer else []
    names = [x.name for x in workload.layers]
    return [names.index(name) for name in after if name]


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
