"""One op of a model before anybody says how it is split: its sizes and what may divide them.

Sizes are those of one sample; the batch is never among them. `splits` says which dim each axis of
the device mesh divides, so that the shape a rank is left with is worked out, not work ÷ ranks:

    size(dim) = ⌈ size / degrees that split it ⌉, or with padding ⌈ size / (pad·degrees) ⌉ · pad

Axes: `tp` (tensor), `sp` (sequence, over the ranks of `tp`), `cp` (context), `ep` (experts), `etp`
(tensor, of each expert), `esp` (the same under sequence parallelism), `eseq` (tp / etp),
`filter`, `channel`, `height`, `width`, `depth`. Data parallelism splits the batch, pipelines the
layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
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
    """Work on one rank. Which kernels a `kind` runs is said in `foretell.workload.kernels`."""

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
