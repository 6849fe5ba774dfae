"""Prices of checked plans: what layers and stages take, sharded or not, and blocks split into
stages.

Closed forms (`foretell.plan.prices`) and graphs (`foretell.plan.lower`) are made of these and of
what `foretell.plan.prices` prices.

Unlike blocks partitioned into pipeline stages so that the slowest stage is as fast as can be.

With t the seconds of each block (forward and backward, and the layers between blocks with the block
before them), b[k][j] the least that the busiest of k stages has of the first j blocks:

    b[1][j] = Σ t[:j]        b[k][j] = min over i < j of max( b[k−1][i], Σ t[i:j] )      → `cut`

Every stage has a block at least. Of cuts that are equally good the earliest stages have least.

Bytes each rank holds at the worst moment of a step, and what of.

parameters   as computed with, a part of them where they are sharded (zero 3)
gradients    as they are added up, a part where sharded (zero 2 and 3)
optimizer    fp32 copy and moments, a part where sharded (zero 1 to 3), none where offloaded
activations  what autograd keeps of each layer (Korthikanti et al., arXiv 2205.05198) times the
             micro-batches a stage holds at once, until their weight gradients are there; inputs of
             layers alone where all is run again, and then one layer in full while it is
head         logits and what the loss makes of them, in fp32
buffers      the largest exchange; layers gathered at once where parameters are sharded
FSDP         parameters are sharded in fp32 and computed with in half precision; gathered once and
             kept, the half copy is held whole (→ foretell.plan.costs: `keeps_whole`)
sharded      over data-parallel and context-parallel ranks alike, as FSDP2 and Megatron do it
rounding     PyTorch's allocator gives out blocks of 2 MiB and cannot use all it has
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from foretell import portable
from foretell.cluster import Cluster, Device
from foretell.cost import collective, kernel
from foretell.errors import InfeasibleError
from foretell.plan.check import check, micro_batches, placed
from foretell.plan.framework import Running, running
from foretell.plan.layer_cost import (
    FIRST,
    LAST,
    MIDDLE,
    Array,
    LayerCost,
    LayerMemory,
    Layouts,
    PassCost,
    Rows,
    blocks_of,
    layer_costs,
    layer_memories,
    layers_of,
    layouts,
    shares,
    slowest,
)
from foretell.plan.plan import Plan, expert_ranks, levels, stride
from foretell.plan.program import chunks_of, in_flight, is_split, key_of
from foretell.workload import Layer, Op, Workload
from foretell.workload.workload import BYTES, KEPT

CAST = 6.0  # bytes to read a number in fp32 and write it in 16 bits, or the other way
BIG = 2.0**30  # bytes of a kernel that runs at the pace of the memory
CopySeconds = list[tuple[Array, Array]]  # seconds more of each layer, forward and backward
_WEIGHED = ("matmul", "conv")  # ops whose weight gradient is a kernel of its own


@dataclass(frozen=True)
class Costs:
    """Everything a closed form or a graph needs to know of some layouts."""

    plans: Layouts
    layers: list[LayerCost]
    layer_memories: list[LayerMemory]
    overlap_exponent: Array
    turn: Array
    again: Array  # what is run again of a block: 0 nothing, 1 attention, 2 all of it
    share: Array  # the part of a stage's blocks that is run again
    weight_gradients: tuple[Array, ...] = ()  # seconds of each layer's, if any backward is in two
    adding: tuple[Array, ...] = ()  # seconds to move a byte of each gradient of each layer
    added: Array = field(default_factory=lambda: np.zeros(0))  # bytes of a gradient so moved
    fetched: Array = field(default_factory=lambda: np.zeros(0))  # host seconds to gather a module
    tied: tuple[tuple[int, int, float], ...] = ()  # layers that share a weight (→ `_tied`)

    def take(self, rows: Rows) -> Costs:
        """Some of the plans."""
        return Costs(
            self.plans.take(rows),
            [cost.take(rows) for cost in self.layers],
            [_taken(held, rows) for held in self.layer_memories],
            self.overlap_exponent[rows],
            self.turn[rows],
            self.again[rows],
            self.share[rows],
            tuple(seconds[rows] for seconds in self.weight_gradients),
            tuple(seconds[rows] for seconds in self.adding),
            self.added[rows],
            self.fetched[rows],
            self.tied,
        )

    def of(self, plan: Plan, cluster: Cluster) -> Costs:
        """The same prices for one plan of their cell, with its own recompute; all blocks of it."""
        return replace(
            self,
            plans=layouts([plan]),
            again=np.array([_again(plan)]),
            share=np.ones(1),
            added=np.array([_added(plan)]),
            fetched=np.array([_fetched(plan, cluster)]),
        )


def joined(some: Sequence[Costs]) -> Costs:
    """Prices of several plans side by side."""
    if len(some) == 1:
        return some[0]
    parts = zip(*(one.layers for one in some), strict=True)
    held = zip(*(one.layer_memories for one in some), strict=True)
    columns = ("overlap_exponent", "turn", "again", "share", "added", "fetched")
    apart = [one.weight_gradients for one in some] if all(o.weight_gradients for o in some) else []
    adding = zip(*(one.adding for one in some), strict=True)
    return Costs(
        layouts([plan for one in some for plan in one.plans.plans]),
        [LayerCost.joined(layer) for layer in parts],
        [LayerMemory.joined(layer) for layer in held],
        weight_gradients=tuple(np.concatenate(layer) for layer in zip(*apart, strict=True)),
        adding=tuple(np.concatenate(layer) for layer in adding),
        tied=some[0].tied,
        **{name: np.concatenate([getattr(one, name) for one in some]) for name in columns},
    )


def cell_of(plan: Plan) -> Plan:
    """What of a checked plan decides what a layer costs: how it is split, not how often it runs."""
    own = plan.but(
        pp=1, zero=0, shard=0, recompute="none", recompute_layers=0, chunks=1, layers=(),
        bucket_mb=25.0, overlap=None, offload=False, optimizer_kernels="", grad_dtype="",
        schedule="zb-h1" if is_split(plan) else "1f1b", actions=(),
        global_batch=plan.micro_batch * plan.dp,
    )  # fmt: skip
    inner = plan.ep > 1 or plan.filter * plan.channel > 1 or plan.spatial
    return own if inner else own.but(dp=1, global_batch=plan.micro_batch)


def costs(
    plans: Sequence[Plan], workload: Workload, cluster: Cluster, device: Device | None = None,
    layers: list[LayerCost] | None = None,
) -> Costs:  # fmt: skip
    """Prices of all layers for checked plans, one entry a plan; on the slowest device of all.

    `layers` are what kernels and exchanges of each cell of the plans take, where that is known.
    """
    table = layouts(plans)
    cells, which = table.cells()
    for key in sorted({key for p in plans for key in (alike(p), _shared(p)) if key[0] > 1}):
        levels(cluster, *key)  # links of all groups that reduce or gather, ahead
    layers = layer_costs(workload, cluster, cells, device) if layers is None else layers
    layers = [cost.take(which) for cost in layers]
    held = [_taken(h, which) for h in layer_memories(workload, cells)]
    overlap_exponent = np.array([r.profile.exponent for r in table.runs])
    timed = [d.timed is not None for d in ([device] if device else cluster.devices)]
    if all(timed):  # cores that compute are those that send
        overlap_exponent = np.ones(len(overlap_exponent))
    turn = np.array([r.profile.microbatch for r in table.runs]) * cluster.calibration.host
    again = np.array([_again(p) for p in plans])
    share = _rerun_share(plans, workload)
    apart: tuple[Array, ...] = ()
    if len(rows := np.flatnonzero([is_split(p) for p in plans])):
        some, mine = table.take(rows).cells()
        apart = tuple(np.zeros((len(workload.layers), len(plans))))
        late = layer_costs(weight_gradients(workload), cluster, some)
        for seconds, cost in zip(apart, late, strict=True):
            seconds[rows] = cost.backward.kernels[mine]
    pace, added = _added_seconds(held, cluster, device), np.array([_added(p) for p in plans])
    fetched = np.array([_fetched(p, cluster) for p in plans])
    return Costs(
        table, layers, held, overlap_exponent, turn, again, share, apart, pace, added, fetched,
        _tied(workload),
    )  # fmt: skip


def _added_seconds(
    held: list[LayerMemory], cluster: Cluster, device: Device | None
) -> tuple[Array, ...]:
    """Seconds to move a byte for each gradient of each layer."""
    moved = [np.sum(one.trained(), axis=0) for one in held]
    size, n = np.array([BIG]), np.array([BIG / 6])
    took = kernel.seconds(device or slowest(cluster), "elementwise", "bf16", {"n": n}, bytes=size)
    pace = float(took.seconds[0]) / BIG * cluster.calibration.compute
    return tuple(pace * size for size in moved)


def _added(plan: Plan) -> float:
    """Bytes a micro-batch moves to add one gradient to those before it, the first one's nothing.

    Sharded gradients are added up where they are reduced: a rank has a part of them.
    """
    run = running(plan)
    if plan.zero == 3 and not keeps_whole(plan, run):
        return 0.0
    return run.accumulation_bytes * (1 - 1 / max(micro_batches(plan), 1))


def unpriced(plans: Sequence[Plan], workload: Workload) -> Costs:
    """What checked plans hold, without the seconds of anything."""
    table = layouts(plans)
    zero = np.zeros(len(plans))
    share = _rerun_share(plans, workload)
    held = layer_memories(workload, table)
    return Costs(table, [], held, zero, zero, zero, share, tied=_tied(workload))


def _taken(held: LayerMemory, which: Rows) -> LayerMemory:
    return LayerMemory(**{name: values[which] for name, values in vars(held).items()})


def _again(plan: Plan) -> float:
    """What is run again in the backward: nothing, attention alone, or whole blocks."""
    return {"none": 0.0, "selective": 1.0, "full": 2.0}[plan.recompute]


def _rerun_share(plans: Sequence[Plan], workload: Workload) -> Array:
    """The part of the blocks of a stage that is run again, the mean of all stages."""
    blocks = max(workload.num_blocks, 1)
    return np.array([min(p.recompute_layers * p.pp / blocks, 1.0) or 1.0 for p in plans])


def rerun_share(plan: Plan, blocks: int) -> float:
    """The part of one stage's blocks that is run again."""
    return min(plan.recompute_layers / max(blocks, 1), 1.0) or 1.0


