"""ParaDL's oracle as it was published: closed forms for one epoch of a convolutional network.

Kahira et al., HPDC 2021 (arXiv 2104.09075), table 3, with the arithmetic of the released oracle.
With D samples an epoch, B of them a step, p ranks, α and β of the slowest link between them, and of
each layer |x|, |y| (elements of a sample) and |w|, sums over the layers that are split:

    data      D/p·t                     2(D/B)(p−1)(α + Wδβ/p)                       → `_data`
    filter    t·D(1 − f + f/p)          3(D/B)(p−1) Σ (α + B|y|δβ/p)                 → `_filter`
    channel   the same                  the same: the formulas cannot tell them apart
    df        as filter within a node   filter's with p₂, 2(D/B)(p₁−1)(α + φWδβ/p₁)
    spatial   t·D(1 − f + f/p)          data's, and 4(D/B) Σ (α + B·halo·δβ)         → `_spatial`
    ds        as spatial within a node  halos, an all-gather, two all-reduces
    pipeline  (D(p+S−1)/S)·max stage    2(D/B)(p+S−2)·max (α + B/S·|y|δβ)            → `_pipeline`
    memory    2δ Σ (samples·(|x|+|y|) + |w|), each split as the strategy splits it

t is the measured time of a sample on one device, split over layers by flop, f the share of
those that are split: compute is taken to shrink as 1/p and nothing to overlap. `foretell.predict`
prices the shapes that splits leave; this is what it is compared with.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from foretell.errors import unknown
from foretell.workload import Op, Workload
from foretell.workload.workload import calls

DELTA = 4.0  # bytes of a number
IN_PLACE = ("relu", "norm")  # layers whose x and y the oracle does not count


@dataclass(frozen=True)
class Part:
    """One layer and one sample: elements, and operations of its forward."""

    kind: str  # conv, pool, add, relu, norm, dropout, fc
    x: float
    y: float
    weights: float = 0.0
    flops: float = 0.0
    halo: float = 0.0  # elements of x that a neighbour needs where images are split along one side
    is_split: bool = False  # whether filter, channel and spatial split it
    strides: bool = False  # a pool whose windows do not overlap: data+spatial leaves its time out

    @property
    def work(self) -> float:
        """What time is split by: both ways, and the weights."""
        return 2 * self.flops + self.weights


@dataclass(frozen=True)
class Net:
    """A network as the oracle sees it."""

    parts: tuple[Part, ...]
    seconds: float  # of one sample on one device, forward and backward, as measured

    @property
    def weights(self) -> float:
        """Elements of all weights."""
        return sum(p.weights for p in self.parts)

    @property
    def held(self) -> float:
        """Elements of x and y of all layers that are not in place."""
        return sum(p.x + p.y for p in self.parts if p.kind not in IN_PLACE)

    @property
    def split(self) -> tuple[Part, ...]:
        """The layers that are split."""
        return tuple(p for p in self.parts if p.is_split)

    @property
    def share(self) -> float:
        """Of the time, what lies in layers that are split."""
        return sum(p.work for p in self.split) / sum(p.work for p in self.parts)


@dataclass(frozen=True)
class Fabric:
    """α and β as the oracle has them for ABCI; seconds and bytes/s."""

    node: int = 4  # ranks of one machine
    local_wait: float = 9e-6
    local_rate: float = 50e9  # NVLink
    rate: float = 12.5e9  # InfiniBand EDR
    cable: float = 20e-6  # of the PCIe switch, at both ends; 15 µs in some logs
    adapter: float = 110e-9
    host_wait: float = 3e-3  # a message through the host, without GPUDirect, as measured
    host_rate: float = 16e9  # PCIe 3
    whole: bool = True  # hybrids exchange all weights, not only a rank's own share
    flows: float = 0.0  # that share a node's cable when hybrids exchange; twice its ranks where 0

    def wait(self, ranks: int) -> float:
        """α of a ring over the first so many ranks: switches on its longest way."""
        if ranks <= self.node:
            return self.local_wait
        leaf, rack, spine = 90e-9, 2 * 90e-9, 400e-9 + 2 * 90e-9
        switches = leaf + (rack if ranks > 68 else 0.0) + (spine - leaf if ranks > 136 else 0.0)
        return 2 * (self.cable + self.adapter) + switches

    def beta(self, ranks: int) -> float:
        """Seconds a byte over the slowest link."""
        return 1 / (self.local_rate if ranks <= self.node else self.rate)


@dataclass(frozen=True)
class Epoch:
    """What the oracle says; seconds, and bytes of one rank."""

    compute: float
    communication: float
    memory: float

    @property
    def seconds(self) -> float:
        """Both, one after the other."""
        return self.compute + self.communication


@dataclass(frozen=True)
class Question:
    """One question to the oracle."""

    net: Net
    fabric: Fabric
    ranks: int
    batch: float  # samples of one step, all ranks
    samples: float = 1.28e6  # of one epoch
    inner: int = 4  # ranks that hybrids split a model over
    segments: int = 1  # of a pipeline

    @property
    def steps(self) -> int:
        """Steps of an epoch, the last one perhaps not full."""
        return math.ceil(self.samples / self.batch)

    @property
    def time(self) -> float:
        """Seconds of an epoch on one device."""
        return self.net.seconds * self.samples

    def memory(self, samples: float, weights: float) -> float:
        """Bytes: x, y and weights, and as much for their gradients."""
        return 2 * DELTA * (samples * self.net.held + weights)


def paradl(strategy: str, question: Question) -> Epoch:
    """An epoch by the published formulas."""
    if strategy not in STRATEGIES:
        raise unknown("strategy of ParaDL", strategy, STRATEGIES)
    return STRATEGIES[strategy](question)


def ring(ranks: int, size: float, wait: float, beta: float) -> float:
    """Seconds of a ring all-reduce of `size` bytes."""
    return 2 * (ranks - 1) * (wait + size * beta / ranks)


def _serial(a: Question) -> Epoch:
    return Epoch(a.time, 0.0, a.memory(a.batch, a.net.weights))


def _data(a: Question) -> Epoch:
    wait, beta = a.fabric.wait(a.ranks), a.fabric.beta(a.ranks)
    comm = a.steps * ring(a.ranks, a.net.weights * DELTA, wait, beta)
    return Epoch(a.time / a.ranks, comm, a.memory(a.batch / a.ranks, a.net.weights))


def _filter(a: Question) -> Epoch:
    wait, beta = a.fabric.wait(a.ranks), a.fabric.beta(a.ranks)
    comm = a.steps * _layers(a, a.ranks, a.batch, wait, beta)
    compute = a.time * (1 - a.net.share + a.net.share / a.ranks)
    return Epoch(compute, comm, a.memory(a.batch, a.net.weights / a.ranks))


def _layers(a: Question, ranks: int, batch: float, wait: float, beta: float) -> float:
    """An all-gather of y and an all-reduce of dx for every layer that is split: 3(p−1) messages."""
    sizes = (batch * part.y * DELTA / ranks for part in a.net.split)
    return 3 * (ranks - 1) * sum(wait + size * beta for size in sizes)


def _data_filter(a: Question) -> Epoch:
    inner, outer = a.inner, a.ranks // a.inner
    local, beta = a.fabric.wait(inner), a.fabric.beta(inner)
    comm = _layers(a, inner, a.batch / outer, local, beta)
    own = sum(p.weights / (inner if p.is_split else 1) for p in a.net.parts)
    size = (a.net.weights if a.fabric.whole else own) * DELTA
    if outer > 1:
        comm += ring(outer, size, a.fabric.wait(a.ranks), _shared(a))
    compute = a.time / outer * (1 - a.net.share + a.net.share / inner)
    return Epoch(_whole(a, compute), a.steps * comm, a.memory(a.batch / outer, own))


def _shared(a: Question) -> float:
    """β between machines while all ranks of one use its cable."""
    return a.fabric.beta(a.ranks) * (a.fabric.flows or 2.0 * a.inner)


def _whole(a: Question, compute: float) -> float:
    """Hybrids fill the last step."""
    return compute * a.steps * a.batch / a.samples


def _spatial(a: Question) -> Epoch:
    wait, beta = a.fabric.wait(a.ranks), a.fabric.beta(a.ranks)
    comm = ring(a.ranks, a.net.weights * DELTA, wait, beta)
    comm += _halos(a, a.batch, wait, beta)
    compute = a.time * (1 - a.net.share + a.net.share / a.ranks)
    return Epoch(compute, a.steps * comm, _spatial_memory(a, a.ranks, a.batch))


def _spatial_memory(a: Question, ranks: int, batch: float) -> float:
    held = sum((p.x + p.y) / (ranks if p.is_split else 1) for p in a.net.parts if _counts(p))
    return 2 * DELTA * (batch * held + a.net.weights)


def _counts(part: Part) -> bool:
    return part.kind not in IN_PLACE


def _halos(a: Question, batch: float, wait: float, beta: float) -> float:
    """Each layer sends to both neighbours, forward and backward."""
    sizes = (batch * part.halo * DELTA for part in a.net.parts if part.halo)
    return 4 * sum(wait + size * beta for size in sizes)


def _data_spatial(a: Question) -> Epoch:
    inner, outer, fabric = a.inner, a.ranks // a.inner, a.fabric
    batch = a.batch / outer
    slow = 2 * inner / fabric.host_rate
    comm = _halos(a, batch, fabric.host_wait, slow)
    last = a.net.split[-1].y * batch * DELTA / inner
    comm += (inner - 1) * (fabric.wait(inner) + last * 2 * fabric.beta(inner))
    comm += ring(inner, a.net.weights * DELTA, fabric.wait(inner), fabric.beta(inner))
    if outer > 1:
        comm += ring(outer, a.net.weights * DELTA, fabric.wait(a.ranks), _shared(a))
    lost = sum(p.work for p in a.net.parts if p.strides) / sum(p.work for p in a.net.parts)
    compute = a.time / outer * (1 - lost - a.net.share + a.net.share / inner)
    return Epoch(compute, a.steps * comm, _spatial_memory(a, inner, batch))


def _pipeline(a: Question) -> Epoch:
    """Stages of even work, in the layers' order."""
    stages = _even_stages(a.net, a.ranks)
    total = sum(p.work for p in a.net.parts)
    longest = max(sum(p.work for p in stage) for stage in stages) / total
    many = (a.ranks + a.segments - 1) / a.segments
    wait, beta = a.fabric.wait(a.ranks), a.fabric.beta(a.ranks)
    size = max((stage[-1].y for stage in stages[:-1]), default=0.0) * DELTA
    hand = wait + a.batch / a.segments * size * beta
    comm = 2 * a.steps * (a.ranks + a.segments - 2) * hand
    held = max(_stage_memory(a, stage) for stage in stages)
    return Epoch(a.time * many * longest, comm, held)


