"""Scaling rows for which there is no trace: only the step on one device and the model's size.

A step that is known by its time T alone is made of `LAYERS` even layers, a third of T forward and
two thirds backward, with the model's bytes spread evenly. What is scored is the same ratio as with
a trace: the step on many devices over the step on few.

    pollux   ResNet-18 on CIFAR-10, T4 in g4dn.12xlarge nodes, by how many devices on each node;
             data-parallel over Ethernet (petuum/adaptdl, the profiles behind Pollux, OSDI 2021)
    mxnet    AlexNet, Inception-v3, ResNet-152 on 2 to 16 p2.16xlarge, relative to one of them;
             `dist_device_sync`: devices of a node add up first, then one push a node (apache/mxnet)
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from foretell.baseline import steady_seconds
from foretell.cluster import Calibration, Cluster, load
from foretell.errors import InputError
from foretell.graph import Builder
from foretell.graph.graph import Graph
from foretell.whatif import Setting, parse

LAYERS = 20
RESNET18 = 4 * 11_173_962.0  # bytes of ResNet-18 for ten classes (kuangliu's, which adaptdl trains)
# One flow of AWS's network carries at most 10 Gb/s between instances of a placement group (Amazon
# EC2 user guide, instance network bandwidth), of the 50 that a g4dn.12xlarge has; a ring of NCCL
# was one flow.
ONE_FLOW = Calibration(beta=50 / 10)
EVERY = 8  # of the batch sizes of a placement: neighbours differ little


@dataclass(frozen=True)
class Scaled:
    """One row: how many times as long a step takes there."""

    group: str
    what: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def even_step(seconds: float, bytes: float) -> Graph:
    """A step of so many seconds whose layers are all alike."""
    make = Builder()
    lane = make.lane("stream", kind="compute")
    layers = [f"layer.{k}" for k in range(LAYERS)]
    passes = (("forward", seconds / 3, layers), ("backward", seconds * 2 / 3, layers[::-1]))
    for phase, took, names in passes:
        for layer in names:
            make.task(
                kind="kernel", op="layer", lane=lane, phase=phase, layer=layer,
                seconds=took / LAYERS,
            )  # fmt: skip
    make.task(kind="kernel", op="update", lane=lane, phase="update")
    for layer in layers:
        make.buffer(bytes / LAYERS, name=layer, kind="gradient")
    return make.graph()


def pollux(truth: Path) -> Iterator[Scaled]:
    """ResNet-18 on placements of up to 16 devices, every few batch sizes."""
    rows = rows_of(truth / "tables" / "pollux_cifar10.placements.csv")
    alone = {r["local_bsz"]: float(r["step_time"]) for r in rows if r["placement"] == "1"}
    for r in rows[::EVERY]:
        where, batch = r["placement"], r["local_bsz"]
        if batch not in alone or where == "1":
            continue
        machines = _placed(load(f"g4dn.12xlarge:nodes={len(where)}"), where, 4)
        machines = machines.calibrated(ONE_FLOW)
        step = even_step(alone[batch], RESNET18)
        after = parse(f"data-parallel:ranks={machines.size}").apply(step, Setting(machines))
        inside = "one node" if len(where) == 1 else "several nodes"
        measured = float(r["step_time"]) / alone[batch]
        yield Scaled(f"pollux, {inside}", f"{where} batch {batch}", measured, _times(after, step))


def mxnet(truth: Path) -> Iterator[Scaled]:
    """Three models on several p2.16xlarge, relative to one."""
    rows = rows_of(truth / "tables" / "mxnet_p2_scaling.csv")
    node = {r["model"]: r for r in rows if r["n_gpus"] == "16"}
    for r in rows:
        nodes = int(r["n_nodes"])
        if nodes < 2:
            continue
        one = node[r["model"]]
        seconds = float(one["global_batch"]) / float(one["value"])
        size = float(r["notes"].split()[2]) * 1e6  # `model size 203 MB`
        machines = _placed(load(f"p2.16xlarge:nodes={nodes}"), "1" * nodes, 16)
        step = even_step(seconds, size)
        after = parse(f"parameter-server:ranks={nodes}").apply(step, Setting(machines))
        measured = nodes * float(one["value"]) / float(r["value"])
        yield Scaled("mxnet", f"{r['model']} on {nodes} nodes", measured, _times(after, step))


def _times(after: Graph, before: Graph) -> float:
    return steady_seconds(after) / steady_seconds(before)


def _placed(cluster: Cluster, where: str, slots: int) -> Cluster:
    """So many ranks on each node, `214` for two, one and four."""
    ranks = [node * slots + k for node, count in enumerate(where) for k in range(int(count))]
    return cluster.subset(ranks)


def rows_of(path: Path) -> list[dict[str, str]]:
    """The rows of a table of measured data."""
    try:
        with path.open() as file:
            return list(csv.DictReader(file))
    except OSError:
        raise InputError(f"no scaling rows at `{path}`") from None
