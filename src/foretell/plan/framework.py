"""Number formats and framework profiles: what computes, what is kept, and how a framework runs
it.

A kernel's time comes from its shape, a collective's from its bytes; what is left is the framework.
The numbers and their sources stand in `frameworks.toml`; `profile_of` is the profile as one plan
runs it: in its precision, compiled or not, with its optimizer.

Number formats as people run them: what computes, what is kept, and the bytes of each parameter.

fp32            parameters, gradients and optimizer state in fp32; convolutions in tf32 where the
                device has it, as cuDNN does unless that is disabled (PyTorch's default)
tf32            the same, matmuls in tf32 too
fp32-ieee       no tf32 at all (`torch.backends.fp32_precision = "ieee"`)
bf16-true       everything in bf16, optimizer state included (`model.bfloat16()`)
bf16-mixed      autocast over fp32 parameters: weights are cast before use (fp16-mixed alike)
bf16-master     bf16 parameters and compute, fp32 master weights and gradient reduction
fp16-master     the same in fp16 with fp16 gradients, as DeepSpeed's fp16 engine
fp8, nvfp4      bf16-master whose matmuls run in eight or four bits
fp8-mixed       bf16-mixed whose linear layers run in eight bits where that is faster, casts counted

What a step takes in the field: where no whole steps say so, all prices of a step are a little
longer (`slowdown`). It is one number for a framework on some devices, so that the order of its
plans stays as it is, and none where the machines were measured.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np
import numpy.typing as npt

from foretell import portable
from foretell.cluster import Cluster
from foretell.cost.price import issued as host_issued
from foretell.cost.price import updated as host_updated
from foretell.errors import InputError, unknown
from foretell.plan.plan import Plan
from foretell.workload.workload import Op, Workload

Array = npt.NDArray[np.float64]
HALVES = ("bf16", "fp16", "fp8", "fp4")
ALIASES = {"megatron": "megatron-deepspeed", "ddp-flash": "ddp"}


@dataclass(frozen=True)
class Precision:
    """The formats of one way to train; bytes of one parameter."""

    compute: str  # format of matmuls
    weight: float  # the parameter as the model holds it
    gradient: float
    master: float = 0.0  # its fp32 copy, where there is one
    moment: float = 4.0  # each moment of the optimizer
    casts: bool = False  # autocast: weights are cast each step, norms and loss run in fp32
    convolution: str = ""  # format of convolutions where it is not that of matmuls

    @property
    def updated_bytes(self) -> float:
        """Bytes of the copy of a parameter that the optimizer updates."""
        return self.master or self.weight


PRECISIONS = {
    "fp32": Precision("fp32", 4.0, 4.0, convolution="tf32"),
    "fp32-ieee": Precision("fp32", 4.0, 4.0),
    "tf32": Precision("tf32", 4.0, 4.0),
    "bf16-true": Precision("bf16", 2.0, 2.0, moment=2.0),
    "fp16-true": Precision("fp16", 2.0, 2.0, moment=2.0),
    "bf16-mixed": Precision("bf16", 4.0, 4.0, casts=True),
    "fp16-mixed": Precision("fp16", 4.0, 4.0, casts=True),
    "bf16-master": Precision("bf16", 2.0, 4.0, master=4.0),
    "fp16-master": Precision("fp16", 2.0, 2.0, master=4.0),
    "fp8": Precision("fp8", 2.0, 4.0, master=4.0),
    "fp8-mixed": Precision("fp8", 4.0, 4.0, casts=True),
    "nvfp4": Precision("fp4", 2.0, 4.0, master=4.0),
    "fp64": Precision("fp64", 8.0, 8.0, moment=8.0),
}


def precision_of(name: str) -> Precision:
    """The precision of this name."""
    if name not in PRECISIONS:
        raise unknown("precision", name, PRECISIONS)
    return PRECISIONS[name]


@dataclass(frozen=True)
class Optimizer:
    """How often an update reads or writes each tensor of a parameter, and the moments it keeps."""

    moments: int
    parameter: float
    gradient: float
    moment: float  # all moments together
    scratch: float = 0.0  # temporaries, as wide as a moment
    temporaries: float = 0.0  # of all parameters at once, as wide as a moment

    def update_bytes(self, precision: Precision) -> float:
        """Bytes one update moves for each parameter."""
        copied = precision.weight if precision.master else 0.0  # the half copy, written back
        unscaled = 2.0 if precision.compute == "fp16" and precision.casts else 0.0  # GradScaler
        return (
            self.parameter * precision.updated_bytes
            + (self.gradient + unscaled) * precision.gradient
            + (self.moment + self.scratch) * precision.moment
            + copied
        )


# Counted in torch/optim/adam.py and sgd.py (2.11): `foreach` runs one kernel for each operation
# (weight decay, lerp, mul, addcmul, sqrt, div, add, addcdiv), `fused` one for all of them.
OPTIMIZERS = {
    ("adam", "foreach"): Optimizer(2, 4.0, 2.0, 8.0, 6.0, 1.0),  # roots of the second moments
    ("adam", "fused"): Optimizer(2, 2.0, 1.0, 4.0),
    ("momentum", "foreach"): Optimizer(1, 2.0, 2.0, 4.0),
    ("momentum", "fused"): Optimizer(1, 2.0, 1.0, 2.0),
    ("sgd", "foreach"): Optimizer(0, 2.0, 1.0, 0.0),
    ("sgd", "fused"): Optimizer(0, 2.0, 1.0, 0.0),
}


@dataclass(frozen=True)
class FrameworkProfile:
    """What one framework does its own way, as `frameworks.toml` explains; seconds and bytes."""

    name: str
    kernels: str
    flash: bool
    host: float
    straggler: float
    overlaps: bool
    precision: Mapping[str, str]
    update: float = 0.0
    microbatch: float = 0.0
    gathers: int = 2
    efficiency: float = 1.0
    compiled_host: float = 0.6
    exponent: float = 2.3
    runtime: float = 0.0
    prefetch: int = 2
    attention: float = 1.0
    gradient: str = ""
    layout: str = ""
    fused_loss: bool = True
    compiled_loss: bool = False
    sends_wait: bool = False
    sends_split: bool = False
    fp32_parameters: bool = False
    selective: str = "attention"
    early_stop: bool = False
    flash2: bool = False
    quantise: float = 6.0
    copies: tuple[float, float] = (0.0, 0.0)
    grad_copies: Mapping[str, float] = field(default_factory=dict)
    fetch: float = 0.0
    accumulate: Mapping[str, float] = field(default_factory=dict)
    updating: Mapping[str, float] = field(default_factory=dict)
    contention: float = 0.0
    tp_overlap: bool = False
    ep_overlap: bool = False
    casts_weights: bool = True
    fp8_gather: bool = False
    zero1: str = "flat"
    dispatch: str = "rank"
    experts: str = "grouped"
    kept_by_ops: float = 0.32
    sources: tuple[str, ...] = ()
    judged: tuple[str, ...] = ()
    arch: tuple[str, ...] = ()
    gpus: int = 8
    centred: tuple[str, ...] = ()


@dataclass(frozen=True)
class Running:
    """A framework profile in one precision: the kernels it runs and the bytes it holds."""

    profile: FrameworkProfile
    formats: Precision
    optimizer: Optimizer
    flags: frozenset[str] = field(default_factory=frozenset)
    is_compiled: bool = False
    tp_overlap: bool = False
    ep_overlap: bool = False
    dispatch: str = "rank"
    cuda_graph: str = ""
    update_by: tuple[str, str] = ("adam", "foreach")  # the optimizer and its kernels

    def op(self, op: Op) -> Op:
        """The op as this framework runs it: only Megatron pads the vocabulary."""
        return replace(op, pads={}) if op.pads and self.profile.kernels == "eager" else op

    @property
    def weight_bytes(self) -> float:
        """Of one parameter, held all the time: autocast keeps a half copy of it in the backward."""
        if self.profile.fp32_parameters and self.formats.master:
            return self.formats.master
        return self.formats.weight

    @property
    def cast_bytes(self) -> float:
        """Of the half copy that autocast makes of one parameter, kept until its backward."""
        return 2.0 if self.formats.casts else 0.0

    @property
    def grad_dtype(self) -> str:
        """The format gradients are added up and reduced in.

        Megatron widens those of bf16 by itself, those of fp16 only with an option (its
        `arguments.py`: accumulate_allreduce_grads_in_fp32).
        """
        widths = {4.0: "fp32", 8.0: "fp64"}
        half = "fp16" if self.formats.compute == "fp16" else "bf16"
        widens = bool(self.formats.master) and half == "bf16"
        width = self.profile.gradient if widens else ""
        return width or widths.get(self.formats.gradient, half)

    @property
    def accumulation_bytes(self) -> float:
        """Bytes moved to add the gradient of one parameter to that of earlier micro-batches.

        PyTorch reads both and writes their sum.
        """
        own = 0.0 if self.profile.kernels == "fused" else 3.0 * self.formats.gradient
        return self.profile.accumulate.get(self.formats.compute, own)

    @property
    def state_bytes(self) -> float:
        """Of the optimizer, one parameter: the master copy and the moments."""
        copied = 0.0 if self.profile.fp32_parameters else self.formats.master
        return copied + self.optimizer.moments * self.formats.moment

    @property
    def update_peak_bytes(self) -> float:
        """Bytes of one parameter that are there while it is updated, when activations are gone."""
        is_own = self.profile.kernels == "eager"
        own = self.optimizer.temporaries * self.formats.moment if is_own else 0.0
        return self.profile.updating.get(self.formats.compute, own)

    @property
    def update(self) -> float:
        """Bytes the optimizer moves for one parameter."""
        return self.profile.update or self.optimizer.update_bytes(self.formats)

    def exposed_share(self, ranks: float) -> float:
        """Share of a sequence-parallel collective that the step waits for.

        Behind a matmul cut into as many pieces as there are ranks, all but the first piece is sent
        while another is multiplied, which takes units from it.
        """
        return 1 / ranks + (1 - 1 / ranks) * self.profile.contention

    def hides_tp(self, is_backward: bool) -> bool:
        """Whether sequence-parallel collectives of a pass run behind matmuls.

        PyTorch's async TP shortens the forward alone: by up to 29 %, whole steps by up to 8
        (Introducing Async Tensor Parallelism in PyTorch, 2024-09: discuss.pytorch.org 209487).
        """
        return self.tp_overlap and not (is_backward and self.profile.kernels == "eager")

    def issue_seconds(self, op: str, is_backward: bool) -> float:
        """Host seconds to issue one kernel; a compiled step issues them from one wrapper."""
        if not self.profile.host:
            return host_issued("compiled" if self.is_compiled else op, is_backward)
        return self.profile.host * (self.profile.compiled_host if self.is_compiled else 1.0)

    def in_cuda_graph(self, op: Op, is_block: bool) -> bool:
        """Whether a CUDA graph issues an op: all of a step, or what has the same shape each time.

        How many words an expert gets is known too late for a graph of layers, unless padded to a
        capacity.
        """
        if self.cuda_graph != "layers":
            return self.cuda_graph == "iteration"
        is_sparse = op.kind in ("permute", "experts", "expert_bias", "regroup", "combine")
        return is_block and (not is_sparse or bool(op.options.get("padded")))

    def update_seconds(self, tensors: Array) -> Array:
        """Host seconds of the optimizer's step over so many tensors; 0 where `host` has them."""
        is_replayed = self.cuda_graph == "iteration"
        if is_replayed or self.profile.host or self.profile.kernels != "eager":
            return np.zeros_like(tensors)
        return host_updated(*self.update_by, tensors, self.is_scaled)

    @property
    def is_scaled(self) -> bool:
        """Whether a gradient scaler lets the host wait for the device before each update."""
        return self.formats.compute == "fp16" and self.formats.casts