def layer_parts(c: Costs, at: int, workload: Workload) -> tuple[PassCost, PassCost]:
    """Forward and backward of one layer, what is run again counted with the backward."""
    cost = c.layers[at]
    back = cost.backward
    if workload.layers[at].is_block and c.again.any():
        core, whole = c.share * (c.again == 1), c.share * (c.again == 2)
        back = back + cost.core.times(core) + cost.whole.times(whole)
    if c.added.any():
        back = replace(back, kernels=back.kernels + c.added * c.adding[at])
    if c.fetched.any():
        return _with_fetches(c, workload.layers[at], cost.forward, back)
    return cost.forward, back


def _fetched(plan: Plan, cluster: Cluster) -> float:
    """Host seconds to gather and release the weights of one module each time it runs."""
    return running(plan).profile.fetch * cluster.calibration.host if plan.zero == 3 else 0.0


def _with_fetches(
    c: Costs, layer: Layer, forward: PassCost, back: PassCost
) -> tuple[PassCost, PassCost]:
    """The same where the host gathers the weights of every module before it runs."""
    once = c.fetched * sum(bool(op.weights) for op in layer.works())
    again = 1.0 + (c.share * (c.again == 2) if layer.is_block else 0.0)
    return (
        replace(forward, host=forward.host + once),
        replace(back, host=back.host + once * again),
    )


