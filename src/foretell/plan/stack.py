"""The programs that run plans: a few numbers of each that no model or cluster knows.

A kernel's time comes from its shape, a collective's from its bytes; what is left is the program:
how long its host takes to issue one kernel, whether it waits for gradients, how often its optimizer
reads and writes each parameter. These are measured properties of a program, the same for all
models.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from foretell.errors import unknown


@dataclass(frozen=True)
class Stack:
    """What one program does its own way; seconds and bytes."""

    name: str
    flags: frozenset[str]  # `fused` pointwise chains, `flash` attention (→ workload.op.holds)
    host: float  # host seconds to issue one kernel and its share of views, casts and bookkeeping
    skew: float  # each blocking exchange waits for the slowest rank: seconds a further rank
    overlaps: bool  # whether gradients are reduced during the backward
    grad_dtype: str  # in which they are added up and reduced
    update: float  # bytes the optimizer moves a parameter: norm, scale, Adam in fp32, cast back
    rerun: str = "full"  # what `recompute=full` runs again: everything, or attention alone
    turn: float = (
        0.0  # host seconds a micro-batch takes beside its kernels: batch, loss, bookkeeping
    )
    products: float = 1.0  # times as long as priced that matrix products take: an older library
    attention: float = 1.0  # times as long as FlashAttention-2 that its fused attention takes
    gathers: int = 2  # times a step gathers sharded parameters, micro-batch by micro-batch
    reach: float = 1.0  # share of the links' rate that gathers of sharded parameters reach
    whole_vocab: float = 1.0  # times as long the logits take where one rank has all words
    bend: float = 2.3  # host and device take turns as what bounds a layer: (hᵖ + dᵖ)^(1/p)
    weight_bytes: float = 2.0  # of one parameter, held all the time
    state_bytes: float = 12.0  # of one parameter: fp32 copy and two moments of Adam
    held: float = 0.0  # bytes the program holds besides, on each rank
    sigma: float = 0.1  # of ln(measured / foretold) on models its numbers were not fitted to
    ahead: int = 2  # layers of parameters gathered at once when they are sharded


# vTrain's 1440 layouts (8 A100, tables/vtrain_single_node.csv) run a step of hidden 2048 at 164
# Tflop/s of model work a rank. A second forward would make that 219 with attention unfused, more
# than the products alone reach: what their `full` runs again is attention. With all words on one
# rank the products with the vocabulary reach 80 Tflop/s, with half of them on each 230.
_DEEPSPEED = Stack(
    "megatron-deepspeed",
    frozenset({"fused"}),
    host=69e-6,
    skew=30e-6,
    overlaps=False,
    grad_dtype="fp16",
    update=34.0,
    rerun="selective",
    turn=2.2e-3,
    whole_vocab=2.8,
    bend=2.5,
    sigma=0.09,
)
# The runs of the SC'21 paper: products take 1.09 times the price of today's cuBLAS on a lone A100.
_MEGATRON = Stack(
    "megatron-lm",
    frozenset({"fused"}),
    host=12e-6,
    skew=10e-6,
    overlaps=False,
    grad_dtype="fp32",
    update=40.0,
    products=1.09,
    sigma=0.06,
)
# Megatron-LM's own test runs (tables/megatron_lm_golden_values.csv) hold 78 MiB beside tensors, for
# cuBLAS and the like. Their times are of tiny models on busy hosts; the two of 7 billion parameters
# are 10 and 20 % above what is foretold.
_CORE = Stack(
    "megatron-core",
    frozenset({"fused", "flash"}),
    host=12e-6,
    skew=10e-6,
    overlaps=True,
    grad_dtype="fp32",
    update=34.0,
    products=1.09,
    held=78 * 2**20,
    sigma=0.12,
)
_UNFUSED = replace(_CORE, name="megatron-core-unfused", flags=frozenset({"fused"}))
# llm-foundry's MPT runs: products as above; attention by Triton, about as fast as the first
# FlashAttention, half as fast as the second (Dao 2023, arXiv 2307.08691, figure 4).
_FSDP = Stack(
    "fsdp",
    frozenset({"flash"}),
    host=15e-6,
    skew=10e-6,
    overlaps=True,
    grad_dtype="bf16",
    update=34.0,
    weight_bytes=4.0,
    state_bytes=8.0,
    products=1.09,
    attention=2.0,
    sigma=0.07,
)
# The ZeRO-3 rows of the SC'21 paper are bound by gathers at 21 GB/s a node: one of eight cards.
_ZERO3 = Stack(
    "deepspeed-zero3",
    frozenset({"fused"}),
    host=12e-6,
    skew=10e-6,
    overlaps=True,
    grad_dtype="fp16",
    update=34.0,
    products=1.09,
    gathers=3,
    reach=1 / 8,
)
# PyTorch's DistributedDataParallel over its own operators, in the workload's format and in autocast
# with channels last; SGD with momentum reads and writes eight tensors of four bytes.
_DDP = Stack(
    "ddp",
    frozenset({"eager"}),
    host=20e-6,
    skew=10e-6,
    overlaps=True,
    grad_dtype="fp32",
    update=32.0,
    weight_bytes=4.0,
    state_bytes=4.0,
    sigma=0.2,
)
_DDP_AMP = replace(_DDP, name="ddp-amp", flags=frozenset({"eager", "amp", "nhwc", "fp16"}))
# Its scaled_dot_product_attention is one kernel in halves, where a model calls it.
_DDP_FLASH = replace(_DDP, name="ddp-flash", flags=frozenset({"eager", "flash"}))
_ALL = (_DEEPSPEED, _MEGATRON, _CORE, _UNFUSED, _FSDP, _ZERO3, _DDP, _DDP_AMP, _DDP_FLASH)
STACKS = {stack.name: stack for stack in _ALL}
STACKS["megatron"] = _DEEPSPEED


def usual(can_split: bool, dtype: str, zero: int) -> str:
    """The program to think of where none is named.

    Models that Megatron can split run under it: in fp16 under that of 2022, in bf16 under today's.
    Sharded parameters mean FSDP; everything else is plain data parallelism.
    """
    if zero == 3:
        return "fsdp"
    if can_split and dtype in ("fp16", "bf16", "fp8"):
        return "megatron" if dtype == "fp16" else "megatron-core"
    return "ddp"


def today(can_split: bool, dtype: str, zero: int) -> str:
    """The same among programs of today: what strategies are compared under."""
    found = usual(can_split, dtype, zero)
    return "megatron-core" if found == "megatron" else found


MEASURED_ON = "ampere"  # all these numbers come from A100
AWAY = 0.1  # spread to expect on devices of another generation, where only the data sheet is known


def spread(stack: Stack, arch: str) -> float:
    """Standard deviation of ln(measured / foretold) to expect of a program on a device."""
    return math.hypot(stack.sigma, 0.0 if arch == MEASURED_ON else AWAY)


def stack_of(name: str) -> Stack:
    """The program a plan names."""
    if name not in STACKS:
        raise unknown("stack", name, STACKS)
    return STACKS[name]
