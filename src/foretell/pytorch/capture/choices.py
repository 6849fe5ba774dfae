"""What PyTorch would choose on a GPU where the choice is made in C++ from the device.

Fused attention, dropout and the like are picked by functions that look for a real device; here the
same choice is made before they are called. A mode catches what models call, whatever name they
imported it by; what torch's own Python calls inside is replaced by name. Losses are noticed on the
way: with the first of them the loss phase begins, as it does when a trace is read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from foretell.pytorch.capture.gpu import GPU
from foretell.pytorch.capture.recurrent import is_recurrent, recurrent

aten = torch.ops.aten

_LOSS = re.compile(
    r"(cross_entropy|nll_loss\w*|mse_loss|l1_loss|smooth_l1_loss|huber_loss|kl_div|ctc_loss"
    r"|binary_cross_entropy\w*|cosine_embedding_loss|soft_margin_loss)$"
)
_HALF = (torch.float16, torch.bfloat16)
_ALIGNED = 8  # elements: heads of other widths are padded or left to the unfused way


_LINEAR = F.linear
CPU = "cpu"  # the architecture for which torch chooses by itself


@contextmanager
def chosen(arch: str, on_loss: Callable[[], None]) -> Iterator[None]:
    """While this is open, torch chooses as on a GPU of that architecture."""
    if arch == CPU:  # torch's own choices count
        with _Choices({F.batch_norm: _batch_norm}, on_loss, is_gpu=False):
            yield
        return
    choices: dict[str, Callable[..., Any]] = {
        "scaled_dot_product_attention": partial(attention, arch),
        "dropout": _dropout,
        "linear": _linear,
        "rms_norm": _rms_norm,
    }
    with ExitStack() as stack:
        known = {getattr(F, name): choice for name, choice in choices.items()}
        known |= {torch.Tensor.to: _to, torch.Tensor.cuda: _cuda, F.batch_norm: _batch_norm}
        for name, choice in choices.items():
            stack.enter_context(patch.object(F, name, choice))
        stack.enter_context(_Choices(known, on_loss))
        yield


class _Choices(TorchFunctionMode):  # type: ignore[misc]
    """Calls what was chosen instead of what was asked for."""

    def __init__(
        self,
        known: dict[Any, Callable[..., Any]],
        on_loss: Callable[[], None],
        *,
        is_gpu: bool = True,
    ) -> None:
        super().__init__()
        self.known, self.on_loss, self.is_gpu = known, on_loss, is_gpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self.known:
            return self.known[func](*args, **kwargs)
        if func == torch.Tensor.is_cuda.__get__:
            return args[0].device.type == "cuda"
        name = getattr(func, "__name__", "")
        if self.is_gpu and is_recurrent(name, args):
            return recurrent(name, _autocast, *args)
        if _LOSS.match(name):
            self.on_loss()
        return func(*args, **kwargs)


def attention(
    arch: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Scaled dot product attention by the backend that a GPU of that architecture would use."""
    query, key, value = _autocast(query, key, value)
    backend = backend_of(arch, query, key, value, attn_mask, enable_gqa)
    if backend == "math":
        options = {"scale": scale, "enable_gqa": enable_gqa}
        return aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, **options
        )[0]
    if backend == "flash":
        return aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, scale=scale
        )[0]
    bias = _bias(attn_mask, query, key)
    grad = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad)
    fused = getattr(aten, f"_scaled_dot_product_{backend}_attention")
    return fused(query, key, value, bias, grad, dropout_p, is_causal, scale=scale)[0]


def backend_of(
    arch: str, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, gqa: bool
) -> str:
    """cudnn on Hopper and later, flash before, for halves; memory-efficient for fp32 and masks.

    torch 2.11 on an H200 runs bf16 attention on cuDNN and fp32 on the memory-efficient kernels
    (traces of GPT-2 and BERT). Grouped heads and odd widths are left unfused in fp32.
    """
    width = query.shape[-1]
    fits = query.dim() == 4 and width % _ALIGNED == 0 and value.shape[-1] == width
    if not fits:
        return "math"
    if query.dtype in _HALF and mask is None and width <= 256:
        return "cudnn" if arch in ("hopper", "blackwell") and width <= 128 else "flash"
    return "math" if gqa and query.shape[1] != key.shape[1] else "efficient"


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Autocast computes attention in its format."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(t.to(dtype) if t.is_floating_point() else t for t in tensors)


def _bias(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """A mask as what is added to the scores."""
    if mask is None:
        return None
    if mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), -math.inf)
    return mask.to(query.dtype).expand(*query.shape[:-1], key.shape[-2])


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A layer with a bias is one matmul that adds it, whatever the dims of its input."""
    flat = input.dim() == 3 or (input.dim() > 3 and input.is_contiguous())
    if bias is None or not flat:
        return _LINEAR(input, weight, bias)
    rows = _LINEAR(input.reshape(-1, input.shape[-1]), weight, bias)
    return rows.view(*input.shape[:-1], -1)


def _to(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """A tensor that is on the GPU stays there: C++, told another name for it, would copy."""
    if args and isinstance(args[0], Tensor):
        args, kwargs = args[1:], {"dtype": args[0].dtype, "device": args[0].device, **kwargs}
    copy = kwargs.pop("copy", False)
    device, dtype, _, layout = torch._C._nn._parse_to(*args, **kwargs)
    if device is not None and device.type == "cuda":
        device = None if input.device.type == "cuda" else GPU
    options = {"device": device, "dtype": dtype, "memory_format": layout, "copy": copy}
    asked = {key: value for key, value in options.items() if value}
    return input.to(**asked) if asked else input


def _cuda(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return _to(input, GPU)


_BATCH_NORM = F.batch_norm
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def _batch_norm(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """cuDNN and the CPU answer in order whatever order the input is in; fake tensors keep its."""
    layout = _CHANNELS_LAST.get(input.dim())
    if layout is None or not input.is_contiguous(memory_format=layout):
        input = input.contiguous()
    return _BATCH_NORM(input, *args, **kwargs)


def _rms_norm(
    input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Any:
    return aten._fused_rms_norm(input, list(normalized_shape), weight, eps)[0]


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """One kernel that draws, scales and keeps a mask of bytes, where the GPU has one."""
    if not training or inplace or not 0 < p < 1 or not input.numel():
        return torch.dropout_(input, p, training) if inplace else torch.dropout(input, p, training)
    kept: Tensor = torch.native_dropout(input, p, True)[0]
    return kept
