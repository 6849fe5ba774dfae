"""What one training step of a model is before it is split: layers of ops, repeated, and their
sizes.

GPT-3's 96 blocks are one `Layer` with `times=96`; prices and memory are worked out once for it.
Sizes of an op are those of one sample; the batch is never among them. `splits` says which dim each
axis of the device mesh divides, so that the shape a rank is left with is worked out, not work ÷
ranks:

    size(dim) = ⌈ size / degrees that split it ⌉, or with padding ⌈ size / (pad·degrees) ⌉ · pad

Axes: `tp` (tensor), `sp` (sequence, over the ranks of `tp`), `cp` (context), `ep` (experts), `etp`
(tensor, of each expert), `esp` (the same under sequence parallelism), `eseq` (tp / etp),
`filter`, `channel`, `height`, `width`, `depth`. Data parallelism splits the batch, pipelines the
layers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

Number = npt.NDArray[np.float64] | float
Sizes = Mapping[str, Number]
AXES = (
    *("tp", "sp", "cp", "ep", "etp", "esp", "eseq"),
    *("filter", "channel", "height", "width", "depth"),
)
BYTES = {"fp64": 8.0, "fp32": 4.0, "tf32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int64": 8.0}
BYTES |= {"int32": 4.0, "int8": 1.0, "bool": 1.0, "fp4": 0.5}
# What tensors are kept in where matmuls are computed in a format too narrow to keep.
KEPT = {"fp8": "bf16", "fp4": "bf16"}


def holds(when: str, flags: frozenset[str]) -> bool:
    """Whether a condition is met: empty, a flag that is there, or `!flag` for one that is not.

    Flags say how a stack computes: `flash` (attention keeps no scores), `fused` (chains of
    pointwise work are one kernel), `eager` (PyTorch's own operators). Conditions joined by `&` have
    to hold all.
    """
    parts = when.split("&") if when else []
    return all(p[1:] not in flags if p.startswith("!") else p in flags for p in parts)


@dataclass(frozen=True)
class Tensor:
    """A tensor by the dims whose sizes it multiplies."""

    name: str
    dims: tuple[str, ...]
    dtype: str = ""  # that of the workload where empty
    when: str = ""  # a flag of the stack, or `!flag`: there only with it, only without it
    times: float = 1.0  # for what is no whole product of dims
    frozen: bool = field(default=False, repr=False)  # a weight that is not trained

    def elements(self, sizes: Sizes) -> Number:
        """How many numbers it has, given the sizes a rank is left with."""
        out: Number = self.times
        for dim in self.dims:
            out = out * sizes[dim]
        return out

    def bytes(self, sizes: Sizes, dtype: str) -> Number:
        """Bytes it takes where the workload computes in `dtype`."""
        return self.elements(sizes) * BYTES[self.dtype or dtype]


@dataclass(frozen=True)
class Op:
    """Work on one rank; `foretell.workload.kernels` has the kernels of each `kind`."""

    name: str
    kind: str
    dims: Mapping[str, float]
    splits: Mapping[str, str] = field(default_factory=dict)  # axis → dim
    weights: tuple[Tensor, ...] = ()  # parameters
    saved: tuple[Tensor, ...] = ()  # what autograd keeps for the backward
    most: Mapping[str, int] = field(default_factory=dict)  # axis → largest degree that makes sense
    pads: Mapping[str, int] = field(default_factory=dict)  # dim → multiple it is padded to, a rank
    options: Mapping[str, Any] = field(default_factory=dict)  # of the kind: passes, kernel, causal
    when: str = ""  # a flag of the stack, or `!flag`: runs only with it, only without it
    brief: tuple[Tensor, ...] = ()  # what is there only while its layer runs

    def sizes(self, degrees: Mapping[str, Number], batch: Number = 1.0) -> dict[str, Number]:
        """The sizes one rank is left with, `batch` among them; degrees may be arrays."""
        out: dict[str, Number] = {"batch": batch}
        for dim, size in self.dims.items():
            by: Number = 1.0
            for axis, split in self.splits.items():
                if split == dim:
                    by = by * degrees.get(axis, 1.0)
            pad = self.pads.get(dim, 1)
            out[dim] = np.ceil(size / (pad * by)) * pad
        return out


@dataclass(frozen=True)
class Exchange:
    """Ranks of one axis give each other what the ops around it need; nothing at degree 1.

    `forward` and `backward` are collectives, `send` (to each neighbour: a halo), or empty.
    """

    name: str
    axis: str
    forward: str
    backward: str
    dims: Mapping[str, float]  # of the whole tensor, one sample: product of all
    splits: Mapping[str, str] = field(default_factory=dict)  # by other axes
    unless: str = ""  # not where this axis is split too: `sp` has exchanges of its own
    dtype: str = ""
    times: float = 1.0
    kept: bool = True  # False: what it gathers is gathered again in the backward, not kept
    copies: float = 1.0  # of one row, to as many ranks: one to a node is enough

    def bytes(self, degrees: Mapping[str, Number], batch: Number, dtype: str) -> Number:
        """Bytes of the whole tensor in the meaning of `foretell.cost.collective`."""
        sizes = Op(self.name, "exchange", self.dims, self.splits).sizes(degrees, batch)
        out: Number = self.times * BYTES[self.dtype or dtype]
        for size in sizes.values():
            out = out * size
        return out


@dataclass(frozen=True)
class Layer:
    """Ops that run one after another, `times` times in a row, each time with its own weights."""

    name: str
    ops: tuple[Op | Exchange, ...]
    carries: Tensor  # what it hands to the next layer: all that a checkpoint keeps
    sizes: Mapping[str, float]  # the dims of `carries`, one sample
    times: int = 1
    splits: Mapping[str, str] = field(default_factory=dict)  # how axes split `carries`
    is_block: bool = True  # counted when layers are split into stages; embedding and head are not
    # layers it reads, the one before where empty; ("",): none, it reads the input
    after: tuple[str, ...] = field(default=(), repr=False)

    def works(self) -> Iterator[Op]:
        """Its ops without the exchanges."""
        return (op for op in self.ops if isinstance(op, Op))

    def output_bytes(self, degrees: Mapping[str, Number], batch: Number, dtype: str) -> Number:
        """Bytes one rank hands to the next layer."""
        sizes = Op(self.name, "carry", self.sizes, self.splits).sizes(degrees, batch)
        return self.carries.bytes(sizes, dtype)


@dataclass(frozen=True)
class Workload:
    """A model, what it is fed and in which number format it computes."""

    name: str  # the spec it was made from: `gpt:layers=24,…`
    layers: tuple[Layer, ...]  # in forward order
    batch: int = 1  # default samples of one step
    dtype: str = "bf16"
    tied: tuple[tuple[str, str], ...] = ()  # (layer/weight that is kept, layer/weight that is it)
    unit: str = "samples"  # what a sample is called
    tokens: float = 1.0  # of one sample, where it has tokens
    notes: tuple[str, ...] = ()  # what of a recorded model was not understood

    @property
    def num_blocks(self) -> int:
        """Layers that a pipeline splits to its stages."""
        return sum(layer.times for layer in self.layers if layer.is_block)

    @property
    def parameters(self) -> float:
        """Weights of the whole model; tied ones count once, padding does not count."""
        again = {other for _, other in self.tied}
        return sum(
            layer.times * float(weight.elements(op.dims))
            for layer in self.layers
            for op in layer.works()
            for weight in op.weights
            if f"{layer.name}/{weight.name}" not in again
        )

    @property
    def weights(self) -> dict[str, float]:
        """Elements of each weight, by `layer/name`; a repeated layer has one of each per time."""
        return {
            f"{layer.name}/{weight.name}": float(weight.elements(op.dims))
            for layer in self.layers
            for op in layer.works()
            for weight in op.weights
        }

    def flops(self, samples: float = 1.0) -> float:
        """Floating point operations of forward and backward for some samples, nothing twice."""
        pairs = zip(self.layers, self.layer_flops, strict=True)
        return samples * sum(layer.times * work for layer, work in pairs)

    @cached_property
    def layer_flops(self) -> list[float]:
        """Floating point operations of one sample through each layer once, forward and backward."""
        from foretell.workload.kernels import flops

        return [sum(flops(op, op.sizes({})) for op in layer.works()) for layer in self.layers]

    @cached_property
    def ends(self) -> tuple[float, float]:
        """Embedding and head as a share of a block, by flops."""
        places = [at for at, layer in enumerate(self.layers) if layer.is_block]
        pairs = zip(self.layers, self.layer_flops, strict=True)
        work = [layer.times * once for layer, once in pairs]
        each = sum(work[at] for at in places) / max(self.num_blocks, 1)
        last = len(self.layers) - 1
        inner = [at for at in range(1, last) if at not in places]
        counted = {at: work[at] / each if at in inner and each else 1.0 for at in range(last + 1)}
        before = sum(counted[at] for at in range(places[0])) if places else 0.0
        behind = sum(counted[at] for at in range(places[-1] + 1, last + 1)) if places else 0.0
        return before, behind

    def most(self, axis: str) -> float:
        """The largest degree an axis may have; 1 where nothing can be split along it."""
        return self._limits.get(axis, 1.0)

    def splits(self, axis: str) -> bool:
        """Whether any op names a split along an axis, be its largest degree 1 (multi-query)."""
        return axis in self._limits

    @cached_property
    def _limits(self) -> dict[str, float]:
        """The largest useful degree of each axis; searches ask for it thousands of times."""
        found: dict[str, float] = {}
        for layer in self.layers:
            for op in layer.works():
                for axis in sorted({*op.splits, *op.most}):
                    most = float(op.most.get(axis, float("inf")))
                    found[axis] = min(found.get(axis, float("inf")), most)
        return found

    def fingerprint(self) -> str:
        """A hash of layers, sizes and format: a plan remembers for what it was made."""
        text = json.dumps([repr(layer) for layer in self.layers] + [self.dtype])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def __str__(self) -> str:
        lines = [f"{self.name}  {self.dtype}, batch {self.batch}"]
        lines += [f"  {layer.times:4} × {layer.name}: {_ops(layer)}" for layer in self.layers]
        flops = self.flops()
        lines += [f"  {self.parameters:,.0f} parameters, {flops:.3g} flop per sample"]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)


def _ops(layer: Layer) -> str:
    return " ".join(op.name for op in layer.works())
