"""Values of small tensors that a model makes from constants while it is built.

    rates = [x.item() for x in torch.linspace(0, 0.1, 24)]

Fake tensors have no data, but a ramp needs none to be known: what is worked out from ramps alone
keeps its values beside the fake tensor, and `.item()` is answered from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_map_only

aten = torch.ops.aten
_RAMPS = (
    *(aten.linspace.default, aten.logspace.default),
    *(aten.arange.default, aten.arange.start, aten.arange.start_step),
)
# Elements of what is kept: rates of layers and places in windows while a model is built; in the
# step less, as what is kept here does not give its memory back.
_BUILT, _SMALL = 1 << 18, 1 << 12


@dataclass
class Shadow:
    """What is known of fake tensors' values."""

    # by id: the fake tensor, so that nothing else gets its id, and the real one on the CPU
    known: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    most: int = _BUILT

    def begin(self) -> None:
        """The model is built and its step begins."""
        self.most = _SMALL
        self.known = {k: v for k, v in self.known.items() if v[0].numel() <= _SMALL}

    def follow(self, func: Any, args: Any, kwargs: dict[str, Any], made: Any) -> None:
        """Note what an operator made if its inputs are known, and forget what it wrote over."""
        given = _tensors((args, kwargs))
        if func in _RAMPS or (given and self.known and all(id(t) in self.known for t in given)):
            size = sum(t.numel() for t in _tensors(made))
            if not func._schema.is_mutable and size <= self.most:
                self._note(made, self._real(func, args, kwargs))
            else:
                self._forget(given)
        elif func._schema.is_mutable:
            self._forget(given[:1])

    def answer(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """What an operator makes whose sizes depend on values, None where those are not known."""
        given = _tensors((args, kwargs))
        if not given or not all(id(t) in self.known for t in given):
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

    def number(self, tensor: Any) -> Any:
        """The one value of a tensor, None where it is not known."""
        if id(tensor) not in self.known:
            return None
        with no_dispatch():
            return self.known[id(tensor)][1].item()

    def _real(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        real_args, real_kwargs = tree_map_only(
            Tensor, lambda t: self.known[id(t)][1], (args, kwargs)
        )
        if "device" in real_kwargs:
            real_kwargs["device"] = torch.device("cpu")
        with no_dispatch():
            return func(*real_args, **real_kwargs)

    def _note(self, made: Any, real: Any) -> None:
        for fake, value in zip(_tensors(made), _tensors(real), strict=True):
            self.known[id(fake)] = (fake, value)

    def _forget(self, tensors: Sequence[Tensor]) -> None:
        """Also what shares their memory: views of it are not told apart."""
        if any(id(t) in self.known for t in tensors):
            self.known.clear()


def _tensors(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    inner = values.values() if isinstance(values, dict) else values
    if isinstance(values, (dict, list, tuple)):
        return [t for v in inner for t in _tensors(v)]
    return []