@cache
def profiles() -> dict[str, FrameworkProfile]:
    """Every framework profile that comes with the package, by its name."""
    text = files("foretell.plan").joinpath("frameworks.toml").read_text(encoding="utf-8")
    table: dict[str, dict[str, Any]] = tomllib.loads(text)
    whole = {name: table.get(row.get("like", ""), {}) | row for name, row in table.items()}
    return {name: _profile(name, row) for name, row in whole.items()}


def clear_cache() -> None:
    """Drop what was derived from profiles, after one of them was replaced."""
    _running.cache_clear()


def _profile(name: str, row: dict[str, Any]) -> FrameworkProfile:
    fields: dict[str, Any] = {k: v for k, v in row.items() if k != "like"}
    fields |= {k: tuple(v) for k, v in fields.items() if isinstance(v, list)}
    return FrameworkProfile(name=name, **fields)


def framework_of(name: str) -> FrameworkProfile:
    """The profile of this name."""
    known = profiles()
    found = ALIASES.get(name, name)
    if found not in known:
        raise unknown("framework", name, [*known, *ALIASES])
    return known[found]


def default_framework(can_split: bool, dtype: str, zero: int) -> str:
    """The framework to think of where a plan names none; the same in every command.

    Sharded parameters mean FSDP. Models that Megatron can split run under it in half precision: in
    fp16 as Megatron-DeepSpeed does, in bf16 under Megatron-core. All else is plain DDP.
    """
    if zero == 3:
        return "fsdp"
    if can_split and dtype in HALVES:
        return "megatron-deepspeed" if dtype == "fp16" else "megatron-core"
    return "ddp"


