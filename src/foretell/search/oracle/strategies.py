"""What each parallel strategy of the oracle is, how it is priced, and where that ends.

A layout's name (`fsdp+tensor`) joins these words. The oracle itself needs none of this: it is what
`foretell explain` tells a person, beside the code it describes.
"""

from __future__ import annotations

from typing import NamedTuple


class Strategy(NamedTuple):
    """One way to share a step among ranks."""

    does: str
    model: str  # how a step of it is priced
    fields: str  # of a plan
    ends: str  # how far it reaches
    assumes: tuple[str, ...] = ()
    source: str = ""


_PARADL = "Kahira et al., ParaDL, HPDC 2021"
_MEGATRON = "Shoeybi et al., Megatron-LM, 2019; Narayanan et al., SC 2021"
_ZERO = "Rajbhandari et al., ZeRO, SC 2020"
_ALIKE = "every rank computes as much as every other, at the same time"

STRATEGIES: dict[str, Strategy] = {
    "serial": Strategy(
        "One device does everything.",
        "Every kernel at its full shape, the host beside it, then the update.",
        "dp=1", "what one device holds", ("nothing else runs on the device",), _PARADL,
    ),
    "data": Strategy(
        "Every rank has the whole model and a part of the samples.",
        "Kernels at the shape of a rank's samples; gradients all-reduced in buckets, beside the "
        "backward pass where the program does that; every rank updates everything.",
        "dp", "one sample a rank", (_ALIKE,), _PARADL,
    ),
    "zero": Strategy(
        "Data parallel, with optimizer state (and gradients) shared among the ranks.",
        "Gradients are reduce-scattered, each rank updates its part, parameters are gathered once "
        "a step.",
        "dp, zero=1 or 2, shard", "one sample a rank", (_ALIKE,), _ZERO,
    ),
    "fsdp": Strategy(
        "Data parallel, with parameters shared too and gathered layer by layer.",
        "Each layer's parameters are gathered before its forward and its backward, one layer "
        "ahead; gradients are reduce-scattered. Gathers and kernels meet as host and device do.",
        "dp, zero=3, shard", "one sample a rank", (_ALIKE,),
        "Rajbhandari et al., ZeRO, SC 2020; Zhao et al., PyTorch FSDP, VLDB 2023",
    ),
    "tensor": Strategy(
        "The matmuls of each block are split by columns, then by rows.",
        "Every kernel at the shape the split leaves, not work divided by ranks; two all-reduces a "
        "block each way, or gathers and scatters where norms are split too (`sp`).",
        "tp, sp", "heads of attention; ranks of one node, by default", (_ALIKE,),
        _MEGATRON,
    ),
    "pipeline": Strategy(
        "Stages of layers on different ranks, micro-batches behind each other.",
        "Forwards and backwards in the order of the schedule, sends between stages, simulated; the "
        "closed form of the sweep takes the slowest stage and the bubble.",
        "pp, chunks, schedule, micro_batch", "blocks of the model",
        ("stages hold as many blocks as each other, unless `layers` says more",), _MEGATRON,
    ),
    "context": Strategy(
        "The tokens of a sample are split; attention needs all keys and values.",
        "Kernels at a rank's share of the tokens; keys and values gathered before each attention, "
        "their gradients scattered in the backward pass.",
        "cp", "4096 tokens a rank at least, 16 ranks at most",
        ("causal attention is balanced among ranks",), "Grattafiori et al., Llama 3, 2024",
    ),
    "expert": Strategy(
        "The experts of a mixture live on different ranks.",
        "Two all-to-alls a block each way; experts' matmuls at the tokens they get.",
        "ep", "experts of a block", ("tokens are split evenly among experts",),
        "Lepikhin et al., GShard, 2020",
    ),
    "spatial": Strategy(
        "Images (or cubes) are cut into parts; neighbours exchange the rows at the cuts.",
        "Convolutions at the size of a part with its halo; halos are sent before each of them; "
        "gradients all-reduced among all.",
        "spatial=2+2", "pixels of the last layer", (_ALIKE,), _PARADL,
    ),
    "filter": Strategy(
        "Output channels are split: every rank computes some filters.",
        "Convolutions at a rank's filters, activations gathered behind each, their gradients "
        "all-reduced in the backward pass.",
        "filter", "output channels of the narrowest layer", (_ALIKE,), _PARADL,
    ),
    "channel": Strategy(
        "Input channels are split: every rank sums over some of them.",
        "Convolutions at a rank's channels, results all-reduced behind each, gradients gathered.",
        "channel", "input channels of the narrowest layer", (_ALIKE,), _PARADL,
    ),
}  # fmt: skip
