"""Measured tables that come with the package, as a link of the price chain.

`tables/measured/DEVICE.csv.gz` is what `python -m foretell.pytorch.bench` wrote on such a device.
Of its many ops the matmuls are read here: the three of a linear layer y = x·Wᵀ, with x of
m × k and W of n × k, and batches of them.

    forward  y: m × n over k        dgrad  dx: m × k over n        wgrad  dW: n × k over m
"""

from __future__ import annotations

import csv
import gzip
from collections.abc import Iterator
from functools import cache
from importlib.resources import files

import numpy as np

from foretell.cost.measured import Key, Measured, collected, normal
from foretell.cost.work import Work
from foretell.graph.columns import Array, Source

# The sizes (m, n, k) of the matmul that each part of a linear layer is.
_PRODUCTS = {"forward": ("m", "n", "k"), "dgrad": ("m", "k", "n"), "wgrad": ("n", "k", "m")}


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
    return collected(_rows(device, csv.DictReader(text.splitlines())))


def _rows(device: str, reader: csv.DictReader[str]) -> Iterator[tuple[Key, float, float]]:
    for row in reader:
        shape = _product(row)
        if shape and row["device_seconds"]:  # some rows time the host alone
            key = (device, "gemm", row["dtype"], normal(shape))
            yield key, float(row["device_seconds"]), float(row["spread"] or 0.0)


def _product(row: dict[str, str]) -> str:
    """The shape of the matmul a row is about; empty where it is not about one."""
    sizes = dict(part.split("=") for part in row["shape"].split(";")) if row["shape"] else {}
    if row["op"] == "linear" and row["direction"] in _PRODUCTS:
        m, n, k = (sizes[name] for name in _PRODUCTS[row["direction"]])
        return f"m={m},n={n},k={k}"
    if row["op"] == "bmm" and row["direction"] == "forward":
        return ",".join(f"{key}={sizes[key]}" for key in ("b", "m", "n", "k"))
    return ""
