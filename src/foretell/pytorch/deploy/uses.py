"""How a forward uses parameters and outputs of its layers, seen in a trial without values; and
parameters that have several names, or that several stages of a pipeline hold.

Stages on one rank share the tensor itself. Where stages are on different ranks each has a copy,
and the copies stay equal because all of them take the sum of their gradients.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from foretell.errors import InputError

Call = tuple[tuple[Any, ...], dict[str, Any]]  # positional and keyword arguments of a forward
_CHANGES = ("__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__", "__setitem__")
Tensor = Any
Homes = Mapping[str, Sequence[tuple[int, ...]]]  # of each parameter, the ranks of its stages


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
def untouched(module: Any) -> Iterator[None]:
    """Put buffers and random numbers back to what they were."""
    before = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        for buffer, old in before:
            buffer.data.copy_(old)  # autograd need not know: what it saved is not these values


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
            wide = [x for x in tree_leaves((args, kwargs)) if is_wide(x)]
            found.setdefault(name, wide[0].shape[1]) if wide else None

        return note

    if call is not None:
        with suppress(Exception), trial(model) as fake:
            for name, block in blocks.items():
                block.register_forward_pre_hook(entered(name), with_kwargs=True)
            args, kwargs = tree_map(fake, call)
            model(*args, **kwargs)
    return found


def is_wide(x: Any) -> bool:
    """Whether a value has samples, tokens and features."""
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
            layer.register_forward_pre_hook(lambda *_, own=name: self.inside.append(own))
            layer.register_forward_hook(self._left(name))

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


def aliases(model: Any) -> dict[str, str]:
    """The first name of each parameter, by every name it has."""
    first: dict[int, str] = {}
    every = model.named_parameters(remove_duplicate=False)
    return {name: first.setdefault(id(p), name) for name, p in every}


def shared_names(model: Any) -> dict[str, list[str]]:
    """Parameters with more than one name: all of them, by the first."""
    found: dict[str, list[str]] = {}
    for name, first in aliases(model).items():
        found.setdefault(first, []).append(name)
    return {first: names for first, names in found.items() if len(names) > 1}


def tied_names(model: Any) -> set[str]:
    """Every name of a parameter that has more than one."""
    return {name for names in shared_names(model).values() for name in names}


def here(modules: Iterable[Any], names: Mapping[str, str]) -> dict[str, Tensor]:
    """The parameters of some modules by their first names; raise where a tie was cut."""
    found: dict[str, Tensor] = {}
    for module in modules:
        for name, parameter in module.named_parameters(remove_duplicate=False):
            first = names.get(name, name)
            if found.setdefault(first, parameter) is not parameter:
                raise InputError(
                    f"`{name}` and `{first}` are one parameter, and the plan splits one of them",
                    hint="leave layers with tied weights out of `tensor_layout`, or untie them",
                )
    return found


def holders(homes: Homes, rank: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Parameters of a rank that others hold besides, and the ranks that hold the same part."""
    for name, each in homes.items():
        groups = list(dict.fromkeys(each))
        if len(groups) < 2:
            continue
        ranks = [r for group in groups for r in group]
        if len(set(ranks)) < len(ranks) or len({len(g) for g in groups}) > 1:
            raise InputError(
                f"`{name}` is in stages on ranks {' and '.join(str(list(g)) for g in groups)}",
                hint="parameters that stages share need the same ranks, or as many others",
            )
        own = next((group for group in groups if rank in group), None)
        if own is not None:
            yield name, tuple(sorted(group[own.index(rank)] for group in groups))
