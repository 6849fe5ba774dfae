"""Mixed precision: matmuls in a shorter format, parameters and sums as they were.

In fp8 the linear layers have one scale a tensor, found each time it is used: inputs and weights go
as e4m3, gradients as e5m2, sums are fp32 and outputs bf16. All three matmuls of a layer are
`torch._scaled_mm`, a name that torch marks as private.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import OptState

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
_EACH = 16  # what the sizes of an fp8 matmul are multiples of
_FORMATS = (torch.float32, torch.bfloat16, torch.float16)  # of weights that are cast to fp8
_CAPABLE = (8, 9)  # compute capability from which NVIDIA's GPUs have it


def dtype_of(word: str) -> Any:
    """The torch dtype of a plan's word; None for full precision."""
    if word not in DTYPES:
        raise unknown("dtype that can be run", word, [w for w in DTYPES if w])
    return DTYPES[word]


def mixed(word: str, device: str) -> AbstractContextManager[Any]:
    """Forward and loss run inside this."""
    dtype = dtype_of(word)
    if dtype is None:
        return nullcontext()
    context: AbstractContextManager[Any] = torch.autocast(device, dtype=dtype)
    return context


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


def unscale(scaler: Any, optimizer: Any, parameters: Iterable[Any]) -> Any:
    """Undo the scale of gradients here, parts of split ones too; 1 where one is not finite.

    As `GradScaler.unscale_`, which takes no split gradients beside whole ones; its state is set.
    """
    grads: dict[Any, list[Any]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            grad = local(parameter.grad)
            grads.setdefault(grad.dtype, []).append(grad)
    found = torch.zeros((), device=scaler._scale.device)
    factor = scaler._scale.double().reciprocal().float()
    for same in grads.values():
        torch._amp_foreach_non_finite_check_and_unscale_(same, found, factor)
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
    if word != "fp8":
        return
    name = "the CPU"
    if device == "cuda":
        if torch.cuda.get_device_capability() >= _CAPABLE:
            return
        name = torch.cuda.get_device_name()
    raise InputError(
        f"dtype=fp8: {name} has no fp8 matmuls",
        hint="run it on a GPU of compute capability 8.9 or more, or with dtype=bf16",
    )


def require_layers(model: Any) -> None:
    """Raise where no layer of a model can compute in fp8."""
    if not _layers(model):
        raise InputError(
            f"dtype=fp8: no linear layer of {type(model).__name__} has sizes that are multiples of "
            f"{_EACH}",
            hint="run it with dtype=bf16",
        )


def use_fp8(module: Any) -> None:
    """Let the linear layers of a module compute in fp8, those that can."""
    for layer in _layers(module):
        layer.forward = _Forward(layer)


def _layers(module: Any) -> list[Any]:
    linear = (m for m in module.modules() if type(m) is nn.Linear and "weight" in m._parameters)
    fitting = (m for m in linear if not m.in_features % _EACH and not m.out_features % _EACH)
    return [m for m in fitting if m.weight.dtype in _FORMATS]


class _Forward:
    """The forward of one layer."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    def __call__(self, x: Tensor) -> Tensor:
        y = _Linear.apply(x, self.layer.weight)
        return y if self.layer.bias is None else y + self.layer.bias.to(y.dtype)


class _Linear(torch.autograd.Function):  # type: ignore[misc]
    """A linear layer whose operands are cast once: backward takes those of the forward, turned."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        a, b = (_cast(one, torch.float8_e4m3fn) for one in (_filled(rows), weight))
        ctx.save_for_backward(*a, *b)
        ctx.shape, ctx.dtypes = x.shape, (x.dtype, weight.dtype)
        return _matmul(a, b)[: len(rows)].reshape(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        *a, b, other = ctx.saved_tensors
        rows = g.reshape(-1, g.shape[-1])
        wants, (dtype, own) = ctx.needs_input_grad, ctx.dtypes
        g8 = _cast(_filled(rows), torch.float8_e5m2)
        gx = _matmul(g8, _turned((b, other)))[: len(rows)] if wants[0] else None
        gw = _matmul(_turned(g8), _turned(a)) if wants[1] else None
        return (
            None if gx is None else gx.to(dtype).reshape(ctx.shape),
            None if gw is None else gw.to(own),
        )


def _matmul(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    """`a @ b.t()` of two tensors in eight bits, each with what it is to be multiplied by."""
    return torch._scaled_mm(a[0], b[0].t(), a[1], b[1], out_dtype=torch.bfloat16)


def _turned(a: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    return a[0].t().contiguous(), a[1]


def _filled(x: Tensor) -> Tensor:
    """Rows of zeros behind what is no multiple: they add nothing to a sum, or are cut off."""
    tall = -len(x) % _EACH
    return nn.functional.pad(x, (0, 0, 0, tall)) if tall else x


def _cast(x: Tensor, kind: Any) -> tuple[Tensor, Tensor]:
    """A tensor in eight bits, in order of rows, and by what to multiply it."""
    least, most = torch.aminmax(x.detach())
    scale = torch.finfo(kind).max / torch.maximum(-least, most).float().clamp_min(1e-12)
    return (x * scale).to(kind).contiguous(), scale.reciprocal()