def weight_gradients(workload: Workload) -> Workload:
    """The matmuls with weights alone, as if their inputs needed no gradient.

    What its backward takes is what a backward in two can put off.
    """
    layers = tuple(
        replace(layer, ops=tuple(_first(op) for op in layer.works() if _is_weighed(op)))
        for layer in workload.layers
    )
    return replace(workload, layers=layers, tied=())


def _is_weighed(op: Op) -> bool:
    return op.kind in _WEIGHED and bool(op.weights)


def _first(op: Op) -> Op:
    return replace(op, options={**op.options, "first": True})


@dataclass(frozen=True)
class StageCost:
    """One kind of stage and one micro-batch, an entry a plan; seconds, and elements of weights."""

    forward: Array
    backward: Array
    compute: Array
    host: Array
    comm: Array
    weights: Array
    experts: Array
    tensors: Array  # of weights that are trained
    ahead: Array  # seconds the host is ahead of the device once it has issued the backward

    @property
    def both(self) -> Array:
        """Forward and backward of a micro-batch."""
        return self.forward + self.backward


def stage(
    c: Costs, times: Array, workload: Workload, cluster: Cluster, copied: CopySeconds | None = None
) -> StageCost:
    """What a stage with each layer so many times costs one micro-batch."""
    copied = copy_seconds(c, workload, cluster) if copied is None else copied
    zero = np.zeros(len(c.plans))
    ways, kernels, comm = [zero.copy(), zero.copy()], zero.copy(), zero.copy()
    issued, tensors = zero.copy(), zero.copy()
    trained = trained_tensors(workload)
    for at, many in enumerate(times):
        for way, part in enumerate(layer_parts(c, at, workload)):
            ways[way] += many * part.seconds(c.overlap_exponent)
            kernels += many * part.kernels
            comm += many * part.shown(c.overlap_exponent)
            issued += many * part.host
        tensors += many * trained[at]
    late = zero.copy(), zero.copy()  # what sharded or fp32 parameters add, layer by layer
    for many, both in zip(times, copied, strict=False):
        for sums, more in zip(late, both, strict=True):
            sums += more * many
    ways[1] += c.turn * (times[-1] > 0)  # the stage that has the loss
    return StageCost(
        ways[0] + late[0],
        ways[1] + late[1],
        kernels,
        np.maximum(ways[0] + ways[1] - kernels - comm, 0.0),
        comm + late[0] + late[1],
        weights(c, times),
        sum((h.trained()[1] * n for h, n in zip(c.layer_memories, times, strict=True)), zero),
        tensors,
        np.maximum(kernels + comm - issued, 0.0),
    )


