"""How a forward uses its layers' parameters and outputs, seen in a trial without values."""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
        watch = _Watch(model, names, found)
        try:
            with (
                torch.no_grad(),
                untouched(model),
                FakeTensorMode(allow_non_fake_inputs=True) as mode,
                watch,
            ):
                args, kwargs = tree_map(lambda x: _fake(x, mode), call)
                model(*args, **kwargs)
            found.is_known = True
        except Exception:  # what such tensors cannot do: no more is known than was seen
            pass
        finally:
            watch.remove()
    if not found.is_known and any(getattr(m, "inplace", False) for m in model.modules()):
        found.changed |= set(names)
    return found


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
        self.hooks = [
            hook
            for name, layer in self.layers.items()
            for hook in (
                layer.register_forward_pre_hook(self._entered(name)),
                layer.register_forward_hook(self._left(name)),
            )
        ]

    def remove(self) -> None:
        for hook in self.hooks:
            hook.remove()

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


def _fake(x: Any, mode: Any) -> Any:
    return mode.from_tensor(x) if isinstance(x, torch.Tensor) else x
