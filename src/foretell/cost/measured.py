"""Prices that were measured: a table of (device, op, number format, shape) → seconds.

Tables are CSV, plain or gzip, with the columns `device,op,dtype,shape,seconds` and optionally
`spread` (relative standard deviation). A row counts only for its own kind of device and exactly its
own shape; several rows of the same work are one price, their median.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from foretell.cost.work import Work
from foretell.errors import InputError
from foretell.graph.columns import Array, Source
from foretell.io import read_text

Key = tuple[str, str, str, str]  # device, op, dtype, shape
COLUMNS = ("device", "op", "dtype", "shape", "seconds")
_UNSAID = {"", "b=1", "ta=0", "tb=0", "groups=1", "stride=1", "pad=0"}
SPREAD = 0.03  # of a median of repeated measurements, where the table says nothing


@dataclass(frozen=True, eq=False)
class Measured:
    """A price model that knows what was measured and nothing else."""

    table: Mapping[Key, tuple[float, float]]
    name: str = "measured table"
    source: Source = Source.MEASURED

    def price(self, work: Work) -> tuple[Array, Array]:
        devices = [work.cluster.devices[int(rank)].name for rank in work.rank]
        keys = zip(devices, work.op, work.dtype, map(normal, work.shape), strict=True)
        found = [self.table.get(key, (np.nan, 0.0)) for key in keys]
        seconds, sigma = np.array(found, np.float64).reshape(-1, 2).T
        return seconds, sigma


def normal(shape: str) -> str:
    """A shape with its keys in order and without what goes without saying."""
    parts = {part.strip() for part in shape.split(",")}
    return ",".join(sorted(parts - _UNSAID))


def load(path: str | Path) -> Measured:
    """The table in a file."""
    try:
        return collected(_rows(csv.DictReader(read_text(path).splitlines()), str(path)))
    except csv.Error as error:
        raise InputError(f"`{path}` is no table: {error}") from None


def collected(rows: Iterable[tuple[Key, float, float]]) -> Measured:
    """A table of rows; of several for the same work, their median."""
    seen: dict[Key, list[tuple[float, float]]] = {}
    for key, seconds, spread in rows:
        seen.setdefault(key, []).append((seconds, spread))
    return Measured(
        {
            key: (median(s for s, _ in found), max(spread for _, spread in found))
            for key, found in seen.items()
        }
    )


def _rows(reader: csv.DictReader[str], where: str) -> Iterator[tuple[Key, float, float]]:
    missing = [c for c in COLUMNS if c not in (reader.fieldnames or ())]
    if missing:
        raise InputError(
            f"`{where}` has no column {', '.join(f'`{m}`' for m in missing)}",
            hint=f"a measured table has {', '.join(COLUMNS)}",
        )
    for number, row in enumerate(reader, start=2):
        try:
            seconds, spread = float(row["seconds"]), float(row.get("spread") or SPREAD)
        except (TypeError, ValueError):
            seconds, spread = np.nan, np.nan
        if not (0 < seconds < np.inf and 0 <= spread < np.inf):
            raise InputError(f"`{where}`, line {number}: `{row['seconds']}` is no time in seconds")
        yield (row["device"], row["op"], row["dtype"], normal(row["shape"])), seconds, spread
