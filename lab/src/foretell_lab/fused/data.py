"""Measured regions that ship with the lab: what the formula and the network were fitted to.

`tables/fused_h200.xz` was measured on an H200, `tables/fused_cpu.npz` on one core of a server;
`tables/fused_steps.npz` has the kernels of whole compiled steps. docs/concepts/fused.md says how.
A row is a region, or one kernel that a compiler wrote (`regions.written`). Families named in
`HELD_OUT` are whole models no fit has seen.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import numpy as np
import numpy.typing as npt

from foretell.cost.fused_regions import NODE, Regions, codes_of
from foretell.errors import unknown
from foretell_lab.fused.pack import unpacked

Array = npt.NDArray[np.float64]
HELD_OUT = ("llama", "swin", "rnn", "unet")
SETS = {"h200": "fused_h200.xz", "cpu": "fused_cpu.npz", "steps": "fused_steps.npz"}
_WHOLE = ("op", "dtype", "across")


@dataclass(frozen=True, eq=False)
class Measured:
    """Regions and what they took."""

    regions: Regions
    seconds: Array
    spread: Array  # between quartiles of repetitions, as a share
    kernels: npt.NDArray[np.int64]
    family: npt.NDArray[np.str_]
    again: npt.NDArray[np.int64]  # the row that measured the same region before; -1 for none

    def __len__(self) -> int:
        return len(self.seconds)

    @property
    def held_out(self) -> npt.NDArray[np.bool_]:
        """Rows of models that no fit has seen."""
        return np.isin(self.family, HELD_OUT)

    def take(self, rows: npt.NDArray[np.int64]) -> Measured:
        """Some of the rows; `again` names a row before it only where that is among them."""
        place = np.full(len(self) + 1, -1)  # the last is that of none
        place[rows] = np.arange(len(rows))
        return Measured(
            self.regions.take(rows), self.seconds[rows], self.spread[rows], self.kernels[rows],
            self.family[rows], place[self.again[rows]],
        )  # fmt: skip


def shipped(name: str) -> Measured:
    """A data set of the package."""
    if name not in SETS:
        raise unknown("set of measured regions", name, SETS)
    path = files("foretell_lab.fused").joinpath("tables", SETS[name])
    return read(path.read_bytes())


def read(raw: bytes) -> Measured:
    """A data set from the bytes of its file."""
    arrays = unpacked(raw)
    first = arrays["first"].astype(np.int64)
    at = np.repeat(first[:-1], arrays["edges"].astype(np.int64))
    columns: dict[str, Any] = {
        n: arrays[n].astype(np.int64 if n in _WHOLE else float) for n in NODE
    }
    columns["op"] = codes_of(arrays["words"].tolist())[columns["op"]]
    regions = Regions(
        first,
        source=arrays["source"] + at,
        target=arrays["target"] + at,
        pattern=arrays["pattern"].astype(np.int64),
        **columns,
        written=arrays.get("written"),
    )
    return Measured(
        regions,
        arrays["measured"].astype(float),
        arrays["spread"].astype(float),
        arrays["kernels"].astype(np.int64),
        arrays["family"],
        arrays["again"].astype(np.int64),
    )
