"""Layers in a row that the same ranks run on the same samples: one range each.

Nothing is sent inside a range. Plans of `groups` list them row by row; a plan of data parallelism
whose ranks have `shares`, or whose parameters are reduced in ways of their own (`sync`), is one
range of all layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from foretell.errors import InputError, unknown
from foretell.plan.group_costs import Array, GroupCosts, Product, gathered, held, products
from foretell.plan.grouped import agreed, layers_of, micro_batches, runs, spoken
from foretell.plan.plan import Plan

_ONE_RANK = "all-reduce"  # there is nothing to agree with: any way is this


@dataclass(frozen=True)
class Layer:
    """One layer, and how its replicas agree."""

    unit: int
    name: str
    way: str
    server: int = -1  # the rank that updates it for everyone
    factors: tuple[Product, ...] = ()  # what of it goes as factors


@dataclass(frozen=True)
class LayerRange:
    """Layers in a row on the same ranks."""

    layers: tuple[Layer, ...]
    samples: Mapping[int, int]
    batches: int  # micro-batches
    is_split: bool = False

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Who runs it, in the order of their samples."""
        return tuple(self.samples)

    @property
    def batch(self) -> int:
        """Samples of a step."""
        each = [*self.samples.values()]
        return each[0] if self.is_split else sum(each)

    @property
    def rows(self) -> int:
        """Samples whose factors are gathered: as many of each rank as the one with most has."""
        return len(self.samples) * max(self.samples.values())

    @cached_property
    def units(self) -> list[int]:
        """Its layers, by number."""
        return [layer.unit for layer in self.layers]

    def seconds(self, costs: GroupCosts, rank: int) -> tuple[float, float]:
        """Forward and backward of one micro-batch."""
        ahead, back = self._each(costs, rank)
        return float(ahead[self.units].sum()), float(back[self.units].sum())

    def _each(self, costs: GroupCosts, rank: int) -> tuple[Array, Array]:
        many = -(-self.samples[rank] // self.batches)
        if self.is_split:
            return costs.split_seconds(self.ranks, many)
        return costs.seconds(costs.cluster.devices[rank], many)

    def backward(
        self, costs: GroupCosts, rank: int, piece: Sequence[Layer], *, by_factors: bool
    ) -> float:
        """Some layers backward, without the matmuls that factors will make."""
        _, back = self._each(costs, rank)
        took = float(back[[layer.unit for layer in piece]].sum())
        if by_factors:
            many, device = -(-self.samples[rank] // self.batches), costs.cluster.devices[rank]
            took -= sum(
                costs.product_seconds(device, p, many) for layer in piece for p in layer.factors
            )
        return max(took, 0.0)

    def messages(self, costs: GroupCosts, fuse: float) -> list[tuple[Layer, ...]]:
        """Layers with one gradient bucket, the last first: one way and server, up to `fuse`."""
        out: list[list[Layer]] = []
        size = 0.0
        for layer in reversed(self.layers):
            mine = costs.gradient([layer.unit])
            like = out and out[-1][-1].way == layer.way and out[-1][-1].server == layer.server
            if like and layer.way != "factors" and size + mine <= fuse:
                out[-1].append(layer)
                size += mine
            else:
                out.append([layer])
                size = mine
        return [tuple(reversed(piece)) for piece in out]

    def update(self, costs: GroupCosts, rank: int) -> float:
        """Seconds of the optimizer on one rank."""
        if rank not in self.samples:
            return 0.0
        device, many, out = costs.cluster.devices[rank], len(self.ranks), 0.0
        for layer in self.layers:
            whole = costs.update(device, layer.unit)
            if layer.way == "ps" and layer.server != rank:
                whole = 0.0
            elif layer.way == "sharded":
                whole /= many
            out += whole * self._kept_part(costs, layer.unit)
        return out

    def _kept_part(self, costs: GroupCosts, unit: int) -> float:
        """What of a layer's weights one rank has."""
        if not self.is_split:
            return 1.0
        whole = float(costs.held["weights"][unit])
        return float(self._split_held(costs)["weights"][unit]) / max(whole, 1.0)

    def _split_held(self, costs: GroupCosts) -> dict[str, Array]:
        return held(costs.workload, costs.plain, **costs.degrees(len(self.ranks)))

    def holds(self, costs: GroupCosts, rank: int, flying: int) -> tuple[dict[str, float], float]:
        """Bytes of one rank by what they are, and those that are there for a moment.

        It has so many micro-batches at once whose backward is still to come.
        """
        many, state = -(-self.samples[rank] // self.batches), costs.widths[2]
        found = costs.memory(self.units, len(self.ranks), many, split=self.is_split)
        sent = max(self._factor_bytes(costs, layer) for layer in self.layers)
        less = sum(self._others(costs, layer, rank) for layer in self.layers) * state
        out = {
            "parameters": float(found.parameters[0]),
            "gradients": float(found.gradients[0]),
            "optimizer": max(float(found.optimizers[0]) - less, 0.0),
            "activations": float(found.each[0]) * flying,
        }
        return out, max(float(found.workspace[0]), sent)

    def _others(self, costs: GroupCosts, layer: Layer, rank: int) -> float:
        """Elements of a layer whose optimizer state other ranks keep."""
        share = 1 / len(self.ranks) if layer.way == "sharded" else 1.0
        share = 0.0 if layer.way == "ps" and layer.server != rank else share
        return (1 - share) * float(costs.held["weights"][layer.unit])

    def _factor_bytes(self, costs: GroupCosts, layer: Layer) -> float:
        """Bytes of the factors gathered for the weights of a layer."""
        return gathered(layer.factors) * self.rows * costs.widths[1]


def is_apart(plan: Plan) -> bool:
    """Whether ranks are priced one by one: layers apart, or replicas that are not alike."""
    plain = plan.zero <= 1 and plan.recompute == "none" and not plan.offload
    only_dp = all(n == 1 for axis, n in plan.degrees().items() if axis != "dp") and plan.ep == 1
    return bool(plan.groups or ((plan.shares or plan.sync) and plain and only_dp))


def layer_ranges(plan: Plan, costs: GroupCosts) -> tuple[list[LayerRange], int]:
    """The layer_ranges of a checked plan in order of forward, and its micro-batches."""
    ways = _named(plan, costs)
    if not plan.groups:
        shares = plan.shares or (plan.global_batch // plan.dp,) * plan.dp
        batches = -(-max(shares) // plan.micro_batch) if plan.micro_batch else 1
        usual, ranks = "sharded" if plan.zero == 1 else _ONE_RANK, tuple(range(plan.dp))
        layers = tuple(_layer(costs, at, usual, ranks, ways[at]) for at in range(len(ways)))
        return [LayerRange(layers, dict(enumerate(shares)), batches)], batches
    found, batches = runs(plan), micro_batches(plan)
    names = [unit.name for unit in costs.units]
    rows = []
    for run, where in zip(found, layers_of(found, names, costs.workload.name), strict=True):
        layers = tuple(_layer(costs, at, run.way, run.ranks, ways[at], run.batch) for at in where)
        rows.append(LayerRange(layers, run.samples, batches, run.way == "split"))
    out = []
    for _, same in groupby(rows, key=lambda row: (list(row.samples.items()), row.is_split)):
        each = list(same)
        layers = tuple(layer for row in each for layer in row.layers)
        out.append(LayerRange(layers, each[0].samples, batches, each[0].is_split))
    return out, batches


def _named(plan: Plan, costs: GroupCosts) -> list[dict[str, str]]:
    """Of each layer: the ways of single ops, where the plan's `sync` names their parameters."""
    left, out, known = agreed(plan), [], []
    for unit in costs.units:
        ways: dict[str, str] = {}
        for op in costs.workload.layers[unit.layer].works():
            for weight in op.weights:
                known.append(f"{unit.name}/{weight.name}")
                said = next((name for name in spoken(known[-1]) if name in left), None)
                if said is not None:
                    ways[f"{unit.name}/{op.name}"] = left.pop(said)
        out.append(ways)
    if left:
        raise unknown("parameter in the plan's `sync`", next(iter(left)), known)
    return out


def _layer(
    costs: GroupCosts, at: int, usual: str, ranks: tuple[int, ...], ways: Mapping[str, str],
    batch: int = 0,
) -> Layer:  # fmt: skip
    """A layer with the way of most consequence that its parameters have, or else the usual one.

    Where nothing says who serves it, ranks take turns; nor what goes as factors, what pays.
    """
    name, said = costs.units[at].name, {w.partition(":")[0]: w for w in ways.values()}
    way = next((w for w in ("factors", "ps", "sharded") if w in said), usual)
    if len(ranks) == 1 or way == "split":
        return Layer(at, name, _ONE_RANK)
    if way == "ps":
        return Layer(at, name, way, served_by(said.get("ps", ""), ranks, at, name))
    if way != "factors":
        return Layer(at, name, way)
    if "factors" not in said:
        return Layer(at, name, way, factors=tuple(costs.paying(at, ranks, batch)))
    every = products(costs.workload, costs.units[at])
    sent = [p for p in every if ways.get(p.name) == "factors"]
    if not sent:
        raise InputError(
            f"`{min(op for op, word in ways.items() if word == 'factors')}` has no factors",
            hint="only matmuls with a weight of their own do: linear layers",
        )
    return Layer(at, name, way, factors=tuple(sent))


def served_by(way: str, ranks: tuple[int, ...], turn: int, name: str) -> int:
    """The rank that serves a layer: the one that `ps:K` counts to, or whose turn it is."""
    place = way.partition(":")[2]
    if not way:
        return ranks[turn % len(ranks)]
    if not (place.isdecimal() and int(place) < len(ranks)):
        raise InputError(
            f"`{name}` is served by rank {place or 'none'}, there are {len(ranks)}",
            hint=f"write ps:0 to ps:{len(ranks) - 1}",
        )
    return ranks[int(place)]
