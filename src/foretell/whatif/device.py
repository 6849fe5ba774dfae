"""Another GPU under the same host: every kernel takes what it took, times the ratio of two prices.

    seconds there = seconds measured · Σ price there / Σ price here      over an operator

Both prices come from the same formula, so what it gets wrong of a kernel on both devices alike
cancels. A kernel whose operator's shapes are not known is taken to be bound by memory:

    seconds = floor there + (seconds measured - floor here) · bandwidth here / bandwidth there
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foretell import portable
from foretell.cluster.node import Device
from foretell.cluster.read import cables
from foretell.cost import kernel as kernels
from foretell.cost.aten import Kernel
from foretell.graph.graph import Array, Dtype, Graph, Source, word_of
from foretell.whatif.base import DoesNotApply, Setting, WhatIf
from foretell.whatif.kernel_request import requested_kernels
from foretell.whatif.machine import copies, device_named, device_of

_UNSURE = 0.25  # spread of a ratio that is one of bandwidths alone
_PRICED = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "int8")


@dataclass(frozen=True)
class OtherDevice(WhatIf):
    """Run the step on another GPU, its host unchanged."""

    name = "device"
    source = "ours: kernel formulas of both devices"
    assumes = (
        "the host, the network and the libraries are the same; kernels compute in the same format",
        "what a price gets wrong of a kernel, it gets wrong on both devices alike",
    )
    to: str  # the preset: a100-80, h100, l40s …
    here: str = ""  # the device it runs on now; as the trace or --on says

    def apply(self, graph: Graph, setting: Setting) -> Graph:
        there = device_named(self.to)
        here = device_named(self.here) if self.here else device_of(graph, setting)
        tasks = graph.select(kind="kernel")
        moved = copies(graph)
        if not len(tasks):
            raise DoesNotApply("the step has no kernels")
        with graph.edit(str(self)) as edit:
            seconds, sigma = repriced(graph, tasks, here, there)
            edit.set(tasks, seconds=seconds, sigma=sigma, source=int(Source.FORMULA))
            edit.scale(moved, _bus(here) / _bus(there))
            inside = np.setdiff1d(graph.select(kind="copy"), moved)
            edit.scale(inside, here.memory_bandwidth / there.memory_bandwidth)
            edit.fact(device=there.title)
        return edit.graph


def _bus(device: Device) -> float:
    return float(cables()[device.bus].bandwidth)


def repriced(graph: Graph, tasks: Array, here: Device, there: Device) -> tuple[Array, Array]:
    """Seconds of kernels on another device, and how surely."""
    seconds, sigma = _by_memory(graph.seconds[tasks], here, there), np.full(len(tasks), _UNSURE)
    found = _ratios(graph, tasks, here, there)
    known = ~np.isnan(found)
    seconds[known] = graph.seconds[tasks][known] * found[known]
    sigma[known] = portable.hypot(graph.sigma[tasks][known], _UNSURE / 2)
    return seconds, sigma


def _by_memory(seconds: Array, here: Device, there: Device) -> Array:
    floor = np.minimum(seconds, here.floor)
    ratio = here.memory_bandwidth / there.memory_bandwidth
    found: Array = floor * there.floor / here.floor + (seconds - floor) * ratio
    return found


def _ratios(graph: Graph, tasks: Array, here: Device, there: Device) -> Array:
    """Price there over price here of the operator of each kernel; NaN where it has no shape."""
    columns = [graph.column(c)[tasks] for c in ("op", "shape", "dtype", "name", "flops", "bytes")]
    rows, first, place = np.unique(
        np.stack([c.astype(np.float64) for c in columns]),
        axis=1, return_index=True, return_inverse=True,
    )  # fmt: skip
    found = np.full(rows.shape[1], np.nan)
    for r, i in enumerate(tasks[first].tolist()):
        prices = [_price(graph, i, device) for device in (here, there)]
        if prices[0] > 0:
            found[r] = prices[1] / prices[0]
    ratios: Array = found[place.reshape(-1)]
    return ratios


def _price(graph: Graph, i: int, device: Device) -> float:
    """The price of all kernels of the operator that task i belongs to; zero where unknown."""
    dtype = _format(graph, i)
    parts = requested_kernels(graph.text_of("op", i), graph.text_of("shape", i))
    if parts:
        return sum(_one(device, part, dtype) for part in parts)
    flops, moved = float(graph.flops[i]), float(graph.bytes[i])
    if not flops and not moved:
        return 0.0
    found = kernels.seconds(device, graph.text_of("op", i), dtype, None, [flops], [moved])
    return float(found.seconds[0])


def _one(device: Device, part: Kernel, dtype: str) -> float:
    flops = [part.flops] if part.flops else None
    moved = [part.bytes] if part.bytes else None
    return float(kernels.seconds(device, part.op, dtype, [part.shape], flops, moved).seconds[0])


def _format(graph: Graph, i: int) -> str:
    """The format a kernel computes in; its own name tells of TF32."""
    dtype = word_of(Dtype, graph.dtype[i])
    if dtype == "fp32" and "tf32" in graph.text_of("name", i).lower():
        return "tf32"
    return dtype if dtype in _PRICED else "fp32"
