"""One training step of a workload on one device, kernel by kernel, as a graph without times.

Every kernel has the op, shape and format that `foretell.cost` prices; parameters, gradients and
what autograd keeps stand as buffers, so that questions of memory work too. Layers that repeat are
written out: a graph has a task for each kernel that runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from foretell.graph import Builder, Graph
from foretell.workload.kernels import Call, calls, turned
from foretell.workload.workload import BYTES, Layer, Number, Op, Sizes, Workload, holds

# What the optimizer moves of a parameter: gradient, weight and two moments read, three written.
_ADAM = 28.0
FUSED = frozenset({"fused", "flash"})


@dataclass
class _Page:
    """The step while it is written down."""

    make: Builder
    lane: int
    workload: Workload
    flags: frozenset[str]
    last: list[int] = field(default_factory=list)

    def kernel(self, call: Call, layer: str, name: str, phase: str) -> int:
        task = self.make.task(
            kind="kernel",
            op=call.op,
            name=name,
            shape=_shape(call),
            flops=_plain(call.flops),
            bytes=_plain(call.moved(self.workload.dtype)),
            dtype=call.dtype or self.workload.dtype,
            layer=layer,
            phase=phase,
            lane=self.lane,
            after=self.last,
        )
        self.last = [task]
        return task


def step(workload: Workload, batch: int = 0, *, flags: frozenset[str] = FUSED) -> Graph:
    """Forward, loss, backward and update of one batch; the workload's own batch where 0."""
    make = Builder()
    page = _Page(make, make.lane("compute", kind="compute"), workload, flags)
    samples = float(batch or workload.batch)
    places = [
        (layer, f"{layer.name}.{i}" if layer.times > 1 else layer.name, i)
        for layer in workload.layers
        for i in range(layer.times)
    ]
    born = [_layer(page, place, samples, 0) for place in places]
    dies = [_layer(page, place, samples, 1) for place in reversed(places)][::-1]
    for (layer, name, _), first, last in zip(places, born, dies, strict=True):
        _hold(page, layer, name, samples, first, last)
    for layer, name, _ in places:
        _update(page, layer, name)
    return make.graph(workload=workload.name, batch=samples)


def _layer(page: _Page, place: tuple[Layer, str, int], samples: float, way: int) -> int:
    """One layer forward (way 0) or backward (way 1); its first task forward, its last backward."""
    layer, name, turn = place
    works = [turned(op, turn) for op in layer.works() if holds(op.when, page.flags)]
    tasks: list[int] = []
    for op in works[::-1] if way else works:
        phase = ("loss" if op.kind == "loss" else "forward", "backward")[way]
        for call in calls(op, op.sizes({}, samples), page.flags)[way]:
            for _ in range(int(call.times)):
                tasks.append(page.kernel(call, name, op.name, phase))
    if not tasks:
        return page.last[0] if page.last else -1
    return tasks[-1] if way else tasks[0]


def _hold(page: _Page, layer: Layer, name: str, samples: float, born: int, dies: int) -> None:
    """Buffers of one layer: its weights and their gradients for good, what it keeps for a while."""
    for op in layer.works():
        if not holds(op.when, page.flags):
            continue
        sizes = op.sizes({}, samples)
        size = _weights(op, sizes) * BYTES[page.workload.dtype]
        if size:
            for kind in ("parameter", "gradient"):
                page.make.buffer(size, kind=kind, name=f"{name}/{op.name}")
            page.make.buffer(_weights(op, sizes) * 8, kind="optimizer", name=f"{name}/{op.name}")
        for tensor in op.saved:
            if holds(tensor.when, page.flags):
                kept = _plain(tensor.bytes(sizes, page.workload.dtype))
                where = f"{name}/{op.name}/{tensor.name}"
                page.make.buffer(kept, kind="activation", name=where, born=born, dies=dies)


def _update(page: _Page, layer: Layer, name: str) -> None:
    """The optimizer on one layer's weights."""
    works = (op for op in layer.works() if holds(op.when, page.flags))
    n = sum(_weights(op, op.sizes({})) for op in works)
    if n:
        call = Call("optimizer", {"n": n}, "fp32", bytes=_ADAM * n)
        page.kernel(call, name, "update", "update")


def _weights(op: Op, sizes: Sizes) -> float:
    return sum(_plain(weight.elements(sizes)) for weight in op.weights)


def _shape(call: Call) -> str:
    return ",".join(f"{key}={_plain(value):g}" for key, value in call.shape.items())


def _plain(value: Number) -> float:
    return float(np.asarray(value))
