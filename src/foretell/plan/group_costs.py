"""What layers on ranks of their own cost and hold: prices of single layers at single batches.

Seconds of layers come from `plan.layer_cost`, of messages from `foretell.cost.collective`; what a
search draws lines between is asked here for exactly the samples a plan names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from foretell.cluster import Cluster, Device
from foretell.cost import collective, kernel
from foretell.plan.costs import unpriced
from foretell.plan.framework import Running, running
from foretell.plan.grouped import Unit, units
from foretell.plan.layer_cost import layer_costs
from foretell.plan.layer_memory import holdings
from foretell.plan.layouts import layouts
from foretell.plan.memory import Memory, stage_memory
from foretell.plan.plan import Plan
from foretell.workload import Op, Workload
from foretell.workload.op import BYTES

Array = npt.NDArray[np.float64]


class Product(NamedTuple):
    """An op whose weight gradient is a product, and may go as its factors."""

    name: str  # behind the name of its layer
    n1: float
    n2: float
    rows: float  # of one sample
    elements: float  # of weight and bias
    source: str = ""  # the first op that reads its input: one input, gathered once for all of them


def products(workload: Workload, unit: Unit) -> list[Product]:
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


def gathered(some: Sequence[Product]) -> float:
    """Numbers of one sample that are gathered for some matmuls: inputs that they share once."""
    inputs = {p.source or p.name: p.rows * p.n1 for p in some}
    return sum(inputs.values()) + sum(p.rows * p.n2 for p in some)


def sharing(some: Sequence[Product]) -> list[list[Product]]:
    """Matmuls by the input that they read."""
    found: dict[str, list[Product]] = {}
    for p in some:
        found.setdefault(p.source or p.name, []).append(p)
    return [*found.values()]


def choices(some: Sequence[Product]) -> list[tuple[Product, ...]]:
    """Which of some matmuls with one input may go as factors: any; of many, none or all."""
    if len(some) > _MOST_CHOSEN:
        return [(), tuple(some)]
    return [c for n in range(len(some) + 1) for c in combinations(some, n)]


_MOST_CHOSEN = 6


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
    def _known(self) -> dict[Any, tuple[Array, Array]]:
        return {}

    def seconds(self, device: Device, samples: int) -> tuple[Array, Array]:
        """Forward and backward of each unit with so many samples."""
        key = (device.name, samples)
        if key not in self._known:
            self._known[key] = self._priced(self.cluster, device, samples)
        return self._known[key]

    def split_seconds(self, ranks: Sequence[int], samples: int) -> tuple[Array, Array]:
        """The same of units that are split over all of some ranks."""
        key = (tuple(ranks), samples)
        if key not in self._known:
            device = self.cluster.devices[ranks[0]]
            part = self.cluster.subset(tuple(ranks))
            self._known[key] = self._priced(part, device, samples, **self.degrees(len(ranks)))
        return self._known[key]

    def degrees(self, ranks: int) -> dict[str, int]:
        """How units are split over so many ranks."""
        return {"tp" if self.workload.most("tp") > 1 else "filter": ranks}

    def _priced(
        self, cluster: Cluster, device: Device, samples: int, **degrees: int
    ) -> tuple[Array, Array]:
        one = self.plain.but(micro_batch=samples, global_batch=samples, **degrees)
        costs = layer_costs(self.workload, cluster, layouts([one]), device)
        ahead = [float(c.forward.seconds(self.run.profile.exponent)[0]) for c in costs]
        back = [float(c.backward.seconds(self.run.profile.exponent)[0]) for c in costs]
        each = [unit.layer for unit in self.units]
        return np.array([ahead[i] for i in each]), np.array([back[i] for i in each])

    @cached_property
    def held(self) -> dict[str, Array]:
        """Of each unit: elements of weights; bytes a sample keeps, takes for a moment, sends on."""
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

    def update(self, device: Device, at: int) -> float:
        """Seconds of the optimizer on all weights of a unit."""
        n = float(self.held["weights"][at])
        if not n:
            return 0.0
        moved = np.array([max(n, 1.0) * self.run.update])
        sizes = {"n": moved / self.run.update}
        return float(kernel.seconds(device, "optimizer", "fp32", sizes, bytes=moved).seconds[0])

    def talk(self, op: str, size: float, ranks: Sequence[int]) -> float:
        """Seconds of a collective, or of a message between two ranks."""
        if len(set(ranks)) < 2 or not size:
            return 0.0
        return float(collective.price(op, size, self.cluster.levels(tuple(ranks))).seconds)

    # Factors

    def paying(self, at: int, ranks: Sequence[int], batch: int) -> list[Product]:
        """The matmuls of a unit whose factors take less than their gradients, on these links."""
        found: list[Product] = []
        for some in sharing(products(self.workload, self.units[at])):
            worth = [(self._saved(sent, ranks, batch), sent) for sent in choices(some)]
            found += max(worth, key=lambda one: (one[0], -len(one[1])))[1]
        return found

    def _saved(self, sent: Sequence[Product], ranks: Sequence[int], batch: int) -> float:
        """Seconds of communication that factors save."""
        width = self.widths[1]
        reduce = sum(self.talk("all_reduce", p.elements * width, ranks) for p in sent)
        return reduce - self.talk("all_gather", batch * gathered(sent) * width, ranks)

    def product_seconds(self, device: Device, product: Product, samples: float) -> float:
        """Seconds of a weight gradient over so many samples."""
        rows = samples * product.rows
        shape = {"b": 1.0, "m": product.n2, "n": product.n1, "k": rows, "ta": 1.0, "tb": 0.0}
        sizes = {key: np.array([value]) for key, value in shape.items()}
        nothing = np.array([np.nan])
        return float(kernel.seconds(device, "gemm", "fp32", sizes, bytes=nothing).seconds[0])


def _product(unit: str, op: Op, source: str) -> Product:
    size = sum(float(np.asarray(w.elements(op.dims))) for w in op.weights)
    rows, n1, n2 = (float(op.dims.get(dim, 1.0)) for dim in ("tokens", "in", "out"))
    return Product(f"{unit}/{op.name}", n1, n2, rows, size, f"{unit}/{source}")


def held(workload: Workload, plain: Plan, **degrees: int) -> dict[str, Array]:
    """What each unit holds: elements of weights; bytes a sample keeps, takes and sends on."""
    table = layouts([plain.but(micro_batch=_MANY, global_batch=_MANY, **degrees)])
    found = holdings(workload, table)
    each = [unit.layer for unit in units(workload)]
    again = {other.partition("/") for _, other in workload.tied}
    sizes = workload.weights
    less = [
        sum(sizes[f"{a}/{b}"] for a, _, b in again if a == layer.name) for layer in workload.layers
    ]
    split = float(np.prod(list(degrees.values()) or [1]))
    weights = [float(h.weights[0] + h.experts[0]) for h in found]
    kept, brief = ([float(getattr(h, k)[0]) / _MANY for h in found] for k in ("kept", "brief"))
    kept[-1], brief[-1] = 0.0, kept[-1] + brief[-1]  # the loss is there for a moment
    return {
        "weights": np.array([weights[i] - less[i] / split for i in each]),
        "kept": np.array([kept[i] for i in each]),
        "brief": np.array([brief[i] for i in each]),
        "handed": np.array([float(found[i].handed[0]) / _MANY for i in each]),
    }


_MANY = 16  # samples that bytes are counted for: what does not grow with them hardly counts
