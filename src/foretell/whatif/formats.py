"""Kernels in another number format or memory layout: what the tables say, put into the graph."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from foretell import portable
from foretell.cost.ratios import Way
from foretell.graph.edit import Edit
from foretell.graph.graph import Graph
from foretell.whatif.base import DoesNotApply, Setting
from foretell.whatif.machine import device_named, device_of
from foretell.whatif.tabled import IMAGES, PASS, Sort, changed
from foretell.whatif.walks import powers

REFERENCE = "h200"  # the device whose table is read
CONVOLVES = frozenset({"conv2d", "conv3d", "convt2d"})
LAID_OUT = CONVOLVES | IMAGES  # rows that tell one image layout from another


class Change(NamedTuple):
    """What becomes of a sort of kernels: how many times as long, how sure, in which format."""

    sort: Sort
    factor: float
    sigma: float
    dtype: str


def told(
    graph: Graph, setting: Setting, sort: Sort, before: str, after: str, layout: str = ""
) -> tuple[float, float] | None:
    """What the tables say of a sort in another format or another image layout.

    fp16 is given by rows of bf16 where it was not measured.
    """
    now = layout_of(graph, sort)
    here, gain = _place(graph, setting, sort, before, after)
    each = float(graph.seconds[sort.kernels].sum()) / sort.calls if here and sort.calls else 0.0

    def asked(before: str, after: str) -> tuple[float, float] | None:
        return changed(sort, way(before, now, sort), way(after, layout or now, sort), each)

    found = asked(before, after)
    if found is None and "fp16" in (before, after):
        swap = {"fp16": "bf16"}
        found = asked(swap.get(before, before), swap.get(after, after))
    if found is None:
        return None
    if sort.rows[0][0] == PASS:
        return _walked(graph, sort, *found)
    return found[0] * gain, found[1]


def _place(
    graph: Graph, setting: Setting, sort: Sort, before: str, after: str
) -> tuple[bool, float]:
    """Whether a step runs on the device of the tables; what its matmuls gain less or more."""
    try:
        device = device_of(graph, setting)
    except DoesNotApply:
        return False, 1.0
    if device.name == REFERENCE or not sort.is_product or before == after:
        return device.name == REFERENCE, 1.0
    gains = [d.peak(after) / d.peak(before) for d in (device_named(REFERENCE), device)]
    return False, gains[0] / gains[1]


def _walked(graph: Graph, sort: Sort, factor: float, sigma: float) -> tuple[float, float]:
    """A plain pass, as its kernels go over memory."""
    seconds = graph.seconds[sort.kernels]
    each = portable.power(factor, powers(graph, sort.kernels))
    total = float(seconds.sum())
    return (float((seconds * each).sum()) / total if total > 0 else factor), sigma


def way(dtype: str, layout: str, sort: Sort) -> Way:
    """A format and layout as the rows of a sort call them."""
    row = sort.rows[0][0]
    if row == "attention":
        return Way(dtype, "efficient" if dtype in ("fp32", "tf32") else "cudnn")
    if row == PASS:
        return Way(dtype, "-")
    return Way(dtype, layout if row in LAID_OUT else "")


def image_layout(graph: Graph) -> str:
    """The memory layout images have in a step: as an earlier what-if left it, or as given."""
    if any(spec.startswith("channels-last") for spec in graph.history):
        return "nhwc"
    return "nchw"


def layout_of(graph: Graph, sort: Sort) -> str:
    """The image layout of one operator: a kernel for channels last with nothing turned round."""
    names = {graph.names[int(n)].lower() for n in np.unique(graph.name[sort.kernels])}
    if any("nhwc" in name for name in names) and not any("nchw" in name for name in names):
        return "nhwc"
    return image_layout(graph)


def retimed(edit: Edit, graph: Graph, changes: list[Change]) -> None:
    """Multiply the time of every sort, widen its error and say its new format."""
    for sort, factor, sigma, dtype in changes:
        tasks = sort.kernels
        edit.set(
            tasks,
            seconds=graph.seconds[tasks] * factor,
            sigma=portable.hypot(graph.sigma[tasks], sigma),
            dtype=dtype,
        )