def resolved(plan: Plan, workload: Workload) -> Plan:
    """The plan with framework, precision, compute format and optimizer made explicit."""
    return _resolved(plan, workload.splits("tp"), workload.dtype)


def _resolved(plan: Plan, can_split: bool, dtype: str) -> Plan:
    if plan.precision:
        formats = precision_of(plan.precision)
        if plan.dtype and plan.dtype != formats.compute:
            raise InputError(
                f"dtype={plan.dtype} beside precision={plan.precision}",
                hint=f"{plan.precision} computes in {formats.compute}: leave dtype out",
            )
        dtype = formats.compute
    else:
        dtype = plan.dtype or dtype
    name = plan.framework or _default(plan, can_split, dtype)
    profile = framework_of(name)
    precision = plan.precision or profile.precision.get(dtype, dtype)
    if precision not in PRECISIONS:
        precision = {"fp4": "nvfp4"}.get(precision, "fp32")
    kind = plan.optimizer or ("adam" if can_split or profile.kernels == "fused" else "momentum")
    formats = precision_of(precision)
    return plan.but(
        framework=profile.name, precision=precision, dtype=formats.compute, optimizer=kind
    )


def _default(plan: Plan, can_split: bool, dtype: str) -> str:
    """Parameters in half precision without a copy, autocast and torch.compile are PyTorch's own."""
    plain = plan.tp == plan.pp == plan.cp == 1 and plan.zero < 3
    if plain and (plan.compile or plan.precision.endswith(("-true", "-mixed"))):
        return "ddp"
    return default_framework(can_split, dtype, plan.zero)


