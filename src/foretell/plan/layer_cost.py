"""Cost and memory of one layer on one rank, by phase: kernels, host, communication, activations.

Each kernel is priced at the shape the split leaves (→ `foretell.workload.workload`), all layouts at
once. Host and device work at the same time; which of them bounds a layer changes from kernel to
kernel, so that a phase takes (hostᵖ + deviceᵖ)^(1/p) (→ `phase`), p from the framework's profile.
Communication of a split tensor delays the next kernel and counts as device time.

Per-rank memory of one layer: parameters, saved activations, stage output; an entry a layout.

Kept bytes are for one micro-batch and one layer. With full recompute a layer keeps its input alone;
selective recompute drops what attention keeps of its scores.

Many plans as columns: their cells to price, the ranks of each axis, and layers split into
stages.

A kernel's shape depends on how a layer is split and on the micro-batch, not on how many replicas or
stages there are: ten thousand layouts have some hundred different cells.

Layers split into pipeline stages: first, middle and last, for many layouts at once.

The first stage has what stands before the blocks (the embedding), the last what stands behind them
(the head; where chunks go there and back that is the first one too); blocks are split in a row and
evenly by number, the earlier stages taking what is left over. Blocks of a network of images differ,
and so do its stages.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from foretell import portable
from foretell.cluster import Cluster, Device, Level
from foretell.cost import collective, eight_bits, kernel
from foretell.cost.kernel import passes
from foretell.plan.check import micro_batches
from foretell.plan.framework import Running, running
from foretell.plan.plan import Plan, levels, stride
from foretell.plan.plan import blocks_of as blocks_of
from foretell.plan.program import last_stage
from foretell.workload import Exchange, Layer, Op, Workload
from foretell.workload.workload import (
    BYTES,
    KEPT,
    Call,
    Calls,
    Number,
    Sizes,
    Tensor,
    calls,
    holds,
    in_bf16,
)

Array = npt.NDArray[np.float64]
Rows = npt.NDArray[np.intp]
_PLAIN = ("dp", "tp", "pp", "cp", "ep", "filter", "channel", "zero", "micro_batch", "global_batch")
_SPATIAL = ("height", "width", "depth")
# Of experts: ranks that split each, the same under sequence parallelism, and the tensor-parallel
# ranks that have experts of their own, each with its part of the sequence.
_EXPERTS = ("etp", "esp", "eseq")
SPLIT = ("tp", "sp", "cp", "ep", *_EXPERTS, "filter", "channel", *_SPATIAL)


@dataclass(frozen=True, eq=False)
class Layouts:
    """Checked plans, one entry a plan in every column."""

    plans: tuple[Plan, ...]

    def __len__(self) -> int:
        return len(self.plans)

    def column(self, name: str) -> Array:
        """A field of the plans, or a degree."""
        return self.columns[name]

    @cached_property
    def columns(self) -> dict[str, Array]:
        """Every number a price may need, by name."""
        found = {name: np.array([getattr(p, name) for p in self.plans], float) for name in _PLAIN}
        found["sp"] = np.array([p.tp if p.sp else 1 for p in self.plans], float)
        found["etp"] = np.array([p.etp or p.tp for p in self.plans], float)
        found["esp"] = np.where(found["sp"] > 1, found["etp"], 1.0)
        found["eseq"] = found["tp"] / found["etp"]
        found["chunks"] = np.array([p.chunks for p in self.plans], float)
        found["sharing"] = np.array([p.sharing * p.cp for p in self.plans], float)
        found["micro_batches"] = np.array([micro_batches(p) for p in self.plans], float)
        for i, axis in enumerate(_SPATIAL):
            found[axis] = np.array([(*p.spatial, 1, 1, 1)[i] for p in self.plans], float)
        return found

    @cached_property
    def runs(self) -> tuple[Running, ...]:
        """The framework profile of each plan, in its precision."""
        return tuple(running(p) for p in self.plans)

    def cells(self) -> tuple[Layouts, Rows]:
        """Plans that differ in what a layer costs, and for each plan which of them it is."""
        number: dict[int, int] = {}
        code = np.array([number.setdefault(id(r), len(number)) for r in self.runs], float)
        keys = np.stack([code, *(self.columns[n] for n in (*SPLIT, "micro_batch"))], axis=1)
        _, first, which = np.unique(keys, axis=0, return_index=True, return_inverse=True)
        return Layouts(tuple(self.plans[i] for i in first)), which.reshape(-1)

    def degrees(self) -> dict[str, Array]:
        """The degree of each axis that splits a tensor."""
        return {axis: self.columns[axis] for axis in SPLIT}

    def by_profile(self) -> list[tuple[Running, Rows]]:
        """Rows that one framework runs in one precision."""
        rows: dict[int, list[int]] = {}
        for i, run in enumerate(self.runs):
            rows.setdefault(id(run), []).append(i)
        return [(self.runs[some[0]], np.array(some)) for some in rows.values()]

    def take(self, rows: Rows) -> Layouts:
        """Some of the plans, with the columns that are known already."""
        found = Layouts(tuple(self.plans[i] for i in rows.tolist()))
        known = self.__dict__
        if "columns" in known:
            found.__dict__["columns"] = {name: c[rows] for name, c in self.columns.items()}
        if "runs" in known:
            found.__dict__["runs"] = tuple(self.runs[i] for i in rows.tolist())
        return found


def layouts(plans: Sequence[Plan]) -> Layouts:
    """Columns of plans that `check` has passed."""
    return Layouts(tuple(plans))


FIRST, MIDDLE, LAST = 0, 1, 2


@dataclass(frozen=True)
class Shares:
    """How often each layer runs on first, middle and last stage: kinds × layers × plans."""

    times: Array
    middles: Array  # how many middle stages each plan has


def shares(workload: Workload, plans: Layouts) -> Shares:
    """The layers of each kind of stage.

    Where blocks differ, the middle stages of a plan count as all alike, by their mean.
    """
    keys = [(p.pp, p.layers, last_stage(p)) for p in plans.plans]
    alike = dict(zip(keys, plans.plans, strict=True))
    assigned = {key: _stage_kinds(p, workload) for key, p in alike.items()}
    times = np.stack([assigned[key] for key in keys], axis=2)
    return Shares(times, np.maximum(plans.column("pp") - 2, 0.0))


def _stage_kinds(plan: Plan, workload: Workload) -> Array:
    """Times of each layer on the first, a middle and the last stage; one stage is the first."""
    every = np.array([layers_of(plan, workload, stage) for stage in range(plan.pp)])
    none = np.zeros(len(workload.layers))
    last = every[-1] if plan.pp > 1 else none
    inner = every[1:-1]
    if not len(inner):
        return np.stack([every[0], none, last])
    even = sum(layer.is_block for layer in workload.layers) == 1
    return np.stack([every[0], inner.max(axis=0) if even else inner.mean(axis=0), last])


def layers_of(plan: Plan, workload: Workload, stage: int) -> list[float]:
    """How often each layer runs on one stage: blocks in a row, others where the one before is."""
    counts = blocks_of(plan, workload)
    low, total, end = sum(counts[:stage]), sum(counts), last_stage(plan)
    high, out, at = low + counts[stage], [], 0
    for layer in workload.layers:
        if layer.is_block:
            mine = min(high, at + layer.times) - max(low, at)
            out.append(float(max(mine, 0)))
            at += layer.times
        else:
            inside = stage == end if at == total else low < at <= high
            home = stage == 0 if at == 0 else inside
            out.append(float(layer.times) if home else 0.0)
    return out


ATTENTION = "attention"
_SUMMED = ("weights", "experts", "kept", "gathered", "scores", "brief", "frozen", "frozen_experts")
_SCORES = ("softmax", "mask", "dropped")  # what attention keeps besides queries, keys and values


CONVOLUTIONS = ("conv", "conv_dgrad", "conv_wgrad")
PRODUCTS = ("gemm", *CONVOLUTIONS)  # what narrow formats speed up
MATRIX = (*PRODUCTS, "attention")  # what the clock of the matrix units paces
GAP: float = passes()["gap"]["stream"]  # seconds between two kernels of one stream
_COMPARED = ("fp32", "tf32", "fp16", "bf16", "fp8")


@dataclass(frozen=True)
class LayerMemory:
    """One layer, an entry a layout; elements and bytes of one rank."""

    weights: Array  # elements that every data-parallel rank has
    experts: Array  # elements split over data-parallel ranks besides
    kept: Array  # bytes autograd keeps with nothing run again
    gathered: Array  # bytes besides of inputs that split matmuls gathered from all their ranks
    scores: Array  # bytes among them that selective recompute drops
    output_bytes: Array  # bytes passed to the next layer
    brief: Array  # bytes that are there only while it runs
    largest: Array  # bytes of the largest single tensor kept: what is there twice for a moment
    frozen: Array  # elements of `weights` that are not trained
    frozen_experts: Array  # and of `experts`

    @classmethod
    def joined(cls, some: Sequence[LayerMemory]) -> LayerMemory:
        """The layouts of several side by side."""
        names = [one.name for one in fields(cls)]
        return cls(**{n: np.concatenate([getattr(one, n) for one in some]) for n in names})

    def trained(self) -> tuple[Array, Array]:
        """Elements that have gradients and optimizer state: of `weights` and of `experts`."""
        return self.weights - self.frozen, self.experts - self.frozen_experts


def layer_memories(workload: Workload, cells: Layouts) -> list[LayerMemory]:
    """What each layer holds once, for every cell."""
    return [_layer_memory(layer, cells) for layer in workload.layers]


def _layer_memory(layer: Layer, cells: Layouts) -> LayerMemory:
    degrees, batch = cells.degrees(), cells.column("micro_batch")
    zero = np.zeros(len(cells))
    sums = {name: zero.copy() for name in _SUMMED}
    largest, output_bytes = zero.copy(), zero.copy()
    for run, rows in cells.by_profile():
        dtype = KEPT.get(run.formats.compute, run.formats.compute)
        some = {k: v[rows] for k, v in degrees.items()}
        passed = "fp32" if _passes_stream(layer, run) else dtype
        output_bytes[rows] = layer.output_bytes(some, batch[rows], passed)
        for op in layer.works():
            if not holds(op.when, run.flags):
                continue
            op = run.op(op)
            sizes = op.sizes(some, batch[rows])
            assigned = (
                cells.column("ep")[rows] > 1 if "ep" in op.splits else np.zeros(len(rows), bool)
            )
            for weight in op.weights:
                size = weight.elements(sizes)
                sums["experts"][rows] += np.where(assigned, size, 0.0)
                sums["weights"][rows] += np.where(assigned, 0.0, size)
                if weight.frozen:
                    sums["frozen_experts"][rows] += np.where(assigned, size, 0.0)
                    sums["frozen"][rows] += np.where(assigned, 0.0, size)
            if _keeps_gathered(op, run):
                words = sizes["batch"] * sizes.get("tokens", 1.0)
                whole = words * sizes["in"] * BYTES[dtype]
                sums["gathered"][rows] += np.where(cells.column("sp")[rows] > 1, whole, 0.0)
            for tensor in op.brief:
                if holds(tensor.when, run.flags):
                    more = _split_loss(op, run, cells.column("tp")[rows])
                    sums["brief"][rows] += more * tensor.bytes(sizes, dtype)
            for tensor in op.saved:
                if holds(tensor.when, run.flags):
                    size = tensor.bytes(sizes, _kept_in(op, tensor, dtype, run))
                    sums["kept"][rows] += size
                    largest[rows] = np.maximum(largest[rows], size)
                    if _is_score(op, tensor.name):
                        sums["scores"][rows] += size
    return LayerMemory(**sums, output_bytes=output_bytes, largest=largest)


def _split_loss(op: Op, run: Running, ranks: Array) -> Array:
    """How many times as much PyTorch's loss over a split vocabulary holds for a moment.

    It adds zeros to the softmax and multiplies their sum: three tensors where one kernel makes two
    (torch/distributed/tensor/parallel/loss.py, its backward).
    """
    is_split = (ranks > 1) & (op.kind == "loss") & ("fp32-loss" in run.flags)
    return np.where(is_split, 1.5, 1.0)


def _passes_stream(layer: Layer, run: Running) -> bool:
    """Whether a layer passes on a sum of residuals that autocast leaves in fp32."""
    ops = [op for op in layer.works() if holds(op.when, run.flags)]
    return run.formats.casts and any(op.options.get("stream") for op in ops)


def _keeps_gathered(op: Op, run: Running) -> bool:
    """Whether a column-parallel matmul keeps its whole input under sequence parallelism.

    PyTorch's DTensor does, for the gradient of the weight; Megatron keeps its part and gathers it
    again in the backward.
    """
    is_column = op.kind == "matmul" and op.splits.get("tp") == "out"
    return is_column and run.profile.kernels == "eager"


def _kept_in(op: Op, tensor: Tensor, dtype: str, run: Running) -> str:
    """The format a saved tensor is kept in: autocast leaves sums of residuals and softmax in fp32.

    Transformer Engine keeps the inputs of matmuls as it has cast them.
    """
    is_cast = op.kind in ("matmul", "experts") and not op.options.get("vocabulary")
    if is_cast and tensor.name == "input" and "fp8-weights" in run.flags:
        return run.formats.compute
    is_wide = (op.kind, tensor.name) in (("norm", "input"), (ATTENTION, "softmax"))
    return "fp32" if is_wide and run.formats.casts else dtype


def _is_score(op: Op, name: str) -> bool:
    return op.kind == ATTENTION and name in _SCORES


# CORE: what selective recompute runs again, WHOLE: what full recompute does
FORWARD, BACKWARD, CORE, WHOLE = range(4)


@dataclass(frozen=True)
class PassCost:
    """One phase of one layer, an entry a layout; seconds."""

    kernels: Array  # on the device
    host: Array  # to issue them
    comm: Array  # exchanges, on the device
    straggler_wait: Array  # waiting for the slowest rank in them
    flops: Array  # of the matrix units
    beside: Array  # exchanges that run beside the compute of another micro-batch
    sent: Array  # bytes of tensor-parallel collectives, as all-reduces of so many

    def __add__(self, other: PassCost) -> PassCost:
        return PassCost(*(a + b for a, b in zip(_values(self), _values(other), strict=True)))

    def times(self, factor: Array | float) -> PassCost:
        """The same phase several times."""
        return PassCost(*(a * factor for a in _values(self)))

    def take(self, rows: Rows) -> PassCost:
        """Some of the layouts."""
        return PassCost(*(a[rows] for a in _values(self)))

    def put(self, rows: Rows, values: PassCost) -> None:
        """Set some of the layouts."""
        for to, of in zip(_values(self), _values(values), strict=True):
            to[rows] = of

    def seconds(self, overlap_exponent: Array | float) -> Array:
        """How long it takes when host, device and network take turns in bounding it."""
        device = self.kernels + self.comm
        every = portable.power(self.host, overlap_exponent) + portable.power(
            device, overlap_exponent
        )
        if self.beside.any():
            every = every + portable.power(self.beside, overlap_exponent)
        return portable.power(every, 1 / overlap_exponent) + self.straggler_wait

    def shown(self, overlap_exponent: Array | float) -> Array:
        """Exchanges that a step waits for: those in its way, and what is left of those beside."""
        alone = replace(self, beside=np.zeros_like(self.beside))
        left = (
            self.seconds(overlap_exponent) - alone.seconds(overlap_exponent)
            if self.beside.any()
            else 0.0
        )
        return self.comm + self.straggler_wait + left

    def lead(self, overlap_exponent: Array | float) -> Array:
        """By which the device has more to do than the host to issue."""
        return self.kernels + self.shown(overlap_exponent) - self.host


def _values(part: PassCost) -> tuple[Array, ...]:
    return (
        part.kernels, part.host, part.comm, part.straggler_wait, part.flops, part.beside, part.sent
    )  # fmt: skip


@dataclass(frozen=True)
class LayerCost:
    """All phases of one layer."""

    forward: PassCost
    backward: PassCost
    core: PassCost
    whole: PassCost

    def take(self, rows: Rows) -> LayerCost:
        """Some of the layouts."""
        return LayerCost(*(getattr(self, f.name).take(rows) for f in fields(self)))

    @classmethod
    def joined(cls, some: Sequence[LayerCost]) -> LayerCost:
        """The layouts of several side by side."""
        phases = ([_values(getattr(one, f.name)) for one in some] for f in fields(cls))
        return cls(*(PassCost(*map(np.concatenate, zip(*one, strict=True))) for one in phases))


def layer_costs(
    workload: Workload, cluster: Cluster, cells: Layouts, device: Device | None = None
) -> list[LayerCost]:
    """The cost of each layer once, for every cell; on the kind of device that others wait for."""
    found = []
    for kind in [device] if device is not None else slow_devices(cluster):
        whole = [_empty(len(cells)) for _ in workload.layers]
        for run, rows in cells.by_profile():
            some = cells.take(rows)
            wanted = [
                Wanted(at, phase, in_format(call, run, kind))
                for at, layer in enumerate(workload.layers)
                for phase, call in _wanted(layer, run, some, kind)
            ]
            seconds = [np.zeros(len(some))] * len(wanted)
            for query in _price_queries(
                [one.call for one in wanted], run.formats.compute, len(some)
            ):
                took = kernel.seconds(kind, query.op, query.dtype, query.shape, bytes=query.bytes)
                for i, part in zip(
                    query.rows, np.split(took.seconds, len(query.rows)), strict=True
                ):
                    call = wanted[i].call
                    seconds[i] = part * call.times * call.shape.get("_slow", 1.0)
            phases = _summed(workload, kind, cluster, run, some, wanted, seconds)
            for exchange, at, is_rerun in _exchanges(workload, run):
                messages = exchange_seconds(exchange, run.formats.compute, cluster, some)
                _add_exchange(
                    exchange, messages, cluster, kind, run, some, phases[at], is_rerun=is_rerun
                )
            for layer, mine in zip(whole, phases, strict=True):
                for to, values in zip(layer, mine, strict=True):
                    to.put(rows, values)
        found.append([LayerCost(*phases) for phases in whole])
    if len(found) == 1:
        return found[0]
    busy = np.array([_kernels(one, workload) for one in found])
    return _picked(found, busy.argmax(axis=0))


def _kernels(costs: list[LayerCost], workload: Workload) -> Array:
    """Device seconds of all layers, forward and backward."""
    pairs = zip(costs, workload.layers, strict=True)
    parts = [(cost.forward.kernels + cost.backward.kernels) * one.times for cost, one in pairs]
    return np.asarray(sum(parts))


def _picked(found: list[list[LayerCost]], which: Rows) -> list[LayerCost]:
    """For each cell the costs on one of some devices."""
    out = found[0]
    for k, others in enumerate(found[1:], 1):
        rows = np.flatnonzero(which == k)
        for mine, other in zip(out, others, strict=True):
            for one in fields(mine):
                getattr(mine, one.name).put(rows, getattr(other, one.name).take(rows))
    return out


def _empty(length: int) -> list[PassCost]:
    return [PassCost(*(np.zeros(length) for _ in fields(PassCost))) for _ in range(4)]


def slowest(cluster: Cluster, dtype: str = "bf16") -> Device:
    """The device that others wait for: the one of the least matrix rate in a format."""
    return min(_kinds(cluster), key=lambda device: device.peak(dtype))


def slow_devices(cluster: Cluster) -> list[Device]:
    """The kinds of device that others may wait for: no other is as slow in everything."""
    kinds = _kinds(cluster)
    rates = [(*(one.peak(d) for d in _COMPARED), one.memory_bandwidth) for one in kinds]
    return [
        one
        for k, one in enumerate(kinds)
        if not any(
            all(a <= b for a, b in zip(other, rates[k], strict=True))
            and (other != rates[k] or j < k)
            for j, other in enumerate(rates)
            if j != k
        )
    ]


def _kinds(cluster: Cluster) -> list[Device]:
    return [cluster.devices[int(ranks[0])] for ranks in cluster.devices_by_kind().values()]


class Wanted(NamedTuple):
    """One kernel of a layer in one phase."""

    at: int  # of the workload's layers
    phase: int
    call: Call


class _PriceQuery(NamedTuple):
    """Kernels of one op, format and kind of shape."""

    op: str
    dtype: str
    shape: dict[str, Array]
    bytes: Array
    rows: list[int]  # which of those asked


def _summed(
    workload: Workload, device: Device, cluster: Cluster, run: Running, cells: Layouts,
    wanted: list[Wanted], seconds: list[Array],
) -> list[list[PassCost]]:  # fmt: skip
    """Forward, backward and what recompute runs again of every layer, but for its exchanges."""
    issued = [
        (c.times + c.launches) * run.issue_seconds(c.issue or c.op, phase == BACKWARD)
        for _, phase, c in wanted
    ]
    spread = kernel.slowest_of(cluster.waits_for)
    slower = _throttled(workload, device, run.formats.compute, wanted, seconds, issued, spread)
    whole = [_empty(len(cells)) for _ in workload.layers]
    for (at, phase, call), took, host in zip(wanted, seconds, issued, strict=True):
        took = (took * slower if call.op in MATRIX else took) + call.times * GAP
        host = host * cluster.calibration.host
        took = took * cluster.calibration.compute * cluster.calibration.family(call.op)
        if device.timed is not None:  # a CPU issues an op and runs it, one after the other
            took, host = took + call.times * device.launch * cluster.calibration.host, 0.0 * host
        whole[at][phase].kernels[:] += took
        whole[at][phase].host[:] += host
        whole[at][phase].flops[:] += call.flops * call.times
    return whole


def _exchanges(workload: Workload, run: Running) -> Iterator[tuple[Exchange, int, bool]]:
    """Exchanges of all layers, with the layer and whether they run again with it."""
    for at, layer in enumerate(workload.layers):
        end = _last_kept(layer, run)
        for k, exchange in enumerate(layer.ops):
            if isinstance(exchange, Exchange):
                yield exchange, at, k < end


def _throttled(
    workload: Workload, device: Device, dtype: str, wanted: list[Wanted],
    seconds: list[Array], hosts: list[Array | float], spread: float,
) -> Array:  # fmt: skip
    """How many times as long matrix kernels take once the board runs at its power limit.

    `spread` is how far the slowest of the boards is from the mean, in standard deviations.
    """
    length = len(seconds[0]) if seconds else 0
    matrix, energy, rest, issued = (np.zeros(length) for _ in range(4))
    for (at, phase, call), took, host in zip(wanted, seconds, hosts, strict=True):
        if phase in (CORE, WHOLE):
            continue
        many = workload.layers[at].times
        issued += many * host
        if call.op in MATRIX:
            each = kernel.joules(device, format_of(call.op, call.dtype or dtype), power_kind(call))
            matrix += many * took
            energy += many * call.times * each * call.flops
        else:
            rest += many * took
    idle = np.maximum(issued - matrix - rest, 0.0)
    out: Array = 1 / kernel.clock(device, matrix, energy, rest, idle, spread)
    return out


def power_kind(call: Call) -> str:
    """What a kernel of the matrix units is to the power model, where it is no product."""
    if call.op != "attention":
        return ""
    return "flash2" if "flash2" in call.shape else "attention"


def _wanted(layer: Layer, run: Running, cells: Layouts, device: Device) -> list[tuple[int, Call]]:
    """Every kernel of a layer with the phase it runs in."""
    degrees, batch = cells.degrees(), cells.column("micro_batch")
    found: list[tuple[int, Call]] = []
    end = _last_kept(layer, run)
    for k, op in enumerate(layer.ops):
        if isinstance(op, Exchange) or not holds(op.when, run.flags):
            continue
        op = run.op(op)
        forward, backward = _calls(op, op.sizes(degrees, batch), run, device)
        if run.in_cuda_graph(op, layer.is_block):
            forward, backward = _replayed(forward), _replayed(backward)
        found += [(FORWARD, _longer(call, run)) for call in forward]
        found += [(BACKWARD, _longer(call, run)) for call in backward]
        if layer.is_block and k < end:
            found += [(WHOLE, _longer(call, run)) for call in forward]
            found += [(CORE, _longer(call, run)) for call in _rerun(op, forward, run)]
    return found


def _calls(op: Op, sizes: Sizes, run: Running, device: Device) -> Calls:
    """The kernels of an op; of a linear layer that may run in fp8, those that are faster."""
    if "fp8-where-faster" not in run.flags:
        return calls(op, sizes, run.flags)
    wide = in_bf16(calls(op, sizes, run.flags - {"fp8"}))
    if op.kind != "matmul" or not op.weights:
        return wide
    rows = sizes["batch"] * sizes.get("tokens", 1.0)
    gains = eight_bits.saved(device, rows, sizes["in"], sizes["out"]) > 0
    narrow = calls(op, sizes, run.flags)
    forward, back = (
        [_share(call, gains) for call in some] + [_share(call, ~gains) for call in others]
        for some, others in zip(narrow, wide, strict=True)
    )
    return forward, back


def _share(call: Call, rows: npt.NDArray[np.bool_]) -> Call:
    """The call in some of the layouts."""
    return call._replace(times=np.asarray(call.times * rows, float))


def _replayed(some: list[Call]) -> list[Call]:
    """Kernels that the host does not issue one by one."""
    return [call._replace(launches=-1.0 * call.times) for call in some]


def _last_kept(layer: Layer, run: Running) -> int:
    """Where running a block again ends: PyTorch stops at the last op that keeps what it reads.

    That op does not run again, as all it is run for is there (`torch.utils.checkpoint`, without
    reentrant autograd: early stop). What scales another op's result keeps it: experts end later.
    """
    if not run.profile.early_stop:
        return len(layer.ops)
    end = len(layer.ops)  # where nothing says what is kept
    for k, op in enumerate(layer.ops):
        if isinstance(op, Exchange) or not holds(op.when, run.flags):
            continue
        kept = [tensor.name for tensor in op.saved if holds(tensor.when, run.flags)]
        if kept or op.kind == "combine":
            end = k + 1 if "mask" in kept else k  # a mask is made by the op that keeps it
    return end


def _rerun(op: Op, forward: list[Call], run: Running) -> list[Call]:
    """What selective recompute runs again: attention, or all but attention and every other matmul.

    Megatron reruns the attention core; PyTorch's selective checkpointing, as torchtitan sets it up,
    keeps attention and every second matmul.
    """
    if run.profile.selective == "attention":
        return forward if op.kind == "attention" else []
    if op.kind == "attention":
        return []
    return [c._replace(times=c.times / 2) if c.op == "gemm" else c for c in forward]


def _longer(call: Call, run: Running) -> Call:
    """The call as a framework runs it whose attention or casts to fp8 take longer."""
    slow = run.profile.attention if call.op == "attention" else 1.0
    slow = run.profile.quantise / 6.0 if call.op == "cast" else slow
    return call._replace(shape=call.shape | {"_slow": slow})


def _price_queries(calls: list[Call], dtype: str, length: int) -> Iterator[_PriceQuery]:
    """Calls for every layout; one question to the formulas for each class of op."""
    groups: dict[tuple[str, str, tuple[str, ...]], list[int]] = {}
    for i, call in enumerate(calls):
        keys = tuple(sorted(set(call.shape) - {"_slow"}))
        kind = call.dtype or format_of(call.op, dtype)
        groups.setdefault((call.op, kind, keys), []).append(i)
    for (op, kind, keys), rows in groups.items():
        shape = {k: _stacked([calls[i].shape[k] for i in rows], length) for k in keys}
        moved = _stacked([calls[i].moved(kind) for i in rows], length)
        yield _PriceQuery(op, kind, shape, moved, rows)


def in_format(call: Call, run: Running, device: Device) -> Call:
    """The call in the format its library takes: cuDNN's for convolutions."""
    own = run.formats.convolution
    is_conv = call.op in CONVOLUTIONS and call.dtype in ("", run.formats.compute)
    if own not in device.flops or not is_conv:
        return call
    return call._replace(dtype=own, bytes=call.moved(run.formats.compute))


