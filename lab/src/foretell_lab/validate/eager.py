"""One training step on one device as PyTorch runs it: operators issued one by one by a host.

    graph = eager(load("resnet50:batch=64"), Eager(amp="bf16"))

The graph is like that of a trace: a host lane that issues, a device lane that computes, forward,
loss, backward and update, and the memory that is held meanwhile. Prices come later, from
`foretell.cost.price`. `foretell.workload.step` leaves the host out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from foretell.cost.kernel import write_shape as write
from foretell.graph import Builder, Graph
from foretell.spec import Spec
from foretell.workload.workload import (
    BYTES,
    Call,
    Layer,
    Op,
    Tensor,
    Workload,
    calls,
    holds,
    turned,
)

# The operator that a host issues for a class of kernel; elementwise ones where none is named.
_OPERATORS = {
    "gemm": "mm",
    "conv": "convolution",
    "conv_dgrad": "convolution_backward",
    "conv_wgrad": "convolution_backward",
    "batch_norm": "native_batch_norm",
    "batch_norm_backward": "native_batch_norm_backward",
    "norm": "native_layer_norm",
    "norm_backward": "native_layer_norm_backward",
    "rms_norm": "native_layer_norm",
    "rms_norm_backward": "native_layer_norm_backward",
    "dropout": "native_dropout",
    "copy": "copy_",
    "reduce": "sum",
    "embedding": "embedding",
    "embedding_backward": "embedding_dense_backward",
}
# Kernels of one parameter's update in a loop, and the tensors of its size each reads and writes:
# torch.optim's _single_tensor_adam and _single_tensor_sgd.
_UPDATES: dict[str, tuple[float, ...]] = {
    "sgd": (3.0,),  # add_
    "momentum": (2.0, 3.0, 3.0),  # mul_, add_ of the momentum, add_ to the parameter
    "adam": (3.0, 2.0, 3.0, 2.0, 2.0, 2.0, 4.0),  # lerp_ mul_ addcmul_ sqrt div add_ addcdiv_
}
# Views around an op, forward and backward: `t` and `reshape` of a linear layer, `view` and
# `transpose` of queries, keys, values and context (counted in H200 traces of BERT and GPT-2).
_VIEWS = {"matmul": (2, 4), "attention": (8, 8)}
_STATES = {"sgd": 0.0, "momentum": 1.0, "adam": 2.0}  # tensors kept for each parameter
_FUSED = {"sgd": 3.0, "momentum": 5.0, "adam": 7.0}  # passes where one kernel does all of it
_LIST = 64  # tensors that one kernel of a list operator takes (multi_tensor_apply.cuh, depth 3, 4)


@dataclass(frozen=True)
class Eager(Spec):
    """How PyTorch is asked to run a step."""

    name: ClassVar[str] = "eager"
    amp: Literal["", "bf16", "fp16"] = ""  # format that autocast computes in
    nhwc: bool = False  # channels last in memory
    flash: bool = True  # attention in one kernel
    optimizer: Literal["sgd", "momentum", "adam"] = "momentum"
    way: Literal["loop", "foreach", "fused"] = "foreach"  # how the optimizer walks its parameters

    @property
    def flags(self) -> frozenset[str]:
        """What ops ask before they say their kernels."""
        said = {"amp": bool(self.amp), "nhwc": self.nhwc, "flash": self.flash, "eager": True}
        return frozenset(flag for flag, is_on in said.items() if is_on) | {self.amp or "fp32"}


@dataclass
class _Page:
    """A graph while it is written."""

    workload: Workload
    run: Eager
    batch: float
    build: Builder = field(default_factory=Builder)
    lanes: tuple[int, int] = (0, 0)  # host, device

    @property
    def dtype(self) -> str:
        return self.run.amp or self.workload.dtype

    def issue(
        self, op: str, phase: str, layer: str, kernels: list[Call], **said: float
    ) -> list[int]:
        """One operator: what the host does, and the kernels that follow from it."""
        ways = {"direction": float(phase == "backward"), "kernels": float(len(kernels))}
        shape = write({**ways, **said})
        host = self.build.task(
            kind="host", op=op, lane=self.lanes[0], phase=phase, layer=layer, shape=shape
        )
        return [self._kernel(call, host, phase, layer) for call in kernels]

    def _kernel(self, call: Call, host: int, phase: str, layer: str) -> int:
        dtype = call.dtype or self.dtype
        i = self.build.task(
            kind="kernel",
            op=call.op,
            lane=self.lanes[1],
            phase=phase,
            layer=layer,
            dtype=dtype,
            shape=write({k: float(v) for k, v in call.shape.items()}),
            flops=float(call.flops),
            bytes=float(call.moved(dtype)),
        )
        self.build.wait(i, host, kind="launch")
        return i


def eager(workload: Workload, run: Eager | None = None, *, batch: float = 0) -> Graph:
    """The graph of one step; `batch` samples, those of the workload where 0."""
    run = run or Eager()
    page = _Page(workload, run, float(batch or workload.batch))
    page.lanes = (page.build.lane("host", kind="host"), page.build.lane("device", kind="compute"))
    ops = list(_ops(workload, run.flags))
    born = [_forward(page, layer, op) for layer, op in ops]
    for (layer, op), first in reversed(list(zip(ops, born, strict=True))):
        _backward(page, layer, op, first)
    _update(page)
    _lasting(page)
    return page.build.graph(workload=workload.name, run=str(run), batch=page.batch)


def _ops(workload: Workload, flags: frozenset[str]) -> Iterator[tuple[Layer, Op]]:
    """Every op that runs, as often as its layer is repeated; PyTorch pads no vocabulary."""
    for layer in workload.layers:
        for turn in range(layer.times):
            works = (turned(op, turn) for op in layer.works() if holds(op.when, flags))
            yield from ((layer, replace(op, pads={}) if op.pads else op) for op in works)


def _forward(page: _Page, layer: Layer, op: Op) -> int:
    """The kernels of an op; the first of them, -1 where it has none."""
    there, _ = calls(op, op.sizes({}, page.batch), page.run.flags)
    phase = "loss" if op.kind == "loss" else "forward"
    made: list[int] = []
    for i, call in enumerate(_each(there)):
        name = _OPERATORS.get(call.op, call.op)
        name = "convolution" if call.op.startswith("conv") else name
        made += page.issue(name, phase, layer.name, [call], modules=float(i == 0))
    _views(page, op, phase, layer.name)
    return made[0] if made else -1


def _views(page: _Page, op: Op, phase: str, layer: str) -> None:
    for _ in range(_VIEWS.get(op.kind, (0, 0))[phase == "backward"]):
        page.issue("view", phase, layer, [], nodes=float(phase == "backward"))


def _backward(page: _Page, layer: Layer, op: Op, first: int) -> None:
    """Gradients of an op, and what was kept for them until then."""
    _, back = calls(op, op.sizes({}, page.batch), page.run.flags)
    last, nodes = -1, 1.0 + len(op.weights)  # each parameter has a node that takes its gradient
    for group in _grouped(list(_each(back))):
        name = _OPERATORS.get(group[0].op, group[0].op)
        last = page.issue(name, "backward", layer.name, group, nodes=nodes)[-1]
        nodes = 1.0
    _views(page, op, "backward", layer.name)
    if last >= 0:
        _hold(page, op, first, last)


def _hold(page: _Page, op: Op, first: int, last: int) -> None:
    """What an op keeps until its gradient is made; the gradients of its weights from then on."""
    sizes, keep = op.sizes({}, page.batch), page.build.buffer
    for tensor in op.saved:
        if holds(tensor.when, page.run.flags) and first >= 0:
            size = float(tensor.bytes(sizes, _held(page, op, tensor)))
            keep(size, born=first, dies=last, name=tensor.name, kind="activation")
            if op.kind == "loss":  # the logits in fp32, and in the end their gradient
                keep(size, born=first, dies=last, name="logits", kind="activation")
                keep(size, born=last, dies=last, name="logits.grad", kind="activation")
    for weight in op.weights:
        n = float(weight.elements(op.dims))
        keep(n * BYTES["fp32"], born=last, name=f"{weight.name}.grad", kind="gradient")
        if page.run.amp and op.kind in ("matmul", "conv") and first >= 0:  # autocast's own copies
            half = n * BYTES[page.run.amp]
            keep(half, born=first, dies=last, name=weight.name, kind="workspace")
            keep(half, born=last, dies=last, name=f"{weight.name}.grad", kind="workspace")


def _held(page: _Page, op: Op, tensor: Tensor) -> str:
    """The format something is kept in: norms keep fp32 under autocast."""
    stays = page.run.amp and op.kind == "norm" and tensor.name == "input"
    return "fp32" if stays else page.dtype


def _each(found: list[Call]) -> Iterator[Call]:
    for call in found:
        for _ in range(int(call.times)):
            yield call


def _grouped(found: list[Call]) -> Iterator[list[Call]]:
    """One operator makes both gradients of a convolution."""
    at = 0
    while at < len(found):
        many = 2 if _is_pair(found[at : at + 2]) else 1
        yield found[at : at + many]
        at += many


def _is_pair(two: list[Call]) -> bool:
    return len(two) == 2 and two[1].op == "conv_wgrad"


def _parameters(workload: Workload) -> list[float]:
    """Elements of every parameter tensor; tied ones once."""
    again = {other for _, other in workload.tied}
    return [
        float(weight.elements(op.dims))
        for layer in workload.layers
        for op in layer.works()
        for weight in op.weights
        for _ in range(layer.times)
        if f"{layer.name}/{weight.name}" not in again
    ]


def _update(page: _Page) -> None:
    sizes = _parameters(page.workload)
    passes = _UPDATES[page.run.optimizer]
    if page.run.way == "loop":
        for n in sizes:
            if page.run.optimizer == "adam":  # its count of steps is on the host
                page.issue("add_", "update", "", [], update=1.0)
            for each in passes:
                page.issue("add_", "update", "", [_pass("elementwise", n, each)], update=1.0)
        return
    if page.run.way == "fused":
        passes = (_FUSED[page.run.optimizer],)
    name = f"_{page.run.way}_{page.run.optimizer}_"
    for each in passes:
        lists = [sizes[i : i + _LIST] for i in range(0, len(sizes), _LIST)]
        kernels = [_pass("optimizer", sum(part), each) for part in lists]
        page.issue(name, "update", "", kernels, tensors=float(len(sizes)))


def _pass(op: str, n: float, each: float) -> Call:
    return Call(op, {"n": n}, "fp32", bytes=4.0 * each * n)


def _lasting(page: _Page) -> None:
    """Parameters and optimizer state are there all the time."""
    total = sum(_parameters(page.workload)) * BYTES["fp32"]
    page.build.buffer(total, name="parameters", kind="parameter")
    page.build.buffer(total * _STATES[page.run.optimizer], name="state", kind="optimizer")
