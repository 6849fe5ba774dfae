"""How a forward uses its layers' parameters and outputs, seen in a trial without values."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from foretell.pytorch.deploy.messages import untouched

Call = tuple[tuple[Any, ...], dict[str, Any]]
_CHANGES = ("__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__", "__setitem__")


@dataclass
class Uses:
    """What splitting a layer would disturb."""

    outside: set[str] = field(default_factory=set)  # parameters used outside their layer's call
    changed: set[str] = field(default_factory=set)  # layers whose outputs are changed in place
    is_known: bool = False  # whether the trial ran to its end


def uses_of(model: Any, layers: Iterable[str], call: Call | None) -> Uses:
    """Try a forward and watch what it does with the parameters and outputs of some layers."""
    found = Uses()
    names = list(layers)
    if call is not None and names:
        with suppress(Exception), trial(model) as fake:  # what such tensors cannot do is not seen
            with _Watch(model, names, found):
                args, kwargs = tree_map(fake, call)
                model(*args, **kwargs)
            found.is_known = True
    if not found.is_known and any(getattr(m, "inplace", False) for m in model.modules()):
        found.changed |= set(names)
    return found


@contextmanager
def trial(model: Any) -> Iterator[Callable[[Any], Any]]:
    """Let a model be called without values and without a trace; gives what makes an input fake.

    Hooks are those of the model's owner, who would keep what they are given: they are off.
    """
    kept = [(m, dict(vars(m))) for m in model.modules()]
    caches = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)  # which would keep weights without values
    for module, _ in kept:
        module._forward_hooks, module._forward_pre_hooks = OrderedDict(), OrderedDict()
    try:
        with torch.no_grad(), untouched(model), FakeTensorMode(allow_non_fake_inputs=True) as mode:
            yield lambda x: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x
    finally:
        torch.set_autocast_cache_enabled(caches)
        for module, before in kept:
            vars(module).clear()
            vars(module).update(before)


def tokens_of(model: Any, blocks: Mapping[str, Any], call: Call | None) -> dict[str, int]:
    """How many tokens blocks are given, by name, as far as a trial shows."""
    found: dict[str, int] = {}

    def entered(name: str) -> Callable[..., None]:
        def note(module: Any, args: Any, kwargs: Any) -> None:
            wide = [x for x in tree_leaves((args, kwargs)) if _is_wide(x)]
            found.setdefault(name, wide[0].shape[1]) if wide else None

        return note

    if call is not None:
        with suppress(Exception), trial(model) as fake:
            for name, block in blocks.items():
                block.register_forward_pre_hook(entered(name), with_kwargs=True)
            args, kwargs = tree_map(fake, call)
            model(*args, **kwargs)
    return found


def _is_wide(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.dim() >= 3 and x.is_floating_point()


def copied(layer: Any) -> None:
    """Let a layer give a tensor of its own, which may be changed in place."""
    layer.register_forward_hook(lambda module, args, output: output.clone())


class _Watch(TorchFunctionMode):  # type: ignore[misc]
    """Sees every call of a torch function."""

    def __init__(self, model: Any, layers: list[str], found: Uses) -> None:
        super().__init__()
        self.found, self.inside = found, list[str]()
        self.layers = {name: model.get_submodule(name) for name in layers}
        self.owner = {
            id(p): (name, f"{name}.{key}")
            for name, layer in self.layers.items()
            for key, p in layer.named_parameters()
        }
        self.made: dict[int, tuple[str, Any]] = {}  # outputs, held so that ids stay theirs
        for name, layer in self.layers.items():  # a trial takes hooks away again
            layer.register_forward_pre_hook(self._entered(name))
            layer.register_forward_hook(self._left(name))

    def _entered(self, name: str) -> Callable[..., None]:
        return lambda *_: self.inside.append(name)

    def _left(self, name: str) -> Callable[..., None]:
        def left(module: Any, args: Any, output: Any) -> None:
            self.inside.pop()
            for one in tree_leaves(output):
                if isinstance(one, torch.Tensor):
                    self.made[id(one)] = (name, one)

        return left

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        here = self.inside[-1] if self.inside else ""
        name = str(getattr(func, "__name__", ""))
        for one in tree_leaves((args, given)):
            layer, parameter = self.owner.get(id(one), ("", ""))
            if parameter and layer != here and name != "__get__":
                self.found.outside.add(parameter)
        is_change = name in _CHANGES or (name.endswith("_") and not name.endswith("__"))
        if args and (is_change or given.get("inplace")):
            base = getattr(args[0], "_base", None)
            for one in (args[0], base):
                if id(one) in self.made:
                    self.found.changed.add(self.made[id(one)][0])
        return func(*args, **given)
