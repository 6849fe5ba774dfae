"""A GPU that is not there: fake tensors on `cuda`, and what PyTorch would choose on it.

Tensors made here carry the dispatch keys of a GPU, so autocast casts what it casts on a GPU and
optimizers see `cuda`. Two things in torch's C++ would look for a driver:

* the autograd engine asks each tensor for its device and then for that device's stream. C++ gets
  another answer than Python: `xla`, which autocast treats like `cuda` and which has no streams;
* guards around kernels are looked up by kind of device. Those of `meta` do nothing, so for the time
  of a capture they stand in for the ones that are missing.

Where that cannot be arranged (`is_possible`), a capture has to be on fake `cpu` tensors.

Fused attention, dropout and the like are picked in C++ by functions that look for a real device;
here the same choice is made before they are called. A mode catches what models call, whatever name
they imported it by; what torch's own Python calls inside is replaced by name. Losses are noticed on
the way: with the first of them the loss phase begins, as it does when a trace is read.

Recurrent layers run as cuDNN runs them: one call forward and one backward, however many steps. That
operator has no fake form of its own for the backward pass, so the shapes of its gradients are
answered here.
"""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch import _prims_common as utils
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode

aten = torch.ops.aten
_MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}  # cuDNN's numbers
KINDS = tuple(_MODES)
_ARGUMENTS = 9  # of a recurrent layer, packed or not


def recurrent(kind: str, cast: Callable[..., tuple[Tensor, ...]], *args: Any) -> tuple[Any, ...]:
    """Outputs of `torch.lstm`, `torch.gru` and `torch.rnn_*`, for padded or packed sequences."""
    sizes: list[int] = []
    if isinstance(args[1], Tensor) and not args[1].is_floating_point():
        input, packed, *rest = args
        args, sizes = (input, *rest, False), packed.tolist()
    input, hx, weights, has_biases, layers, dropout, train, bidirectional, batch_first = args
    hidden, cell = (hx[0], hx[1]) if kind == "lstm" else (hx, None)
    each = len(weights) // (layers * (2 if bidirectional else 1))
    input, hidden, *weights = cast(input, hidden, *weights)
    cell = cast(cell)[0] if cell is not None else None
    size, projected = int(hidden.shape[-1]), 0
    if each == (5 if has_biases else 3):  # the state is projected
        size, projected = int(weights[each - 1].shape[1]), size
    flat = weights[0].detach()  # stands for the buffer that all weights are views of
    out, new, state, *_ = aten._cudnn_rnn(
        input, weights, each, flat, hidden, cell, _MODES[kind], size, projected, layers,
        batch_first, dropout, train, bidirectional, sizes, None,
    )  # fmt: skip
    return (out, new, state) if kind == "lstm" else (out, new)


def gradients(func: Any, input: Tensor, weight: Sequence[Tensor], *rest: Any) -> tuple[Any, ...]:
    """Tensors like those that `_cudnn_rnn_backward` makes."""
    hidden, cell = rest[2], rest[3]
    return (
        torch.empty_like(input),
        torch.empty_like(hidden),
        torch.empty_like(cell) if cell is not None else torch.empty_like(hidden),
        [torch.empty_like(w) for w in weight],
    )


_LOSS = re.compile(
    r"(cross_entropy|nll_loss\w*|mse_loss|l1_loss|smooth_l1_loss|huber_loss|kl_div|ctc_loss"
    r"|binary_cross_entropy\w*|cosine_embedding_loss|soft_margin_loss)$"
)
_HALF = (torch.float16, torch.bfloat16)
_ALIGNED = 8  # elements: heads of other widths are padded or left to the unfused way
_LINEAR = F.linear
ON_CPU = "cpu"  # the architecture for which torch chooses by itself


_BATCH_NORM = F.batch_norm
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
GPU = torch.device("cuda", 0)
CPU = torch.device("cpu")
ALIAS = torch.device("xla", 0)  # what C++ is given
DEVICE_OF = torch.ops.prim.device.default
_REGISTRY = "_ZN3c104impl26device_guard_impl_registryE"
_CAPABILITY = (9, 0)  # what user code sees of the GPU: a Hopper
_LAYOUT = "_conv_determine_backend_memory_format"
_TRUNCATED = "_no_grad_trunc_normal_"
_draw_truncated = getattr(torch.nn.init, _TRUNCATED)
# All ops of torch 2.13 with a kernel for CPUs and also one made of other ops, and one that only
# GPUs have a kernel for.
_WHOLE = (
    *("aten::silu_backward", "aten::mish_backward", "aten::native_channel_shuffle"),
    "aten::_fused_rms_norm",
)


@contextmanager
def chosen(arch: str, on_loss: Callable[[], None]) -> Iterator[None]:
    """While this is open, torch chooses as on a GPU of that architecture."""
    if arch == ON_CPU:  # torch's own choices count
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
        known |= {torch.Tensor.to: _to, F.batch_norm: _batch_norm}
        known[torch.Tensor.cuda] = lambda input, *_, **__: _to(input, GPU)
        for name, choice in choices.items():
            stack.enter_context(patch.object(F, name, choice))
        stack.enter_context(_Choices(known, on_loss))
        yield


