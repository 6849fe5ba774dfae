"""Plans that place ranges of layers on ranks of their own (`groups`): ranges, seconds and memory.

A `LayerRange` is consecutive layers on the same ranks; nothing is sent inside it. Plans with
`groups` list ranges row by row; a data-parallel plan with uneven `shares`, or with a reduction
method per parameter (`sync`), is one range of all layers.

`GroupCosts` prices single layers for exactly the samples a rank gets: kernels from
`plan.layer_cost`, messages from `foretell.cost.collective`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, groupby
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from foretell.cluster import Cluster, Device
from foretell.cost import collective, kernel
from foretell.errors import InputError, unknown
from foretell.plan.check import (
    Unit,
    agreed,
    layers_of,
    micro_batches_of_groups,
    runs,
    spoken,
    units,
)
from foretell.plan.costs import trained_tensors, unpriced
from foretell.plan.estimate import bend_on, rank_update
from foretell.plan.framework import Running, running
from foretell.plan.layer_cost import holdings, layer_costs
from foretell.plan.layouts import layouts
from foretell.plan.memory import Memory, stage_memory
from foretell.plan.plan import Plan
from foretell.workload import Op, Workload
from foretell.workload.workload import BYTES

Array = npt.NDArray[np.float64]


_MOST_CHOSEN = 6
_MANY = 16  # samples that bytes are counted for: what does not grow with them hardly counts
_ONE_RANK = "all-reduce"  # there is nothing to agree with: any way is this


class FactorMatmul(NamedTuple):
    """A matmul whose weight gradient xᵀ·dy may be sent as its two factors x and dy."""

    name: str  # behind the name of its layer
    n1: float
    n2: float
    rows: float  # of one sample
    elements: float  # of weight and bias
    source: str = ""  # the first op that reads its input: one input, gathered once for all of them


def factor_matmuls(workload: Workload, unit: Unit) -> list[FactorMatmul]:
    """The matmuls of a unit; tied weights have none."""
    layer = workload.layers[unit.layer]
    again = {name for pair in workload.tied for name in pair}
    found, before, source = [], None, ""
    for op in layer.works():
        if op.when.startswith("fused"):
            continue
        is_product = op.kind == "matmul" and bool(op.weights)
        reads = (op.dims.get("tokens", 1.0), op.dims["in"]) if is_product else None
        # Two matmuls with nothing between them would be one: they read the same input.
        source = source if reads and reads == before else op.name
        before = reads
        if is_product and not any(f"{layer.name}/{w.name}" in again for w in op.weights):
            found.append(_product(unit.name, op, source))
    return found


def gathered(some: Sequence[FactorMatmul]) -> float:
    """Numbers of one sample that are gathered for some matmuls: inputs that they share once."""
    inputs = {p.source or p.name: p.rows * p.n1 for p in some}
    return sum(inputs.values()) + sum(p.rows * p.n2 for p in some)


def sharing(some: Sequence[FactorMatmul]) -> list[list[FactorMatmul]]:
    """Matmuls by the input that they read."""
    found: dict[str, list[FactorMatmul]] = {}
    for p in some:
        found.setdefault(p.source or p.name, []).append(p)
    return [*found.values()]


def choices(some: Sequence[FactorMatmul]) -> list[tuple[FactorMatmul, ...]]:
    """Which of some matmuls with one input may go as factors: any; of many, none or all."""
    if len(some) > _MOST_CHOSEN:
        return [(), tuple(some)]
    return [c for n in range(len(some) + 1) for c in combinations(some, n)]


class UnitSeconds(NamedTuple):
    """Every unit once, by number of samples where there are several."""

    forward: Array
    backward: Array
    lead: Array  # by which the device has more to do than the host to issue


def unit_seconds(
    workload: Workload, cluster: Cluster, device: Device, plain: Plan, sizes: Array, **degrees: int
) -> UnitSeconds:
    """Every unit at some numbers of samples on one kind of device: units × sizes."""
    run, bend = running(plain), bend_on(device, running(plain))
    table = layouts([plain.but(micro_batch=int(b), global_batch=int(b), **degrees) for b in sizes])
    costs = layer_costs(workload, cluster, table, device)
    parts = [(c.forward, c.backward) for c in costs]
    ahead, back = ([pair[way].seconds(bend) for pair in parts] for way in (0, 1))
    lead = [sum(part.lead(bend) for part in pair) for pair in parts]
    back[-1] = back[-1] + run.profile.microbatch * cluster.calibration.host  # beside the loss
    each = [unit.layer for unit in units(workload)]
    return UnitSeconds(*(np.array([rows[i] for i in each]) for rows in (ahead, back, lead)))


@dataclass(frozen=True, eq=False)
class GroupCosts:
    """Prices of a workload's layers on the devices of a cluster, under one program."""

    workload: Workload
    cluster: Cluster
    run: Running
    plain: Plan  # what single layers are priced under: program and precision

    @classmethod
    def of(cls, plan: Plan, workload: Workload, cluster: Cluster) -> GroupCosts:
        names = ("framework", "precision", "dtype", "compile", "optimizer", "optimizer_kernels")
        plain = Plan(**{name: getattr(plan, name) for name in names})
        return cls(workload, cluster, running(plan), plain)

    @cached_property
    def units(self) -> list[Unit]:
        """Every layer of the model once for each time it runs."""
        return units(self.workload)

    @cached_property
    def _known(self) -> dict[Any, UnitSeconds]:
        return {}

    def seconds(self, device: Device, samples: int) -> UnitSeconds:
        """Each unit with so many samples."""
        key = (device.name, samples)
        if key not in self._known:
            self._known[key] = self._priced(self.cluster, device, samples)
        return self._known[key]

    def split_seconds(self, ranks: Sequence[int], samples: int) -> UnitSeconds:
        """The same of units that are split over all of some ranks."""
        key = (tuple(ranks), samples)
        if key not in self._known:
            device = self.cluster.devices[ranks[0]]
            part = self.cluster.part(tuple(ranks))
            self._known[key] = self._priced(part, device, samples, **self.degrees(len(ranks)))
        return self._known[key]

    def degrees(self, ranks: int) -> dict[str, int]:
        """How units are split over so many ranks."""
        return {"tp" if self.workload.most("tp") > 1 else "filter": ranks}

    def _priced(
        self, cluster: Cluster, device: Device, samples: int, **degrees: int
    ) -> UnitSeconds:
        found = unit_seconds(
            self.workload, cluster, device, self.plain, np.array([samples]), **degrees
        )
        return UnitSeconds(*(values[:, 0] for values in found))

    @cached_property
    def held(self) -> dict[str, Array]:
        """What each unit holds."""
        return held(self.workload, self.plain)

    @cached_property
    def widths(self) -> tuple[float, float, float]:
        """Bytes of a parameter, of its gradient, and of its optimizer's state."""
        run = self.run
        return run.weight_bytes + run.cast_bytes, BYTES[run.grad_dtype], run.state_bytes

    def memory(self, units: Sequence[int], ranks: int, many: int, *, split: bool) -> Memory:
        """What one rank holds of some units, with so many samples at a time."""
        degrees = self.degrees(ranks) if split else {"dp": ranks}
        each = many if split else many * ranks
        one = self.plain.but(micro_batch=many, global_batch=each, **degrees)
        times = np.zeros((len(self.workload.layers), 1))
        for at in units:
            times[self.units[at].layer] += 1.0
        return stage_memory(unpriced([one], self.workload), times, self.workload, np.zeros(1))

    def gradient(self, at: Sequence[int]) -> float:
        """Bytes of the gradients of some units."""
        return float(self.held["weights"][list(at)].sum()) * self.widths[1]

    def talk(self, op: str, size: float, ranks: Sequence[int]) -> float:
        """Seconds of a collective, or of a message between two ranks."""
        if len(set(ranks)) < 2 or not size:
            return 0.0
        return float(collective.price(op, size, self.cluster.levels(tuple(ranks))).seconds)

    # Factors

    def paying(self, at: int, ranks: Sequence[int], batch: int) -> list[FactorMatmul]:
        """The matmuls of a unit whose factors take less than their gradients, on these links."""
        found: list[FactorMatmul] = []
        for some in sharing(factor_matmuls(self.workload, self.units[at])):
            worth = [(self._saved(sent, ranks, batch), sent) for sent in choices(some)]
            found += max(worth, key=lambda one: (one[0], -len(one[1])))[1]
        return found

    def _saved(self, sent: Sequence[FactorMatmul], ranks: Sequence[int], batch: int) -> float:
        """Seconds of communication that factors save."""
        width = self.widths[1]
        reduce = sum(self.talk("all_reduce", p.elements * width, ranks) for p in sent)
        return reduce - self.talk("all_gather", batch * gathered(sent) * width, ranks)

    def product_seconds(self, device: Device, product: FactorMatmul, samples: float) -> float:
        """Seconds of a weight gradient over so many samples."""
        rows = samples * product.rows
        shape = {"b": 1.0, "m": product.n2, "n": product.n1, "k": rows, "ta": 1.0, "tb": 0.0}
        sizes = {key: np.array([value]) for key, value in shape.items()}
        nothing = np.array([np.nan])
        return float(kernel.seconds(device, "gemm", "fp32", sizes, bytes=nothing).seconds[0])


