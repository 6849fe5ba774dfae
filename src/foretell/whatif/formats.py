"""Kernels in another number format or memory layout: what the tables say, put into the graph."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from foretell.cost.ratios import Way
from foretell.graph.edit import Edit
from foretell.graph.graph import Graph
from foretell.whatif.base import DoesNotApply, Setting
from foretell.whatif.machine import device_named, device_of
from foretell.whatif.tabled import IMAGES, Sort, changed

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
    graph: Graph, sort: Sort, before: str, after: str, layout: str = ""
) -> tuple[float, float] | None:
    """What the tables say of a sort in another format or another image layout.

    fp16 is told by rows of bf16 where it was not measured.
    """
    now = layout_of(graph, sort)
    source = way(before, now, sort)
    found = changed(sort, source, way(after, layout or now, sort))
    if found is None and "fp16" in (before, after):
        swap = {"fp16": "bf16"}
        source = way(swap.get(before, before), now, sort)
        found = changed(sort, source, way(swap.get(after, after), layout or now, sort))
    return found


def way(dtype: str, layout: str, sort: Sort) -> Way:
    """A format and layout as the rows of a sort call them."""
    row = sort.rows[0][0]
    if row == "attention":
        return Way(dtype, "efficient" if dtype in ("fp32", "tf32") else "cudnn")
    if row == "add":
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
            sigma=np.hypot(graph.sigma[tasks], sigma),
            dtype=dtype,
        )


def other_generation(graph: Graph, setting: Setting, sort: Sort, before: str, after: str) -> float:
    """What a ratio of the reference device lacks on another one: its products gain less or more."""
    if not sort.is_product:
        return 1.0
    try:
        device = device_of(graph, setting)
    except DoesNotApply:
        return 1.0
    gains = [d.peak(after) / d.peak(before) for d in (device_named(REFERENCE), device)]
    return gains[0] / gains[1]