def trained_tensors(workload: Workload) -> list[int]:
    """How many weights of each layer are trained."""
    works = [layer.works() for layer in workload.layers]
    return [sum(not w.frozen for op in some for w in op.weights) for some in works]


def weights(c: Costs, times: Array, *, frozen: bool = False) -> Array:
    """Elements that every data-parallel rank of a stage trains; with `frozen`, all that it has."""
    own, zero = untied_weights(c, times, frozen=frozen), np.zeros(len(c.plans))
    return sum((w * n for w, n in zip(own, times, strict=True)), zero)


def untied_weights(c: Costs, times: Array, *, frozen: bool = False) -> list[Array]:
    """Elements of each layer, once; what it shares with an earlier one of the stage is not its."""
    every = [h.weights if frozen else h.trained()[0] for h in c.layer_memories]
    found = list(every)
    for kept, other, share in c.tied:
        both = (times[kept] > 0) & (times[other] > 0)
        found[other] = found[other] - np.where(both, every[other] * share, 0.0)
    return found


def _tied(workload: Workload) -> tuple[tuple[int, int, float], ...]:
    """The layers that share a weight, and what share of the second's it is; all are split alike."""
    found, at = [], {layer.name: i for i, layer in enumerate(workload.layers)}
    size = workload.weights if workload.tied else {}
    for kept, other in workload.tied:
        first, layer = kept.partition("/")[0], other.partition("/")[0]
        whole = sum(n for name, n in size.items() if name.startswith(f"{layer}/"))
        found.append((at[first], at[layer], size[other] / whole))
    return tuple(found)


def is_copied(plan: Plan) -> bool:
    """Whether parameters are gathered, or cast from fp32, for each micro-batch.

    A rank that shares with no other gathers nothing, but still casts and copies them.
    """
    run = running(plan)
    return plan.zero == 3 or (run.profile.fp32_parameters and run.formats.master > 0)


def layer_seconds(c: Costs, at: int, workload: Workload) -> tuple[Array, Array]:
    """Forward and backward of one layer, once."""
    forward, backward = layer_parts(c, at, workload)
    return forward.seconds(c.overlap_exponent), backward.seconds(c.overlap_exponent)


def copy_seconds(c: Costs, workload: Workload, cluster: Cluster) -> CopySeconds:
    """What gathers and casts of parameters add to every layer; empty where no plan has any."""
    rows = np.flatnonzero([is_copied(p) for p in c.plans.plans])
    if not len(rows):
        return []
    some = c.take(rows)
    found = []
    for at in range(len(workload.layers)):
        both = np.zeros((2, len(c.plans)))
        both[:, rows] = copied_seconds(some, at, workload, cluster)
        found.append((both[0], both[1]))
    return found


def copied_seconds(c: Costs, at: int, workload: Workload, cluster: Cluster) -> tuple[Array, Array]:
    """What that adds to forward and backward of one layer, once.

    Its neighbours' parameters are gathered and its gradients scattered meanwhile. Both go on at the
    same time and slow each other: (computeᵖ + talkᵖ)^(1/p), as host and device. Collectives take
    units from kernels beside them, and what they read and write is copied.
    """
    alone = layer_seconds(c, at, workload)
    gather, scatter = shard_comm(c, at, workload, cluster)
    again = np.array([r.profile.gathers - 1.0 for r in c.plans.runs])
    sharded = c.plans.column("zero") == 3
    comm = np.where(sharded, gather, 0.0), np.where(sharded, again * gather + scatter, 0.0)
    taken = np.array([r.profile.contention for r in c.plans.runs])
    copied = _shard_copies(c, at, cluster)
    found = []
    for way in (0, 1):
        busy = portable.power(alone[way] + taken * comm[way] + copied[way], c.overlap_exponent)
        both = busy + portable.power(comm[way], c.overlap_exponent)
        found.append(portable.power(both, 1 / c.overlap_exponent) - alone[way])
    return found[0], found[1]


