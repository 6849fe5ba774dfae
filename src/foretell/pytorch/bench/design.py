"""Which sizes to measure: points that fill a box evenly in logarithms, snapped as models snap them.

    xᵢ = frac(½ + i·α),  αⱼ = φ_d^−(j+1),  φ_d the root of φ^(d+1) = φ + 1        (→ `fill`)

the additive recurrence of M. Roberts (“The unreasonable effectiveness of quasirandom sequences”,
2018): every prefix covers the box, without a table and the same on every machine. Most widths of
models are multiples of 64, some of 8, a few are odd (vocabularies, feature counts); `snap` keeps
that mixture, because matrix units need aligned rows.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import resources
from typing import TypeVar

T = TypeVar("T")
Range = tuple[float, float]

# Of 20 sizes: 11 multiples of 64, 5 of 8, 4 as they fall. The order spreads each over a prefix.
_STEPS = (64, 64, 8, 64, 1, 64, 8, 64, 64, 1, 64, 8, 64, 8, 64, 1, 64, 64, 8, 1)


def fill(count: int, *ranges: Range) -> Iterator[tuple[float, ...]]:
    """`count` points, each size between the ends of its range, even in their logarithms."""
    alphas = _alphas(len(ranges))
    for i in range(1, count + 1):
        at = [(0.5 + i * alpha) % 1.0 for alpha in alphas]
        yield tuple(low * (high / low) ** x for x, (low, high) in zip(at, ranges, strict=True))


def wholes(count: int, *ranges: Range) -> Iterator[tuple[int, ...]]:
    """`fill` in whole numbers, snapped to the multiples that models use."""
    for i, point in enumerate(fill(count, *ranges)):
        yield tuple(snap(value, _STEPS[(i + 7 * j) % 20]) for j, value in enumerate(point))


def snap(value: float, step: int) -> int:
    """The nearest multiple of `step`; of a smaller power of two where the value is small."""
    while step > 1 and value < 2 * step:
        step //= 2
    return max(1, round(value / step) * step)


def one_of(options: Sequence[T], i: int) -> T:
    """The i-th turn through weighted options: repeat an option to make it come more often."""
    return options[int((0.5 + i * 0.6180339887498949) % 1.0 * len(options))]


def sizes(count: int, low: float, high: float) -> list[int]:
    """Element counts from low to high, even in logarithms and none a round power of two."""
    return [round(value) // 4 * 4 for (value,) in fill(count, (low, high))]


def dims(written: str) -> list[tuple[int, ...]]:
    """`64x112 128x56` → [(64, 112), (128, 56)]."""
    return [tuple(int(d) for d in each.split("x")) for each in written.split()]


@cache
def published(name: str) -> tuple[dict[str, str], ...]:
    """Rows of a table of layers of published architectures."""
    file = resources.files("foretell.pytorch.bench") / "published" / f"{name}.csv"
    with file.open(encoding="utf-8") as lines:
        rows = csv.DictReader(line for line in lines if not line.startswith("#"))
        return tuple(dict(row) for row in rows)


def _alphas(dims: int) -> list[float]:
    root = 2.0
    for _ in range(60):
        root = (1 + root) ** (1 / (dims + 1))
    return [root ** -(j + 1) for j in range(dims)]
