"""What one training step of a model is: layers of ops, repeated, before it is split.

GPT-3's 96 blocks are one `Layer` with `times=96`; prices and memory are worked out once for it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from foretell.workload.op import Exchange, Number, Op, Tensor


@dataclass(frozen=True)
class Layer:
    """Ops that run one after another, `times` times in a row, each time with its own weights."""

    name: str
    ops: tuple[Op | Exchange, ...]
    carries: Tensor  # what it hands to the next layer: all that a checkpoint keeps
    sizes: Mapping[str, float]  # the dims of `carries`, one sample
    times: int = 1
    splits: Mapping[str, str] = field(default_factory=dict)  # how axes split `carries`
    is_block: bool = True  # counted when layers are split to stages; embedding and head are not
    # layers it reads, the one before where empty; ("",): none, it reads the input
    after: tuple[str, ...] = field(default=(), repr=False)

    def works(self) -> Iterator[Op]:
        """Its ops without the exchanges."""
        return (op for op in self.ops if isinstance(op, Op))

    def handed(self, degrees: Mapping[str, Number], batch: Number, dtype: str) -> Number:
        """Bytes one rank hands to the next layer."""
        sizes = Op(self.name, "carry", self.sizes, self.splits).sizes(degrees, batch)
        return self.carries.bytes(sizes, dtype)


@dataclass(frozen=True)
class Workload:
    """A model, what it is fed and in which number format it computes."""

    name: str  # the spec it was made from: `gpt:layers=24,…`
    layers: tuple[Layer, ...]  # in forward order
    batch: int = 1  # samples of one step where a plan says nothing
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
        from foretell.workload.kernels import flops

        return samples * sum(
            layer.times * flops(op, op.sizes({})) for layer in self.layers for op in layer.works()
        )

    def most(self, axis: str) -> float:
        """The largest degree an axis may have; 1 where nothing can be split along it."""
        return self._limits.get(axis, 1.0)

    @cached_property
    def _limits(self) -> dict[str, float]:
        """The largest degree of each axis that splits anything: asked thousands of times."""
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