def _shard_copies(c: Costs, at: int, cluster: Cluster) -> tuple[Array, Array]:
    """Seconds of the copies around the collectives of one layer, forward and backward."""
    held, (trained, _) = c.layer_memories[at].weights, c.layer_memories[at].trained()
    pairs = zip(c.plans.plans, c.plans.runs, strict=True)
    each = np.array([_copied(plan, run) for plan, run in pairs])
    moved = held * each[:, 0], held * each[:, 1] + trained * each[:, 2]
    found = []
    for size in moved:
        n = np.maximum(size / 4, 1.0)
        took = kernel.seconds(slowest(cluster), "copy", "bf16", {"n": n}, bytes=4 * n)
        found.append(np.where(size > 0, took.seconds * cluster.calibration.compute, 0.0))
    return found[0], found[1]


def _copied(plan: Plan, run: Running) -> tuple[float, float, float]:
    """Bytes copied: of a parameter forward and backward, of its gradient.

    Gathered once and kept (zero 2, `reshard_after_forward=False`), it is copied forward alone; held
    whole (DDP), it is cast from fp32 before its use and its gradient back, as autocast does.
    """
    grads = run.profile.grad_copies.get(plan.grad_dtype or run.grad_dtype, 0.0)
    ahead, back = run.profile.copies
    if plan.zero == 3:
        gathered, scattered = _times_shared(plan, run)
        return ahead * gathered, back * gathered, grads * scattered
    return (ahead, 0.0, grads) if plan.zero == 2 else (CAST, 0.0, CAST)


def keeps_whole(plan: Plan, run: Running) -> bool:
    """Whether parameters sharded in fp32 (FSDP) are held whole in half precision for a step.

    Gathered once and kept (zero 2, `reshard_after_forward=False`), as torchtitan does in a pipeline
    too, where gradients add up unsharded until the last micro-batch
    (torch/distributed/pipelining/stage.py: `backward_maybe_with_nosync`).
    """
    is_sharded = run.profile.fp32_parameters and bool(run.formats.master) and plan.zero >= 2
    return is_sharded and (plan.zero == 2 or plan.pp > 1)


def _times_shared(plan: Plan, run: Running) -> tuple[float, float]:
    """How often a pass of a micro-batch gathers parameters and scatters gradients, on average."""
    if plan.zero != 3 or not keeps_whole(plan, run):
        return 1.0, 1.0
    turns = max(micro_batches(plan), 1)
    return 1 / (turns * run.profile.gathers), 1 / turns


def shard_comm(c: Costs, at: int, workload: Workload, cluster: Cluster) -> tuple[Array, Array]:
    """Seconds to gather the parameters of one layer and to scatter its gradients, each time."""
    size = c.layer_memories[at].weights
    reach = _network_share(c, cluster)
    narrow = np.array(["fp8-gather" in r.flags for r in c.plans.runs])
    each = np.where(narrow & workload.layers[at].is_block, 1.0, width(c, workload))
    shared = dp_groups("all_gather", c.plans.plans)
    gather = over("all_gather", size * each / reach, shared, cluster)
    trained = c.layer_memories[at].trained()[0]
    scatter = over("reduce_scatter", trained * grad_width(c) / reach, shared, cluster)
    pairs = zip(c.plans.plans, c.plans.runs, strict=True)
    often = np.array([_times_shared(plan, run) for plan, run in pairs])
    return gather * often[:, 0], scatter * often[:, 1]


def _network_share(c: Costs, cluster: Cluster) -> Array:
    """Share of the links' bandwidth that gathers reach: all of it inside a node."""
    found = np.ones(len(c.plans))
    for i, (plan, run) in enumerate(zip(c.plans.plans, c.plans.runs, strict=True)):
        if run.profile.efficiency < 1 and len(levels(cluster, *_shared(plan))) > 1:
            found[i] = run.profile.efficiency
    return found


def _shared(plan: Plan) -> tuple[int, int]:
    """How many ranks share a copy of the weights, and how far apart they are."""
    return plan.sharing * plan.cp, stride(plan, "cp" if plan.cp > 1 else "dp")


