"""Which device a step runs on, and how fast the bus to its host is: as given, or as traced."""

from __future__ import annotations

import numpy as np

from foretell.cluster.node import Device
from foretell.cluster.read import cables, devices, titled
from foretell.errors import unknown
from foretell.graph.graph import Graph
from foretell.whatif.base import DoesNotApply, Setting

LARGE = 1e6  # bytes: from here on a copy shows the rate of the bus and not its start


def device_named(name: str) -> Device:
    """The device preset of that name."""
    known = devices()
    if name not in known:
        raise unknown("device", name, known)
    return known[name]


def device_of(graph: Graph, setting: Setting) -> Device:
    """The device a step runs on: the cluster's, else the one its trace names."""
    if setting.cluster is not None:
        return setting.cluster.devices[0]
    name = str(graph.facts.get("device", ""))
    found = titled(name)
    if found is None:
        what = f"`{name}`, where this step runs, is no device foretell knows"
        what = what if name else "nothing says on which device this step runs"
        raise DoesNotApply(what, hint="name it: --on h200")
    return found


def check_format(graph: Graph, setting: Setting, dtype: str) -> None:
    """Refuse a number format that the device of a step has no units for, where it is known."""
    try:
        device = device_of(graph, setting)
    except DoesNotApply:
        return
    if dtype in device.flops:
        return
    hint = "use dtype=fp16" if dtype == "bf16" and "fp16" in device.flops else ""
    raise DoesNotApply(f"{device.title} has no {dtype.upper()} arithmetic", hint=hint)


def bus_rate(graph: Graph, setting: Setting) -> float:
    """Bytes/s between host and device: the cluster's, the preset's, or the best copy of a trace."""
    if setting.cluster is not None:
        return setting.cluster.host_bandwidth(0)
    try:
        return float(cables()[device_of(graph, setting).bus].bandwidth)
    except DoesNotApply:
        seen = traced_rate(graph)
        if seen:
            return seen
        raise


def traced_rate(graph: Graph) -> float:
    """The highest rate of a large copy between host and device, zero where there is none."""
    tasks = copies(graph)
    tasks = tasks[(graph.bytes[tasks] >= LARGE) & (graph.seconds[tasks] > 0)]
    return float((graph.bytes[tasks] / graph.seconds[tasks]).max(initial=0.0))


def copies(graph: Graph, *ways: str) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Copies between host and device: into the device (`h2d`), out of it (`d2h`), or both."""
    directions = ways or ("h2d", "d2h")
    names = tuple(f"*{_TRACED[way]}*" for way in directions)
    by_name, by_op = graph.select(kind="copy", name=names), graph.select(kind="copy", op=directions)
    return np.union1d(by_name, by_op)


_TRACED = {"h2d": "HtoD", "d2h": "DtoH"}  # how Kineto names their tasks