def format_of(op: str, dtype: str) -> str:
    """The format a kernel runs in where matmuls run in `dtype`: attention has no tf32 kernel."""
    if op in PRODUCTS:
        return dtype
    return "fp32" if dtype == "tf32" else KEPT.get(dtype, dtype)


def _stacked(values: list[Array | float], length: int) -> Array:
    return np.concatenate([np.broadcast_to(np.asarray(v, float), (length,)) for v in values])


def _add_exchange(
    exchange: Exchange, messages: list[tuple[bool, str, Array]], cluster: Cluster, device: Device,
    run: Running, cells: Layouts, phases: list[PassCost], *, is_rerun: bool,
) -> None:  # fmt: skip
    """Add what an exchange costs where its axis is split."""
    rows = _split_rows(exchange, cells)
    if not len(rows):
        return
    copied = _reordered(exchange, device, run, cells.take(rows)) * cluster.calibration.compute
    ranks = cells.take(rows).column(exchange.axis)
    apart = np.array([_behind(n) for n in ranks])
    shown = np.array([run.exposed_share(n) for n in ranks])
    sent = _sent_bytes(exchange, run, cells.take(rows))
    for is_back, op, seconds in messages:
        again = (WHOLE,) if is_rerun and not is_back else ()
        for phase in (BACKWARD if is_back else FORWARD, *again):
            part = phases[phase]
            if exchange.axis == "ep" and run.ep_overlap:
                part.beside[rows] += seconds
                part.kernels[rows] += run.profile.contention * seconds
            else:
                hides = exchange.axis == "sp" and run.hides_tp(phase == BACKWARD)
                part.comm[rows] += (shown if hides else 1.0) * seconds
                whole = 1.0 if op == "all_reduce" else 0.5  # a gather and a scatter make one
                part.sent[rows] += (shown if hides else 1.0) * whole * sent
                part.kernels[rows] += 0.0 if hides else copied
                part.straggler_wait[rows] += run.profile.straggler * apart
            if run.cuda_graph != "iteration":
                part.host[rows] += (
                    run.issue_seconds(exchange.axis, is_back) * cluster.calibration.host
                )


