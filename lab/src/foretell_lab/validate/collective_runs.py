"""Measured collectives, read from the files of `truth/comm`: every row, with the machine it ran on.

A `Run` is one operation of one group on one system, at many sizes. Sizes are bytes as
`foretell.cost.collective.price` counts them; seconds are what the source wrote. Prices start when
the last rank arrives; what a source timed beyond that depends on its clock:

    loop    many calls back to back: nothing
    kernel  one kernel on one rank, which waits there for the others: at least `floor`, which is
            how far apart that machine's hosts launch
    call    one call from Python, between two events: `delay` more

The constants are fitted beside the links (`tables/collective_clocks.toml`).
"""

from __future__ import annotations

import csv
import gzip
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from foretell.cluster.node import Level
from foretell.cost.collective import PROTOCOLS
from foretell.errors import InputError, UnmodelledError
from foretell_lab.validate.collective_systems import Machine, machine_of

Row = Mapping[str, str]
_WIDTH = {"half": 2, "bfloat16": 2, "float": 4, "int8": 1, "fp8": 1}
_OPS = {"alltoall": "all_to_all", "send_recv": "send"}


@dataclass(frozen=True)
class Run:
    """One operation of one group of ranks on one system, at every size that was measured."""

    source: str
    system: str
    op: str
    per_node: int
    nodes: int
    levels: tuple[Level, ...]
    protocols: tuple[str, ...]
    clock: str  # how it was timed: a name in the table of clocks
    bytes: NDArray[np.float64]
    seconds: NDArray[np.float64]

    @property
    def ranks(self) -> int:
        return self.per_node * self.nodes

    def at(self, rows: NDArray[np.bool_]) -> Run:
        """The same run at some of its sizes."""
        return replace(self, bytes=self.bytes[rows], seconds=self.seconds[rows])


@dataclass(frozen=True)
class _Key:
    source: str
    system: str
    op: str
    per_node: int
    nodes: int
    machine: Machine
    clock: str
    protocols: tuple[str, ...] = PROTOCOLS


Reading = tuple[_Key, float, float]  # of which run, bytes, seconds


def read(folder: Path) -> tuple[list[Run], Counter[str]]:
    """Every run in a folder of measured collectives; and the rows of undescribed machines."""
    found: dict[_Key, list[tuple[float, float]]] = defaultdict(list)
    missing: Counter[str] = Counter()
    for path in sorted(folder.glob("*.csv*")):
        reader = next((r for name, r in _READERS.items() if path.name.startswith(name)), None)
        if reader is None:
            raise InputError(f"no reader for `{path.name}`", hint=f"known: {', '.join(_READERS)}")
        for row in _rows(path):
            try:
                reading = reader(row)
            except UnmodelledError as error:
                missing[f"{path.name}: {error.message}"] += 1
                continue
            if reading:
                key, size, seconds = reading
                found[key].append((size, seconds))
    return [_run(key, points) for key, points in found.items()], missing


def _run(key: _Key, points: list[tuple[float, float]]) -> Run:
    sizes, seconds = np.array(sorted(points)).T
    levels = key.machine.levels(key.per_node, key.nodes)
    return Run(
        source=key.source,
        system=key.system,
        op=key.op,
        per_node=key.per_node,
        nodes=key.nodes,
        levels=levels,
        protocols=key.protocols,
        clock=key.clock,
        bytes=sizes,
        seconds=seconds,
    )


def _rows(path: Path) -> Iterator[Row]:
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt") as lines:
        yield from csv.DictReader(lines)


def _aiconfigurator(row: Row) -> Reading:
    """Sizes in elements of the dtype, times in milliseconds, from back-to-back calls."""
    machine, ranks = machine_of(row["system"]), int(row["num_gpus"])
    per_node = min(ranks, machine.ranks)
    op = _OPS.get(row["op_name"], row["op_name"])
    size = int(row["message_size"]) * _WIDTH[row["nccl_dtype"]]
    key = _Key("aiconfigurator", row["system"], op, per_node, ranks // per_node, machine, "loop")
    return key, size, float(row["latency"]) * 1e-3


def _vidur(row: Row) -> Reading:
    """Times of one kernel on rank 0, which waits there for the others; a sender does not wait."""
    machine, ranks = machine_of(row["gpu"]), int(row["n_gpus"])
    per_node = int(row["interconnect"].partition("devices_per_node=")[2].split()[0])
    op = _OPS.get(row["collective"], row["collective"])
    clock = "loop" if op == "send" else f"kernel-{row['gpu']}"
    key = _Key("vidur", row["gpu"], op, per_node, ranks // per_node, machine, clock)
    return key, float(row["size_bytes"]), float(row["time_us"]) * 1e-6


def _vtrain(row: Row) -> Reading:
    """NCCL tests, out of place; those on A100 show no LL128: 1 MiB takes twice what it would."""
    machine, ranks, nodes = machine_of(row["gpu"]), int(row["n_gpus"]), int(row["n_nodes"] or 1)
    protocols = ("ll", "simple") if row["gpu"] == "A100" else PROTOCOLS
    op = _OPS.get(row["collective"], row["collective"])
    key = _Key("vtrain", row["gpu"], op, ranks // nodes, nodes, machine, "loop", protocols)
    return key, float(row["size_bytes"]), float(row["time_us"]) * 1e-6


def _aicb(row: Row) -> Reading | None:
    """Calls of torch.distributed in a step on 8 A100, each timed by itself, in milliseconds.

    The log is of tensor 2 × data 4; groups whose size it leaves out are of 2 (tensor) and 4
    (expert). Rows that end an epoch are no collective: the only ones left out.
    """
    op, group = row["comm_type"].partition(".")[2], row["comm_group"].partition(".")[2]
    if op == "epoch_end":
        return None
    given = row["comm_group_size"]
    ranks = {"tp_group": 2, "dp_group": 4, "ep_group": 4}[group] if given == "None" else int(given)
    key = _Key("aicb", "A100", op, ranks, 1, machine_of("a100_sxm"), "call")
    return key, float(row["msg_size"]), float(row["_elapsed_time"]) * 1e-3


def _nccl_tests(row: Row) -> Reading:
    """NCCL tests, out of place, with the links in words."""
    machine = machine_of(row["gpu"], row["interconnect"])
    ranks, nodes = int(row["n_gpus"]), int(row["n_nodes"] or 1)
    op = _OPS.get(row["collective"], row["collective"])
    system = row["gpu"].partition(" (")[0]
    key = _Key("nccl_tests", system, op, ranks // nodes, nodes, machine, "loop")
    return key, float(row["size_bytes"]), float(row["time_us"]) * 1e-6


_READERS: Mapping[str, Callable[[Row], Reading | None]] = {
    "aiconfigurator": _aiconfigurator,
    "vidur": _vidur,
    "vtrain": _vtrain,
    "aicb": _aicb,
    "nccl_tests": _nccl_tests,
}
