"""A fused region as plain data: the tensors that enter, the ops inside, the values that leave.

Ops are torch's own (`aten`), as an eager step runs them, so that each has a time of its own beside
the time of the kernel they become together. A region is text (→ `dumps`), so it is made on one
machine and measured on another.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

Encoded = Any  # numbers, words, lists, and `["%", value, result]` where a tensor is meant


@dataclass(frozen=True)
class Entry:
    """A tensor that enters a region; the first of a region was written just before."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str  # torch's name: float32, bfloat16, int64, bool
    high: int = 2  # whole numbers are drawn below this


@dataclass(frozen=True)
class Op:
    """One op: `aten` name with overload, and arguments in which values are referred to."""

    name: str
    args: Encoded
    kwargs: Encoded


@dataclass(frozen=True)
class Region:
    """Ops that are to be one kernel; values are numbered, entries first, then ops."""

    family: str  # the model it was cut from, or how it was drawn
    entries: tuple[Entry, ...]
    ops: tuple[Op, ...]
    outputs: tuple[tuple[int, int], ...]  # value and which of its results; -1 where there is one

    @property
    def key(self) -> str:
        """What tells two regions apart, whatever their family."""
        return blake2b(dumps(self).partition("|")[2].encode(), digest_size=8).hexdigest()


def dumps(region: Region) -> str:
    """One line of text."""
    entries = [[e.shape, e.stride, e.dtype, e.high] for e in region.entries]
    ops = [[op.name, op.args, op.kwargs] for op in region.ops]
    body = json.dumps([entries, ops, region.outputs], separators=(",", ":"))
    return f"{region.family}|{body}"


def loads(line: str) -> Region:
    """The region that a line of text says."""
    family, _, body = line.strip().partition("|")
    entries, ops, outputs = json.loads(body)
    return Region(
        family,
        tuple(Entry(tuple(shape), tuple(stride), d, high) for shape, stride, d, high in entries),
        tuple(Op(name, args, kwargs) for name, args, kwargs in ops),
        tuple((value, result) for value, result in outputs),
    )


def references(encoded: Encoded) -> list[tuple[int, int]]:
    """Every value an argument refers to, with the result of it that is meant."""
    if isinstance(encoded, dict):
        return [r for value in encoded.values() for r in references(value)]
    if not isinstance(encoded, list):
        return []
    if len(encoded) == 3 and encoded[0] == "%":
        return [(encoded[1], encoded[2])]
    return [r for value in encoded for r in references(value)]
