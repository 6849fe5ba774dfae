"""A data-parallel training step of a decoder-only transformer, as tasks with shapes and no times.

Per layer: forward matmuls and memory-bound kernels, the backward of each, and an all-reduce of
the layer's gradients as soon as they are there; then the optimizer. Every kernel has a launch on
the host before it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from foretell.graph import Builder, Graph
from foretell.graph.graph import group_text

LAUNCH = (
    6e-6  # seconds of host work a kernel: what eager PyTorch spends on an operator of this kind
)
BYTES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2}


@dataclass
class _Rank:
    """One rank while its step is written down."""

    make: Builder
    rank: int
    host: int
    compute: int
    comm: int
    dtype: str
    last: list[int] = field(default_factory=list)  # what the next kernel waits for
    saved: list[int] = field(default_factory=list)  # per layer: the kernel that makes activations
    used: dict[int, int] = field(default_factory=dict)  # per layer: the last that needs them

    def kernel(self, op: str, shape: str, flops: float, moved: float, **where: Any) -> int:
        """A launch and the kernel it starts, after the kernel before."""
        launch = self.make.task(
            kind="host", op="launch", lane=self.host, rank=self.rank, seconds=LAUNCH, **where
        )
        task = self.make.task(
            kind="kernel",
            op=op,
            shape=shape,
            flops=flops,
            bytes=moved,
            dtype=self.dtype,
            lane=self.compute,
            rank=self.rank,
            after=self.last,
            **where,
        )
        self.make.wait(task, launch, kind="launch")
        self.last = [task]
        return task

    def product(self, m: int, n: int, k: int, **where: Any) -> int:
        moved = BYTES[self.dtype] * (m * k + k * n + m * n)
        return self.kernel("gemm", f"b=1,m={m},n={n},k={k}", 2.0 * m * n * k, moved, **where)

    def pointwise(self, op: str, elements: int, passes: int, **where: Any) -> int:
        return self.kernel(op, "", elements, passes * BYTES[self.dtype] * elements, **where)


def transformer(
    ranks: int = 2,
    layers: int = 6,
    hidden: int = 1024,
    tokens: int = 8192,
    dtype: str = "bf16",
) -> Graph:
    """One step of `layers` blocks on each rank, gradients all-reduced layer by layer."""
    make = Builder()
    sides = [_rank(make, r, dtype) for r in range(ranks)]
    for side in sides:
        _forward(side, layers, hidden, tokens)
    reduced = _backward(make, sides, layers, hidden, tokens)
    for side in sides:
        _update(side, layers, hidden, reduced)
        _remember(make, side, layers, hidden, tokens)
    return make.graph(workload=f"transformer:layers={layers},hidden={hidden},tokens={tokens}")


def _rank(make: Builder, rank: int, dtype: str) -> _Rank:
    host = make.lane("main thread", rank=rank, kind="host")
    compute = make.lane("compute stream", rank=rank, kind="compute")
    comm = make.lane("communication stream", rank=rank, kind="comm")
    return _Rank(make, rank, host, compute, comm, dtype)


def _forward(side: _Rank, layers: int, h: int, t: int) -> None:
    for layer in range(layers):
        where: dict[str, Any] = {"layer": f"block.{layer}", "phase": "forward"}
        side.saved.append(side.pointwise("norm", t * h, 2, **where))
        side.product(t, 3 * h, h, **where)
        side.product(t, h, h, **where)
        side.pointwise("norm", t * h, 3, **where)
        side.product(t, 4 * h, h, **where)
        side.pointwise("elementwise", 4 * t * h, 2, **where)
        side.product(t, h, 4 * h, **where)


def _backward(make: Builder, sides: list[_Rank], layers: int, h: int, t: int) -> list[int]:
    group = group_text(side.rank for side in sides)
    reduced = []
    for layer in reversed(range(layers)):
        ends = [_backward_block(side, layer, h, t) for side in sides]
        if len(sides) > 1:
            gradients = 12.0 * h * h * BYTES[sides[0].dtype]
            reduced.append(
                make.task(
                    kind="collective",
                    op="all_reduce",
                    name=f"gradients of block.{layer}",
                    layer=f"block.{layer}",
                    phase="communicate",
                    lanes=[side.comm for side in sides],
                    comm_bytes=gradients,
                    group=group,
                    dtype=sides[0].dtype,
                    after=ends,
                )
            )
    return reduced


def _backward_block(side: _Rank, layer: int, h: int, t: int) -> int:
    where: dict[str, Any] = {"layer": f"block.{layer}", "phase": "backward"}
    for n, k in ((h, 4 * h), (4 * h, h), (h, h), (3 * h, h)):
        side.product(t, k, n, **where)  # what the layer below needs
        side.product(n, k, t, **where)  # what the weights need
        side.pointwise("elementwise", t * n, 3, **where)
    side.used[layer] = side.last[0]
    return side.last[0]


def _update(side: _Rank, layers: int, h: int, reduced: list[int]) -> None:
    side.last = side.last + reduced
    for layer in range(layers):
        side.kernel(
            "optimizer",
            "",
            12.0 * 12 * h * h,
            16.0 * 12 * h * h,
            layer=f"block.{layer}",
            phase="update",
        )


def _remember(make: Builder, side: _Rank, layers: int, h: int, t: int) -> None:
    """Parameters and optimizer state from the beginning; activations from forward to backward."""
    weights, saved = 12.0 * h * h, 16.0 * t * h * BYTES[side.dtype]
    for layer in range(layers):
        where: dict[str, Any] = {"rank": side.rank, "name": f"block.{layer}"}
        make.buffer(weights * BYTES[side.dtype], kind="parameter", **where)
        make.buffer(weights * BYTES[side.dtype], kind="gradient", **where)
        make.buffer(weights * 8, kind="optimizer", **where)
        life: dict[str, Any] = {"born": side.saved[layer], "dies": side.used[layer]}
        make.buffer(saved, kind="activation", **life, **where)
