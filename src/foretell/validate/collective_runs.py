"""Measured collectives, read from the files of `truth/comm`: every row, with the machine it ran on.

A `Run` is one operation of one group on one system, at many sizes. Sizes are bytes as
`foretell.cost.collective.price` counts them; seconds are what the source wrote. How the source
measured is part of the run: `floor` is the wait for the other ranks that a single call timed on one
rank contains, `delay` what the host adds to each call.
"""

from __future__ import annotations

import csv
import gzip
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from foretell.cluster.level import Level
from foretell.cost.link import PROTOCOLS
from foretell.errors import InputError
from foretell.validate.collective_systems import Machine, machine_of

Row = Mapping[str, str]
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


def runs(folder: Path) -> list[Run]:
    """Every run in a folder of measured collectives."""
    readers = {
        "aiconfigurator": _aiconfigurator,
        "vidur": _vidur,
        "vtrain": _vtrain,
        "aicb": _aicb,
        "nccl_tests": _nccl_tests,
    }
    found: dict[_Key, list[tuple[float, float]]] = defaultdict(list)
    for path in sorted(folder.glob("*.csv*")):
        reader = next((read for name, read in readers.items() if path.name.startswith(name)), None)
        if reader is None:
            raise InputError(f"no reader for `{path.name}`", hint=f"known: {', '.join(readers)}")
        for key, size, seconds in reader(_rows(path)):
            found[key].append((size, seconds))
    return [_run(key, points) for key, points in found.items()]


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


def _aiconfigurator(rows: Iterable[Row]) -> Iterator[tuple[_Key, float, float]]:
    """Sizes in elements of the dtype, times in milliseconds, from back-to-back calls."""
    width = {"half": 2, "bfloat16": 2, "float": 4, "int8": 1}
    for row in rows:
        machine, ranks = machine_of(row["system"]), int(row["num_gpus"])
        per_node = min(ranks, machine.ranks)
        op = _OPS.get(row["op_name"], row["op_name"])
        size = int(row["message_size"]) * width[row["nccl_dtype"]]
        key = _Key("aiconfigurator", row["system"], op, per_node, ranks // per_node, machine, "loop")
        yield key, size, float(row["latency"]) * 1e-3


def _vidur(rows: Iterable[Row]) -> Iterator[tuple[_Key, float, float]]:
    """Times of one kernel on rank 0, which waits there for the others; a sender does not wait."""
    for row in rows:
        machine, ranks = machine_of(row["gpu"]), int(row["n_gpus"])
        per_node = int(row["interconnect"].partition("devices_per_node=")[2].split()[0])
        op = _OPS.get(row["collective"], row["collective"])
        clock = "loop" if op == "send" else f"kernel-{machine.chip}"
        key = _Key("vidur", row["gpu"], op, per_node, ranks // per_node, machine, clock)
        yield key, float(row["size_bytes"]), float(row["time_us"]) * 1e-6


def _vtrain(rows: Iterable[Row]) -> Iterator[tuple[_Key, float, float]]:
    """NCCL tests, out of place; on the A100 they show no LL128 (1 MiB takes twice what it would)."""
    for row in rows:
        name = "v100-mesh" if row["gpu"] == "V100" else row["gpu"]
        machine, ranks, nodes = machine_of(name), int(row["n_gpus"]), int(row["n_nodes"] or 1)
        protocols = ("ll", "simple") if row["gpu"] == "A100" else PROTOCOLS
        op = row["collective"]
        key = _Key("vtrain", row["gpu"], op, ranks // nodes, nodes, machine, "loop", protocols)
        yield key, float(row["size_bytes"]), float(row["time_us"]) * 1e-6


def _aicb(rows: Iterable[Row]) -> Iterator[tuple[_Key, float, float]]:
    """Calls of torch.distributed in a real step on 8 A100, each timed by itself, in milliseconds.

    The groups whose size the log leaves out are of 2 ranks (tensor) and 4 (expert): the log is of
    tensor 2 × data 4. Rows that end an epoch are no collective and are the only ones left out.
    """
    sizes = {"tp_group": 2, "dp_group": 4, "ep_group": 4}
    machine = machine_of("a100_sxm")
    for row in rows:
        op, group = row["comm_type"].partition(".")[2], row["comm_group"].partition(".")[2]
        if op == "epoch_end":
            continue
        given = row["comm_group_size"]
        ranks = sizes[group] if given == "None" else int(given)
        key = _Key("aicb", "A100", op, ranks, 1, machine, "call")
        yield key, float(row["msg_size"]), float(row["_elapsed_time"]) * 1e-3


def _nccl_tests(rows: Iterable[Row]) -> Iterator[tuple[_Key, float, float]]:
    """NCCL tests, out of place, with the links in words."""
    for row in rows:
        machine = machine_of(row["gpu"], row["interconnect"])
        ranks, nodes = int(row["n_gpus"]), int(row["n_nodes"] or 1)
        op = _OPS.get(row["collective"], row["collective"])
        system = row["gpu"].partition(" (")[0]
        key = _Key("nccl_tests", system, op, ranks // nodes, nodes, machine, "loop")
        yield key, float(row["size_bytes"]), float(row["time_us"]) * 1e-6