def _product(unit: str, op: Op, source: str) -> FactorMatmul:
    size = sum(float(np.asarray(w.elements(op.dims))) for w in op.weights)
    rows, n1, n2 = (float(op.dims.get(dim, 1.0)) for dim in ("tokens", "in", "out"))
    return FactorMatmul(f"{unit}/{op.name}", n1, n2, rows, size, f"{unit}/{source}")


def held(workload: Workload, plain: Plan, **degrees: int) -> dict[str, Array]:
    """Weights and their elements of each unit; bytes a sample keeps, takes and sends on."""
    table = layouts([plain.but(micro_batch=_MANY, global_batch=_MANY, **degrees)])
    found = holdings(workload, table)
    each = [unit.layer for unit in units(workload)]
    again = {other.partition("/") for _, other in workload.tied}
    sizes = workload.weights
    less = [
        sum(sizes[f"{a}/{b}"] for a, _, b in again if a == layer.name) for layer in workload.layers
    ]
    split = float(np.prod(list(degrees.values()) or [1]))
    trained = trained_tensors(workload)
    weights = [float(h.weights[0] + h.experts[0]) for h in found]
    kept, brief = ([float(getattr(h, k)[0]) / _MANY for h in found] for k in ("kept", "brief"))
    kept[-1], brief[-1] = 0.0, kept[-1] + brief[-1]  # the loss is there for a moment
    return {
        "weights": np.array([weights[i] - less[i] / split for i in each]),
        "tensors": np.array([float(trained[i]) for i in each]),
        "kept": np.array([kept[i] for i in each]),
        "brief": np.array([brief[i] for i in each]),
        "handed": np.array([float(found[i].output_bytes[0]) / _MANY for i in each]),
    }


