"""How Inductor (torch 2.11) cuts a kernel into blocks, each of them a program on one unit.

A reduction's block has so many rows and so many places of each; what does not fit is a turn of a
loop. A short one is `held`: its whole row lies in one block. Sizes are rounded up to powers of two,
and what is rounded is computed in vain. The rules are those of `triton_heuristics`: rows that lie
side by side, and columns, have blocks of their own shape.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from foretell import portable

Array = npt.NDArray[np.float64]
_POINTS = 1024.0  # places of a block without reductions
_ROW, _COLUMN = 1024, 64  # longest reductions held in one block: along rows, down columns
_HELD = 4096  # places of a block that holds its rows
_MANY, _MOST, _FEWER = 10, 2048.0, 1024.0  # loads that spare registers; places of a row in a block


class Blocks(NamedTuple):
    """Of each kernel: programs, turns of their loop, and places visited for each that counts."""

    programs: Array
    turns: Array
    padded: Array
    held: npt.NDArray[np.bool_]


def blocks(rows: Array, inner: Array, down: npt.NDArray[np.bool_], loads: Array) -> Blocks:
    """Of kernels with so many results of `inner` places each; `loads` counts what enters."""
    x, r = _power(rows), _power(inner)
    held = (inner > 1) & np.where(down, r <= _COLUMN, r <= _ROW)
    wide, long = np.where(down, _down(x, r, loads, held), _along(x, r, loads, held))
    wide = np.minimum(np.where(inner > 1, wide, _POINTS), x)
    long = np.minimum(np.where(inner > 1, long, 1.0), r)
    programs, turns = np.ceil(rows / wide), np.ceil(inner / long)
    padded = programs * wide * turns * long / np.maximum(rows * inner, 1.0)
    return Blocks(programs, turns, padded, held)


def _power(values: Array) -> Array:
    return portable.two_above(np.maximum(values, 1.0))


def _along(x: Array, r: Array, loads: Array, held: npt.NDArray[np.bool_]) -> Array:
    """Rows and places of a block that reduces along rows."""
    several = np.where(x // 8 < 128, 1.0, np.minimum(_ROW // r, 8.0))
    most = np.where((x >= 1024) & (loads >= _MANY), _FEWER, _MOST)
    wide = np.where(held, np.where(r >= 256, several, 8.0), np.where(r <= 2048, 2.0, 1.0))
    return np.stack([wide, np.where(held, r, np.minimum(r, most))])


def _down(x: Array, r: Array, loads: Array, held: npt.NDArray[np.bool_]) -> Array:
    """Columns and places of a block that reduces down columns."""
    few, some = x <= 1024, x // 4096 <= 8
    heavy = (loads >= 4) & (r > 128)
    many = np.clip(_power(x // 4096), 64.0, 256.0)
    wide = np.select([few, some, heavy], [np.clip(x // 128, 2.0, 8.0), 16.0, 32.0], many)
    rest = np.where(heavy, np.where(r >= 2048, 64.0, 32.0), 512.0 // many)
    long = np.select([few, some], [np.minimum(r, 64.0), 32.0], rest)
    kept = np.select([b * r <= _HELD for b in (128.0, 32.0, 8.0)], [128.0, 32.0, 8.0], 1.0)
    return np.stack([np.where(held, np.minimum(kept, x), wide), np.where(held, r, long)])
