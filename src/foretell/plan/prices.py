"""Seconds and bytes of stages, and of whole steps in closed form.

Seconds of a step in closed form, for thousands of layouts at once: a bound that prunes.

With F and B the forward and backward of a stage (what is run again included), m micro-batches, p
stages and c the time to hand a tensor on:

    period   max over k of ( Σ of the last k stages (F + B) + 2c(k−1) ) / k          → `_period`
    pipe     Σ over stages (F + B) + 2c(p−1) + (m−1)·period                          → `_pipe`
    step     pipe + reduction of gradients that is not hidden + update

k stages in a row hold k micro-batches, which bounds how often a new one can start (1F1B); in GPipe
it is the slowest forward and the slowest backward, each no shorter than a hand-over. Where weight
gradients are apart, stages wait for the first forward alone. Chunks taken in turns divide what a
stage waits at both ends. `foretell.plan.lower` makes the graph of the
same step; tests hold the two together.

Gradient-ready times, used to overlap bucketed reduction with backward.

A message of gradients is there when the layer is done that makes the last of them; tied weights
wait for the layer nearest to the input. With a reduction that takes W, n messages of which the
first has a share a of the gradients and the others the same, and f of the gradients made before a
layer that ends at t, the backward at T, no less than

    t + (1 - gone)·W - T          gone = 0 where f < a, else a + ⌊(n-1)·(f-a)/(1-a)⌋·(1-a)/(n-1)

of the reduction is left when the backward is over (→ `exposed`).

What stages of a plan in any syntax take and hold: the prices that its lowering reads.

A stage is layers, each so many times, on some ranks under a plan of its own. Stages are priced
together: layers once for every kind of machines and way to split them, stages as columns of that.
What was priced for a workload on a cluster is kept, as searches ask again and again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from foretell import portable
from foretell.cluster import Cluster, Device, Level
from foretell.cluster.cluster import Calibration
from foretell.cost import collective, kernel
from foretell.errors import InputError
from foretell.graph.graph import group_text
from foretell.plan.check import check, micro_batches, placed
from foretell.plan.costs import (
    HALF,
    CopySeconds,
    Costs,
    Memory,
    StageCost,
    alike,
    cell_of,
    copies,
    copy_seconds,
    costs,
    dp_groups,
    grad_width,
    joined,
    layer_parts,
    layer_seconds,
    over,
    peaks,
    rerun_share,
    room,
    same_experts,
    shard_comm,
    stage,
    stage_memory,
    untied_weights,
)
from foretell.plan.framework import Running, running, slowdown
from foretell.plan.layer_cost import (
    FIRST,
    LAST,
    MIDDLE,
    Array,
    exchange_seconds,
    layer_costs,
    layouts,
    shares,
    slow_devices,
)
from foretell.plan.plan import Plan, hop_levels, levels, stride
from foretell.plan.program import chunks_of, is_split, last_stage
from foretell.workload import Exchange, Workload

ROUNDED = 1e-9  # what sums may be off by


MOST_MESSAGES = 1 << 18  # of one step's gradients
# Parameters a second that the cores of one host update: 1 billion in 0.22 s, 10 in 2.57 s (Ren et
# al., ZeRO-Offload, arXiv 2101.06840, table 4).
HOST_ADAM = 4e9
FIRST_BUCKET = 2**20  # bytes, of DDP's first bucket (torch/nn/parallel/distributed.py)


class GradientReady(NamedTuple):
    """One layer in the order of backward, all its times together; an entry a plan."""

    times: Array  # how often gradients are there, evenly over its seconds
    seconds: Array
    elements: Array


def made(c: Costs, times: Array, workload: Workload) -> Iterator[GradientReady]:
    """What each layer of a stage takes backward and makes; the loss first."""
    own, parts = untied_weights(c, times), _parts(workload)
    for at in reversed(range(len(times))):
        seconds = layer_parts(c, at, workload)[1].seconds(c.overlap_exponent) * times[at]
        seconds = seconds + (c.turn * (times[at] > 0) if at == len(times) - 1 else 0.0)
        yield GradientReady(times[at] * parts[at], seconds, own[at] * times[at])


def _parts(workload: Workload) -> list[int]:
    """How many gradients each layer makes one after another: of tables side by side, every one."""
    found = []
    for layer in workload.layers:
        sizes = [w.elements(op.dims) for op in layer.works() for w in op.weights]
        found.append(len(sizes) if len(set(sizes)) == 1 else 1)
    return found


class Messages(NamedTuple):
    """In how many messages gradients go, and which share of them the first has; an entry a plan."""

    number: Array
    first: Array

    def take(self, rows: NDArray[np.int64]) -> Messages:
        """Those of some plans."""
        return Messages(self.number[rows], self.first[rows])

    def sizes(self) -> Array:
        """The share of each message of one plan."""
        count, first = round(float(self.number[0])), float(self.first[0])
        if count > MOST_MESSAGES:
            raise InputError(
                f"gradients in {count} messages", hint="raise bucket_mb, or make the model smaller"
            )
        rest = np.full(count - 1, (1 - first) / max(count - 1, 1))
        return np.append(first, rest)

    def last(self) -> Array:
        """The share of the last message."""
        rest = (1 - self.first) / np.maximum(self.number - 1, 1.0)
        return np.where(self.number > 1, rest, 1.0)

    def gone(self, made: Array) -> Array:
        """The share that is in full messages when so much is made."""
        left = np.maximum(1 - self.first, ROUNDED)
        others = np.maximum(self.number - 1, 1.0)
        full = np.floor(others * (made - self.first) / left + ROUNDED * others)
        found: Array = self.first + np.clip(full, 0.0, others) * left / others
        return np.where(made < self.first * (1 - ROUNDED), 0.0, np.minimum(found, 1.0))


def first_share(layers: Sequence[GradientReady], cap: Array) -> Array:
    """The share of the gradients in a message that is closed when it has a share `cap` or more."""
    total = sum((layer.elements for layer in layers), np.zeros(len(cap)) + ROUNDED**2)
    found, sent = np.ones(len(cap)), np.zeros(len(cap))
    for layer in layers:
        many = np.maximum(np.round(layer.times), 1.0)
        each = np.maximum(layer.elements / many, ROUNDED**2)
        opens = (sent < cap * total) & (sent + layer.elements >= cap * total * (1 - ROUNDED))
        whole = sent + np.ceil((cap * total - sent) / each * (1 - ROUNDED)) * each
        found = np.where(opens, whole / total, found)
        sent = sent + layer.elements
    return np.clip(found, cap, 1.0)


def gradient_shares(c: Costs, times: Array, workload: Workload, sizes: Array) -> list[float]:
    """Parts of one plan's backward between one of its messages and the next."""
    took, sent = [0.0], [0.0]
    for layer in made(c, times, workload):
        many = max(round(float(layer.times[0])), 1)
        took += [float(layer.seconds[0]) / many] * many
        sent += [float(layer.elements[0]) / many] * many
    ends, known = np.cumsum(took), np.cumsum(sent)
    due = np.cumsum(sizes) * known[-1] * (1 - ROUNDED)
    ready = ends[np.searchsorted(known, due)] / ends[-1]
    ready[-1] = 1.0
    found: list[float] = np.diff(ready, prepend=0.0).tolist()
    return found


