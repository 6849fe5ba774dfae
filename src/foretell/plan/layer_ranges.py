"""Plans that place ranges of layers on ranks of their own (`groups`): prices, order, sends, memory.

A `LayerRange` is consecutive layers on the same ranks; nothing is sent inside it. Plans with
`groups` list ranges row by row; a data-parallel plan with uneven `shares`, or with a reduction
method per parameter (`sync`), is one range of all layers.

Each range is priced for exactly the samples a rank gets (→ `foretell.plan.prices`).

In the program of a step every rank of a range is a stage of its own:

    forward, backward   one task a range of layers, rank and micro-batch; the last backward has one
                        for each message of gradients
    send                samples that a range which reads it wants elsewhere
    sync, product       gradients as soon as their backward is done; with factors, then the product
    update, share       the optimizer when all gradients are there; then parameters go round

Messages between nodes use the way out of the one and into the other, inside a node its bus, and
share them with collectives; a rank has one lane for its work and one for collectives.
`foretell.search.placement` simulates the same step compiled, thousands of times a second.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from itertools import accumulate, combinations, groupby, pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from foretell.cluster import Cluster, Device
from foretell.cost import collective, kernel
from foretell.errors import InfeasibleError, InputError, unknown
from foretell.graph.graph import group_text
from foretell.plan.check import (
    Unit,
    layer_groups,
    layers_of,
    micro_batches_of_groups,
    sync_methods,
    torch_names,
    unit_reads,
    units,
)
from foretell.plan.costs import (
    ROUNDING,
    USABLE,
    Costs,
    copy_seconds,
    costs,
    layer_parts,
    rounded,
    trained_tensors,
    untied_weights,
)
from foretell.plan.framework import Running, running
from foretell.plan.layer_cost import layer_memories, layouts
from foretell.plan.plan import Plan
from foretell.plan.prices import (
    PricedStage,
    StageLayers,
    priced_stages,
    rank_update,
    seconds_by_layer,
)
from foretell.plan.program import (
    BACKWARD,
    FORWARD,
    HELD_AS,
    Buffer,
    Message,
    Piece,
    Program,
    ResolvedStep,
    StageTasks,
)
from foretell.workload import Op, Workload
from foretell.workload.workload import BYTES

Array = npt.NDArray[np.float64]


_TAKES = {"F": 1, "B": 2}  # a backward is about twice a forward
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
    maker: str = ""  # the matmul that makes its input, where each rank can run that on all rows
    maker_n1: float = 0.0
    reader: str = ""  # the matmul whose backward makes its output gradient, where each rank can
    reader_n2: float = 0.0
    recomputes: tuple[str, ...] = ()  # what ranks recompute and do not gather: input, output


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
    return _linked(found, layer)


# What a matmul's output passes to the next matmul of a plain chain; ReLU and dropout leave zeros
# where nothing comes back, so that the backward needs only what they made.
_DETERMINISTIC = ("relu", "gelu", "silu", "tanh", "sigmoid")
_ZEROING = ("relu", "dropout")


def _linked(found: list[FactorMatmul], layer: Any) -> list[FactorMatmul]:
    """Matmuls of a layer that is a plain chain, each with what makes its input and its gradient."""
    ops = [op for op in layer.works() if not op.when.startswith("fused")]
    stems = [op.name.rstrip("0123456789") for op in ops]
    known = {*_DETERMINISTIC, *_ZEROING}
    if any(op.kind not in ("matmul", "loss") and stem not in known
           for op, stem in zip(ops, stems, strict=True)):  # fmt: skip
        return found
    at = {op.name: i for i, op in enumerate(ops)}
    for i, j in pairwise(range(len(found))):
        one, other = found[i], found[j]
        between = stems[at[one.name.rpartition("/")[2]] + 1 : at[other.name.rpartition("/")[2]]]
        if (one.n2, one.rows) == (other.n1, other.rows) and one.source != other.source:
            if {*between} <= {*_DETERMINISTIC}:
                found[j] = other._replace(maker=one.name, maker_n1=one.n1)
            if {*between} <= {*_ZEROING}:
                found[i] = one._replace(reader=other.name, reader_n2=other.n2)
    return found


def gathered(some: Sequence[FactorMatmul]) -> float:
    """Numbers of one sample that are gathered for some matmuls: inputs that they share once."""
    inputs = {p.source or p.name: p.rows * p.n1 for p in some if "input" not in p.recomputes}
    outputs = [p.rows * p.n2 for p in some if "output" not in p.recomputes]
    return sum(inputs.values()) + sum(outputs)


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
    added: Array  # to add gradients to those of earlier micro-batches


def unit_seconds(
    workload: Workload, cluster: Cluster, device: Device, plain: Plan, sizes: Array, **degrees: int
) -> UnitSeconds:
    """Every unit at some numbers of samples on one kind of device: units × sizes."""
    plans = [plain.but(micro_batch=int(b), global_batch=int(b), **degrees) for b in sizes]
    c = costs(plans, workload, cluster, device)
    ahead, back = seconds_by_layer(c, workload, copy_seconds(c, workload, cluster))
    parts = [layer_parts(c, at, workload) for at in range(len(workload.layers))]
    lead = np.array([sum(part.lead(c.overlap_exponent) for part in pair) for pair in parts])
    each = [unit.layer for unit in units(workload)]
    added = np.array(c.adding) * running(plain).accumulation_bytes
    return UnitSeconds(ahead[each], back[each], lead[each], added[each])


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
        plain = Plan(**{name: getattr(plan, name) for name in (*names, "grad_dtype")})
        return cls(workload, cluster, running(plan), plain)

    @cached_property
    def units(self) -> list[Unit]:
        """Every layer of the model once for each time it runs."""
        return units(self.workload)

    @cached_property
    def stages(self) -> dict[object, PricedStage]:
        """Ranges once priced, by their first layer, kind of device or ranks, and samples."""
        return {}

    def unpriced(self, found: Sequence[LayerRange]) -> dict[object, StageLayers]:
        """The stages of ranges, for the samples that their ranks have, to be priced."""
        to_price: dict[object, StageLayers] = {}
        for one in found:
            times = np.bincount(
                [self.units[at].layer for at in one.units], minlength=len(self.workload.layers)
            )
            for rank in one.ranks:
                key = one.priced_as(self, rank)
                if key not in to_price:
                    to_price[key] = StageLayers(one.plan(self, rank), one.on(rank), tuple(times))
        return to_price

    def degrees(self, ranks: int) -> dict[str, int]:
        """How units are split over so many ranks."""
        return {"tp" if self.workload.most("tp") > 1 else "filter": ranks}

    @property
    def grad_bytes(self) -> float:
        """Bytes of one gradient where it is reduced."""
        return BYTES[self.plain.grad_dtype or self.run.grad_dtype]

    def comm(self, op: str, size: float, ranks: Sequence[int]) -> float:
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
        width = self.grad_bytes
        reduce = sum(self.comm("all_reduce", p.elements * width, ranks) for p in sent)
        return reduce - self.comm("all_gather", batch * gathered(sent) * width, ranks)

    def product_seconds(self, device: Device, product: FactorMatmul, samples: float) -> float:
        """Seconds of a weight gradient over so many samples."""
        return float(product_seconds(device, product, np.array([samples]))[0])

    def recompute_seconds(self, device: Device, product: FactorMatmul, samples: float) -> float:
        """Seconds of the factors that ranks recompute over so many samples."""
        return float(recompute_seconds(device, product, np.array([samples]))[0])


def product_seconds(device: Device, product: FactorMatmul, samples: Array) -> Array:
    """Seconds of a weight gradient over some numbers of samples."""
    return _gemm(device, product.n2, product.n1, samples * product.rows, ta=1.0)


def recompute_seconds(device: Device, product: FactorMatmul, samples: Array) -> Array:
    """Seconds of the factors of a gradient that ranks recompute over some numbers of samples."""
    found, rows = np.zeros(samples.shape), samples * product.rows
    if "input" in product.recomputes:
        found = found + _gemm(device, product.n1, rows, product.maker_n1)
    if "output" in product.recomputes:
        found = found + _gemm(device, product.n2, rows, product.reader_n2)
    return found


def _gemm(device: Device, m: Any, n: Any, k: Any, ta: float = 0.0) -> Array:
    shape = {"b": 1.0, "m": m, "n": n, "k": k, "ta": ta, "tb": 0.0}
    flat = np.broadcast_arrays(*(np.asarray(value, float) for value in shape.values()))
    sizes, nothing = dict(zip(shape, flat, strict=True)), np.full(flat[0].shape, np.nan)
    found: Array = kernel.seconds(device, "gemm", "fp32", sizes, bytes=nothing).seconds
    return found


def _product(unit: str, op: Op, source: str) -> FactorMatmul:
    size = sum(float(np.asarray(w.elements(op.dims))) for w in op.weights)
    rows, n1, n2 = (float(op.dims.get(dim, 1.0)) for dim in ("tokens", "in", "out"))
    return FactorMatmul(f"{unit}/{op.name}", n1, n2, rows, size, f"{unit}/{source}")


def held(workload: Workload, plain: Plan, **degrees: int) -> dict[str, Array]:
    """Weights and their elements of each unit; bytes a sample keeps, takes and sends on."""
    table = layouts([plain.but(micro_batch=_MANY, global_batch=_MANY, **degrees)])
    found = layer_memories(workload, table)
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
        """Ranks that run it, in the order of their samples."""
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

    def priced_as(self, costs: GroupCosts, rank: int) -> tuple[int, object, int]:
        """What the seconds of a rank go by."""
        where = self.ranks if self.is_split else costs.cluster.devices[rank].name
        return self.units[0], where, self.each(rank)

    def each(self, rank: int) -> int:
        """The most samples that a rank has in a micro-batch."""
        return -(-self.samples[rank] // self.batches)

    def on(self, rank: int) -> tuple[int, ...]:
        """The ranks that run it together with one."""
        return self.ranks if self.is_split else (rank,)

    def plan(self, costs: GroupCosts, rank: int) -> Plan:
        """The plan of a rank: replicas, or parts of layers."""
        many, ranks = self.each(rank), len(self.ranks)
        degrees = costs.degrees(ranks) if self.is_split else {"dp": ranks}
        whole = many * self.batches * (1 if self.is_split else ranks)
        return costs.plain.but(micro_batch=many, global_batch=whole, **degrees)

    def stage(self, costs: GroupCosts, rank: int) -> PricedStage:
        """Its prices on one rank."""
        return costs.stages[self.priced_as(costs, rank)]

    def elements(self, costs: GroupCosts) -> Array:
        """Trained elements of every layer of the workload, once, on a rank; tied ones once."""
        found = self.stage(costs, self.ranks[0])
        c, times = found.costs, np.array(found.layers)[:, None]
        own = untied_weights(c, times)
        return np.array(
            [float(w[0] + h.trained()[1][0]) for w, h in zip(own, c.layer_memories, strict=True)]
        )

    def gradient_bytes(self, costs: GroupCosts, some: Sequence[Layer]) -> float:
        """Bytes of the gradients of some of its layers."""
        elements = self.elements(costs)
        return sum(float(elements[costs.units[x.unit].layer]) for x in some) * costs.grad_bytes

    def backward(
        self, costs: GroupCosts, rank: int, piece: Sequence[Layer], *, by_factors: bool
    ) -> float:
        """Some layers backward, without the matmuls that factors will make."""
        found = self.stage(costs, rank)
        back = found.columns.layers[1][:, found.column]
        took = sum(float(back[costs.units[layer.unit].layer]) for layer in piece)
        if by_factors:
            many, device = self.each(rank), costs.cluster.devices[rank]
            took -= sum(
                costs.product_seconds(device, p, many) for layer in piece for p in layer.factors
            )
        return max(took, 0.0)

    def messages(self, costs: GroupCosts, fuse: float) -> list[tuple[Layer, ...]]:
        """Layers with one gradient bucket, the last first: one way and server, up to `fuse`."""
        out: list[list[Layer]] = []
        size = 0.0
        for layer in reversed(self.layers):
            mine = self.gradient_bytes(costs, [layer])
            like = out and out[-1][-1].way == layer.way and out[-1][-1].server == layer.server
            if like and layer.way != "factors" and size + mine <= fuse:
                out[-1].append(layer)
                size += mine
            else:
                out.append([layer])
                size = mine
        return [tuple(reversed(piece)) for piece in out]

    def kept_share(self, layer: Layer, rank: int) -> float:
        """The share of a layer that a rank updates and keeps optimizer state of."""
        if layer.way == "ps" and layer.server != rank:
            return 0.0
        return 1 / len(self.ranks) if layer.way == "sharded" else 1.0

    def updated(self, costs: GroupCosts, rank: int) -> tuple[float, float, float]:
        """What the optimizer has to do on one rank: elements, tensors, and the host's lead."""
        if rank not in self.samples:
            return 0.0, 0.0, 0.0
        size, number = self.elements(costs), trained_tensors(costs.workload)
        shares = [(costs.units[x.unit].layer, self.kept_share(x, rank)) for x in self.layers]
        elements = sum(share * float(size[at]) for at, share in shares)
        tensors = float(sum(number[at] for at, share in shares if share))
        found = self.stage(costs, rank)
        return elements, tensors, float(found.columns.cost.ahead[found.column])

    def holds(self, costs: GroupCosts, rank: int, flying: int) -> tuple[dict[str, float], float]:
        """Bytes of one rank by what they are, and those that are there for a moment.

        It has so many micro-batches at once whose backward is still to come.
        """
        found, size, units = self.stage(costs, rank).memory, self.elements(costs), costs.units
        whole = [[p._replace(recomputes=()) for p in x.factors] for x in self.layers]
        sent = max(gathered(each) * self.rows * costs.grad_bytes for each in whole)
        others = [(1 - self.kept_share(x, rank)) * size[units[x.unit].layer] for x in self.layers]
        out = {
            "parameters": float(found.parameters[0]),
            "gradients": float(found.gradients[0]),
            "optimizer": max(float(found.optimizers[0] - sum(others) * costs.run.state_bytes), 0.0),
            "activations": float(found.each[0]) * flying,
        }
        return out, max(float(found.workspace[0]), sent)


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
    """The ranges of layers of a checked plan in order of forward, and its micro-batches."""
    ways = _named(plan, costs)
    if not plan.groups:
        shares = plan.shares or (plan.global_batch // plan.dp,) * plan.dp
        batches = -(-max(shares) // plan.micro_batch) if plan.micro_batch else 1
        usual, ranks = "sharded" if plan.zero == 1 else _ONE_RANK, tuple(range(plan.dp))
        layers = tuple(_layer(costs, at, usual, ranks, ways[at]) for at in range(len(ways)))
        return [LayerRange(layers, dict(enumerate(shares)), batches)], batches
    found, batches = layer_groups(plan), micro_batches_of_groups(plan)
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
    left, out, known = sync_methods(plan), [], []
    for unit in costs.units:
        ways: dict[str, str] = {}
        for op in costs.workload.layers[unit.layer].works():
            for weight in op.weights:
                known.append(f"{unit.name}/{weight.name}")
                said = next((name for name in torch_names(known[-1]) if name in left), None)
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
    named = {op: word for op, word in ways.items() if word.partition(":")[0] == "factors"}
    sent = [_recomputing(p, named[p.name]) for p in every if p.name in named]
    if not sent:
        raise InputError(
            f"`{min(named)}` has no factors",
            hint="only matmuls with a weight of their own do: linear layers",
        )
    return Layer(at, name, way, factors=tuple(sent))


def _recomputing(product: FactorMatmul, word: str) -> FactorMatmul:
    """A matmul with the factors that `factors:recompute-input` and the like leave to each rank."""
    said = {"": (), "recompute": ("input", "output"), "recompute-input": ("input",),
            "recompute-output": ("output",)}.get(word.partition(":")[2])  # fmt: skip
    able = {"input": product.maker, "output": product.reader}
    if said is None or not all(able[one] for one in said):
        raise InputError(
            f"`{product.name}` is sent as `{word}`",
            hint="factors, or where a matmul right before or behind makes them "
            "factors:recompute, factors:recompute-input, factors:recompute-output",
        )
    return product._replace(recomputes=said)


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


class Action(NamedTuple):
    """The forward or backward of one run of layers for one micro-batch."""

    kind: str  # F or B
    run: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.run}{self.kind}{self.micro_batch}"


def orders(
    where: Sequence[Sequence[int]], batches: int, together: Collection[int] = (),
    links: Collection[tuple[int, int]] | None = None,
) -> dict[int, list[Action]]:  # fmt: skip
    """What each rank does, in order; `where` has the ranks of each run of layers.

    Ranks of runs in `together` (the split ones) begin at the same moment: they communicate inside.
    `links` has the runs that read one another; each reads the one before where it is None.
    """
    links = [*pairwise(range(len(where)))] if links is None else links
    played = _RankActions(where, batches, together, links)
    now = 0
    played.begin(now)
    while played.busy:
        now = played.busy[0][0]
        played.end(now)
        played.begin(now)
    return played.found


class _RankActions:
    """A step on its way."""

    def __init__(
        self, where: Sequence[Sequence[int]], batches: int, together: Collection[int],
        links: Collection[tuple[int, int]],
    ) -> None:  # fmt: skip
        self.where, self.together = where, together
        self.found: dict[int, list[Action]] = {rank: [] for ranks in where for rank in ranks}
        self.idle, self.busy = set(self.found), list[tuple[int, int, Action]]()  # end, rank, what
        self.ready: dict[int, list[tuple[bool, int, int]]] = {rank: [] for rank in self.found}
        self.then, self.missing = (
            dict[Action, list[Action]](),
            dict[Action, int](),
        )  # ends still to come
        acts = [Action(k, q, m) for m in range(batches) for q in range(len(where)) for k in "FB"]
        for act in acts:
            needs = _before(act, links)
            for need in needs:
                self.then.setdefault(need, []).append(act)
            self.missing[act] = sum(len(where[need.run]) for need in needs)
            if not needs:
                self._offer(act)

    def _offer(self, act: Action) -> None:
        """Nothing is missing any more: its ranks may take it."""
        for rank in self.where[act.run]:
            self.ready[rank].append((act.kind == "F", act.micro_batch, act.run))

    def begin(self, now: int) -> None:
        """Idle ranks take what comes first."""
        for rank in sorted(self.idle):
            if rank in self.idle:
                chosen = next(filter(self._can_begin, sorted(self.ready[rank])), None)
                if chosen is not None:
                    self._take(chosen, rank, now)

    def _can_begin(self, key: tuple[bool, int, int]) -> bool:
        return key[2] not in self.together or self.idle.issuperset(self.where[key[2]])

    def _take(self, key: tuple[bool, int, int], rank: int, now: int) -> None:
        """Let a rank begin what it chose, and with it all that have to begin at once."""
        is_forward, m, q = key
        act = Action("F" if is_forward else "B", q, m)
        for one in self.where[q] if q in self.together else (rank,):
            self.ready[one].remove(key)
            self.found[one].append(act)
            self.idle.discard(one)
            heappush(self.busy, (now + _TAKES[act.kind], one, act))

    def end(self, now: int) -> None:
        """What is done at this moment frees its rank, and others that waited for it."""
        while self.busy and self.busy[0][0] == now:
            _, rank, act = heappop(self.busy)
            self.idle.add(rank)
            for follower in self.then.get(act, ()):
                self.missing[follower] -= 1
                if not self.missing[follower]:
                    self._offer(follower)


def _before(act: Action, links: Collection[tuple[int, int]]) -> list[Action]:
    """What has to be done on all its ranks first; micro-batches of a run go in turn."""
    kind, q, m = act
    earlier = [Action(kind, q, m - 1)] if m else []
    if kind == "F":
        return earlier + [Action("F", read, m) for read, reader in links if reader == q]
    behind = [Action("B", reader, m) for read, reader in links if read == q]
    return [*earlier, Action("F", q, m), *behind]


class Move(NamedTuple):
    """Samples `first` to `last` go from one rank to another."""

    source: int
    target: int
    first: int
    last: int


def edges(shares: Sequence[int]) -> list[int]:
    """Where each rank's samples begin and end."""
    return [0, *accumulate(shares)]


def redistribute(held: Mapping[int, int], wanted: Mapping[int, int]) -> list[Move]:
    """Moves that turn one split into another; both map ranks to samples, in order."""
    (before, behind), moves = (edges([*d.values()]) for d in (held, wanted)), []
    if before[-1] != behind[-1]:
        raise ValueError(f"{before[-1]} samples are held, {behind[-1]} are wanted")
    for i, source in enumerate(held):
        for j, target in enumerate(wanted):
            first, last = max(before[i], behind[j]), min(before[i + 1], behind[j + 1])
            if first < last:
                moves.append(Move(source, target, first, last))
    return moves


def gather(held: dict[int, int], targets: Sequence[int]) -> list[Move]:
    """Moves after which every target has all samples."""
    bounds = edges([*held.values()])
    return [
        Move(source, target, bounds[i], bounds[i + 1])
        for target in targets
        for i, source in enumerate(held)
        if held[source]
    ]


def handed(
    held: Mapping[int, int], wanted: Mapping[int, int], *, from_all: bool, to_all: bool
) -> list[Move]:
    """Moves between ranks that have a part each or, where layers are split over them, all samples.

    From ranks that hold everything each other rank gets an equal part of all of them.
    """
    if not from_all:
        return gather(dict(held), list(wanted)) if to_all else redistribute(held, wanted)
    whole, bounds = next(iter(held.values())), edges([*wanted.values()])
    found = []
    for i, target in enumerate(wanted):
        first, last = (0, whole) if to_all else (bounds[i], bounds[i + 1])
        if target in held:
            found += [Move(target, target, first, last)] if first < last else []
            continue
        cuts = [first + (last - first) * k // len(held) for k in range(len(held) + 1)]
        each = zip(held, pairwise(cuts), strict=True)
        found += [Move(source, target, a, b) for source, (a, b) in each if a < b]
    return found


def moved(first: LayerRange, then: LayerRange) -> dict[tuple[int, int], float]:
    """What share of the batch goes from rank to rank; a split range has all samples everywhere."""
    out: dict[tuple[int, int], float] = defaultdict(float)
    ways = {"from_all": first.is_split, "to_all": then.is_split}
    for move in handed(first.samples, then.samples, **ways):
        if move.source != move.target:
            out[move.source, move.target] += (move.last - move.first) / first.batch
    return out


def reading(found: Sequence[LayerRange], costs: GroupCosts) -> dict[tuple[int, int], float]:
    """(range, range that reads it): bytes of one sample that it reads."""
    home = {unit: q for q, one in enumerate(found) for unit in one.units}
    read = {
        (home[u], home[v], u)
        for v, sources in enumerate(unit_reads(costs.workload))
        for u in sources
        if home[u] != home[v]
    }
    out: dict[tuple[int, int], float] = defaultdict(float)
    for q, r, unit in sorted(read):
        made = found[q].stage(costs, found[q].ranks[0]).costs
        size = float(made.layer_memories[costs.units[unit].layer].output_bytes[0])
        out[q, r] += size / made.plans.plans[0].micro_batch
    return out


def in_flight(
    found: Sequence[LayerRange], links: Collection[tuple[int, int]]
) -> dict[tuple[int, int], int]:
    """For each rank and stretch the most micro-batches whose backward is still to come."""
    split = [q for q, stretch in enumerate(found) if stretch.is_split]
    out: dict[tuple[int, int], int] = {}
    each = orders([one.ranks for one in found], found[0].batches, split, links)
    for rank, row in each.items():
        now = dict.fromkeys(range(len(found)), 0)
        for act in row:
            now[act.run] += 1 if act.kind == "F" else -1
            out[rank, act.run] = max(out.get((rank, act.run), 0), now[act.run])
    return out


def require_split(stretch: LayerRange, costs: GroupCosts) -> None:
    """Raise where a stretch cannot be split over its ranks."""
    most = costs.workload.most(*costs.degrees(2))
    nodes = {int(costs.cluster.nodes[rank]) for rank in stretch.ranks}
    if len(nodes) > 1 or len(stretch.ranks) > most:
        raise InfeasibleError(
            f"`{stretch.layers[0].name}` is split over ranks {group_text(stretch.ranks)}",
            hint=f"a split stays inside one node and has at most {most:g} ranks",
        )


@dataclass(frozen=True, eq=False)
class GroupStep(ResolvedStep):
    """A checked plan whose ranks are priced one by one."""

    costs: GroupCosts
    found: list[LayerRange]
    batches: int

    @classmethod
    def of(cls, plan: Plan, workload: Workload, cluster: Cluster) -> GroupStep:
        """The step of a checked plan."""
        costs = GroupCosts.of(plan, workload, cluster)
        found, batches = layer_ranges(plan, costs)
        for one in found:
            if one.is_split:
                require_split(one, costs)
        to_price = costs.unpriced(found)
        stages = priced_stages(list(to_price.values()), workload, cluster)
        costs.stages.update(zip(to_price, stages, strict=True))
        return cls(plan, workload, cluster, costs, found, batches)

    @property
    def advice(self) -> str:
        """What to do where it does not fit."""
        return "give the fullest rank fewer samples or layers"

    def priced_layers(self) -> list[tuple[tuple[int, ...], Costs, Sequence[float]]]:
        """Of every range and rank the prices of all layers, and how often each runs there."""
        pairs = [(rank, one.stage(self.costs, rank)) for one in self.found for rank in one.ranks]
        return [((rank,), found.costs, found.layers) for rank, found in pairs]

    @cached_property
    def ranks(self) -> list[int]:
        """Everyone who has a layer."""
        return sorted({rank for one in self.found for rank in one.ranks})

    @cached_property
    def cells(self) -> dict[tuple[int, int], int]:
        """The stage of the program that is one range of layers on one rank."""
        pairs = [(q, rank) for q, one in enumerate(self.found) for rank in one.ranks]
        return {pair: at for at, pair in enumerate(pairs)}

    @cached_property
    def links(self) -> dict[tuple[int, int], float]:
        """(range, range that reads it): bytes of one sample."""
        return reading(self.found, self.costs)

    def _first(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank whose backward is its last: no other range of it comes before."""
        behind: dict[int, set[int]] = defaultdict(set)  # ranges that read a range of this rank
        for q, r in sorted(self.links):
            behind[r] |= behind[q] | ({q} if rank in self.found[q].samples else set())
        mine = [q for q, one in enumerate(self.found) if rank in one.samples]
        return tuple(self.cells[q, rank] for q in mine if not behind[q])

    def program(self, detail: str) -> Program:
        """The program of the step; a range is one task a rank whatever the detail."""
        out = Program(is_ordered=False)
        for name, kind in (("compute", "compute"), ("collectives", "comm")):
            for rank in self.ranks:
                out.lane(rank, name, kind)
        nodes = sorted({self._node(rank) for rank in self.ranks})
        out.links = [f"{word} {node}" for node in nodes for word in ("out", "in", "bus")]
        for q in range(len(self.found)):
            self._add_range(out, q)
        for (q, r), size in self.links.items():
            self._add_messages(out, q, r, size)
        read = {q for q, _ in self.links}
        ends = [(q, one) for q, one in enumerate(self.found) if q not in read]
        out.turns = [(self.cells[q, rank], 0) for q, one in ends for rank in one.ranks]
        self._add_end(out)
        for rank in self.ranks:
            for kind, size in rounded(self._held_bytes[rank]).items():
                out.buffers.append(Buffer(rank, HELD_AS[kind], kind, size))
        return out

    def _lane(self, rank: int, *, comm: bool = False) -> int:
        """The compute lane of a rank, or that of its collectives."""
        return self.ranks.index(rank) + comm * len(self.ranks)

    def _node(self, rank: int) -> int:
        return int(self.cluster.nodes[rank])

    def _sent(self, q: int) -> list[tuple[Layer, ...]]:
        """The messages of gradients of a range; none where there is nothing to agree on."""
        one = self.found[q]
        if len(one.ranks) == 1 or one.is_split:
            return []
        return one.messages(self.costs, self.plan.bucket_mb * 2**20)

    def _order(self, way: int, m: int, q: int) -> int:
        """Where a range of one micro-batch stands; between them is room for messages."""
        each, ranges = 4 * len(self.costs.units) + 4, len(self.found)
        place = m * ranges + (ranges - 1 - q if way else q)
        return (place + way * self.batches * ranges) * each + 1

    def _add_range(self, out: Program, q: int) -> None:
        """One range of layers on each of its ranks: all forwards, then all backwards."""
        one, costs, num = self.found[q], self.costs, self.batches
        way, micro = np.repeat((FORWARD, BACKWARD), num), np.tile(np.arange(num), 2)
        order = np.array([[self._order(w, m, q) for m in range(num)] for w in (0, 1)]).reshape(-1)
        sent = self._sent(q)
        for rank in one.ranks:
            ahead, first = one.stage(costs, rank).forward, len(out.chains)
            back = one.backward(costs, rank, one.layers, by_factors=False)
            last = [one.backward(costs, rank, some, by_factors=True) for some in sent] or [back]
            out.chains += [[Piece("kernel", "forward", ahead)], [Piece("kernel", "backward", back)]]
            out.chains.append([Piece("kernel", "backward", took) for took in last])
            chain = first + way
            chain[-1] = first + 2
            held, wire = self._lane(rank), self._lane(rank, comm=True)
            out.stages.append(
                StageTasks(rank, (held,), wire, chain, way, np.zeros_like(way), micro, order)
            )

    def _add_messages(self, out: Program, q: int, r: int, bytes_each: float) -> None:
        """What one range reads of another and sends back; what its ranks have they wait for."""
        first, then = self.found[q], self.found[r]
        size = bytes_each * first.batch / self.batches
        for rank in first.ranks:
            if rank in then.ranks:
                a, b = (self.cells[q, rank], 0), (self.cells[r, rank], 0)
                out.messages += [Message(FORWARD, a, b), Message(BACKWARD, b, a)]
        for (source, target), share in moved(first, then).items():
            a, b = (self.cells[q, source], 0), (self.cells[r, target], 0)
            for way, here, there in ((FORWARD, a, b), (BACKWARD, b, a)):
                ranks = (target, source) if way else (source, target)
                out.messages.append(
                    Message(
                        way, here, there, self.costs.comm("send", share * size, ranks), ranks[1],
                        comm_bytes=share * size, group=group_text(ranks), links=self._wires(ranks),
                    )
                )  # fmt: skip

    def _wires(self, ranks: Sequence[int], *, together: bool = False) -> tuple[int, ...]:
        """The links a message from one rank to another takes, or a collective of several."""
        known = sorted({self._node(rank) for rank in self.ranks})
        nodes = [3 * known.index(self._node(rank)) for rank in ranks]
        if len(set(nodes)) == 1:
            return (nodes[0] + 2,)
        if together:
            return tuple(n + word for n in dict.fromkeys(nodes) for word in (0, 1))
        return nodes[0], nodes[1] + 1

    def _add_end(self, out: Program) -> None:
        """Messages of gradients, the optimizer of each rank, then parameters others updated."""
        synced: dict[int, list[int]] = defaultdict(list)
        later: list[tuple[LayerRange, str, float]] = []
        for q in reversed(range(len(self.found))):
            for i, some in enumerate(self._sent(q)):
                self._add_sync(out, (q, i, some), synced, later)
        updated = {}
        for rank in self.ranks:
            took = update_seconds(self.found, self.costs, rank)
            updated[rank] = out.end(
                "kernel", "optimizer", rank, (self._lane(rank),), took, "update",
                stages=self._first(rank), parts=(), behind=tuple(synced[rank]),
            )  # fmt: skip
        for one, op, size in later:
            took = self.costs.comm(op, size, one.ranks)
            behind = tuple(updated[rank] for rank in one.ranks)
            self._add_collective(out, one, op, took, size, behind=behind)

    def _add_collective(
        self, out: Program, one: LayerRange, op: str, seconds: float, size: float, **waits: Any
    ) -> int:  # fmt: skip
        """A collective of all ranks of a range: one at a time on each."""
        held = tuple(self._lane(rank, comm=True) for rank in one.ranks)
        return out.end(
            "collective", op, one.ranks[0], held, seconds, "communicate", comm_bytes=size,
            group=group_text(one.ranks), links=self._wires(one.ranks, together=True), **waits,
        )  # fmt: skip

    def _add_sync(
        self, out: Program, sent: tuple[int, int, Sequence[Layer]], synced: dict[int, list[int]],
        later: list[tuple[LayerRange, str, float]],
    ) -> None:  # fmt: skip
        """One message of gradients; with factors, the matmul that follows it."""
        q, i, some = sent
        one, costs, way, factors = self.found[q], self.costs, some[0].way, some[0].factors
        size = one.gradient_bytes(costs, some)
        if not size:
            return
        op = {"ps": "reduce", "sharded": "reduce_scatter"}.get(way, "all_reduce")
        seconds = costs.comm(op, size, one.ranks)
        if factors:
            rest = size - sum(p.elements for p in factors) * costs.grad_bytes
            gathers = one.rows * gathered(factors) * costs.grad_bytes
            seconds = costs.comm("all_gather", gathers, one.ranks)
            seconds += costs.comm("all_reduce", rest, one.ranks)
            size = gathers + rest
        is_late = self.plan.overlap is False
        order = self._order(BACKWARD, self.batches - 1, q) + 2 * i + 1
        order += 2 * len(self.costs.units) * is_late
        cells = tuple(self.cells[q, rank] for rank in one.ranks)
        task = self._add_collective(
            out, one, op, seconds, size,
            stages=cells, parts=(-1 if is_late else i,), order=order,
        )  # fmt: skip
        for rank in one.ranks:
            behind = task
            if factors:
                device = costs.cluster.devices[rank]
                took = sum(
                    costs.product_seconds(device, p, one.rows)
                    + costs.recompute_seconds(device, p, one.rows)
                    for p in factors
                )
                behind = out.end(
                    "kernel", "product", rank, (self._lane(rank),), took, "backward",
                    behind=(task,), parts=(), order=order,
                )  # fmt: skip
            synced[rank].append(behind)
        if way in ("ps", "sharded"):
            later.append((one, "broadcast" if way == "ps" else "all_gather", size))

    @cached_property
    def _held_bytes(self) -> dict[int, dict[str, float]]:
        """Bytes of every rank at its fullest, by what they are."""
        flying, out = in_flight(self.found, self.links), {}
        for rank in self.ranks:
            total = dict.fromkeys(("parameters", "gradients", "optimizer", "activations"), 0.0)
            brief = 0.0
            for q, one in enumerate(self.found):
                if rank in one.samples:
                    parts, moment = one.holds(self.costs, rank, flying[rank, q])
                    total = {key: total[key] + parts[key] for key in total}
                    brief = max(brief, moment)
            program = self.costs.run.profile.runtime
            out[rank] = total | {"buffers": brief, "program": program}
        return out

    def memory(self) -> tuple[float, float, dict[str, float]]:
        """Bytes of the fullest rank, how many are missing there, and what they are."""
        each = [self._held_bytes[rank] for rank in self.ranks]
        most = [ROUNDING * sum(parts.values()) for parts in each]
        devices = [self.cluster.devices[rank] for rank in self.ranks]
        over = [m - d.memory * USABLE for m, d in zip(most, devices, strict=True)]
        worst = int(np.argmax(over if max(over) > 0 else most))
        return most[worst], max(over[worst], 0.0), rounded(each[worst])
