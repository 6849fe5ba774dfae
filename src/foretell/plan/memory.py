"""Bytes each rank holds at the worst moment of a step, and what of.

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

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foretell.cluster import Cluster
from foretell.plan.check import check, micro_batches, placed
from foretell.plan.costs import Costs, copies, grad_width, keeps_whole, unpriced
from foretell.plan.costs import weights as weights_of
from foretell.plan.framework import Running
from foretell.plan.layouts import FIRST, LAST, MIDDLE, Array, layers_of, shares
from foretell.plan.order import chunks_of, in_flight, key_of
from foretell.plan.plan import Plan
from foretell.workload import Workload

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
    workspace: Array  # what is there only for a moment: a layer run again, the loss

    @property
    def peak(self) -> Array:
        """All of it, as the allocator rounds it up."""
        parts = (self.parameters, self.gradients, self.optimizers, self.activations)
        out: Array = ROUNDING * sum((*parts, self.buffers, self.workspace), np.zeros(1))
        return out

    def parts(self) -> dict[str, float]:
        """Bytes by what they are for, of the first entry."""
        names = ("parameters", "gradients", "optimizers", "activations", "buffers", "workspace")
        return {name: float(np.ravel(getattr(self, name))[0]) for name in names}


def memory(plan: Plan, workload: Workload, cluster: Cluster) -> list[Memory]:
    """What a rank of each stage holds, stage by stage."""
    plan, cluster = placed(plan, cluster)
    c = unpriced([check(plan, workload, cluster)], workload)
    return [rank_memory(c, workload, s) for s in range(plan.pp)]


def rank_memory(c: Costs, workload: Workload, stage: int) -> Memory:
    """What a rank of one stage of the first plan holds."""
    plan = c.plans.plans[0]
    times = np.array(layers_of(plan, workload, stage))[:, None]
    return stage_memory(c, times, workload, np.array([float(stage)]))


def peaks(c: Costs, workload: Workload, cluster: Cluster) -> tuple[Array, Array]:
    """Bytes of the fullest rank of every plan, and by how much that is too many."""
    dealt = shares(workload, c.plans)
    pp = c.plans.column("pp")
    places = {FIRST: np.zeros(len(pp)), MIDDLE: np.ones(len(pp)), LAST: pp - 1}
    found = [stage_memory(c, dealt.times[k], workload, at).peak for k, at in places.items()]
    peak = np.max(found, axis=0)
    return peak, np.maximum(peak - room(cluster), 0.0)


def room(cluster: Cluster) -> float:
    """Bytes the smallest device has for tensors."""
    return min(d.memory for d in cluster.devices) * USABLE


def stage_memory(c: Costs, times: Array, workload: Workload, stage: Array) -> Memory:
    """What a rank holds whose stage has each layer so many times."""
    plans = c.plans
    zero, sharing = plans.column("zero"), plans.column("sharing")
    held_weights = weights_of(c, times, workload, frozen=True)
    weights = weights_of(c, times, workload)
    held_experts, experts = (
        sum((e * n for e, n in zip(found, times, strict=True)), np.zeros(1))
        for found in ([h.experts for h in c.holdings], [h.trained()[1] for h in c.holdings])
    )
    state = np.array([r.state_bytes for r in plans.runs])
    state = np.where([p.offload for p in plans.plans], 0.0, state)
    kept_whole: Flags = np.array([keeps_whole(p) for p in plans.plans])
    held = np.array([r.weight_bytes + r.cast_bytes for r in plans.runs])
    each, again = _kept(c, times, workload)
    flying = _in_flight(c, stage)
    summed = (zero >= 2) & ~(kept_whole & (plans.column("pp") > 1))
    gradients = grad_width(c) * (weights / np.where(summed, sharing, 1.0) + experts)
    alone = np.array([_makes_room(p, r) for p, r in zip(plans.plans, plans.runs, strict=True)])
    gradients = np.where(alone, np.maximum(gradients - each * flying - again, 0.0), gradients)
    share = np.where(zero >= 1, sharing, 1.0)
    apart = copies(c)
    parts = np.where((zero == 3) | kept_whole, sharing, 1.0)
    half = np.where(kept_whole, HALF * held_weights, 0.0)
    return Memory(
        parameters=held * (held_weights / parts + held_experts) + half,
        gradients=gradients,
        optimizers=state * (weights / share + experts / np.where(zero >= 1, apart, 1.0)),
        activations=each * flying,
        buffers=_buffers(c, times, workload) + np.array([r.profile.runtime for r in plans.runs]),
        each=each,
        workspace=again,
    )


def _kept(c: Costs, times: Array, workload: Workload) -> tuple[Array, Array]:
    """What one micro-batch keeps, and what is there for a moment when a layer is run again."""
    again = np.array([_RECOMPUTE[p.recompute] for p in c.plans.plans])
    by_ops = np.array([r.profile.selective == "ops" for r in c.plans.runs])
    still = np.array([r.profile.kept_by_ops for r in c.plans.runs])
    kept, moment = np.zeros(len(c.plans)), np.zeros(len(c.plans))
    for layer, held, many in zip(workload.layers, c.holdings, times, strict=True):
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


def _makes_room(plan: Plan, run: Running) -> bool:
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
    whole = np.max([h.weights * (n > 0) for h, n in zip(c.holdings, times, strict=True)], axis=0)
    ahead = np.array([r.profile.prefetch for r in c.plans.runs])
    apart = np.array([HALF * (r.profile.copies[0] > 0) for r in c.plans.runs]) + grad_width(c)
    is_fsdp = np.array([r.profile.fp32_parameters for r in c.plans.runs])
    zero = c.plans.column("zero")
    each = np.where(zero == 3, HALF * ahead + HALF, 0.0)
    out: Array = whole * (each + np.where(is_fsdp & (zero >= 2), apart, 0.0))
    return out