def exposed(
    c: Costs, times: Array, workload: Workload, *, whole: Array, backward: Array,
    messages: Messages,
) -> Array:  # fmt: skip
    """Seconds of a reduction in some messages that are left when the backward is over."""
    layers = list(made(c, times, workload))
    none = np.zeros(len(whole))
    seconds = sum((layer.seconds for layer in layers), none + ROUNDED**2)
    elements = sum((layer.elements for layer in layers), none + ROUNDED**2)  # never by zero
    late, done, sent = whole * messages.last(), none, none
    for layer in layers:
        many = np.maximum(np.round(layer.times), 1.0)
        for before in (none, many - 1):  # its first time, and its last
            made_then = (sent + layer.elements * before / many) / elements
            ends = (done + layer.seconds * (before + 1) / many) / seconds
            left = ends * backward + (1 - messages.gone(made_then)) * whole - backward
            late = np.where(layer.elements > 0, np.maximum(late, left), late)
        done, sent = done + layer.seconds, sent + layer.elements
    return late


def sends_wait(plan: Plan) -> bool:
    """Whether a stage of a checked plan computes nothing while it sends.

    Megatron overlaps messages with compute only where stages are interleaved.
    """
    return running(plan).profile.sends_wait and chunks_of(plan) == 1


def send_parts(plan: Plan) -> int:
    """In how many parts the tensor-parallel ranks of a stage send what each of them has whole."""
    return plan.tp if running(plan).profile.sends_split and not plan.sp else 1


def sends(c: Costs, workload: Workload, cluster: Cluster) -> Array:
    """Seconds to hand a tensor from stage to stage, the mean of all hops."""
    out = np.zeros(len(c.plans))
    rows = np.flatnonzero(c.plans.column("pp") > 1)
    plans = [c.plans.plans[i] for i in rows.tolist()]
    whole, parts = output_bytes_of(c, workload)[rows], np.array([send_parts(p) for p in plans])
    keys = [(p.pp, stride(p, "pp")) for p in plans]
    for pp, step in sorted(set(keys)):
        mine = np.array([i for i, k in enumerate(keys) if k == (pp, step)])
        for group, many in hop_levels(cluster, pp, step).items():
            took = send_seconds(whole[mine], parts[mine], group, cluster)
            out[rows[mine]] += took * (many / (pp - 1))
    return out


def output_bytes_of(c: Costs, workload: Workload) -> Array:
    """Bytes that a stage hands the next of one micro-batch."""
    block = next(i for i, layer in enumerate(workload.layers) if layer.is_block)
    return c.layer_memories[block].output_bytes


def send_seconds(size: Array, parts: Array, group: tuple[Level, ...], cluster: Cluster) -> Array:
    """Seconds to hand bytes on, in parts that the tensor-parallel ranks then gather."""
    out = np.array(collective.price("send", size / parts, group).seconds)
    for many in sorted(set(parts[parts > 1].tolist())):
        mine = parts == many
        gathers = levels(cluster, many, 1)
        out[mine] += collective.price("all_gather", size[mine], gathers).seconds
    return out


