"""Ops of one rank's step, priced and as a profiler saw them, by family and one by one.

An op that is timed alone finds its inputs in the cache and its memory mapped; in a step it does
not. So a copy of the model is also taken forward and back, and updated, on each rank by itself, all
ranks at once: no message is sent, and nothing of the run changes.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from foretell.cluster.node import Device
from foretell.cost import kernel
from foretell.plan.framework import Running
from foretell.pytorch import timed
from foretell.pytorch.deploy import run_files
from foretell.pytorch.deploy.batch_norm import synchronize_norms
from foretell.pytorch.deploy.units import units
from foretell.pytorch.script import default_loss
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
Tensor = Any
_COPIES = 16.0  # bytes a parameter: values, gradients, two states of an optimizer, in fp32
_SHARE = 0.25  # of the memory that is free, for the copies of all ranks
_WARM, _LEAST, _MOST = 2, 5, 15  # passes
_WHILE = 1.5  # seconds of passes, beyond the least


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


def fits(model: Any, ranks: int) -> bool:
    """Whether copies of a model for so many ranks fit in a part of the free memory."""
    count = sum(p.numel() for p in model.parameters())
    return bool(_COPIES * count * ranks < _SHARE * run_files.free_memory())


class Part(NamedTuple):
    """A part of a pass: from the beginning of one of some modules to that of the next."""

    there: float  # shares of the core seconds of a forward and backward
    back: float
    width: int = 0  # numbers a sample of its output

    def joined(self, other: Part) -> Part:
        """Both together, with the output of this one."""
        return Part(self.there + other.there, self.back + other.back, self.width)


@dataclass(frozen=True)
class Taken:
    """Core seconds of a rank by itself."""

    compute: float  # forward and backward
    update: float
    parts: tuple[Part, ...] = ()  # of the children of an nn.Sequential
    units: tuple[Part, ...] = ()  # of what comes before the first unit, and of all units
    active: float = 1.0  # threads that were busy
    again: Callable[[], float] | None = None  # takes what an update is of once more


@dataclass(frozen=True)
class LocalPass:
    """What is taken forward and back on one rank."""

    model: Any
    batch: tuple[Tensor, ...]  # inputs and target of one data-parallel rank
    loss: Callable[..., Any] | None
    optimizer: Callable[[Any], Any]
    alone: Any = None  # a group of this rank, for batch norms that use statistics of a group

    def taken(self, samples: int, times: int = 1, *, in_buckets: bool = False) -> Taken | None:
        """Forwards and backwards of so many samples, and updates; None where that fails.

        `times`: micro-batches whose gradients are added up before an update; `in_buckets`:
        gradients are put into memory that they leave from.
        """
        try:
            with torch.random.fork_rng(devices=[]):
                model = _copied(self.model)
                if self.alone is not None:
                    synchronize_norms(model, self.alone)
                if in_buckets:
                    put_in_buckets(model)
                return self._taken(model, [_first(one, samples) for one in self.batch], times)
        except Exception:  # whatever a model may want: its ops are priced alone then
            return None

    def _taken(self, model: Any, batch: list[Tensor], times: int) -> Taken:
        passes = _Passes(model, batch, self.loss or default_loss, self.optimizer(model), times)
        rows: list[tuple[float, float]] = []
        begun, spent = time.perf_counter(), time.process_time()
        while len(rows) < _WARM + _LEAST or (
            len(rows) < _MOST and time.perf_counter() - begun < _WHILE
        ):
            rows.append(passes.take())
        active = (time.process_time() - spent) / (time.perf_counter() - begun)
        both, update = (statistics.median(column) for column in zip(*rows[_WARM:], strict=True))
        first, *parts = _parts(_children(model), passes.forward)
        parts = [parts[0].joined(first), *parts[1:]] if parts else []
        inner = [unit for unit in units(model).values() if unit is not model]
        found = _parts(inner, passes.forward)
        return Taken(both / times, update, tuple(parts), found, active, lambda: passes.take()[0])


class _Passes:
    """A model that is taken forward and back and updated on one rank, and keeps its values.

    A batch that is taken again and again would be learnt by heart: gradients would become denormal
    numbers, which take a hundred times as long.
    """

    def __init__(
        self, model: Any, batch: list[Tensor], loss: Callable[..., Any], optimizer: Any, times: int
    ) -> None:
        self.model, self.loss, self.optimizer, self.times = model, loss, optimizer, times
        *self.inputs, self.target = batch
        for group in optimizer.param_groups:
            group["lr"] = 0.0 * group.get("lr", 0.0)
        self.clock = timed.clock()

    def forward(self) -> Callable[[], object]:
        """Go forward; the backward of it."""
        backward: Callable[[], object] = self.loss(self.model(*self.inputs), self.target).backward
        return backward

    def take(self) -> tuple[float, float]:
        """Core seconds of the forwards and backwards of a step, and of its update."""
        self.optimizer.zero_grad()
        start = self.clock()
        for _ in range(self.times):
            self.forward()()
        middle = self.clock()
        self.optimizer.step()
        return middle - start, self.clock() - middle


def _children(model: Any) -> list[Any]:
    return list(model) if isinstance(model, nn.Sequential) else []


class _Marks:
    """When modules begin in a forward, and when gradients of their inputs are there."""

    def __init__(self, modules: Sequence[Any]) -> None:
        self.clock = timed.clock()
        self.there: list[tuple[int, float]] = []
        self.back: list[tuple[int, float]] = []
        self.widths = [0] * len(modules)
        self.hooks = [
            hook
            for k, one in enumerate(modules)
            for hook in (
                one.register_forward_pre_hook(partial(self._begins, k)),
                one.register_forward_hook(partial(self._ends, k)),
            )
        ]

    def _begins(self, k: int, _: Any, inputs: tuple[Any, ...]) -> None:
        self.there.append((k, self.clock()))
        for x in inputs:
            if isinstance(x, torch.Tensor) and x.requires_grad:
                x.register_hook(lambda _, k=k: self.back.append((k, self.clock())))

    def _ends(self, k: int, _: Any, __: Any, output: Any) -> None:
        is_tensor = isinstance(output, torch.Tensor) and output.dim() > 0
        self.widths[k] = output.numel() // max(len(output), 1) if is_tensor else 1

    def take(self, step: Callable[[], Callable[[], object]]) -> Any:
        """Seconds of a forward and of its backward, before the first module and of each."""
        self.there, self.back = [], []
        found = np.zeros((2, len(self.widths) + 1))
        at, last = self.clock(), -1
        backward = step()
        middle = self.clock()
        for k, begun in [*self.there, (-1, middle)]:
            found[0, last + 1] += begun - at
            at, last = begun, k
        backward()
        at = middle
        for k, done in self.back:
            found[1, k + 1] += done - at
            at = done
        first = self.there[0][0] if self.there else -1
        found[1, first + 1] += self.clock() - at  # whose input has no gradient
        return found


def _parts(modules: Sequence[Any], step: Callable[[], Callable[[], object]]) -> tuple[Part, ...]:
    """What a pass is spent on before the first of some modules and in each."""
    marks = _Marks(modules)
    try:
        rows = [marks.take(step) for _ in range(_LEAST)]
    finally:
        for hook in marks.hooks:
            hook.remove()
    there, back = np.median(rows, axis=0) / max(np.median(rows, axis=0).sum(), 1e-12)
    return tuple(
        Part(float(a), float(b), wide)
        for a, b, wide in zip(there, back, (0, *marks.widths), strict=True)
    )


def put_in_buckets(model: Any) -> None:
    """Copy each gradient, once it is there, to a place that stays."""
    for parameter in model.parameters():
        slot = torch.zeros_like(parameter)

        def put(one: Tensor, slot: Tensor = slot) -> None:
            torch.mul(one.grad, 0.5, out=slot)
            one.grad = slot

        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(put)


def _first(tensor: Tensor, samples: int) -> Tensor:
    """So many samples of a part of a batch."""
    return tensor[:samples] if isinstance(tensor, torch.Tensor) and tensor.ndim else tensor


def _copied(model: Any) -> Any:
    """The model with memory of its own, and values where it had none."""
    found = copy.deepcopy(model)
    if any(p.is_meta for p in found.parameters()):
        found = found.to_empty(device="cpu")
        for parameter in found.parameters():
            nn.init.normal_(parameter.data, std=0.02)
        for buffer in found.buffers():
            buffer.data.fill_(1)
    return found.train(model.training)