def _has_wide_loss(profile: FrameworkProfile, formats: Precision, compiled: bool) -> bool:
    """Whether PyTorch's own operators make the loss of logits in fp32.

    Autocast does, and who computes in half precision beside a master copy casts the logits. What is
    compiled as a whole keeps no wide copies; who compiles FSDP block by block may leave it outside.
    """
    if compiled:
        is_outside = profile.fp32_parameters and not profile.compiled_loss
        return bool(formats.master) and is_outside
    return formats.casts or bool(formats.master)


@cache
def _running(
    framework: str, precision: str, compiled: bool, updates: tuple[str, str],
    hides: tuple[bool | None, bool | None], dispatch: str, cuda_graph: str,
) -> Running:  # fmt: skip
    profile, formats = framework_of(framework), precision_of(precision)
    flags = set()
    if profile.kernels == "fused" or compiled:
        flags.add("fused")
    else:
        flags.add("eager")
    if compiled:
        flags.add("compiled")
    if profile.flash and (formats.compute in HALVES or profile.kernels == "eager"):
        flags.add("flash")  # scaled_dot_product_attention keeps no scores in fp32 either
    elif profile.kernels == "eager":
        flags.add("written-out")
    elif "fused" in flags and not compiled and formats.compute not in HALVES:
        flags.add("torch-softmax")
    if profile.kernels == "fused" and not compiled and not profile.fused_loss:
        flags.add("written-loss")
    if profile.flash2:
        flags.add("flash2")
    if formats.casts:
        flags |= {"amp", formats.compute}
    if profile.kernels == "eager" and _has_wide_loss(profile, formats, compiled):
        flags.add("fp32-loss")
    if formats.compute in ("fp8", "fp4"):
        flags.add("fp8")
        if formats.casts:
            flags.add("fp8-where-faster")
        if not profile.casts_weights:
            flags.add("fp8-weights")
        if profile.fp8_gather and formats.compute == "fp8":
            flags.add("fp8-gather")
    if profile.layout:
        flags.add(profile.layout)
    if profile.experts != "grouped":
        flags.add(profile.experts)
    dispatch = dispatch or profile.dispatch
    if dispatch == "node":
        flags.add("sent-once")
    name = updates[0] or "adam", updates[1] or "foreach"
    tp, ep = hides
    return Running(
        profile,
        formats,
        OPTIMIZERS[name],
        frozenset(flags),
        compiled,
        profile.tp_overlap if tp is None else tp,
        profile.ep_overlap if ep is None else ep,
        dispatch,
        cuda_graph,
        name,
    )