def reduction(
    c: Costs, s: StageCost, times: Array, workload: Workload, cluster: Cluster, whole: Array
) -> Array:
    """What no backward hides of reducing a stage, all of which takes `whole`; seconds."""
    out = whole + regathering(c, s, cluster)
    rows = np.flatnonzero(np.array([overlaps(p) for p in c.plans.plans]) & (whole > 0))
    if len(rows):
        last = s.backward / c.plans.column("chunks")  # gradients are there in the last chunk's
        left = exposed(
            c.take(rows), times[:, rows], workload, whole=whole[rows], backward=last[rows],
            messages=messages(c, s, times, workload).take(rows),
        )  # fmt: skip
        out[rows] += left - whole[rows]
    return out


def reducing(c: Costs, s: StageCost, cluster: Cluster) -> Array:
    """Seconds to reduce the gradients of a stage after its last backward."""
    out = np.zeros(len(c.plans))
    zero, ranks = c.plans.column("zero"), np.array([alike(p)[0] for p in c.plans.plans])
    every, plans = np.flatnonzero((ranks > 1) & (zero < 3)), c.plans.plans
    size, some = (s.weights * grad_width(c))[every], [plans[i] for i in every.tolist()]
    whole = over("all_reduce", size, dp_groups("all_reduce", some), cluster)
    scattered = over("reduce_scatter", size, dp_groups("reduce_scatter", some), cluster)
    scatters = np.array([reduce_op(p) == "reduce_scatter" for p in plans])
    out[every] = np.where(scatters[every], scattered, whole)
    many = c.plans.column("dp") * c.plans.column("cp")
    # Between the copies of what is shared by fewer ranks than there are.
    apart = np.flatnonzero(scatters & (many > c.plans.column("sharing")))
    each = (s.weights * grad_width(c) / c.plans.column("sharing"))[apart]
    some = [plans[i] for i in apart.tolist()]
    between = [(p.dp // p.sharing, stride(p, "dp") * p.sharing) for p in some]
    out[apart] += over("all_reduce", each, between, cluster)
    assigned = np.flatnonzero(s.experts > 0)
    held = [same_experts(plans[i]) for i in assigned.tolist()]
    out[assigned] += over("all_reduce", (s.experts * grad_width(c))[assigned], held, cluster)
    return out


def reduce_op(plan: Plan) -> str:
    """How the gradients of a checked plan are reduced after its last backward, or before."""
    is_flat = running(plan).profile.zero1 == "flat"
    return "reduce_scatter" if plan.zero and is_flat else "all_reduce"


def regathering(c: Costs, s: StageCost, cluster: Cluster) -> Array:
    """Seconds to hand parameters back where each rank has updated a part of them (zero 1 and 2)."""
    out, size = np.zeros(len(c.plans)), regather_bytes(c, s)
    zero, ranks = c.plans.column("zero"), c.plans.column("sharing")
    rows = np.flatnonzero((ranks > 1) & ((zero == 1) | (zero == 2)))
    shared = dp_groups("all_gather", [c.plans.plans[i] for i in rows.tolist()])
    out[rows] = over("all_gather", size[rows], shared, cluster)
    apart = [c.plans.runs[i].profile.zero1 == "tensors" for i in rows.tolist()]
    if any(apart):
        rows = rows[apart]
        many = np.minimum(np.maximum(s.tensors, 1.0), ranks)[rows]
        shared = [group for group, is_apart in zip(shared, apart, strict=True) if is_apart]
        out[rows] = many * over("broadcast", size[rows] / many, shared, cluster)
    return out


def regather_bytes(c: Costs, s: StageCost) -> Array:
    """Bytes of the parameters of a stage, in the format that the model computes with."""
    out: Array = s.weights * np.array([run.formats.weight for run in c.plans.runs])
    return out


def messages(c: Costs, s: StageCost, times: Array, workload: Workload) -> Messages:
    """In which messages the gradients of a stage go; `times` of each of its layers.

    Plain PyTorch's first bucket is closed at `FIRST`, so that sending begins early.
    """
    each = np.array([p.bucket_mb * 2**20 for p in c.plans.plans])
    listed = np.array([len(p.buckets) for p in c.plans.plans])  # 0 where the size decides
    size = np.maximum(s.weights * grad_width(c), 1.0)
    plain = np.array([r.profile.kernels == "eager" for r in c.plans.runs])
    plain &= (listed == 0) & (c.plans.column("zero") == 0)
    layers = list(made(c, times, workload))
    first = first_share(layers, np.minimum(np.minimum(FIRST_BUCKET, each) / size, 1.0))
    equal = np.where(listed > 0, listed, np.maximum(np.ceil(size / each), 1.0))
    more = 1 + np.ceil((1 - first) * size / each * (1 - ROUNDED))
    return Messages(np.where(plain, more, equal), np.where(plain, first, 1 / equal))


def tying(c: Costs, workload: Workload, cluster: Cluster) -> Array:
    """Seconds to add up the gradients of weights that the first and the last stage both have."""
    out = np.zeros(len(c.plans))
    rows = np.array([i for i, p in enumerate(c.plans.plans) if last_stage(p)], int)
    some = c.take(rows) if len(rows) else c
    size = tied_bytes(some, workload)
    apart = [stride(p, "pp") * last_stage(p) for p in some.plans.plans]
    for step in sorted(set(apart)) if len(rows) else ():
        mine = np.array([i for i, a in enumerate(apart) if a == step])
        found = collective.price("all_reduce", size[mine], levels(cluster, 2, step))
        out[rows[mine]] = np.where(size[mine] > 0, found.seconds, 0.0)
    return out


def tied_bytes(c: Costs, workload: Workload) -> Array:
    """Bytes of the gradients of weights that the first and the last stage both have."""
    kept = {name for name, _ in workload.tied}
    size = np.zeros(len(c.plans))
    for layer in workload.layers if kept else ():
        for op in layer.works():
            sizes = op.sizes(c.plans.degrees(), c.plans.column("micro_batch"))
            for weight in op.weights:
                if f"{layer.name}/{weight.name}" in kept:
                    size += weight.elements(sizes)
    return size * grad_width(c)


def overlaps(plan: Plan) -> bool:
    """Whether gradients are reduced while the backward still runs."""
    return running(plan).profile.overlaps if plan.overlap is None else plan.overlap


def updating(c: Costs, s: StageCost, cluster: Cluster) -> Array:
    """Seconds of the optimizer on one rank."""
    sharing = np.where(c.plans.column("zero") > 0, c.plans.column("sharing"), 1.0)
    moved = np.array([r.update for r in c.plans.runs])
    apart = np.where(c.plans.column("zero") > 0, copies(c), 1.0)
    size = moved * (s.weights / sharing + s.experts / apart)
    n = np.maximum(size / moved, 1.0)
    found = update_seconds(
        slow_devices(cluster), cluster.calibration, c.plans.runs, c.overlap_exponent, n=n,
        size=size, tensors=s.tensors, ahead=s.ahead,
    )  # fmt: skip
    away = np.array([p.offload for p in c.plans.plans])
    return np.where(away, _on_host(n, cluster), found) if away.any() else found


def update_seconds(
    devices: Sequence[Device], learned: Calibration, runs: Sequence[Running],
    overlap_exponent: Array, *, n: Array, size: Array, tensors: Array, ahead: Array,
) -> Array:  # fmt: skip
    """Seconds of the optimizer on `n` numbers, `size` bytes in so many tensors; an entry a plan.

    The host issues it tensor by tensor; `ahead` is what it is ahead of the device by then.
    """
    each = [
        kernel.seconds(device, "optimizer", "fp32", {"n": n}, bytes=size).seconds
        for device in devices
    ]
    found: Array = np.max(each, axis=0) * learned.compute * learned.update
    if any(d.timed is not None for d in devices):  # the host is the device
        return found
    hosts = [r.update_seconds(tensors[i : i + 1])[0] for i, r in enumerate(runs)]
    waits = np.array([r.is_scaled for r in runs])
    with np.errstate(invalid="ignore"):  # a calibration beyond all numbers: refused by its caller
        left = np.maximum(np.array(hosts) * learned.host - np.where(waits, 0.0, ahead), 0.0)
    left = np.nan_to_num(left, posinf=np.inf)
    both = portable.power(found, overlap_exponent) + portable.power(left, overlap_exponent)
    return np.where(left > 0, portable.power(both, 1 / overlap_exponent), found)


def overlap_on(device: Device, run: Running) -> float:
    """How host and device take turns there: cores that compute are those that send."""
    return 1.0 if device.timed is not None else run.profile.exponent


def rank_update(
    device: Device, learned: Calibration, run: Running, elements: float, tensors: float,
    ahead: float,
) -> float:  # fmt: skip
    """Seconds of the optimizer on one rank that updates so much of the model."""
    if not elements:
        return 0.0
    found = update_seconds(
        [device], learned, [run], np.array([overlap_on(device, run)]),
        n=np.array([max(elements, 1.0)]), size=np.array([run.update * elements]),
        tensors=np.array([tensors]), ahead=np.array([max(ahead, 0.0)]),
    )  # fmt: skip
    return float(found[0])


def _on_host(n: Array, cluster: Cluster) -> Array:
    """Gradients to the host, Adam there, weights back; the ranks of a node share its cores."""
    bus = cluster.host_bandwidth(0)
    ranks = cluster.size / cluster.num_nodes
    out: Array = 2 * HALF * n / bus + n * ranks / HOST_ADAM
    return out


def by_collective(plan: Plan, workload: Workload, cluster: Cluster) -> dict[str, float]:
    """Seconds by name of the collective: layers' exchanges, gradients, shards and hand-overs."""
    plan, cluster = placed(plan, cluster)
    plan = check(plan, workload, cluster)
    c = costs([plan], workload, cluster)
    assigned = shares(workload, c.plans).times[FIRST][:, 0]
    found: dict[str, float] = defaultdict(float)
    for layer, many in zip(workload.layers, assigned.tolist(), strict=True):
        for exchange in layer.ops:
            if isinstance(exchange, Exchange) and many:
                _add_layer(found, exchange, plan, (workload, cluster), layer.is_block, many)
    _add_gradients(found, c, assigned, workload, cluster)
    if plan.pp > 1:
        found["send"] += 2 * micro_batches(plan) * float(sends(c, workload, cluster)[0])
    longer = slowdown(plan, cluster)
    return {op: seconds * longer for op, seconds in found.items() if seconds}


def _add_layer(
    found: dict[str, float],
    exchange: Exchange,
    plan: Plan,
    where: tuple[Workload, Cluster],
    is_block: bool,
    many: float,
) -> None:
    """What one exchange of a layer costs a step; forwards that run again exchange again."""
    workload, cluster = where
    turns = many * micro_batches(plan)
    again = 2.0 if is_block and plan.recompute == "full" else 1.0
    kept = plan.dtype or workload.dtype
    for is_back, op, seconds in exchange_seconds(exchange, kept, cluster, layouts([plan])):
        found[op] += turns * (1.0 if is_back else again) * float(seconds[0])


def _add_gradients(
    found: dict[str, float], c: Costs, assigned: np.ndarray[tuple[int], np.dtype[np.float64]],
    workload: Workload, cluster: Cluster,
) -> None:  # fmt: skip
    """Reduction, parameters passed back, and those that are gathered for use."""
    plan = c.plans.plans[0]
    held = stage(c, assigned[:, None], workload, cluster)
    found[reduce_op(plan)] += float(reducing(c, held, cluster)[0])
    found["all_gather"] += float(regathering(c, held, cluster)[0])
    if plan.zero == 3 and plan.dp * plan.cp > 1:
        for at, many in enumerate(assigned.tolist()):
            gather, scatter = shard_comm(c, at, workload, cluster)
            turns = many * micro_batches(plan)
            found["all_gather"] += turns * running(plan).profile.gathers * float(gather[0])
            found["reduce_scatter"] += turns * float(scatter[0])


@dataclass(frozen=True)
class Estimate:
    """Columns, an entry a plan; seconds and bytes."""

    step: Array
    compute: Array  # kernels of the busiest stage, all micro-batches
    host: Array  # what the host adds to them
    comm: Array  # exchanges inside layers, waiting for the slowest included
    bubble: Array  # stages waiting for each other
    send: Array  # tensors passed between stages, where they are waited for
    reduce: Array  # gradients (and sharded parameters) not hidden behind compute
    update: Array
    flops: Array  # of the matrix units, all ranks, nothing counted twice
    peak: Array  # bytes of the fullest rank
    missing: Array  # bytes by which that is too much; 0 where it fits


def estimate(plans: Sequence[Plan], workload: Workload, cluster: Cluster) -> Estimate:
    """Seconds and bytes of every plan; plans that cannot be raise as in `check`."""
    if any(p.groups for p in plans):
        raise InputError(
            "layers on ranks of their own (`groups`) have no closed form",
            hint="`foretell predict` lowers and simulates them",
        )
    if any(p.placement for p in plans):
        apart = [placed(p, cluster) for p in plans]
        found = [estimate([plan], workload, machines) for plan, machines in apart]
        names = [f.name for f in fields(Estimate)]
        return Estimate(**{n: np.concatenate([getattr(e, n) for e in found]) for n in names})
    c = costs([check(p, workload, cluster) for p in plans], workload, cluster)
    assigned = shares(workload, c.plans)
    copied, kinds = copy_seconds(c, workload, cluster), (FIRST, MIDDLE, LAST)
    stages = [stage(c, assigned.times[kind], workload, cluster, copied) for kind in kinds]
    hop = sends(c, workload, cluster)
    pipe, period = _pipe(c, stages, assigned.middles, hop)
    reduce, update = _ends(c, stages, assigned.times[FIRST], workload, cluster)
    peak, missing = peaks(c, workload, cluster)
    m = c.plans.column("micro_batches")
    busiest = np.argmax([s.forward + s.backward for s in stages], axis=0)
    rows = np.arange(len(c.plans))
    column = {
        name: np.stack([getattr(s, name) for s in stages])[busiest, rows] * m
        for name in ("compute", "host", "comm")
    }
    send = (m - 1) * np.maximum(period - np.max([s.both for s in stages], axis=0), 0.0)
    send = send + 2 * hop * (c.plans.column("pp") - 1)
    bubble = np.maximum(pipe - sum(column.values()) - send, 0.0)
    column |= {"step": pipe + reduce + update, "bubble": bubble, "send": send}
    column |= {"reduce": reduce, "update": update}
    longer = np.array([slowdown(p, cluster) for p in c.plans.plans])
    return Estimate(
        **{name: seconds * longer for name, seconds in column.items()},
        flops=np.full(len(rows), workload.flops()) * c.plans.column("global_batch"),
        peak=peak,
        missing=missing,
    )


def _pipe(c: Costs, stages: list[StageCost], middles: Array, hop: Array) -> tuple[Array, Array]:
    """The time from first forward to last backward, and the period between micro-batches."""
    first, middle, last = (s.both for s in stages)
    m, pp, chunks = (c.plans.column(n) for n in ("micro_batches", "pp", "chunks"))
    total = first + middles * middle + last
    period = _period(first, middle, last, middles, hop)
    flushed = np.array([p.schedule == "gpipe" and not p.actions for p in c.plans.plans])
    if flushed.any():
        period = np.where(flushed, _flushed_period(stages, hop), period)
    apart = np.array([is_split(p) for p in c.plans.plans])
    if apart.any():
        period = np.where(apart, np.max([first, middle, last], axis=0), period)
    waits = np.array([sends_wait(p) for p in c.plans.plans]) & (pp > 1)
    if waits.any():
        busy = [first + hop, np.where(middles > 0, middle + 2 * hop, 0.0), last + hop]
        period = np.where(waits, np.maximum(period, np.max(busy, axis=0)), period)
    wait = total - np.maximum(period, first) + 2 * hop * (pp - 1)
    if apart.any():
        wait = np.where(apart, _filling(stages, middles) + hop * (pp - 1), wait)
    wait = np.where(pp > 1, wait, 0.0)
    steady = m * np.where(pp > 1, np.maximum(period, first), first)
    return steady + wait / chunks, period


def _filling(stages: list[StageCost], middles: Array) -> Array:
    """Seconds until the last stage begins, where weight gradients fill all other bubbles."""
    first, middle, last = (s.forward for s in stages)
    out: Array = first + middles * middle + last - np.max([first, middle, last], axis=0)
    return out


def _flushed_period(stages: list[StageCost], hop: Array) -> Array:
    """Seconds between micro-batches where all forwards come first: no round trip is waited for."""
    ahead = np.max([s.forward for s in stages], axis=0)
    back = np.max([s.backward for s in stages], axis=0)
    out: Array = np.maximum(ahead, hop) + np.maximum(back, hop)
    return out


def _period(first: Array, middle: Array, last: Array, middles: Array, hop: Array) -> Array:
    """Seconds between micro-batches: the worst of one stage, all but the first, and all."""
    k = 1 + middles
    back = (last + middles * middle + 2 * hop * middles) / k
    whole = (first + last + middles * middle + 2 * hop * k) / (k + 1)
    alone = last == 0
    out: Array = np.where(alone, first, np.max([first, middle, last, back, whole], axis=0))
    return out


def _ends(
    c: Costs, stages: list[StageCost], first: Array, workload: Workload, cluster: Cluster
) -> tuple[Array, Array]:
    """Reduction that is not hidden, and the update, of the stage where they take longest."""
    updates = [updating(c, s, cluster) for s in stages]
    # The first stage ends last: it starts to reduce when its last backward is done.
    whole = reducing(c, stages[FIRST], cluster)
    ends = reduction(c, stages[FIRST], first, workload, cluster, whole)
    return ends + tying(c, workload, cluster), np.max(updates, axis=0)


# Prices of one cell on machines of one kind, with what they were worked out for.
_Key = tuple[int, int, object, Plan]
_PRICED: dict[_Key, tuple[Workload, Cluster, Cluster, Costs]] = {}
_MOST_KNOWN = 4096
MOST = 64  # parts of a backward: finer ones change nothing that can be seen


class StageLayers(NamedTuple):
    """Layers on ranks, before they are priced."""

    plan: Plan  # of these ranks alone; its degrees multiply to their number
    ranks: tuple[int, ...]  # of the whole cluster, in mesh order
    times: Sequence[float]  # how often each layer of the workload runs there
    number: int = 0  # of the stage in its pipeline


@dataclass(frozen=True)
class StageColumns:
    """What stages on machines alike cost and hold, a column a stage."""

    costs: Costs
    times: Array  # how often each layer runs: layers × stages
    workload: Workload
    cluster: Cluster  # what their collectives see
    copied: CopySeconds  # what gathers and casts of parameters add to each layer
    cost: StageCost  # what one micro-batch costs
    memory: Memory  # what a rank of each holds
    devices: Cluster | None = None  # whose memory it is, where not all of those

    @property
    def room(self) -> float:
        """Bytes the smallest device has for tensors."""
        return room(self.devices or self.cluster)

    @cached_property
    def layers(self) -> tuple[Array, Array]:
        """Forward and backward seconds of every layer, once: layers × stages."""
        return seconds_by_layer(self.costs, self.workload, self.copied)

    @cached_property
    def weight_seconds(self) -> Array:
        """What of each layer's backward can wait, once: layers × stages."""
        return np.minimum(np.array(self.costs.weight_gradients), self.layers[1])

    @cached_property
    def brief(self) -> Array:
        """Bytes that are there only while the forward of a layer runs: of the largest."""
        pairs = zip(self.costs.layer_memories, self.times, strict=True)
        return np.asarray(np.max([held.brief * (n > 0) for held, n in pairs], axis=0))

    @cached_property
    def reduce_seconds(self) -> Array:
        """Reducing the gradients."""
        return reducing(self.costs, self.cost, self.cluster)

    @cached_property
    def reduce_bytes(self) -> Array:
        """Bytes of the gradients."""
        return self.cost.weights * grad_width(self.costs)

    @cached_property
    def messages(self) -> Messages:
        """In which messages gradients go."""
        return messages(self.costs, self.cost, self.times, self.workload)

    @cached_property
    def update_seconds(self) -> Array:
        """The optimizer."""
        return updating(self.costs, self.cost, self.cluster)

    @cached_property
    def regather_seconds(self) -> Array:
        """Parameters handed back after the update."""
        return regathering(self.costs, self.cost, self.cluster)

    @property
    def regather_bytes(self) -> Array:
        """Bytes of those parameters."""
        return regather_bytes(self.costs, self.cost)


def seconds_by_layer(c: Costs, workload: Workload, copied: CopySeconds) -> tuple[Array, Array]:
    """Forward and backward seconds of every layer, once: layers × plans."""
    found = [layer_seconds(c, at, workload) for at in range(len(workload.layers))]
    if copied:
        found = [(a + x, b + y) for (a, b), (x, y) in zip(found, copied, strict=True)]
    found[-1] = found[-1][0], found[-1][1] + c.turn
    return np.array([one for one, _ in found]), np.array([other for _, other in found])


@dataclass(frozen=True)
class PricedStage:
    """One stage: its ranks, its own plan, and what its layers cost and hold there."""

    index: int
    ranks: tuple[int, ...]  # of the whole cluster, in mesh order
    plan: Plan
    costs: Costs
    workload: Workload
    cluster: Cluster  # what its collectives see
    columns: StageColumns
    column: int = 0  # which of them is this stage's
    replicas: tuple[StageColumns, ...] = ()  # one of each kind, where these have unlike samples

    @property
    def rank(self) -> int:
        """The rank that stands for all of the stage."""
        return self.ranks[0]

    @property
    def forward(self) -> float:
        """Seconds of one micro-batch."""
        return float(self.columns.cost.forward[self.column])

    @property
    def backward(self) -> float:
        """Seconds of one micro-batch, both gradients."""
        return float(self.columns.cost.backward[self.column])

    @cached_property
    def layers(self) -> list[float]:
        """How often each layer runs there."""
        return [float(n) for n in self.columns.times[:, self.column]]

    @cached_property
    def weight_seconds(self) -> list[float]:
        """What each layer's weight gradients take, once, where the backward is in two."""
        apart = self.costs.weight_gradients if is_split(self.plan) else ()
        return [float(seconds[0]) for seconds in apart]

    @property
    def copied(self) -> CopySeconds:
        """What gathers and casts of parameters add to each layer, once; empty where nothing."""
        mine = slice(self.column, self.column + 1)
        return [(ahead[mine], back[mine]) for ahead, back in self.columns.copied]

    @cached_property
    def memory(self) -> Memory:
        """What the fullest rank holds; where one lacks room, the one that lacks most."""
        each = vars(self._fullest.memory)
        return Memory(**{name: v[self.column : self.column + 1] for name, v in each.items()})

    @cached_property
    def _fullest(self) -> StageColumns:
        some = self.replicas or (self.columns,)
        peaks = [float(one.memory.peak[self.column]) for one in some]
        over = [peak - one.room for peak, one in zip(peaks, some, strict=True)]
        return some[int(np.argmax(over if max(over) > 0 else peaks))]

    @cached_property
    def output_bytes(self) -> float:
        """Bytes the rank with most samples sends on of one micro-batch."""
        some = [one.costs for one in self.replicas] or [self.costs]
        return max(float(output_bytes_of(one, self.workload)[0]) for one in some)

    @cached_property
    def sent_in(self) -> Array:
        """The share of its gradients in each of their messages, equal ones where they are many."""
        sizes = self.columns.messages.take(np.array([self.column])).sizes()
        return sizes if len(sizes) <= MOST else np.full(MOST, 1 / MOST)

    @property
    def groups(self) -> dict[str, str]:
        """The ranks that its first rank communicates with, by axis."""
        step, plan = stride(self.plan, "tp"), self.plan
        tp = group_text(self.ranks[step * i] for i in range(plan.tp))
        return {"tp": tp} | ({"dp": self.group} if plan.cp == 1 else {})

    @property
    def group(self) -> str:
        """Its data-parallel ranks."""
        step = stride(self.plan, "dp")
        return group_text(self.ranks[step * i] for i in range(self.plan.dp))

    @property
    def room(self) -> float:
        """Bytes that rank has for tensors."""
        return self._fullest.room


def priced_stages(
    unpriced: Sequence[StageLayers],
    workload: Workload,
    cluster: Cluster,
    known: Costs | None = None,
) -> list[PricedStage]:
    """Stages priced on the machines of their ranks; `known` are prices of all on the cluster."""
    kinds: dict[object, list[int]] = {}
    for i, one in enumerate(unpriced):
        kinds.setdefault(None if known else _kind(cluster, one.ranks), []).append(i)
    out: dict[int, PricedStage] = {}
    for rows in kinds.values():
        some = [unpriced[i] for i in rows]
        keys = {} if known else _keys(some, workload, cluster)
        if missing := _missing(keys):
            part, cells = _machines_of(cluster, some[0].ranks), [key[-1] for key in missing]
            layers = layer_costs(workload, part, layouts(cells).cells()[0])
            table = costs(cells, workload, part, layers=layers)
            for k, key in enumerate(missing):
                _PRICED[key] = workload, cluster, part, table.take(np.array([k]))
        machines = _PRICED[keys[some[0].plan]][2] if keys else cluster
        found = {plan: _PRICED[key][3].of(plan, machines) for plan, key in keys.items()}
        if known:
            found[some[0].plan] = known
        each, times = _columns(some, found, workload)
        numbers, copied = (
            np.array([float(s.number) for s in some]),
            copy_seconds(each, workload, machines),
        )
        cost = stage(each, times, workload, machines, copied)
        held = stage_memory(each, times, workload, numbers)
        columns = StageColumns(each, times, workload, machines, copied, cost, held)
        for k, (i, one) in enumerate(zip(rows, some, strict=True)):
            own = each.take(np.array([k])) if one.plan.recompute_layers else found[one.plan]
            out[i] = PricedStage(
                one.number, one.ranks, one.plan, own, workload, machines, columns, k
            )
    return [out[i] for i in range(len(unpriced))]


def _keys(some: Sequence[StageLayers], workload: Workload, cluster: Cluster) -> dict[Plan, _Key]:
    """What prices of stages on machines alike are kept by."""
    kind = id(workload), id(cluster), _kind(cluster, some[0].ranks)
    return {one.plan: (*kind, cell_of(one.plan)) for one in some}


def _missing(keys: dict[Plan, _Key]) -> list[_Key]:
    """Those that are to be priced; all of them where room is made for them."""
    every = list(dict.fromkeys(keys.values()))
    missing = [key for key in every if key not in _PRICED]
    if missing and len(_PRICED) + len(missing) >= _MOST_KNOWN:
        _PRICED.clear()
        return every
    return missing


def _columns(
    some: Sequence[StageLayers], found: dict[Plan, Costs], workload: Workload
) -> tuple[Costs, Array]:
    """Prices of stages on machines alike side by side, and how often each runs each layer."""
    number = {plan: k for k, plan in enumerate(found)}
    which = np.array([number[one.plan] for one in some])
    each = joined(list(found.values()))
    if len(some) > 1 or len(found) > 1:
        each = each.take(which)
    if any(one.plan.recompute_layers for one in some):
        is_block = [layer.is_block for layer in workload.layers]
        blocks = [sum(n for n, mine in zip(s.times, is_block, strict=True) if mine) for s in some]
        shares = [rerun_share(s.plan, round(n)) for s, n in zip(some, blocks, strict=True)]
        each = replace(each, share=np.array(shares))
    return each, np.array([one.times for one in some], float).T


def uneven_stage(one: StageLayers, workload: Workload, cluster: Cluster) -> PricedStage:
    """A stage whose replicas have unlike samples: all wait for the one that takes longest."""
    machines = _machines_of(cluster, one.ranks)
    every = tuple(
        replace(
            found.columns,
            cluster=machines,
            devices=found.cluster,
            copied=(copied := copy_seconds(found.columns.costs, workload, machines)),
            cost=stage(found.columns.costs, found.columns.times, workload, machines, copied),
        )
        for ranks, plan in unlike_replicas(one.ranks, one.plan, cluster)
        for found in priced_stages([one._replace(plan=plan, ranks=ranks)], workload, cluster)
    )
    slow = max(every, key=lambda column: float(column.cost.both[0]))
    return PricedStage(
        one.number, one.ranks, one.plan, slow.costs, workload, machines, slow, 0, every
    )


def unlike_replicas(
    ranks: tuple[int, ...], plan: Plan, cluster: Cluster
) -> Iterator[tuple[tuple[int, ...], Plan]]:
    """Of each kind of replica of an uneven stage the one with most samples, its plan as if even."""
    inner, turns = len(ranks) // plan.dp, micro_batches(plan)
    found: dict[object, tuple[int, tuple[int, ...]]] = {}
    for k, samples in enumerate(plan.shares):
        some, each = ranks[k * inner : (k + 1) * inner], -(-samples // turns)
        kind = cluster.devices[some[0]].name if inner == 1 else _kind(cluster, some)
        if each > found.get(kind, (0, ()))[0]:
            found[kind] = each, found.get(kind, (0, some))[1]
    for each, some in found.values():
        whole = each * turns * plan.dp
        yield some, plan.but(micro_batch=each, shares=(), global_batch=whole)


@lru_cache(maxsize=1024)
def _machines_of(cluster: Cluster, ranks: tuple[int, ...]) -> Cluster:
    return cluster.part(ranks)


def _kind(cluster: Cluster, ranks: tuple[int, ...]) -> object:
    """What two sets of ranks have in common that see the same machines."""
    if len(ranks) == 1:
        return int(cluster.kinds[cluster.nodes[ranks[0]]]), cluster.devices[ranks[0]].name
    nodes, slots = cluster.nodes[list(ranks)], cluster.slots[list(ranks)]
    return cluster.kinds[nodes].tobytes(), (nodes - nodes[0]).tobytes(), slots.tobytes()
