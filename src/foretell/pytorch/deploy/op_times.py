"""Ops of one rank's step, priced and as a profiler saw them, by family and one by one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from torch.profiler import ProfilerActivity, profile

from foretell.cluster.node import Device
from foretell.cost import kernel
from foretell.plan.framework import Running
from foretell.workload import Workload
from foretell.workload.workload import calls, holds

STEPS = 3  # that are profiled: of each op the shortest counts, whatever else the machine did
APART = 0.5  # of what was predicted: an op that differs by more parts
_SEEN = 0.02  # of a step: by less no op parts
_UPDATE = "Optimizer.step"  # what torch calls an optimizer's step in a profile
# classes of op that a profiler shows as one
_SHOWN = {"conv_dgrad": "conv_backward", "conv_wgrad": "conv_backward"}
_WORDS = {  # parts of an operator's name, in this order, and its family
    "convolution_backward": "conv_backward",
    "conv": "conv",
    "attention": "attention",
    "mm": "gemm",
    "layer_norm_backward": "norm_backward",
    "layer_norm": "norm",
    "batch_norm_backward": "batch_norm_backward",
    "batch_norm": "batch_norm",
    "softmax_backward": "softmax_backward",
    "softmax": "softmax",
    "embedding_dense_backward": "embedding_backward",
    "embedding": "embedding",
    "pool2d_with_indices_backward": "pool_backward",
    "pool": "pool",
    "sum": "reduce",
    "mean": "reduce",
    "gelu": "activation",
    "silu": "activation",
    "tanh": "activation",
    "sigmoid": "activation",
    "copy": "copy",
    "clone": "copy",
    "cat": "copy",
    "add": "elementwise",
    "mul": "elementwise",
    "relu": "elementwise",
    "clamp": "elementwise",
    "threshold": "elementwise",
    "div": "elementwise",
    "sub": "elementwise",
    "pow": "elementwise",
    "fill": "elementwise",
    "zero": "elementwise",
    "where": "elementwise",
    "dropout": "elementwise",
}


def shown_as(family: str) -> str:
    """The family that a profiler shows ops of a class as."""
    return _SHOWN.get(family, family)


class PricedOp(NamedTuple):
    """A priced kernel of a step."""

    name: str  # layer and op
    word: str  # the operator
    family: str
    is_forward: bool
    seconds: float


@dataclass
class Profiled:
    """Seconds of a step by family of op, and of its forward operators one by one."""

    families: dict[str, float] = field(default_factory=dict)
    forward: list[tuple[str, float]] = field(default_factory=list)


def priced_ops(
    workload: Workload, running: Running, samples: int, device: Device
) -> list[PricedOp]:
    """Every kernel of a step of one rank that holds the whole model, forward ones first."""
    found: list[PricedOp] = []
    for layer in workload.layers:
        for turn in range(layer.times):
            name = f"{layer.name}.{turn}" if layer.times > 1 else layer.name
            for op in layer.works():
                if not holds(op.when, running.flags):
                    continue
                both = calls(running.op(op), op.sizes({}, float(samples)), running.flags)
                for way, some in enumerate(both):
                    found += [
                        PricedOp(f"{name}/{op.name}", _word(op.name), call.op, not way, took)
                        for call in some
                        for took in [_seconds(call, workload.dtype, device)]
                    ]
    return sorted(found, key=lambda op: not op.is_forward)


def _word(name: str) -> str:
    parts = [p for p in name.split(".") if not p.isdigit()]
    return parts[-1] if parts else name


def _seconds(call: Any, dtype: str, device: Device) -> float:
    shape = {k: np.array([float(np.asarray(v))]) for k, v in call.shape.items() if k != "_slow"}
    moved = np.array([float(np.asarray(call.moved(dtype)))])
    took = kernel.seconds(device, call.op, call.dtype or dtype, shape, bytes=moved)
    return float(took.seconds[0]) * float(np.asarray(call.times))


def profiled(step: Callable[[], object]) -> Profiled:
    """What the ops of a step take, each the shortest of a few steps."""
    rows = [_events(step) for _ in range(STEPS)]
    least = min(rows, key=len)
    many = len(least)
    alike = [row for row in rows if len(row) == many]
    families: dict[str, float] = defaultdict(float)
    for i, (name, *_) in enumerate(least):
        families[_family(name)] += min(row[i][1] for row in alike)
    each = [(name, min(row[i][2] for row in alike)) for i, (name, *_) in enumerate(least)]
    return Profiled(dict(families), each)


def _events(step: Callable[[], object]) -> list[tuple[str, float, float]]:
    """Operators in order: name, own seconds, seconds with what they call; an update is one."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
    found = []
    for e in sorted(profiler.events(), key=lambda e: e.time_range.start):
        if e.name.startswith(_UPDATE):
            found.append((_UPDATE, 1e-6 * e.cpu_time_total, 1e-6 * e.cpu_time_total))
        elif e.name.startswith("aten::") and not _is_update(e):
            found.append((e.name, 1e-6 * e.self_cpu_time_total, 1e-6 * e.cpu_time_total))
    return found


def _is_update(event: Any) -> bool:
    """Whether an operator is called by an optimizer."""
    while event is not None:
        if event.name.startswith(_UPDATE):
            return True
        event = event.cpu_parent
    return False


def _family(name: str) -> str:
    if name == _UPDATE:
        return "optimizer"
    return next((family for word, family in _WORDS.items() if word in name), "other")


def first_apart(
    priced: Sequence[PricedOp], seen: Sequence[tuple[str, float]]
) -> dict[str, Any] | None:
    """The first forward op that took much longer or shorter than priced, by its name."""
    each: Mapping[str, list[float]] = defaultdict(list)
    for name, took in seen:
        each[name.removeprefix("aten::")].append(took)
    step = sum(op.seconds for op in priced)
    turn: dict[str, int] = defaultdict(int)
    for op in priced:
        if not op.is_forward:
            break
        at = turn[op.word]
        turn[op.word] += 1
        if at >= len(each.get(op.word, ())):
            continue
        took = each[op.word][at]
        if abs(took - op.seconds) > max(APART * op.seconds, _SEEN * step):
            return {"op": op.name, "predicted_s": op.seconds, "measured_s": took}
    return None