class _Choices(TorchFunctionMode):  # type: ignore[misc]
    """Calls the operator chosen instead of the requested one."""

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
        is_layer = name in KINDS and len(args) == _ARGUMENTS and args[0].is_floating_point()
        if self.is_gpu and is_layer:
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
    """A tensor on the GPU stays there: C++ would copy it for another device name."""
    if args and isinstance(args[0], Tensor):
        args, kwargs = args[1:], {"dtype": args[0].dtype, "device": args[0].device, **kwargs}
    copy = kwargs.pop("copy", False)
    device, dtype, _, layout = torch._C._nn._parse_to(*args, **kwargs)
    if device is not None and device.type == "cuda":
        device = None if input.device.type == "cuda" else GPU
    options = {"device": device, "dtype": dtype, "memory_format": layout, "copy": copy}
    conversion = {key: value for key, value in options.items() if value}
    return input.to(**conversion) if conversion else input


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
    return torch.native_dropout(input, p, True)[0]


# Values of c10::DeviceType and the table of guards by them, in libc10.
_CUDA, _XLA, _META, _KINDS = 1, 9, 14, 20


class FakeGpu(FakeTensorMode):  # type: ignore[misc]
    """Fake tensors whose device is `cuda` to Python and `xla` to C++."""

    @property
    def avoid_device_init(self) -> bool:
        """Constants are made on the CPU and then moved."""
        return True

    @avoid_device_init.setter
    def avoid_device_init(self, _: bool) -> None:
        """Some versions of torch set what others work out."""

    def dispatch(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # the signature of torch
        if func is DEVICE_OF:
            return alias_of(args[0])
        return super().dispatch(func, types, args, on_gpu(kwargs or {}))


def alias_of(tensor: Any) -> torch.device:
    """The device of a fake tensor as C++ sees it."""
    return ALIAS if tensor.fake_device.type == "cuda" else tensor.fake_device


def on_gpu(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Options of an op that C++ filled in from a tensor, with the device they mean."""
    device = kwargs.get("device")
    if device is None or torch.device(device).type != ALIAS.type:
        return kwargs
    return {**kwargs, "device": GPU}


def fake_mode(device: torch.device) -> FakeTensorMode:
    """A mode that makes fake tensors on a device."""
    return (FakeGpu if device.type == "cuda" else FakeTensorMode)(allow_non_fake_inputs=True)


def is_possible() -> bool:
    """Whether this build of torch lets a GPU be pretended."""
    guards = _guards()
    return guards is not None and bool(guards[_META])


@contextmanager
def pretended(device: torch.device) -> Iterator[None]:
    """While this is open, torch behaves as with a GPU; nothing stays changed behind it."""
    if device.type != "cuda":
        yield
        return
    with ExitStack() as stack:
        stack.enter_context(_stand_ins())
        stack.enter_context(_kernels())
        stack.enter_context(patch.object(torch._C, _LAYOUT, conv_layout))
        stack.enter_context(patch.object(torch.nn.init, _TRUNCATED, _truncated))
        if not torch.cuda.is_available():
            for name, answer in _ANSWERS.items():
                if hasattr(torch.cuda, name):
                    stack.enter_context(patch.object(torch.cuda, name, always(answer)))
        yield


def conv_layout(input: Tensor, weight: Tensor, backend: Any) -> torch.memory_format:
    """How cuDNN lays out what a convolution makes: channels last where an input or weight has it.

    C++ would look for the kernels of the named device, and make everything contiguous.
    """
    last = _CHANNELS_LAST.get(input.dim())
    if last is None or input.dtype is torch.float64:
        return torch.contiguous_format
    is_last = any(utils.suggest_memory_format(t) is last for t in (input, weight))
    return last if is_last else torch.contiguous_format


def _truncated(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`trunc_normal_` draws until no number is too large, which fake tensors never tell."""
    return tensor if isinstance(tensor, FakeTensor) else _draw_truncated(tensor, *args, **kwargs)


def _guards() -> Any:
    """The table of device guards; None where this build hides it."""
    library = Path(torch.__file__).parent / "lib" / "libc10.so"
    try:
        return (ctypes.c_void_p * _KINDS).in_dll(ctypes.CDLL(str(library)), _REGISTRY)
    except (OSError, ValueError):
        return None


@contextmanager
def _stand_ins() -> Iterator[None]:
    """Guards that do nothing where there is no driver."""
    guards = _guards()
    kinds = [_XLA] if torch.cuda.is_available() else [_XLA, _CUDA]
    before = {kind: guards[kind] for kind in kinds}
    for kind in kinds:
        guards[kind] = guards[_META]
    try:
        yield
    finally:
        for kind, guard in before.items():
            guards[kind] = guard


@contextmanager
def _kernels() -> Iterator[None]:
    """Ops that torch takes apart where it has no kernel for them, as a build without CUDA does."""
    library = torch.library.Library("aten", "IMPL")
    missing = (
        op for op in _WHOLE if not torch._C._dispatch_has_kernel_for_dispatch_key(op, "CUDA")
    )
    for op in missing:  # a kernel by name is enough: fake tensors never call it
        library.impl(op.removeprefix("aten::"), _never, "CUDA")
    try:
        yield
    finally:
        library._destroy()


def _never(*args: Any) -> Any:
    raise NotImplementedError("a pretended GPU runs no kernels")


def always(value: Any) -> Callable[..., Any]:
    """A function that answers one thing, whatever it is asked."""
    return lambda *args, **kwargs: value


# What user code and torch itself ask before they use a GPU.
_ANSWERS = {
    **dict.fromkeys(("is_available", "is_bf16_supported"), True),
    "device_count": 1,
    "current_device": 0,
    "get_device_capability": _CAPABILITY,
    **dict.fromkeys(("synchronize", "_lazy_init", "empty_cache"), None),
    "is_current_stream_capturing": False,
}