def width(c: Costs, workload: Workload) -> Array:
    """Bytes of one number in the format each plan computes in."""
    named = [p.dtype or workload.dtype for p in c.plans.plans]
    return np.array([BYTES[KEPT.get(name, name)] for name in named])


def dp_groups(op: str, plans: Sequence[Plan]) -> list[tuple[int, int]]:
    """Data-parallel ranks of a collective: those that share a copy, or all of them."""
    return [alike(p) if op == "all_reduce" else _shared(p) for p in plans]


def alike(plan: Plan) -> tuple[int, int]:
    """How many ranks hold the same weights for other data, and how far apart they are.

    Those that share an image or its words lie inside; filters and channels are split weights.
    """
    inner = plan.cp * math.prod(plan.spatial)
    return plan.dp * inner, stride(plan, "dp" if inner == 1 else "cp")


def copies(c: Costs) -> Array:
    """Ranks that hold the same experts, among those that share other weights."""
    plans = c.plans
    ranks = plans.column("sharing") * plans.column("eseq")
    return np.maximum(ranks / plans.column("ep"), 1.0)


def same_experts(plan: Plan) -> tuple[int, int]:
    """How many ranks hold the same experts, and how far apart they are."""
    ranks = plan.dp * plan.cp * expert_ranks(plan)
    apart = stride(plan, "ep" if expert_ranks(plan) > 1 else "cp")
    return max(ranks // plan.ep, 1), apart * plan.ep


def over(op: str, size: Array, keys: list[tuple[int, int]], cluster: Cluster) -> Array:
    """Seconds of collectives on groups given by their size and how far apart their ranks are."""
    out = np.zeros(len(keys))
    for key in sorted(set(keys)):
        mine = np.array([i for i, k in enumerate(keys) if k == key])
        out[mine] = collective.price(op, size[mine], levels(cluster, *key)).seconds
    return out


def grad_width(c: Costs) -> Array:
    """Bytes of one gradient where it is reduced."""
    pairs = zip(c.plans.plans, c.plans.runs, strict=True)
    return np.array([BYTES[plan.grad_dtype or run.grad_dtype] for plan, run in pairs])


def cut(seconds: Sequence[float], stages: int) -> tuple[int, ...]:
    """How many blocks each stage has."""
    n = len(seconds)
    if not 1 <= stages <= n:
        raise InfeasibleError(
            f"{n} blocks for {stages} stages", hint=f"pp is between 1 and {n} here"
        )
    total = np.concatenate([[0.0], np.cumsum(seconds)])
    least, came = total.copy(), []
    least[0] = np.inf
    for _ in range(1, stages):
        worst = np.maximum(least[:, None], total[None, :] - total[:, None])
        worst[np.tril_indices(n + 1)] = np.inf  # a stage without blocks
        came.append(np.argmin(worst, axis=0))
        least = worst.min(axis=0)
    ends = [n]
    for back in reversed(came):
        ends.append(int(back[ends[-1]]))
    return tuple(np.diff([0, *reversed(ends)]).tolist())


def is_uneven(workload: Workload) -> bool:
    """Whether blocks differ, so that dealing them out by number is not split work."""
    return sum(layer.is_block for layer in workload.layers) > 1


def with_cuts(plans: Sequence[Plan], workload: Workload, cluster: Cluster) -> list[Plan]:
    """The plans, and behind them those that blocks which differ can be cut by time for.

    Both are kept: with few micro-batches a pipeline fills and drains for much of a step, and then
    stages that are equally busy are not always best.
    """
    mine = [p for p in plans if p.pp > 1 and p.chunks == 1 and not p.layers]
    if not mine or not is_uneven(workload):
        return list(plans)
    took = _blocks([check(p, workload, cluster) for p in mine], workload, cluster)
    known: dict[tuple[int, bytes], tuple[int, ...]] = {}
    more = []
    for column, plan in enumerate(mine):
        key = (plan.pp, took[:, column].tobytes())
        if key not in known:
            known[key] = cut(took[:, column].tolist(), plan.pp)
        if known[key] != blocks_of(plan, workload):
            more.append(plan.but(layers=known[key]))
    return [*plans, *more]


def _blocks(plans: Sequence[Plan], workload: Workload, cluster: Cluster) -> Array:
    """Seconds of every block for every plan; what is no block counts with the one before it."""
    priced = costs(plans, workload, cluster)
    rows: list[Array] = []
    ahead = np.zeros(len(plans))  # what stands before the first block
    for at, layer in enumerate(workload.layers):
        once = np.sum(layer_seconds(priced, at, workload), axis=0)
        if layer.is_block:
            rows += [once + ahead, *[once] * (layer.times - 1)]
            ahead = np.zeros(len(plans))
        elif rows:
            rows[-1] = rows[-1] + once * layer.times
        else:
            ahead = ahead + once * layer.times
    return np.array(rows)


# Of a device's memory: the CUDA context, NCCL's channels and fragments take about 3 GiB of 80.
USABLE = 0.96
HALF = 2.0  # bytes of a parameter in half precision
ROUNDING = 1.01  # of what tensors take: blocks of 512 bytes and 2 MiB, a share of large ones


Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Memory:
    """What one rank of a stage holds at the peak; bytes. Entries are arrays or one number each."""

    parameters: Array
    gradients: Array
    optimizers: Array
    activations: Array
    buffers: Array
    each: Array  # what one micro-batch keeps
    again: Array  # a layer run again, or the loss
    updating: Array  # what the optimizer holds besides, when activations and buffers are gone

    @property
    def workspace(self) -> Array:
        """What is there only for a moment, as far as it is more than was there before."""
        out: Array = np.maximum(self.again, self.updating - self.activations - self.buffers)
        return out

    @property
    def peak(self) -> Array:
        """All of it, as the allocator rounds it up."""
        out: Array = ROUNDING * sum((getattr(self, name) for name in _PARTS_OF_PEAK), np.zeros(1))
        return out

    def parts(self) -> dict[str, float]:
        """Bytes by what they are for, of the first entry; together they are the peak."""
        return rounded({name: float(np.ravel(getattr(self, name))[0]) for name in _PARTS_OF_PEAK})


def rounded(parts: dict[str, float]) -> dict[str, float]:
    """The same parts, with what the allocator adds to them."""
    return parts | {"rounding": (ROUNDING - 1) * sum(parts.values())}


_PARTS_OF_PEAK = ("parameters", "gradients", "optimizers", "activations", "buffers", "workspace")


def memory(plan: Plan, workload: Workload, cluster: Cluster) -> list[Memory]:
    """What a rank of each stage holds, stage by stage."""
    plan, cluster = placed(plan, cluster)
    plan = check(plan, workload, cluster)
    c = unpriced([plan], workload)
    each = [np.array(layers_of(plan, workload, s))[:, None] for s in range(plan.pp)]
    return [stage_memory(c, n, workload, np.array([float(s)])) for s, n in enumerate(each)]


def peaks(c: Costs, workload: Workload, cluster: Cluster) -> tuple[Array, Array]:
    """Bytes of the fullest rank of every plan, and by how much that is too many."""
    assigned = shares(workload, c.plans)
    pp = c.plans.column("pp")
    places = {FIRST: np.zeros(len(pp)), MIDDLE: np.ones(len(pp)), LAST: pp - 1}
    found = [stage_memory(c, assigned.times[k], workload, at).peak for k, at in places.items()]
    peak = np.max(found, axis=0)
    return peak, np.maximum(peak - room(cluster), 0.0)


def room(cluster: Cluster) -> float:
    """Bytes the smallest device has for tensors."""
    return min(d.memory for d in cluster.devices) * USABLE


def stage_memory(c: Costs, times: Array, workload: Workload, stage: Array) -> Memory:
    """What a rank holds whose stage has each layer so many times."""
    plans = c.plans
    zero, sharing = plans.column("zero"), plans.column("sharing")
    held_weights, trained = weights(c, times, frozen=True), weights(c, times)
    held_experts, experts = (
        sum((e * n for e, n in zip(found, times, strict=True)), np.zeros(1))
        for found in (
            [h.experts for h in c.layer_memories],
            [h.trained()[1] for h in c.layer_memories],
        )
    )
    state = np.array([r.state_bytes for r in plans.runs])
    state = np.where([p.offload for p in plans.plans], 0.0, state)
    pairs = list(zip(plans.plans, plans.runs, strict=True))
    kept_whole: Flags = np.array([keeps_whole(plan, run) for plan, run in pairs])
    held = np.array([r.weight_bytes + r.cast_bytes for r in plans.runs])
    each, again = _kept_activations(c, times, workload)
    flying = _in_flight(c, stage)
    summed = (zero >= 2) & ~(kept_whole & (plans.column("pp") > 1))
    whole = grad_width(c) * (trained / np.where(summed, sharing, 1.0) + experts)
    alone = np.array([_frees_gradients(plan, run) for plan, run in pairs])
    gradients = np.where(alone, np.maximum(whole - each * flying - again, 0.0), whole)
    share = np.where(zero >= 1, sharing, 1.0)
    updated = trained / share + experts / np.where(zero >= 1, copies(c), 1.0)
    updating = np.array([r.update_peak_bytes for r in plans.runs])
    parts = np.where((zero == 3) | kept_whole, sharing, 1.0)
    half = np.where(kept_whole, HALF * held_weights, 0.0)
    return Memory(
        parameters=held * (held_weights / parts + held_experts) + half,
        gradients=gradients,
        optimizers=state * updated,
        activations=each * flying,
        buffers=_buffers(c, times, workload) + np.array([r.profile.runtime for r in plans.runs]),
        each=each,
        again=again,
        updating=updating * updated + whole - gradients,
    )


def _kept_activations(c: Costs, times: Array, workload: Workload) -> tuple[Array, Array]:
    """What one micro-batch keeps, and what is there for a moment when a layer is run again."""
    again = np.array([_RECOMPUTE[p.recompute] for p in c.plans.plans])
    by_ops = np.array([r.profile.selective == "ops" for r in c.plans.runs])
    still = np.array([r.profile.kept_by_ops for r in c.plans.runs])
    kept, moment = np.zeros(len(c.plans)), np.zeros(len(c.plans))
    for layer, held, many in zip(workload.layers, c.layer_memories, times, strict=True):
        whole = held.kept + held.gathered
        less = np.where(by_ops, held.output_bytes + still * held.kept, whole - held.scores)
        if layer.is_block:
            each = np.where(again == 2, held.output_bytes, np.where(again == 1, less, whole))
            kept += (c.share * each + (1 - c.share) * whole) * many
            scores = np.where(by_ops, whole - less, held.scores)
            extra = np.where(again == 2, whole, np.where(again == 1, scores, held.brief))
            moment = np.maximum(moment, np.where(many > 0, extra, 0.0))
        else:
            kept += whole * many * (layer is not workload.layers[-1])
            last = (whole + held.brief) * (layer is workload.layers[-1]) * (many > 0)
            moment = np.maximum(moment, last)
    return kept, moment


def _frees_gradients(plan: Plan, run: Running) -> bool:
    """Whether gradients appear as activations go: plain PyTorch, one process, one micro-batch.

    `zero_grad` frees them, and no bucket of DDP or accumulated sum keeps their place.
    """
    return run.profile.kernels == "eager" and plan.dp == 1 and micro_batches(plan) == 1


_RECOMPUTE = {"none": 0, "selective": 1, "full": 2}


def _in_flight(c: Costs, stage: Array) -> Array:
    """Micro-batches a stage holds at once."""
    m, pp, chunks = (c.plans.column(n) for n in ("micro_batches", "pp", "chunks"))
    ends = np.minimum(pp - stage, m)
    deep = np.minimum((2 * (pp - stage - 1) + (chunks - 1) * pp + 1) / chunks, m)
    every = np.array([p.schedule == "gpipe" for p in c.plans.plans])
    out: Array = np.where(every, m, np.where(chunks > 1, deep, ends))
    for at, plan in enumerate(c.plans.plans):
        if plan.actions or plan.schedule not in ("gpipe", "1f1b", "interleaved"):
            held = in_flight(key_of(plan), micro_batches(plan))
            out[at] = held[min(int(stage[at]), plan.pp - 1)] / chunks_of(plan)
    return out


def _buffers(c: Costs, times: Array, workload: Workload) -> Array:
    """Layers of parameters and gradients gathered at once where they are sharded.

    FSDP gathers and reduces on streams of their own, whose blocks the allocator gives to no other:
    what is gathered lies in one buffer before it is copied out (FSDP2), a gradient in one in the
    format it is reduced in (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py).
    """
    whole = np.max(
        [h.weights * (n > 0) for h, n in zip(c.layer_memories, times, strict=True)], axis=0
    )
    ahead = np.array([r.profile.prefetch for r in c.plans.runs])
    apart = np.array([HALF * (r.profile.copies[0] > 0) for r in c.plans.runs]) + grad_width(c)
    is_fsdp = np.array([r.profile.fp32_parameters for r in c.plans.runs])
    zero = c.plans.column("zero")
    each = np.where(zero == 3, HALF * ahead + HALF, 0.0)
    out: Array = whole * (each + np.where(is_fsdp & (zero >= 2), apart, 0.0))
    return out