def running(plan: Plan) -> Running:
    """The profile under which a plan runs; what it leaves open is as for a transformer in bf16."""
    if not (plan.precision and plan.framework):
        plan = _resolved(plan, True, plan.dtype or "bf16")
    return _running(
        plan.framework,
        plan.precision,
        plan.compile,
        (plan.optimizer, plan.optimizer_kernels),
        (plan.tp_overlap, plan.ep_overlap),
        plan.ep_dispatch,
        plan.cuda_graph,
    )


def arches(cluster: Cluster) -> frozenset[str]:
    """The generations of a cluster's devices."""
    return frozenset(cluster.devices[ranks[0]].arch for ranks in cluster.devices_by_kind().values())


def profile_distances(plan: Plan, cluster: Cluster) -> dict[str, float]:
    """How far devices are from whole steps that a profile was held to, by kind: 0 or 1."""
    profile, on = running(plan).profile, arches(cluster)
    known = on <= set(profile.centred) or cluster.is_measured
    return {"field": float(not known), "arch": float(not on <= set(profile.arch))}


@cache
def field_slowdowns() -> dict[str, float]:
    """By how much each of those distances makes a step longer: ln(measured / predicted)."""
    text = files("foretell.plan").joinpath("field.toml").read_text(encoding="utf-8")
    found: dict[str, float] = tomllib.loads(text)["slower"]
    return found


def slowdown(plan: Plan, cluster: Cluster) -> float:
    """How many times as long as its prices say a step takes there; 1 on measured machines."""
    if cluster.is_measured:
        return 1.0
    distances = profile_distances(plan, cluster)
    return float(
        portable.exp(sum(each * distances[name] for name, each in field_slowdowns().items()))
    )