@dataclass(frozen=True)
class Layer:
    """One layer, and how its replicas agree."""

    unit: int
    name: str
    way: str
    server: int = -1  # the rank that updates it for everyone
    factors: tuple[FactorMatmul, ...] = ()  # what of it goes as factors


@dataclass(frozen=True)
class LayerRange:
    """Layers in a row on the same ranks."""

    layers: tuple[Layer, ...]
    samples: Mapping[int, int]
    batches: int  # micro-batches
    is_split: bool = False

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Its ranks, in the order of their samples."""
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
        ahead, back, _ = self._each(costs, rank)
        return float(ahead[self.units].sum()), float(back[self.units].sum())

    def _each(self, costs: GroupCosts, rank: int) -> UnitSeconds:
        many = -(-self.samples[rank] // self.batches)
        if self.is_split:
            return costs.split_seconds(self.ranks, many)
        return costs.seconds(costs.cluster.devices[rank], many)

    def backward(
        self, costs: GroupCosts, rank: int, piece: Sequence[Layer], *, by_factors: bool
    ) -> float:
        """Some layers backward, without the matmuls that factors will make."""
        back = self._each(costs, rank).backward
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

    def updated(self, costs: GroupCosts, rank: int) -> tuple[float, float, float]:
        """What the optimizer has to do on one rank: elements, tensors, and the host's lead."""
        elements = tensors = 0.0
        if rank not in self.samples:
            return 0.0, 0.0, 0.0
        for layer in self.layers:
            if layer.way == "ps" and layer.server != rank:
                continue
            share = self._kept_part(costs, layer.unit)
            share /= len(self.ranks) if layer.way == "sharded" else 1
            elements += share * float(costs.held["weights"][layer.unit])
            tensors += float(costs.held["tensors"][layer.unit])
        return elements, tensors, float(self._each(costs, rank).lead[self.units].sum())

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


def update_seconds(found: Sequence[LayerRange], costs: GroupCosts, rank: int) -> float:
    """Seconds of the optimizer on one rank, for all its layers together."""
    each = [stretch.updated(costs, rank) for stretch in found]
    elements, tensors, lead = (sum(values) for values in zip(*each, strict=True))
    device, learned = costs.cluster.devices[rank], costs.cluster.calibration
    return rank_update(device, learned, costs.run, elements, tensors, lead)


def has_per_rank_costs(plan: Plan) -> bool:
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
    found, batches = runs(plan), micro_batches_of_groups(plan)
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
    every = factor_matmuls(costs.workload, costs.units[at])
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
