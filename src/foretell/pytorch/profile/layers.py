"""Names of modules in a trace: a note `layer:NAME` around the forward of each.

Names are those of `named_modules()` of the outermost module that is called; containers that do
nothing themselves get none. Hooks are there only while a trace is recorded.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules import module as hooks

from foretell.trace.words import LAYER_NOTE

_CONTAINERS = (torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict)


class _Open(threading.local):
    """The notes that are open on a thread: recomputed forwards run on autograd's own."""

    def __init__(self) -> None:
        self.notes: list[Any] = []


class Layers:
    """Opens a note when a module's forward begins and closes it when it ends."""

    def __init__(self) -> None:
        self.names: dict[int, str] = {}
        self.open = _Open()

    def begin(self, module: torch.nn.Module, _: Any) -> None:
        name = self.names.get(id(module))
        if name is None:
            name = self._learn(module)
        note = torch.profiler.record_function(LAYER_NOTE + name) if name else None
        if note is not None:
            note.__enter__()
        self.open.notes.append(note)

    def end(self, module: torch.nn.Module, _: Any, __: Any) -> None:
        note = self.open.notes.pop() if self.open.notes else None
        if note is not None:
            note.__exit__(None, None, None)

    def _learn(self, root: torch.nn.Module) -> str:
        """Names of a module nobody has named yet and of all inside it."""
        for name, module in root.named_modules():
            is_plain = type(module) in _CONTAINERS
            self.names.setdefault(id(module), "" if is_plain else name or type(module).__name__)
        return self.names[id(root)]


@contextmanager
def named_layers() -> Iterator[Layers]:
    """Note the forward of every module while inside."""
    layers = Layers()
    handles = [
        hooks.register_module_forward_pre_hook(layers.begin),
        hooks.register_module_forward_hook(layers.end, always_call=True),
    ]
    try:
        yield layers
    finally:
        for handle in handles:
            handle.remove()
