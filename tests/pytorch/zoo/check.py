"""What a model of the zoo is compared with: a real step on the CPU, counted and measured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import (
    FlopCounterMode,
    conv_backward_flop,
    conv_flop_count,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from foretell.cost.aten import kernels
from foretell.cost.kernel import parse_shape as parse
from foretell.graph import Graph, Kind
from foretell.pytorch.capture import capture
from foretell.pytorch.capture.step import Step, fake_optimizer, settle
from foretell.pytorch.capture.values import seeded
from tests.pytorch.zoo.case import Case

aten = torch.ops.aten
# Products, attention and convolutions: what torch's counter counts.
MATRIX = (
    *("mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "_scaled_mm", "convolution"),
    *("convolution_backward", "_cudnn_rnn", "_cudnn_rnn_backward", "addbmm"),
)


@dataclass(frozen=True)
class Result:
    """A capture beside the step it is of."""

    name: str
    flops: float  # matrix work of the capture
    counted: float  # by torch's counter on a real step
    peak: float  # bytes, of a capture on the CPU
    measured: float  # bytes of tensors alive at once in a real step
    data: str  # how it was captured: "" on fake tensors alone

    @property
    def flops_error(self) -> float:
        return self.flops / self.counted - 1 if self.counted else float(self.flops > 0)

    @property
    def peak_error(self) -> float:
        return self.peak / self.measured - 1


def checked(case: Case) -> Result:
    """A model captured for a GPU and for a CPU, and run."""
    graph = capture(case.model, case.batch, case.loss, "adamw")
    # oneDNN takes memory for itself where it runs a layer in one call
    with _without_onednn():
        on_cpu = capture(case.model, case.batch, case.loss, "adamw:kind=loop", on="cpu")
        counted, measured = _ran(case)
    peak = float(on_cpu.facts["peak_bytes"])
    how = str(graph.facts.get("data", ""))
    return Result(case.name, matrix_work(graph), counted, peak, measured, how)


@contextmanager
def _without_onednn() -> Iterator[None]:
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def matrix_work(graph: Graph) -> float:
    """Flop of products, convolutions and attention; causal attention whole, as torch counts it."""
    total = 0.0
    for i in (graph.kind == Kind.KERNEL).nonzero()[0].tolist():
        op, shape = graph.text_of("op", i), graph.text_of("shape", i)
        if "_attention_" in op:
            causal = dict(parse(kernels(op, shape)[0].shape)).get("causal", 0.0)
            total += float(graph.flops[i]) * (2.0 if causal else 1.0)
        elif op in MATRIX and ",part=bias" not in shape:
            total += float(graph.flops[i])
    return total


def _grouped(a: Any, b: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return 2 * a[-2] * a[-1] * b[-1] * (a[0] if len(a) == len(b) == 3 else 1)


def _attend(q: Any, k: Any, v: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return int(sdpa_flop_count(q, k, v))


def _attend_back(g: Any, q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> int:
    return int(sdpa_backward_flop_count(g, q, k, v))


def _conv_back(g: Any, x: Any, w: Any, *args: Any, out_shape: Any) -> int:
    """Torch counts the weights' gradient of a grouped convolution as if it had no groups."""
    *_, transposed, _, groups, wanted = args
    if groups == 1:
        return int(conv_backward_flop.__wrapped__(g, x, w, *args, out_shape))
    return sum(wanted[:2]) * int(conv_flop_count(x, w, g, transposed))


# What torch's counter does not know, by its own formulas.
_MORE = {
    aten.convolution_backward: _conv_back,
    aten._scaled_dot_product_flash_attention_for_cpu: _attend,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attend_back,
    aten._grouped_mm: _grouped,
}


def _ran(case: Case) -> tuple[float, float]:
    """Flop and peak bytes of a real step, the optimizer's state made before."""
    with seeded():
        model, batch = case.model(), case.batch()
    step = Step(
        model, batch, case.loss, fake_optimizer("adamw:kind=loop", model, model, on_gpu=False)
    )
    settle(step.optimizer, [p for p in model.parameters() if p.requires_grad])
    counter = FlopCounterMode(display=False, custom_mapping=_MORE)
    with counter, seeded():
        _once(step)
    for p in model.parameters():
        p.grad = None
    held = _Held()
    for tensor in _all(step):
        held.see(tensor)
    with held, seeded():
        _once(step)
        step.optimizer.step()
    return float(counter.get_total_flops()), float(held.most)


def _once(step: Step) -> None:
    step.run().backward()


def _all(step: Step) -> list[Any]:
    state = [t for s in step.optimizer.state.values() for t in s.values() if torch.is_tensor(t)]
    return [*step.model.parameters(), *step.model.buffers(), *state, *_tensors(step.batch)]


def _tensors(values: Any) -> list[Any]:
    if torch.is_tensor(values):
        return [values]
    inner = values.values() if isinstance(values, dict) else values
    return (
        [t for v in inner for t in _tensors(v)] if isinstance(values, dict | list | tuple) else []
    )


class _Held(TorchDispatchMode):  # type: ignore[misc]
    """Counts bytes of all storages that are alive, after every operator."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, Any] = {}
        self.now = self.most = 0

    def see(self, tensor: Any) -> None:
        import weakref

        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.live:
            return
        size = storage.nbytes()

        def gone(_: Any) -> None:
            if self.live.pop(key, None) is not None:
                self.now -= size

        self.live[key] = weakref.ref(storage, gone)
        self.now += size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in _tensors(made if isinstance(made, list | tuple) else [made]):
            self.see(tensor)
        self.most = max(self.most, self.now)
        return made
