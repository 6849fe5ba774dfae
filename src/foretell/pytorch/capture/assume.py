"""Operators whose result depends on the data: by known values, by assumption, or refused.

Fake tensors have no data, so how many elements a mask picks or what `.item()` returns is known only
where values are (→ `values`). Elsewhere, with a `share`, every mask picks that share of what it is
asked about, and every number asked for is one (true); the model then takes the branch that follows.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)

from foretell.errors import InputError
from foretell.pytorch.capture.flops import grouped_shape
from foretell.pytorch.capture.recurrent import gradients
from foretell.pytorch.capture.values import Values
from foretell.pytorch.capture.words import inputs_of

aten = torch.ops.aten
UNKNOWN = (DataDependentOutputException, DynamicOutputShapeException)
_LACKING = (UnsupportedFakeTensorException, UnsupportedOperatorException, NotImplementedError)
_LINE = 240  # characters of another's message that are worth repeating
INSTEAD = "run `foretell profile` on a GPU and give its trace to `foretell whatif`"


@dataclass
class Assumed:
    """Runs operators; answers for data that is not there."""

    share: float | None = None  # of elements that a mask picks
    used: list[str] = field(default_factory=list)  # what was assumed, op and layer
    values: Values = field(default_factory=Values)

    def run(self, func: Any, args: Any, kwargs: dict[str, Any], layer: str) -> Any:
        """The result of an operator on fake tensors."""
        if func is aten._local_scalar_dense.default:
            number = self.values.number(args[0])
            if number is not None:
                return number
        made = self._run(func, args, kwargs, layer)
        self.values.follow(func, args, kwargs, made)
        return made

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any], layer: str) -> Any:
        try:
            return func(*args, **kwargs)
        except UNKNOWN as error:
            known = self.values.answer(func, args, kwargs)
            if known is not None:
                return known
            if self.share is None or func not in _ANSWERS:
                raise refused(func, layer, self.share) from error
            self.used.append(f"{func._schema.name} in {layer or 'the model'}")
            return _ANSWERS[func](self.share, func, *args, **kwargs)
        except _LACKING as error:
            known = self.values.answer(func, args, kwargs)
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


class Stopped(InputError):
    """A step that fake tensors without values cannot go on with."""


class NeedsData(Stopped):
    """A step that depends on data which is not there."""


def refused(func: Any, layer: str, share: float | None) -> NeedsData:
    """The result of an operator depends on data that a capture does not have."""
    hint = "" if share is not None else "say what share of the elements masks pick (`share=0.25`), "
    return NeedsData(
        f"`{func}` at {place()}{_in(layer)} depends on the data, which a capture does not have",
        hint=f"{hint}or {INSTEAD}",
    )


def unsupported(func: Any, layer: str, error: Exception) -> Stopped:
    """An operator has no form for fake tensors."""
    return Stopped(
        f"`{func}` at {place()}{_in(layer)} cannot run on fake tensors: {first_line(error)}",
        hint=f"register a fake form for it (torch.library.register_fake), or {INSTEAD}",
    )


def place() -> str:
    """The innermost line of the user's own code on the stack."""
    frames = [f for f in traceback.extract_stack() if is_users(f.filename)]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "an unknown line"


def is_users(path: str) -> bool:
    """Whether a file belongs neither to a framework nor to foretell nor to Python."""
    inside = ("/site-packages/", "/foretell/pytorch/", "/foretell/cli/", "<frozen", "/lib/python")
    return not any(part in path.replace("\\", "/") for part in inside)


def _in(layer: str) -> str:
    return f" in layer `{layer}`" if layer else ""


def first_line(error: BaseException) -> str:
    """What an error says before it goes into detail."""
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
