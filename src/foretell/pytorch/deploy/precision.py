"""Mixed precision: matmuls in a shorter format, parameters and sums as they were.

In fp8 the linear layers that gain more by it than the casts take (→ cost.eight_bits) have one scale
a tensor, found each time it is used: inputs and weights go as e4m3, gradients as e5m2, sums are
fp32 and outputs bf16. All three matmuls of a layer are `torch._scaled_mm`, a name that torch marks
as private; its units read rows of both operands, so that each tensor is written as it lies and
turned, by the kernels that torch.compile makes of one cast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.amp.grad_scaler import OptState

from foretell.cluster.node import Device
from foretell.cluster.read import load, titled
from foretell.cost.eight_bits import EACH, saved
from foretell.errors import InputError, unknown
from foretell.plan import Plan
from foretell.pytorch.deploy.buckets import local
from foretell.spec import split

DTYPES = {
    "": None,
    "fp32": None,
    "fp32-ieee": None,
    "tf32": None,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,  # of what is no matmul of a linear layer
}
Tensor = Any
_FORMATS = (torch.float32, torch.bfloat16, torch.float16)  # of weights that are cast to fp8
_CAPABLE = (8, 9)  # compute capability from which NVIDIA's GPUs have it


def dtype_of(word: str) -> Any:
    """The torch dtype of a plan's word; None for full precision."""
    if word not in DTYPES:
        raise unknown("dtype that can be run", word, [w for w in DTYPES if w])
    return DTYPES[word]


def mixed(word: str, device: str) -> Any:
    """Forward and loss run inside this."""
    dtype = dtype_of(word)
    return nullcontext() if dtype is None else torch.autocast(device, dtype=dtype)


def refusal(model: Any, word: str, device: str) -> str:
    """Why a model cannot compute in a format on this device, or nothing."""
    has_lstm = any(isinstance(m, nn.LSTM) for m in model.modules())
    if word != "fp16" or device != "cpu" or not has_lstm:
        return ""
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad(), mixed(word, device):
            nn.LSTM(16, 16)(torch.zeros(1, 1, 16))
    except RuntimeError:  # of oneDNN, which has none for most processors
        return "this CPU has no LSTM in fp16"
    return ""


def scaler(word: str, device: str) -> Any:
    """What keeps small gradients of fp16 from vanishing; None where they do not."""
    return torch.amp.GradScaler(device) if word == "fp16" else None


def unscaled() -> float:
    """By what a loss is multiplied where gradients do not vanish."""
    return 1.0


def scale_losses(pipeline: Any, scaler: Any, device: str) -> None:
    """Let the losses of a pipeline be multiplied as a scaler says, on ranks without one too."""
    scaler.scale(torch.zeros((), device=device))  # which makes its state
    pipeline.scale = scaler.get_scale


