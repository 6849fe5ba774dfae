"""Who made each tensor, and how long its memory lives.

A tensor's memory is its storage: views share it, and it is given back when the last one that
refers to it is gone, whether that is Python, autograd or an optimizer. Moments are counted in
operators recorded so far.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch

from foretell.graph import BufferKind
from foretell.graph.columns import NONE

BLOCK = 512  # bytes: PyTorch's allocator on CUDA hands out multiples of it


@dataclass(slots=True)
class Stay:
    """Memory from one operator to another."""

    bytes: float
    born: int  # the operator that made it, NONE where it was there before
    kind: BufferKind
    name: str
    dies: int = NONE  # the last operator recorded while it was there, NONE for good
    maker: int = NONE  # the operator that wrote it last
    weight: str = ""  # the parameter it is, or is a cast of


@dataclass
class Ledger:
    """Every piece of device memory met so far, in the order it was met."""

    stays: list[Stay] = field(default_factory=list)
    block: int = BLOCK
    now: int = NONE  # the last operator recorded
    is_closed: bool = False  # what is given back from now on was there for good
    _live: dict[int, Stay] = field(default_factory=dict)
    _watch: dict[int, Any] = field(default_factory=dict)

    def stay(self, tensor: torch.Tensor) -> Stay | None:
        """What is known of a tensor's memory."""
        return self._live.get(_plain(tensor).untyped_storage()._cdata)

    def meet(self, tensor: torch.Tensor, born: int, kind: BufferKind, name: str) -> Stay:
        """Enter a tensor's memory where it is not known yet."""
        storage = _plain(tensor).untyped_storage()
        key = storage._cdata
        known = self._live.get(key)
        if known is not None:
            return known
        size = -(-storage.nbytes() // self.block) * self.block
        made = self._live[key] = Stay(float(size), born, kind, name, maker=born)
        self._watch[key] = weakref.ref(storage, lambda _: self._forget(key))
        self.stays.append(made)
        return made

    def claim(self, tensor: torch.Tensor, kind: BufferKind, name: str) -> None:
        """Say what a tensor's memory turned out to be for."""
        known = self.stay(tensor)
        if known is not None:
            known.kind, known.name = kind, name

    def _forget(self, key: int) -> None:
        gone = self._live.pop(key, None)
        self._watch.pop(key, None)
        if gone is not None and not self.is_closed:
            gone.dies = max(self.now, 0)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor inside those that `torch.func` wraps around it, which have no memory."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor
