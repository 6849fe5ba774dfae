"""A GPU that is not there: fake tensors on `cuda`, on any build of torch and any machine.

Tensors made here carry the dispatch keys of a GPU, so autocast casts what it casts on a GPU and
optimizers see `cuda`. Two things in torch's C++ would look for a driver:

* the autograd engine asks each tensor for its device and then for that device's stream. C++ gets
  another answer than Python: `xla`, which autocast treats like `cuda` and which has no streams;
* guards around kernels are looked up by kind of device. Those of `meta` do nothing, so for the time
  of a capture they stand in for the ones that are missing.

Where that cannot be arranged (`is_possible`), a capture has to be on fake `cpu` tensors.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch import _prims_common as utils
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

GPU = torch.device("cuda", 0)
CPU = torch.device("cpu")
ALIAS = torch.device("xla", 0)  # what C++ is given
DEVICE_OF = torch.ops.prim.device.default

# Values of c10::DeviceType and the table of guards by them, in libc10.
_CUDA, _XLA, _META, _KINDS = 1, 9, 14, 20
_REGISTRY = "_ZN3c104impl26device_guard_impl_registryE"
_CAPABILITY = (9, 0)  # what user code sees of the GPU: a Hopper


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
    """What C++ is told of a fake tensor's device."""
    device: torch.device = tensor.fake_device
    return ALIAS if device.type == "cuda" else device


def on_gpu(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Options of an op that C++ filled in from a tensor, with the device they mean."""
    device = kwargs.get("device")
    if device is None or torch.device(device).type != ALIAS.type:
        return kwargs
    return {**kwargs, "device": GPU}


def fake_mode(device: torch.device) -> FakeTensorMode:
    """A mode that makes fake tensors on a device."""
    kind = FakeGpu if device.type == "cuda" else FakeTensorMode
    return kind(allow_non_fake_inputs=True)


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
            for where, name, answer in _ANSWERS:
                if hasattr(where, name):
                    stack.enter_context(patch.object(where, name, answer))
        yield


def conv_layout(input: Tensor, weight: Tensor, backend: Any) -> torch.memory_format:
    """How cuDNN lays out what a convolution makes: channels last where an input or weight has it.

    C++ would look for the kernels of the device it is told of, and lay all out row by row.
    """
    last = _CHANNELS_LAST.get(input.dim())
    if last is None or input.dtype is torch.float64:
        return torch.contiguous_format
    is_last = any(utils.suggest_memory_format(t) is last for t in (input, weight))
    return last if is_last else torch.contiguous_format


_LAYOUT = "_conv_determine_backend_memory_format"
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


_TRUNCATED = "_no_grad_trunc_normal_"
_draw_truncated = getattr(torch.nn.init, _TRUNCATED)


def _truncated(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`trunc_normal_` draws until no number is too large, which fake tensors never tell."""
    if isinstance(tensor, FakeTensor):
        return tensor
    drawn: Tensor = _draw_truncated(tensor, *args, **kwargs)
    return drawn


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


# All ops of torch 2.13 with a kernel for CPUs and also one made of other ops, and one that only
# GPUs have a kernel for.
_WHOLE = (
    *("aten::silu_backward", "aten::mish_backward", "aten::native_channel_shuffle"),
    "aten::_fused_rms_norm",
)


def _never(*args: Any) -> Any:
    raise NotImplementedError("a pretended GPU runs no kernels")


def _always(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


# What user code and torch itself ask before they use a GPU.
_ANSWERS: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    (torch.cuda, "is_available", _always(True)),
    (torch.cuda, "is_bf16_supported", _always(True)),
    (torch.cuda, "device_count", _always(1)),
    (torch.cuda, "current_device", _always(0)),
    (torch.cuda, "get_device_capability", _always(_CAPABILITY)),
    (torch.cuda, "synchronize", _always(None)),
    (torch.cuda, "is_current_stream_capturing", _always(False)),
    (torch.cuda, "_lazy_init", _always(None)),
    (torch.cuda, "empty_cache", _always(None)),
)