def _sent_bytes(exchange: Exchange, run: Running, cells: Layouts) -> Number:
    """Bytes of a message of tensor parallelism; 0 for other exchanges."""
    if exchange.axis not in ("tp", "sp"):
        return 0.0
    kept = KEPT.get(run.formats.compute, run.formats.compute)
    return exchange.bytes(cells.degrees(), cells.column("micro_batch"), kept)


def _reordered(exchange: Exchange, device: Device, run: Running, cells: Layouts) -> Array:
    """Seconds to bring words into order around one collective of PyTorch's sequence parallelism.

    Its collectives split the first dimension, words are the second: what was gathered is cut and
    put together again, and so is what is scattered (torch/distributed/_functional_collectives.py).
    Async TP reads and writes in place.
    """
    if exchange.axis != "sp" or run.profile.kernels != "eager" or not len(cells):
        return np.zeros(len(cells))
    kept = KEPT.get(run.formats.compute, run.formats.compute)
    moved = exchange.bytes(cells.degrees(), cells.column("micro_batch"), kept)
    moved = np.broadcast_to(2.0 * np.asarray(moved, float), (len(cells),))
    n = moved / (2 * BYTES[kept])
    return kernel.seconds(device, "copy", kept, {"n": n}, bytes=moved).seconds


NODE = 8  # ranks up to which waiting for the slowest was measured


@cache
def _behind(ranks: float) -> float:
    """By how many ranks' worth the slowest of some is late.

    One for each further rank up to a node of eight; beyond, as the largest of so many delays grows.
    """
    if ranks <= NODE:
        return ranks - 1
    return (NODE - 1) * kernel.slowest_of(int(ranks)) / kernel.slowest_of(NODE)


def _split_rows(exchange: Exchange, cells: Layouts) -> Rows:
    """Layouts in which an exchange takes place."""
    split = cells.column(exchange.axis) > 1
    if exchange.unless:
        split &= cells.column(exchange.unless) == 1
    return np.flatnonzero(split)


def exchange_seconds(
    exchange: Exchange, dtype: str, cluster: Cluster, cells: Layouts
) -> list[tuple[bool, str, Array]]:
    """Each collective of an exchange: whether backward, its name, and seconds where it is.

    What is not kept from the forward is gathered again in the backward: Megatron keeps its part of
    the input of a matmul, PyTorch's DTensor all of it.
    """
    rows = _split_rows(exchange, cells)
    if not len(rows):
        return []
    part = cells.take(rows)
    is_kept = exchange.kept or part.runs[0].profile.kernels == "eager"
    kept = KEPT.get(dtype, dtype)
    moved = exchange.bytes(part.degrees(), part.column("micro_batch"), kept)
    moved = np.broadcast_to(np.asarray(moved, float), (len(rows),))
    again = "all_gather" if exchange.backward and not is_kept else ""
    passes = ((False, exchange.forward), (True, exchange.backward), (True, again))
    copies = exchange.copies if part.runs[0].dispatch == "node" else 1.0
    sizes = part.column(exchange.axis).astype(int)
    steps = np.array([stride(p, exchange.axis) for p in part.plans])
    groups = {
        (size, step): levels(cluster, size, step)
        for size, step in sorted(set(zip(sizes.tolist(), steps.tolist(), strict=True)))
    }
    found = []
    for is_back, op in passes:
        took = np.zeros(len(rows) if op else 0)
        for (size, step), group in groups.items() if op else ():
            mine = np.flatnonzero((sizes == size) & (steps == step))
            ends = levels(cluster, 2, step) if op == "send" else group
            took[mine] = collective.price(op, moved[mine], ends).seconds
            if copies > 1:
                took[mine] = _dispatched(op, moved[mine], ends, copies)
        if op:
            found.append((is_back, op, took))
    return found


def _dispatched(op: str, moved: Array, group: tuple[Level, ...], copies: float) -> Array:
    """Seconds of an all-to-all that sends each row once to a node and from there once to a rank.

    `copies` experts chosen at random stand on n·(1 − (1 − 1/n)^copies) of n nodes, or ranks. Both
    legs go on at the same time (DeepEP, HybridEP).
    """
    nodes = math.prod(max(level.sizes) for level in group[1:])
    ranks = nodes * max(group[0].sizes)
    inner, outer = (n * (1 - (1 - 1 / n) ** copies) / copies for n in (ranks, nodes))
    node = replace(group[0], sizes=group[0].sizes[:1], bandwidths=group[0].bandwidths[:1])
    out: Array = collective.price(op, moved * inner, (node,) if nodes > 1 else group).seconds
    if nodes > 1:
        out = np.maximum(out, collective.price(op, moved * outer, group).seconds)
    return out
