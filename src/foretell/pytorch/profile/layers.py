"""Names of modules in a trace: a note `layer:NAME` around the forward of each.

Names are those of `named_modules()` of the outermost module, whether it is called or one of its
own methods calls its parts (as Lightning does); containers that do nothing themselves get none, and
what torch wraps around a model (DistributedDataParallel, torch.compile) is left out. Hooks are
there only while a trace is recorded.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules import module as hooks

from foretell.trace.words import LAYER_NOTE

_WRAPPED = ("module", "_orig_mod")  # what DistributedDataParallel and torch.compile call a model
_DEEPEST = 1000  # modules in modules
_CONTAINERS = (torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict)


class _Open(threading.local):
    """The notes that are open on a thread: recomputed forwards run on autograd's own."""

    def __init__(self) -> None:
        self.notes: list[Any] = []


class Parents:
    """Which module each module was put into, noted while this is open."""

    def __init__(self) -> None:
        self.known: dict[int, Any] = {}

    @contextmanager
    def noted(self) -> Iterator[None]:
        def note(parent: torch.nn.Module, _: str, module: torch.nn.Module | None) -> None:
            if module is not None:
                self.known[id(module)] = weakref.ref(parent)

        handle = hooks.register_module_module_registration_hook(note)
        try:
            yield
        finally:
            handle.remove()

    def root(self, module: torch.nn.Module) -> torch.nn.Module:
        """The outermost module that holds one, less what torch wraps around models."""
        inside = [module]
        while (parent := self._parent(inside[-1])) is not None and len(inside) < _DEEPEST:
            inside.append(parent)
        found = inside[-1]
        # torch's own, which hold nothing but the model
        while len(found._modules) == 1 and next(iter(found._modules)) in _WRAPPED:
            (found,) = (m for m in found._modules.values() if m is not None)
        return found

    def _parent(self, module: torch.nn.Module) -> torch.nn.Module | None:
        found = self.known.get(id(module))
        parent = None if found is None else found()
        is_there = parent is not None and any(m is module for m in parent._modules.values())
        return parent if is_there else None


class Layers:
    """Opens a note when a module's forward begins and closes it when it ends."""

    def __init__(self, parents: Parents) -> None:
        self.parents = parents
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
        """Names of a module that has none yet and of all that its outermost module holds."""
        for name, module in self.parents.root(root).named_modules():
            is_plain = type(module) in _CONTAINERS
            self.names.setdefault(id(module), "" if is_plain else name or type(module).__name__)
        return self.names.setdefault(id(root), type(root).__name__)


@contextmanager
def named_layers(parents: Parents) -> Iterator[Layers]:
    """Note the forward of every module while inside."""
    layers = Layers(parents)
    handles = [
        hooks.register_module_forward_pre_hook(layers.begin),
        hooks.register_module_forward_hook(layers.end, always_call=True),
    ]
    try:
        yield layers
    finally:
        for handle in handles:
            handle.remove()
