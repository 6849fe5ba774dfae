"""Where the layers of a model go: placements worth a schedule, by the name of their shape.

    v     stages one after the other, each on the ranks it needs
    m     first and last layers (words, logits) on all ranks, stages between them
    nn    every layer that is no block on all ranks: those in the middle too
    k     branches side by side on their part of the ranks, what joins them on all
    x     two copies of the model in opposite directions
    loop  two stages a rank, twice over the ranks in turn (interleaved)
    wave  two stages a rank, there and back (a V)
    tp    everything on all ranks

Stages are cut by `foretell.search.schedule.cut`. A layer on all ranks is split over them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, takewhile

import numpy as np

from foretell.errors import ForetellError, InfeasibleError, InputError, unknown
from foretell.plan.memory import ROUNDING
from foretell.plan.place_costs import Prices
from foretell.plan.place_memory import constant
from foretell.plan.places import Place
from foretell.search.schedule.cut import Cutting, Stage, cut
from foretell.workload import Layer, Workload

SHAPES = ("v", "m", "nn", "k", "x", "loop", "wave", "tp")


@dataclass(frozen=True)
class Asked:
    """What stages are for."""

    prices: Prices
    micro_batches: int = 8
    trains: bool = True
    recompute: bool = False
    frozen: tuple[str, ...] = ()  # layers that are not trained

    @property
    def workload(self) -> Workload:
        return self.prices.workload

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(range(self.prices.cluster.size))


def arrange(shape: str, asked: Asked) -> tuple[Place, ...]:
    """The stages of a shape."""
    if shape not in SHAPES:
        raise unknown("placement shape of a model", shape, ("auto", *SHAPES))
    for name in asked.frozen:
        if name not in [layer.name for layer in asked.workload.layers]:
            names = [layer.name for layer in asked.workload.layers]
            raise unknown("frozen layer", name, names)
    made = _MADE[shape](asked)
    return tuple(_with_ways(asked, place) for place in made)


def arrangements(asked: Asked) -> Iterator[tuple[str, tuple[Place, ...]]]:
    """Every shape that fits the model and the memory, once."""
    seen = set()
    for shape in SHAPES:
        try:
            made = arrange(shape, asked)
        except ForetellError:
            continue
        if made not in seen:
            seen.add(made)
            yield shape, made


def _with_ways(asked: Asked, place: Place) -> Place:
    layers = asked.workload.layers
    mine = [layers[i] for i, n in enumerate(place.times) if n]
    ways = []
    if asked.recompute and asked.trains and any(layer.is_block for layer in mine):
        ways.append("recompute")
    if mine and all(layer.name in asked.frozen for layer in mine):
        ways.append("frozen")
    return replace(place, ways=tuple(ways))


def _tp(asked: Asked) -> list[Place]:
    times = tuple(layer.times for layer in asked.workload.layers)
    return [Place(asked.ranks, times)]


def _v(asked: Asked) -> list[Place]:
    return _chain(asked, set())


def _m(asked: Asked) -> list[Place]:
    return _chain(asked, _outer(asked))


def _nn(asked: Asked) -> list[Place]:
    found = _ends(asked)
    if found == _outer(asked):
        raise InputError(
            f"`{asked.workload.name}` has nothing in its middle for all ranks",
            hint="shape nn is for an encoder and a decoder; take m",
        )
    return _chain(asked, found)


def _outer(asked: Asked) -> set[int]:
    """The ends before the first block and behind the last."""
    found, line = _ends(asked), range(len(asked.workload.layers))
    return {i for way in (line, line[::-1]) for i in takewhile(found.__contains__, way)}


def _ends(asked: Asked) -> set[int]:
    """Layers that are no block of the model: words, logits; of a captured one lone products too."""
    layers = asked.workload.layers
    most = max(_products(layer) for layer in layers)
    lone = {i for i, x in enumerate(layers) if x.times == 1 and _products(x) <= 1 < most}
    return lone | {i for i, layer in enumerate(layers) if not layer.is_block}


def _products(layer: Layer) -> int:
    return sum(op.kind in ("matmul", "conv", "attention") for op in layer.works())


def _chain(asked: Asked, wide: set[int]) -> list[Place]:
    """Layers in their order: those in `wide` on all ranks, the others in stages."""
    layers = asked.workload.layers
    line = [i for i, layer in enumerate(layers) for _ in range(layer.times)]
    narrow = tuple(i for i in line if i not in wide)
    if not narrow:
        return _tp(asked)
    taken = _held(asked, wide)
    stages = cut(_cutting(asked, narrow, asked.ranks, taken))
    where = _where(stages)
    homes, at = [], 0
    for i in line:
        homes.append(asked.ranks if i in wide else where[at])
        at += i not in wide
    runs = groupby(zip(homes, line, strict=True), key=lambda pair: pair[0])
    return [p for ranks, run in runs for p in _stages(asked, ranks, [i for _, i in run])]


def _cutting(asked: Asked, line: tuple[int, ...], ranks: Sequence[int], taken: float) -> Cutting:
    names = [layer.name for layer in asked.workload.layers]
    frozen = frozenset(names.index(name) for name in asked.frozen)
    return Cutting(
        asked.prices, line, tuple(ranks), asked.micro_batches, asked.trains, asked.recompute, taken,
        frozen=frozen,
    )  # fmt: skip


def _where(stages: Sequence[Stage]) -> list[tuple[int, ...]]:
    return [s.ranks for s in stages for _ in range(s.last - s.first)]


def _held(asked: Asked, wide: set[int]) -> float:
    """Bytes on every rank of the layers that all of them share: for good, and for a moment."""
    if not wide:
        return 0.0
    layers, r, mine = asked.workload.layers, asked.prices.rates(asked.ranks), sorted(wide)
    times = tuple(layer.times if i in wide else 0 for i, layer in enumerate(layers))
    held = constant(asked.prices, [Place(asked.ranks, times)], 0, trains=asked.trains)
    passing = np.array(times, float) @ r.kept * asked.trains + np.max(r.brief[mine])
    return held + ROUNDING * float(passing)


def _stages(asked: Asked, ranks: tuple[int, ...], line: Sequence[int]) -> list[Place]:
    """A run of layers as stages: what is frozen is one of its own, with less to do."""
    layers = asked.workload.layers
    runs = groupby(line, key=lambda i: layers[i].name in asked.frozen)
    return [_placed(asked, ranks, list(run)) for _, run in runs]


def _placed(asked: Asked, ranks: tuple[int, ...], line: Sequence[int]) -> Place:
    return Place(ranks, tuple(line.count(i) for i in range(len(asked.workload.layers))))


def _k(asked: Asked) -> list[Place]:
    """Branches on their share of the ranks, what joins them on all."""
    ways = branches(asked.workload)
    if len(ways) < 2:
        raise InputError(
            f"`{asked.workload.name}` has no branches that join",
            hint="shape k is for models of several encoders; take v or m",
        )
    layers = asked.workload.layers
    joined = [i for i in range(len(layers)) if not any(i in way for way in ways)]
    taken = _held(asked, set(joined))
    out, first = [], 0
    for way, ranks in zip(ways, _shares(asked, ways), strict=True):
        line = tuple(i for i in way for _ in range(layers[i].times))
        mine = asked.ranks[first : first + ranks]
        first += ranks
        for stage in cut(_cutting(asked, line, mine, taken)):
            out += _stages(asked, stage.ranks, line[stage.first : stage.last])
    last = [i for i in joined for _ in range(layers[i].times)]
    return [*out, *_stages(asked, asked.ranks, last)]


def branches(workload: Workload) -> list[list[int]]:
    """Runs of layers that do not wait for each other, up to where they join."""
    names = [layer.name for layer in workload.layers]
    joins = [i for i, layer in enumerate(workload.layers) if len(layer.after) > 1]
    if not joins:
        return []
    out = []
    for name in workload.layers[joins[0]].after:
        way, here = [], names.index(name)
        while True:
            way.append(here)
            after = workload.layers[here].after or ((names[here - 1],) if here else ("",))
            if not after[0]:
                break
            here = names.index(after[0])
        out.append(way[::-1])
    both = [i for way in out for i in way]
    return out if len(set(both)) == len(both) else []  # a way around is no branch


def _shares(asked: Asked, ways: Sequence[Sequence[int]]) -> list[int]:
    """Ranks for each branch, by its work; every branch gets one."""
    size = len(asked.ranks)
    if size < len(ways):
        raise InfeasibleError(
            f"{len(ways)} branches on {size} ranks", hint="take as many ranks as branches, or v"
        )
    r = asked.prices.rates(asked.ranks[:1])
    layers = asked.workload.layers
    both = r.forward + (r.inputs + r.weights) * asked.trains
    work = [sum(layers[i].times * float(both[i]) for i in way) for way in ways]
    shares = [max(1, round(size * w / sum(work))) for w in work]
    while sum(shares) != size:
        step = 1 if sum(shares) < size else -1
        loads = [w / s if step > 0 or s > 1 else np.inf for w, s in zip(work, shares, strict=True)]
        shares[int(np.argmax(loads) if step > 0 else np.argmin(loads))] += step
    return shares


def _x(asked: Asked) -> list[Place]:
    """Two copies of the model over the same sets of ranks, the second the other way round."""
    for line, ranks, width in _widths(asked):
        with suppress(InfeasibleError):
            stages = _halved(asked, line, ranks, width)
            homes = [s.ranks for s in stages]
            turned = dict(zip(homes, homes[::-1], strict=True))
            there = [p for s in stages for p in _stages(asked, s.ranks, line[s.first : s.last])]
            return [*there, *(replace(p, ranks=turned[p.ranks]) for p in there)]
    raise InfeasibleError(
        f"two copies of `{asked.workload.name}` do not fit into memory",
        hint="take more ranks, a smaller micro-batch, or another shape",
    )


def _rounds(asked: Asked, *, turns: bool) -> list[Place]:
    """Two stages a rank: a second round over the ranks, in turn again or back."""
    for line, ranks, width in _widths(asked):
        groups = [ranks[i : i + width] for i in range(0, len(ranks), width)]
        order = groups + (groups[::-1] if turns else groups)
        with suppress(InfeasibleError):
            found = _halved(asked, line, tuple(r for g in order for r in g), width, len(order))
            return [p for s in found for p in _stages(asked, s.ranks, line[s.first : s.last])]
    raise InfeasibleError(
        f"two stages of `{asked.workload.name}` a rank do not fit into memory, or it has too few",
        hint="take more ranks, a smaller micro-batch, or shape v",
    )


def _widths(asked: Asked) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """The layers in a line, the ranks, and how many of them a stage may have."""
    layers, size = asked.workload.layers, len(asked.ranks)
    line = tuple(i for i, layer in enumerate(layers) for _ in range(layer.times))
    for width in (1 << k for k in range(size.bit_length())):
        if size % width == 0 and size // width > 1:
            yield line, asked.ranks, width


def _halved(
    asked: Asked, line: tuple[int, ...], ranks: tuple[int, ...], width: int, stages: int = 0
) -> list[Stage]:
    """Stages of one width that leave half of the memory to others."""
    plain = _cutting(asked, line, ranks, 0.0)
    return cut(replace(plain, share=0.5, widths=(width,), stages=stages))


_MADE: dict[str, Callable[[Asked], list[Place]]] = {
    "v": _v, "m": _m, "nn": _nn, "k": _k, "x": _x, "tp": _tp,
    "loop": partial(_rounds, turns=False), "wave": partial(_rounds, turns=True),
}  # fmt: skip
