"""Flop and bytes of the kernels of a step, from their shapes: rooflines, MFU and HFU."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from foretell.cluster.node import FORMATS, Device
from foretell.cost.aten import Kernel
from foretell.cost.kernel import parse_shape as parse
from foretell.cost.kernel import visible
from foretell.graph.graph import NONE, Array, Dtype, Graph, Kind, Phase, word_of
from foretell.operators import SIZES
from foretell.whatif.calls import launch_of, operators
from foretell.whatif.kernel_request import requested_kernels as requested

BACKWARD_ATTENTION = 2.5  # matmuls of a fused backward over those of its forward
MODEL = 3.0  # forward and backward of a layer over its forward; more than that is recomputed
_TENSOR = ("tf32", "s1688", "tensorop_s")  # how libraries name TF32 kernels of fp32 matmuls


@dataclass(frozen=True, eq=False)
class Work:
    """Flop and bytes of each kernel of a step; those of a call are spread over its kernels."""

    tasks: Array  # kernels
    flops: Array
    moved: Array  # bytes
    formats: tuple[str, ...]  # number format each computes in


def work_of(graph: Graph) -> Work:
    """Flop and bytes of every kernel."""
    tasks = np.flatnonzero(graph.kind == Kind.KERNEL)
    flops, moved = graph.flops[tasks].copy(), graph.bytes[tasks].copy()
    known = (flops > 0) | (moved > 0)
    if not known.all():
        _fill(graph, tasks, ~known, flops, moved)
    return Work(tasks, flops, moved, _formats(graph, tasks))


def _fill(graph: Graph, tasks: Array, unknown: Array, flops: Array, moved: Array) -> None:
    """Work of kernels whose graph tells only the operator and its inputs."""
    for mine in _calls(graph, tasks, np.flatnonzero(unknown)):
        first = int(tasks[mine[0]])
        size = SIZES.get(word_of(Dtype, graph.dtype[first]), 4.0)
        op, shape = graph.text_of("op", first), graph.text_of("shape", first)
        work, bytes, is_product = _work_of(op, shape, size)
        spent = graph.seconds[tasks[mine]]
        longest = graph.name[tasks[mine[int(np.argmax(spent))]]]
        # Calls that look alike, in a row: a matmul is one kernel of its name.
        many = int((graph.name[tasks[mine]] == longest).sum()) if is_product else 1
        share = spent / spent.sum() if spent.sum() > 0 else np.full(len(mine), 1 / len(mine))
        flops[mine], moved[mine] = many * work * share, many * bytes * share


def _calls(graph: Graph, tasks: Array, rows: Array) -> list[Array]:
    """Kernels launched by one call of an operator, together."""
    launch = launch_of(graph, tasks[rows])
    number = np.where(launch == NONE, NONE, operators(graph)[launch])
    alone = number == NONE
    number[alone] = number.max(initial=0) + 1 + np.arange(int(alone.sum()))
    keys = np.stack([number, graph.op[tasks[rows]], graph.shape[tasks[rows]]])
    _, whose = np.unique(keys, axis=1, return_inverse=True)
    order = np.argsort(whose.reshape(-1), kind="stable")
    parts = np.split(order, np.cumsum(np.bincount(whose.reshape(-1)))[:-1])
    return [rows[part] for part in parts if len(part)]


@lru_cache(1 << 14)
def _work_of(op: str, shape: str, size: float) -> tuple[float, float, bool]:
    """Flop and bytes of one call, and whether it is one matmul."""
    found = requested(op, shape) if shape else ()
    pairs = [_kernel_work(kernel, size) for kernel in found]
    is_product = len(found) == 1 and found[0].op == "gemm" and found[0].times == 1
    return sum(p[0] for p in pairs), sum(p[1] for p in pairs), is_product


def _kernel_work(kernel: Kernel, size: float) -> tuple[float, float]:
    try:
        s = dict(parse(kernel.shape))
    except ValueError:
        s = {}
    flops, moved = kernel.flops, kernel.bytes
    if kernel.op == "gemm" and {"m", "n", "k"} <= set(s):
        b, m, n, k = (s.get(key, 1.0) for key in ("b", "m", "n", "k"))
        flops, moved = 2 * b * m * n * k, b * (m * k + k * n + m * n) * size
    elif kernel.op.startswith("conv") and {"n", "c", "h", "w", "k"} <= set(s):
        flops, moved = _conv(s, size)
    elif kernel.op == "attention" and {"b", "heads", "sq", "sk", "d"} <= set(s):
        keys = float(visible(s["sk"], s.get("causal", 0.0), s.get("window", 0.0)))
        heads = s["b"] * s["heads"] * s["d"]
        back = s.get("direction", 0.0) > 0
        flops = 4 * heads * s["sq"] * keys * (BACKWARD_ATTENTION if back else 1.0)
        moved = heads * (2 * s["sq"] + 2 * s["sk"]) * size * (2 if back else 1)
    return flops * kernel.times, moved * kernel.times


def _conv(s: dict[str, float], size: float) -> tuple[float, float]:
    stride, groups = s.get("stride", 1.0), s.get("groups", 1.0)
    deep = s.get("t", 1.0)
    # A padding wider than half a window makes outputs of nothing but zeros: none has it.
    sides = [(s["h"], s.get("r", 1.0)), (s["w"], s.get("s", 1.0)), (s.get("d", 1.0), deep)]
    pads = [min(s.get("pad", 0.0), tap // 2) for _, tap in sides]
    out = [
        max((side + 2 * pad - tap) // stride + 1, 1.0)
        for (side, tap), pad in zip(sides, pads, strict=True)
    ]
    p, q = s.get("p", out[0]), s.get("q", out[1])
    made = s["n"] * s["k"] * p * q * out[2]
    taps = s.get("r", 1.0) * s.get("s", 1.0) * deep
    weights = s["k"] * s["c"] * taps / groups
    read = s["n"] * s["c"] * s["h"] * s["w"] * s.get("d", 1.0)
    return 2 * made * s["c"] * taps / groups, (read + made + weights) * size


def _formats(graph: Graph, tasks: Array) -> tuple[str, ...]:
    words = [word_of(Dtype, k) for k in graph.dtype[tasks].tolist()]
    return tuple(
        "tf32" if word == "fp32" and _is_tensor(graph.names[int(graph.name[i])]) else word
        for word, i in zip(words, tasks.tolist(), strict=True)
    )


@lru_cache(1 << 12)
def _is_tensor(name: str) -> bool:
    return any(part in name for part in _TENSOR)


def peaks(device: Device, formats: tuple[str, ...]) -> Array:
    """Peak flop/s for each format; fp32's where a kernel computes in none of them."""
    known = {word: device.peak(word if word in FORMATS else "fp32") for word in set(formats)}
    return np.array([known[word] for word in formats])


