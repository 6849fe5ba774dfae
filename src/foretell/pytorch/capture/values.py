"""Values behind fake tensors, known or assumed, so that code which asks for data gets an answer.

A fake tensor has no data, but what a model computes from constants, random draws and the batch can
be known all the same: the operator then runs a second time on real CPU tensors, and the result is
kept on the fake one. Small tensors are always followed:

    rates = [x.item() for x in torch.linspace(0, 0.1, 24)]

With `every`, weights and batch have values too (→ `entry`), and each operator of the forward pass
is followed: masks, routing, lengths and `.item()` are then those of a real step.

Operators whose result depends on the data: by known values, by assumption, or refused. Fake tensors
have no data, so how many elements a mask picks or what `.item()` returns is known only where values
are (→ `values`). Elsewhere, with a `share`, every mask picks that share of what it is asked about,
and every number asked for is one (true); the model then takes the branch that follows.
"""

from __future__ import annotations

import math
import random
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_map_only

from foretell.errors import InputError
from foretell.pytorch.capture.gpu import gradients
from foretell.pytorch.capture.words import grouped_shape, inputs_of, tensors_in

aten = torch.ops.aten
SMALL = 1 << 18  # elements of a tensor whose values are always tracked
_VALUE = "_foretell_value"
_EMPTY = ("aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided")
_CPU = torch.device("cpu")


UNKNOWN = (DataDependentOutputException, DynamicOutputShapeException)
_LACKING = (UnsupportedFakeTensorException, UnsupportedOperatorException, NotImplementedError)
_LINE = 240  # characters of another's message that are worth repeating
INSTEAD = "run `foretell profile` on a GPU and give its trace to `foretell whatif`"


@contextmanager
def seeded() -> Iterator[None]:
    """Random numbers of torch, Python and numpy that are the same every time."""
    numpy = sys.modules.get("numpy")
    before = random.getstate(), numpy.random.get_state() if numpy else None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        random.seed(0)
        if numpy:
            numpy.random.seed(0)
        try:
            yield
        finally:
            random.setstate(before[0])
            if numpy:
                numpy.random.set_state(before[1])


def give(fake: Tensor, value: Tensor | None) -> Tensor:
    """Put a value behind a fake tensor."""
    if value is not None and isinstance(fake, FakeTensor) and has_data(value):
        with no_dispatch():
            setattr(fake, _VALUE, value.detach())
    return fake


def has_data(tensor: Tensor) -> bool:
    """Whether a tensor is real, on the CPU."""
    return not isinstance(tensor, FakeTensor) and tensor.device == _CPU


def copy_of(tensor: Tensor) -> Tensor | None:
    """A real copy, whatever mode is on; None of what has no data."""
    if not has_data(tensor):
        return None
    with no_dispatch():
        return tensor.detach().clone()


