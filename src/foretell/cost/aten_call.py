"""An aten call as text and as values: what PyTorch was asked for.

    in=768+4096x768+768x3072,types=float+float+float,args=-+-+-,strides=-+-+1x768,part=dgrad

Inputs are joined by `+`, dims by `x`; `-` is none. `strides` is there only where an input does not
lie in memory row by row, `part` only where a task is one of several kernels of its operator.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

# Bytes of a number as PyTorch's traces call its format; what is not here counts as one of fp32.
BYTES = {
    "float": 4, "double": 8, "c10::Half": 2, "c10::BFloat16": 2, "long int": 8, "long": 8, "int": 4,
    "short": 2, "signed char": 1, "unsigned char": 1, "bool": 1, "c10::complex<float>": 8,
    "c10::Float8_e4m3fn": 1, "c10::Float8_e5m2": 1,
}  # fmt: skip

_MOST = 1 << 62  # elements; more are no tensor

Dims = tuple[int, ...]
Sizes = dict[str, float]


@dataclass(frozen=True)
class Kernel:
    """A kernel that can be priced: its class, its shape as text, and what it moves and computes."""

    op: str
    shape: str = ""
    bytes: float = 0.0
    flops: float = 0.0
    times: float = 1.0  # how many of them in a row


@dataclass(frozen=True)
class Call:
    """An operator as it was asked for; inputs that are no tensors have no dims."""

    op: str
    dims: tuple[Dims, ...]
    types: tuple[str, ...]
    values: tuple[str, ...]
    strides: tuple[Dims, ...]
    part: str
    lists: tuple[tuple[Dims, ...], ...]  # of inputs that are lists of tensors
    moved: float  # bytes, where the task's author counted them
    flops: float

    def size(self, i: int) -> int:
        """Elements of an input."""
        return min(math.prod(self.dims[i]), _MOST) if i < len(self.dims) else 0

    def item(self, i: int = 0) -> int:
        """Bytes of one element of an input."""
        return BYTES.get(self.types[i], 4) if i < len(self.types) else 4

    def numbers(self, i: int) -> tuple[int, ...]:
        """A value that is whole numbers: `2x2` → (2, 2)."""
        text = self.values[i] if i < len(self.values) else ""
        return tuple(int(part) for part in text.split("x") if part.lstrip("-").isdigit())

    def stride(self, i: int) -> Dims:
        """The strides of an input; those of rows in order where nothing is said."""
        said = self.strides[i] if i < len(self.strides) else ()
        return said or in_order(self.dims[i])

    def tensors(self) -> list[int]:
        """Which inputs are tensors with elements."""
        return [i for i, d in enumerate(self.dims) if d and 0 not in d]

    def input_bytes(self) -> float:
        """Bytes of all tensor inputs."""
        return float(sum(self.size(i) * self.item(i) for i in self.tensors()))


@lru_cache(8192)  # a step has the same few calls many times
def read(op: str, shape: str, moved: float = 0.0, flops: float = 0.0) -> Call:
    """A call from its text."""
    parts = dict(item.partition("=")[::2] for item in shape.split(","))
    texts = {key: parts.get(key, "").split("+") for key in ("in", "types", "args", "strides")}
    dims = tuple(_dims(text) for text in texts["in"])
    strides = tuple(_dims(text) for text in texts["strides"])
    lists = tuple(_each_dims(text) for text in texts["in"])
    return Call(
        op, dims, tuple(texts["types"]), tuple(texts["args"]), strides, parts.get("part", ""),
        lists, moved, flops,
    )  # fmt: skip


def _each_dims(text: str) -> tuple[Dims, ...]:
    return tuple(map(_dims, text.split("|"))) if "|" in text else ()


def _dims(text: str) -> Dims:
    if not text or text == "-" or "|" in text:
        return ()
    return tuple(min(int(d[:20]), _MOST) for d in text.split("x") if d.isdecimal())


def in_order(dims: Dims) -> Dims:
    strides, step = [], 1
    for size in reversed(dims):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))