def utilisation(graph: Graph, work: Work, device: Device, seconds: float) -> dict[str, object]:
    """MFU and HFU: the time the step's flop take at the device's peak, over the step.

    MFU counts each layer's forward and backward once (causal attention as causal), HFU all that
    runs, recomputed forwards too.
    """
    spent = graph.seconds[work.tasks]
    known = float(spent[(work.flops > 0) | (work.moved > 0)].sum())
    ideal = work.flops / peaks(device, work.formats)
    ranks = max(len(np.unique(graph.rank[work.tasks])), 1)
    # Unknown where most kernels have no shapes, or more flop than the device can do.
    if known < 0.5 * spent.sum() or not 0 < ideal.sum() <= ranks * seconds:
        return {"mfu": None, "hfu": None}
    useful = _model_seconds(graph, work, ideal)
    main = max(sorted(set(work.formats)), key=lambda f: sum(_flops_in(work, f)))
    if main not in FORMATS:  # nothing tells in which format it computes
        return {"mfu": None, "hfu": None}
    return {
        "mfu": useful / ranks / seconds,
        "hfu": float(ideal.sum()) / ranks / seconds,
        "flops": float(work.flops.sum()) / ranks,
        "format": main,
        "peak": float(peaks(device, (main,))[0]),
    }


def _flops_in(work: Work, word: str) -> list[float]:
    return [f for f, w in zip(work.flops.tolist(), work.formats, strict=True) if w == word]


def _model_seconds(graph: Graph, work: Work, ideal: Array) -> float:
    """Seconds at peak of what the model asks for: no layer more than three times its forward."""
    layer = graph.layer[work.tasks].astype(np.int64)
    forward = np.isin(graph.phase[work.tasks], (Phase.FORWARD, Phase.LOSS))
    size = int(layer.max(initial=0)) + 1
    every = np.bincount(layer, ideal, size)
    once = np.bincount(layer[forward], ideal[forward], size)
    capped = np.where((once > 0) & (np.arange(size) > 0), np.minimum(every, MODEL * once), every)
    return float(capped.sum())