@dataclass
class Values:
    """Runs operators, follows them where values are known, and answers for data that is not."""

    every: bool = False  # of any size, until the forward pass is over
    is_over: bool = False
    is_off: bool = False  # tensors are real themselves
    share: float | None = None  # of elements that a mask picks, where values are not known
    used: list[str] = field(default_factory=list)  # what was assumed, op and layer
    # memory that something unknown was written to, kept so that no other takes its place
    stale: dict[int, Any] = field(default_factory=dict)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """While this is open nothing is followed, nor forgotten."""
        before, self.is_off = self.is_off, True
        yield
        self.is_off = before

    def run(self, func: Any, args: Any, kwargs: dict[str, Any], layer: str) -> Any:
        """The result of an operator on fake tensors."""
        if func is aten._local_scalar_dense.default:
            value = self.of(args[0])
            if value is not None:
                with no_dispatch():
                    return value.item()
        made = self._run(func, args, kwargs, layer)
        self.follow(func, args, kwargs, made)
        return made

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any], layer: str) -> Any:
        try:
            return func(*args, **kwargs)
        except UNKNOWN as error:
            known = self.answer(func, args, kwargs)
            if known is not None:
                return known
            if self.share is None or func not in _ANSWERS:
                raise refused(func, layer, self.share) from error
            self.used.append(f"{func._schema.name} in {layer or 'the model'}")
            return _ANSWERS[func](self.share, func, *args, **kwargs)
        except _LACKING as error:
            known = self.answer(func, args, kwargs)
            if known is not None:
                return known
            if func._schema.is_mutable and not func._schema.returns:
                return None  # it only writes to what is there: nothing has to be worked out
            if func is aten._cudnn_rnn_backward.default:
                return gradients(func, *args)
            raise unsupported(func, layer, error) from error
        except RuntimeError:
            if func is not aten._grouped_mm.default:
                raise
            # its fake form refuses the formats that its kernel computes one group at a time
            dtype = kwargs.get("out_dtype") or args[0].dtype
            return args[0].new_empty(grouped_shape(*inputs_of(func, args, kwargs)), dtype=dtype)

    def of(self, tensor: Tensor) -> Tensor | None:
        """The value of a tensor, None where it is not known."""
        if not isinstance(tensor, FakeTensor):
            return tensor if has_data(tensor) else None
        value = getattr(tensor, _VALUE, None)
        is_known = value is not None and value.untyped_storage()._cdata not in self.stale
        return value if is_known else None

    def follow(self, func: Any, args: Any, kwargs: dict[str, Any], made: Any) -> None:
        """Run an operator on known values too; forget what it wrote over where they are not."""
        if self.is_off:
            return
        given = tensors_in((args, kwargs))
        if not self._is_wanted(func, given, made):
            if func._schema.is_mutable:
                self._forget(written(func, args, kwargs))
            return
        try:
            real = self._real(func, args, kwargs)
        except Exception:  # kernels that a CPU does not have
            self._forget(written(func, args, kwargs))
            return
        self._note(made, real)

    def answer(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Result of an operator with data-dependent sizes; None where the values are unknown."""
        given = tensors_in((args, kwargs))
        if not given or any(self.of(t) is None for t in given):
            return None
        real = self._real(func, args, kwargs)
        place = given[0].device
        made = tree_map_only(
            Tensor,
            lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=place),
            real,
        )
        self._note(made, real)
        return made

    def _is_wanted(self, func: Any, given: Sequence[Tensor], made: Any) -> bool:
        if any(self.of(t) is None for t in given):
            return False
        if self.every and not self.is_over:
            return True
        out = tensors_in(made) or given
        if func._schema.name in _EMPTY and any(t.numel() > 1 for t in out):
            return False  # memory that nothing was written to
        is_drawn = torch.Tag.nondeterministic_seeded in func.tags
        if not given and is_drawn and any(t.numel() > 1 and t.is_floating_point() for t in out):
            return False  # a random batch is not representative of the user's
        return bool(out) and sum(t.numel() for t in (*given, *out)) <= SMALL

    def _real(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """An operator on the values behind fake tensors."""
        real_args, real_kwargs = tree_map_only(Tensor, self.of, (args, kwargs))
        real_kwargs |= {"device": _CPU} if "device" in real_kwargs else {}
        with no_dispatch():
            if func in ON_CPU:
                return ON_CPU[func](func, *real_args, **real_kwargs)
            made = func(*real_args, **real_kwargs)
            if func._schema.name in _EMPTY:  # memory as it was found would differ every time
                made.zero_()
            return made

    def _note(self, made: Any, real: Any) -> None:
        for fake, value in zip(tensors_in(made), tensors_in(real), strict=False):
            if fake.shape == value.shape:
                give(fake, value)

    def _forget(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            value = getattr(tensor, _VALUE, None)
            if value is not None:
                storage = value.untyped_storage()
                self.stale[storage._cdata] = storage


def written(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that an operator changes."""
    pairs = zip(func._schema.arguments, inputs_of(func, args, kwargs), strict=True)
    return tensors_in([x for a, x in pairs if a.alias_info is not None and a.alias_info.is_write])


def _attention(causal: int, bias: bool) -> Callable[..., Any]:
    """Attention of a GPU's library by the plain formula; only its first result has a value."""

    def run(func: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any, scale: Any = None) -> Any:
        mask = rest[0] if bias and rest else None
        is_causal = bool(len(rest) > causal and rest[causal])
        return aten._scaled_dot_product_attention_math(
            q, k, v, mask, 0.0, is_causal, scale=scale, enable_gqa=q.shape[-3] != k.shape[-3]
        )[0]

    return run


def _rms_norm(func: Any, x: Tensor, shape: Any, weight: Tensor | None, eps: float | None) -> Any:
    around = tuple(range(-len(shape), 0))
    small = torch.finfo(x.dtype).eps if eps is None else eps
    made = x * torch.rsqrt(x.pow(2).mean(around, keepdim=True) + small)
    return made if weight is None else made * weight


def _recurrent(func: Any, x: Tensor, weights: Sequence[Tensor], *rest: Any) -> Any:
    """A recurrent layer of cuDNN's by torch's own."""
    each, _, hidden, cell, mode, _, _, layers, first, _, _, both, sizes, _ = rest
    kind = ("rnn_relu", "rnn_tanh", "lstm", "gru")[mode]
    state = [hidden, cell] if kind == "lstm" else hidden
    more = [each > 3, layers, 0.0, False, both]
    if sizes:
        made = getattr(torch, kind)(x, torch.tensor(sizes), state, list(weights), *more)
    else:
        made = getattr(torch, kind)(x, state, list(weights), *more, first)
    return made


# Operators that only a GPU has, as a CPU can run them.
ON_CPU: dict[Any, Callable[..., Any]] = {
    aten._scaled_dot_product_flash_attention.default: _attention(1, False),
    aten._scaled_dot_product_efficient_attention.default: _attention(3, True),
    aten._scaled_dot_product_cudnn_attention.default: _attention(3, True),
    aten._fused_rms_norm.default: _rms_norm,
    aten._cudnn_rnn.default: _recurrent,
}


class Stopped(InputError):
    """A step that fake tensors without values cannot go on with."""


class NeedsData(Stopped):
    """A step that depends on data which is not there."""


def refused(func: Any, layer: str, share: float | None) -> NeedsData:
    """The result of an operator depends on data that a capture does not have."""
    hint = "" if share is not None else "say what share of the elements masks pick (`share=0.25`), "
    return NeedsData(
        f"`{func}` at {_place()}{_in(layer)} depends on the data, which a capture does not have",
        hint=f"{hint}or {INSTEAD}",
    )


def unsupported(func: Any, layer: str, error: Exception) -> Stopped:
    """An operator has no form for fake tensors."""
    return Stopped(
        f"`{func}` at {_place()}{_in(layer)} cannot run on fake tensors: {first_line(error)}",
        hint=f"register a fake form for it (torch.library.register_fake), or {INSTEAD}",
    )


def _place() -> str:
    return users_line(traceback.extract_stack()) or "an unknown line"


_INSIDE = (
    *("/site-packages/", "/dist-packages/", "/foretell/pytorch/", "/foretell/cli/"),
    *("<frozen", "/lib/python"),
)


def users_line(frames: Sequence[traceback.FrameSummary]) -> str:
    """The innermost line of code that is neither a framework's nor foretell's nor Python's."""
    own = [f for f in frames if not any(p in f.filename.replace("\\", "/") for p in _INSIDE)]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else ""


def _in(layer: str) -> str:
    return f" in layer `{layer}`" if layer else ""


def first_line(error: BaseException) -> str:
    """The first line of an error message."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return line if len(line) <= _LINE else f"{line[:_LINE]}…"


def _picked(share: float, tensor: Any) -> int:
    return max(1, math.ceil(int(tensor.numel()) * share))


def _nonzero(share: float, func: Any, mask: Any) -> Any:
    size = (_picked(share, mask), mask.dim())
    return torch.empty(size, dtype=torch.int64, device=mask.device)


def _masked_select(share: float, func: Any, values: Any, mask: Any) -> Any:
    return values.new_empty(_picked(share, torch.broadcast_tensors(values, mask)[0]))


def _index(share: float, func: Any, values: Any, indices: Any) -> Any:
    """Every mask among the indices as the places it picks."""
    places: list[Any] = []
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            size = _picked(share, index)
            places += [index.new_empty(size, dtype=torch.int64) for _ in range(index.dim())]
        else:
            places.append(index)
    return func(values, places)


def _number(share: float, func: Any, value: Any) -> Any:
    if value.dtype is torch.bool:
        return True
    return 1.0 if value.is_floating_point() else 1


_ANSWERS: dict[Any, Callable[..., Any]] = {
    aten.nonzero.default: _nonzero,
    aten.masked_select.default: _masked_select,
    aten.index.Tensor: _index,
    aten._local_scalar_dense.default: _number,
    aten.equal.default: lambda share, func, a, b: True,
}