def _stage_memory(a: Question, stage: tuple[Part, ...]) -> float:
    return 2 * DELTA * sum(a.batch * (p.x + p.y) * _counts(p) + p.weights for p in stage)


def _even_stages(net: Net, stages: int) -> list[tuple[Part, ...]]:
    """Layers in a row, cut where the work so far passes each even share."""
    total, done = sum(p.work for p in net.parts), 0.0
    out: list[list[Part]] = [[] for _ in range(stages)]
    for part in net.parts:
        out[min(int(done / total * stages), stages - 1)].append(part)
        done += part.work
    return [tuple(stage) for stage in out if stage]


STRATEGIES: dict[str, Callable[[Question], Epoch]] = {
    "serial": _serial,
    "data": _data,
    "spatial": _spatial,
    "filter": _filter,
    "channel": _filter,
    "data+filter": _data_filter,
    "data+spatial": _data_spatial,
    "pipeline": _pipeline,
}


def net_of(workload: Workload, seconds: float) -> Net:
    """A workload of images in the oracle's terms, given the measured seconds of one sample."""
    works = (op for layer in workload.layers for _ in range(layer.times) for op in layer.works())
    return Net(tuple(part for op in works if (part := _part(op)) is not None), seconds)


_KINDS = {"conv": "conv", "matmul": "fc", "pool": "pool", "batch_norm": "norm", "mean": "pool"}


def _part(op: Op) -> Part | None:
    """An op as a layer; None for what the oracle does not know."""
    weights = sum(float(w.elements(op.dims)) for w in op.weights)
    d = dict(op.dims)
    flops = sum(float(c.flops) for c in calls(op, op.sizes({}))[0])
    if op.kind == "conv":
        x = math.prod(d[k] for k in "chwd" if k in d)
        taps = math.prod(d[k] for k in ("c", "r", "s", "t") if k in d)
        y = flops / (2 * taps) * float(op.options.get("groups", 1))
        halo = d["c"] * d.get("d", 1.0) * d["h"] * (d["s"] // 2)
        return Part("conv", x, y, weights, flops, halo, is_split=True)
    if op.kind == "matmul":
        return Part("fc", d["in"], d["out"], weights, flops / 2)
    if op.kind not in (*_KINDS, "pointwise"):
        return None
    n = math.prod(d.values())
    kind = _KINDS.get(op.kind) or ("add" if op.name.startswith("add") else "relu")
    return Part(kind, n, n, weights, n * (4 if kind == "norm" else 1))