def unscale_gradients(parameters: Iterable[Any], factor: Any) -> Any:
    """Multiply the gradients here, parts of split ones too; 1 where one is not finite.

    As a `GradScaler` does, which takes no split gradients beside whole ones.
    """
    grads: dict[Any, list[Any]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            grad = local(parameter.grad)
            grads.setdefault(grad.dtype, []).append(grad)
    found = torch.zeros((), dtype=torch.float32, device=factor.device)
    for same in grads.values():
        torch._amp_foreach_non_finite_check_and_unscale_(same, found, factor)
    return found


def unscale(scaler: Any, optimizer: Any, parameters: Iterable[Any]) -> Any:
    """Undo the scale of gradients, as `GradScaler.unscale_`; 1 where one is not finite."""
    found = unscale_gradients(parameters, scaler._scale.double().reciprocal().float())
    state = scaler._per_optimizer_states[id(optimizer)]
    state["found_inf_per_device"], state["stage"] = {found.device: found}, OptState.UNSCALED
    return found


def precision_of(plan: Plan) -> str:
    """The format of matmuls: the plan's own, or that of its `amp` what-if."""
    for spec in plan.whatifs:
        name, options = split(spec)
        if name == "amp":
            return options.get("dtype", "bf16")
    return plan.dtype or plan.precision.removesuffix("-mixed")


def require_fp8(word: str, device: str) -> None:
    """Raise where a run would be in fp8 on a device without such matmuls."""
    is_cuda = device == "cuda"
    if word != "fp8" or (is_cuda and torch.cuda.get_device_capability() >= _CAPABLE):
        return
    name = torch.cuda.get_device_name() if is_cuda else "the CPU"
    raise InputError(
        f"dtype=fp8: {name} has no fp8 matmuls",
        hint="run it on a GPU of compute capability 8.9 or more, or with dtype=bf16",
    )


def require_layers(model: Any) -> None:
    """Raise where no layer of a model can compute in fp8."""
    if not _layers(model):
        raise InputError(
            f"dtype=fp8: no linear layer of {type(model).__name__} has sizes that are multiples of "
            f"{EACH}",
            hint="run it with dtype=bf16",
        )


def use_fp8(module: Any) -> None:
    """Let the linear layers of a module compute in fp8, those that are faster so."""
    found = titled(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    # of a GPU that nothing is known of all layers are taken
    device = None if found is None else load(f"{found.name}:gpus=1").devices[0]
    for layer in _layers(module):
        layer.forward = _Forward(layer, device)


def fp8_notes(module: Any) -> list[str]:
    """How many of the layers that could compute in fp8 did, where some did not."""
    every = [vars(m)["forward"] for m in module.modules() if "forward" in vars(m)]
    mine = [one for one in every if isinstance(one, _Forward)]
    used = sum(one.device is None or any(one.faster.values()) for one in mine)
    if used == len(mine):
        return []
    return [
        f"{used} of {len(mine)} linear layers run in fp8: the others are faster in bf16, casts to "
        "fp8 take more than their matmuls gain"
    ]


def _layers(module: Any) -> list[Any]:
    linear = (m for m in module.modules() if type(m) is nn.Linear and "weight" in m._parameters)
    fitting = (m for m in linear if not m.in_features % EACH and not m.out_features % EACH)
    return [m for m in fitting if m.weight.dtype in _FORMATS]


class _Forward:
    """The forward of one layer."""

    def __init__(self, layer: Any, device: Device | None) -> None:
        self.layer, self.device = layer, device
        self.faster: dict[int, bool] = {}  # by rows of the input

    def __call__(self, x: Tensor) -> Tensor:
        weight, bias = self.layer.weight, self.layer.bias
        if not self._is_faster(x.numel() // x.shape[-1]):
            return nn.functional.linear(x, weight, bias)
        y = _Linear.apply(x, weight)
        return y if bias is None else y + bias.to(y.dtype)

    def _is_faster(self, rows: int) -> bool:
        if self.device is None:
            return True
        if rows not in self.faster:
            gain = saved(self.device, rows, self.layer.in_features, self.layer.out_features)
            self.faster[rows] = bool(gain[0] > 0)
        return self.faster[rows]


class _Cast(NamedTuple):
    """A tensor in eight bits, in order of rows and of columns, and by what to multiply it."""

    rows: Tensor
    columns: Tensor
    scale: Tensor


class _Linear(torch.autograd.Function):  # type: ignore[misc]
    """A linear layer whose operands are cast once: backward takes those of the forward, turned."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        a, b = (_cast(one, torch.float8_e4m3fn) for one in (_filled(rows), weight))
        ctx.save_for_backward(a.columns, a.scale, b.columns, b.scale)
        ctx.shape, ctx.dtypes = x.shape, (x.dtype, weight.dtype)
        y = _matmul(a.rows, b.rows, a.scale, b.scale, is_fast=True)
        return y[: len(rows)].reshape(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, of_x, weight, of_weight = ctx.saved_tensors
        rows = g.reshape(-1, g.shape[-1])
        wants, (dtype, own) = ctx.needs_input_grad, ctx.dtypes
        given = _cast(_filled(rows), torch.float8_e5m2)
        gx = _matmul(given.rows, weight, given.scale, of_weight)[: len(rows)] if wants[0] else None
        gw = _matmul(given.columns, x, given.scale, of_x) if wants[1] else None
        return (
            None if gx is None else gx.to(dtype).reshape(ctx.shape),
            None if gw is None else gw.to(own),
        )


def _matmul(a: Tensor, b: Tensor, of_a: Tensor, of_b: Tensor, *, is_fast: bool = False) -> Tensor:
    """`a @ b.t()` of two tensors in eight bits; `is_fast`: sums of parts are not kept in fp32."""
    return torch._scaled_mm(a, b.t(), of_a, of_b, out_dtype=torch.bfloat16, use_fast_accum=is_fast)


def _filled(x: Tensor) -> Tensor:
    """Rows of zeros behind what is no multiple: they add nothing to a sum, or are cut off."""
    tall = -len(x) % EACH
    return nn.functional.pad(x, (0, 0, 0, tall)) if tall else x


def _cast(x: Tensor, kind: Any) -> _Cast:
    """A tensor in eight bits: on a GPU by kernels that read it twice and write it twice."""
    return _Cast(*(_compiled() if x.is_cuda else _in_eight_bits)(x.detach(), kind))


@cache
def _compiled() -> Callable[..., Any]:
    """The cast as compiled kernels; one set for all sizes."""
    made: Callable[..., Any] = torch.compile(_in_eight_bits, dynamic=True)
    return made


def _in_eight_bits(x: Tensor, kind: Any) -> tuple[Tensor, Tensor, Tensor]:
    scale = torch.finfo(kind).max / x.abs().amax().float().clamp_min(1e-12)
    short = (x.float() * scale).to(kind)
    return short.contiguous(), short.t().contiguous(), scale.reciprocal()
