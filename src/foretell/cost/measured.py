"""Prices that were measured: tables of a user's, those that come along, ops timed on this
machine.

Tables are CSV, plain or gzip, with the columns `device,op,dtype,shape,seconds` and optionally
`spread` (relative standard deviation). A row counts only for its own kind of device and exactly its
own shape; several rows of the same work are one price, their median.

Measured tables that come with the package, as a link of the price chain.
`tables/measured/DEVICE.csv.gz` is what `python -m foretell_lab.bench` wrote on such a device. Of
its many ops the matmuls are read here: the three of a linear layer y = x·Wᵀ, with x of m × k and W
of n × k, and batches of them.

    forward  y: m × n over k        dgrad  dx: m × k over n        wgrad  dW: n × k over m

Ops timed on the machine at hand: their seconds by shape, and those of others of their family. A
shape that was timed costs what it took; another of the same op is interpolated by its work (flop,
else bytes, else numbers). What is asked for and not there is kept in `asked`, so that it can be
timed.
"""

from __future__ import annotations

import csv
import gzip
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from statistics import median
from typing import ClassVar, NamedTuple

import numpy as np

from foretell.cost.price import Work
from foretell.errors import InputError
from foretell.graph.columns import Array, Source
from foretell.io import read_text

Key = tuple[str, str, str, str]  # device, op, dtype, shape
COLUMNS = ("device", "op", "dtype", "shape", "seconds")
_UNSAID = {"", "b=1", "ta=0", "tb=0", "groups=1", "stride=1", "pad=0"}
SPREAD = 0.03  # of a median of repeated measurements, by default


# The sizes (m, n, k) of the matmul that each part of a linear layer is.
_SIDES = {"forward": ("m", "n", "k"), "dgrad": ("m", "k", "n"), "wgrad": ("n", "k", "m")}
SIGMA = 0.1  # of ln(seconds in a step / seconds alone)
_PRODUCTS = ("gemm", "conv", "conv_dgrad", "conv_wgrad", "attention")
_DEFAULTS = {"b": 1.0, "ta": 0.0, "tb": 0.0, "groups": 1.0, "stride": 1.0, "pad": 0.0}


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


class ShippedTables:
    """What was measured on devices whose tables come with the package."""

    name = "shipped table"
    source = Source.MEASURED

    def price(self, work: Work) -> tuple[Array, Array]:
        seconds, sigma = np.full(len(work), np.nan), np.zeros(len(work))
        devices = np.array([work.cluster.devices[int(rank)].name for rank in work.rank])
        for name in sorted(set(devices.tolist()) & names()):
            rows = np.flatnonzero(devices == name)
            seconds[rows], sigma[rows] = table(name).price(work.take(rows))
        return seconds, sigma


@cache
def names() -> frozenset[str]:
    """The devices that have a table."""
    ending = ".csv.gz"
    found = (f.name for f in files("foretell.cost").joinpath("tables", "measured").iterdir())
    return frozenset(name.removesuffix(ending) for name in found if name.endswith(ending))


@cache
def table(device: str) -> Measured:
    """The table of one device."""
    path = files("foretell.cost").joinpath("tables", "measured", f"{device}.csv.gz")
    text = gzip.decompress(path.read_bytes()).decode()
    return collected(_shipped_rows(device, csv.DictReader(text.splitlines())))


def _shipped_rows(device: str, reader: csv.DictReader[str]) -> Iterator[tuple[Key, float, float]]:
    for row in reader:
        shape = _product(row)
        if shape and row["device_seconds"]:  # some rows time the host alone
            key = (device, "gemm", row["dtype"], normal(shape))
            yield key, float(row["device_seconds"]), float(row["spread"] or 0.0)


def _product(row: dict[str, str]) -> str:
    """The shape of the matmul a row is about; empty where it is not about one."""
    sizes = dict(part.split("=") for part in row["shape"].split(";")) if row["shape"] else {}
    if row["op"] == "linear" and row["direction"] in _SIDES:
        m, n, k = (sizes[name] for name in _SIDES[row["direction"]])
        return f"m={m},n={n},k={k}"
    if row["op"] == "bmm" and row["direction"] == "forward":
        return ",".join(f"{key}={sizes[key]}" for key in ("b", "m", "n", "k"))
    return ""


class TimedOp(NamedTuple):
    """One op, number format and shape."""

    op: str
    dtype: str
    shape: tuple[tuple[str, float], ...]  # sorted; `bytes` among them where they are counted

    @property
    def work(self) -> float:
        """What its seconds grow with."""
        size = dict(self.shape)
        if self.op == "gemm":
            return size.get("b", 1.0) * size["m"] * size["n"] * size["k"]
        if self.op == "attention":
            pairs = size["sq"] * size["sk"] * size["d"]
            return size.get("b", 1.0) * size.get("heads", 1.0) * pairs
        if self.op in _PRODUCTS:
            side = size["h"] * size["w"] * size["r"] * size["s"] / size.get("stride", 1.0) ** 2
            return size["n"] * size["c"] * size["k"] / size.get("groups", 1.0) * side
        whole = size.get("n") or size.get("rows", 1.0) * size.get("cols", 1.0)
        return size.get("bytes") or whole


@dataclass
class TimedOps:
    """Seconds of ops; `load` times as long as on an idle machine."""

    sigma: ClassVar[float] = SIGMA
    seconds: Mapping[TimedOp, float] = field(default_factory=dict)
    load: float = 1.0
    asked: dict[TimedOp, None] = field(default_factory=dict)  # an ordered set

    def price(self, op: str, dtype: str, shape: Mapping[str, Array], moved: Array) -> Array:
        """Seconds of each row; NaN where no op of the kind was timed."""
        rows = [named(op, dtype, shape, moved, i) for i in range(len(moved))]
        found = []
        for row in rows:
            if row not in self.seconds:
                self.asked[row] = None
            found.append(self.seconds.get(row) or self._like(row))
        return self.load * np.array(found, float)

    def _like(self, row: TimedOp) -> float:
        """Interpolated between ops of the same kind with less and more work."""
        kin = [(k.work, s) for k, s in self.seconds.items() if k[:2] == row[:2] and k.work > 0]
        if not kin:
            return float("nan")
        work, took = (np.log(np.array(v)) for v in zip(*sorted(kin), strict=True))
        at = np.log(max(row.work, 1e-9))
        if at > work[-1]:
            return float(np.exp(took[-1] + at - work[-1]))  # large ops: seconds grow as work does
        return float(np.exp(np.interp(at, work, took)))


def named(
    op: str, dtype: str, shape: Mapping[str, Array], moved: Array, row: int
) -> TimedOp:  # fmt: skip
    """One row of a question as a key."""
    sizes = {k: float(v[row]) for k, v in shape.items() if not np.isnan(v[row])}
    if not np.isnan(moved[row]) and op not in _PRODUCTS:
        sizes["bytes"] = float(moved[row])
    kept = {k: round(v, 3) for k, v in sizes.items() if _DEFAULTS.get(k) != v}
    return TimedOp(op, dtype, tuple(sorted(kept.items())))
