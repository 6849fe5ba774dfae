"""A model made without values, and its values made later, one tensor at a time, as on one process.

While a model is made, its tensors are on the meta device and the ops that fill them are noted, with
what seeds the random numbers. `Deferred.values` runs these ops again in the same order, so that
every rank draws the numbers that one process would, and hands out each parameter when nothing
changes it any more. What is overwritten as a whole before it is read is not kept until then: a
model that fills its layers again, when all are made, is not held as a whole either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

Tensor = Any
_SEED = 0x5EED_F0_4E7E11  # while ops are noted: any other says that the script has seeded
_GIVEN = ("tensor", "as_tensor", "asarray", "scalar_tensor", "from_file", "sparse_coo_tensor")
_FILLS = (
    "normal_", "uniform_", "zero_", "fill_", "copy_", "random_", "exponential_", "log_normal_",
    "cauchy_", "geometric_", "bernoulli_",
)  # fmt: skip
_EMPTY = ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided")
_LOOKS = (nn.init._no_grad_trunc_normal_,)  # initialisers that look at what they draw: one op each
_HOST = (None, "cpu", torch.device("cpu"))
_CONSTANT = 0.25  # of a model's bytes: more is values that were read, not made


class NotDeferred(Exception):
    """What is made depends on values, or on numbers that cannot be drawn again."""


@dataclass(frozen=True)
class Place:
    """Where a tensor without values was when an op was noted: parameters move to other storages."""

    storage: Any  # which is kept, so that no other takes its number
    dtype: Any
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    is_whole: bool  # it is all of its storage, in order

    @property
    def key(self) -> int:
        return int(self.storage._cdata)

    def on(self, storage: Any) -> Tensor:
        """The tensor at this place of another storage."""
        flat = torch.empty(0, dtype=self.dtype, device=storage.device)
        return flat.set_(storage, self.offset, self.shape, self.stride)


def placed(tensor: Tensor) -> Place:
    """Where a tensor without values is now."""
    storage = tensor.untyped_storage()
    whole = tensor.is_contiguous() and tensor.numel() * tensor.element_size() == storage.nbytes()
    return Place(
        storage, tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), whole
    )


def _noted(x: Any) -> Any:
    return placed(x) if isinstance(x, torch.Tensor) and _on_meta(x) else x


def _on_meta(tensor: Tensor) -> bool:
    """Whether a tensor is without values, whatever it says itself."""
    return bool(tensor.untyped_storage().device.type == "meta")


def _places(tree: Any) -> dict[int, Place]:
    return {x.key: x for x in tree_leaves(tree) if isinstance(x, Place)}


class _Op(NamedTuple):
    """One op on tensors without values; a seed where `func` is None."""

    func: Any
    args: Any
    kwargs: Any
    out: Any
    touched: dict[int, Place]  # by storage

    @property
    def draws(self) -> bool:
        """Whether it takes random numbers, or sets where they begin."""
        tags = getattr(self.func, "tags", (torch.Tag.nondeterministic_seeded,))
        return torch.Tag.nondeterministic_seeded in tags

    @property
    def filled(self) -> int | None:
        """The storage that an op gives new values as a whole, whatever was there."""
        if self.func is None:
            return None
        if self.func in _LOOKS:
            return self.args[0].key if self.args[0].is_whole else None
        name = self.func._schema.name.partition("::")[2]
        if name in _EMPTY:
            return int(self.out.key)
        first = self.args[0] if self.args else None
        if name not in _FILLS or not isinstance(first, Place) or not first.is_whole:
            return None
        return None if first.key in _places((self.args[1:], self.kwargs)) else first.key


@dataclass
class Deferred:
    """The ops that give a model its values."""

    state: Tensor  # of the random numbers, before the first
    ops: list[_Op] = field(default_factory=list)
    ends: Tensor = None  # that state behind the last, once there are values

    @property
    def keys(self) -> set[int]:
        """The storages that it gives values."""
        return {key for op in self.ops for key in op.touched}

    def values(self, wanted: Mapping[int, Any]) -> Iterator[tuple[Any, Tensor]]:
        """Each of the wanted storages, with its values, as soon as they are final.

        Gives back what `wanted` has for a storage, and a flat tensor of its memory.
        """
        last, dead = self._lives()
        made: dict[int, Any] = {}
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.set_rng_state(self.state)
            for place, op in enumerate(self.ops):
                if op.func is None:
                    torch.manual_seed(op.args)
                    continue
                self._run(op, made)
                for key in op.touched:
                    if last[key] == place and key in wanted:
                        yield wanted[key], made[key]
                    if last[key] == place or (place, key) in dead:
                        made.pop(key, None)
            self.ends = torch.get_rng_state()

    def _run(self, op: _Op, made: dict[int, Any]) -> None:
        def real(x: Any) -> Any:
            if isinstance(x, torch.device):
                return torch.device("cpu") if x.type == "meta" else x
            if not isinstance(x, Place):
                return x
            if x.key not in made:
                size = x.storage.nbytes()
                made[x.key] = torch.empty(size, dtype=torch.uint8).untyped_storage()
            return x.on(made[x.key])

        args, kwargs = tree_map(real, (op.args, op.kwargs))
        found = op.func(*args, **kwargs)
        for place, one in zip(tree_leaves(op.out), tree_leaves(found), strict=True):
            if isinstance(place, Place):
                made.setdefault(place.key, one.untyped_storage())

    def _lives(self) -> tuple[dict[int, int], set[tuple[int, int]]]:
        """The last op on each storage; and the ops behind which its values are overwritten."""
        last: dict[int, int] = {}
        dead: set[tuple[int, int]] = set()
        for place, op in enumerate(self.ops):
            fresh = op.filled
            for key in op.touched:
                if key == fresh and key in last:
                    dead.add((last[key], key))
                last[key] = place
        return last, dead


class _OnMeta(TorchFunctionMode):  # type: ignore[misc]
    """Tensors are made on the meta device, but for those of given numbers, and look as on the CPU.

    Torch's own initialisers, and others, pass over tensors that say they are on the meta device.
    """

    def __init__(self) -> None:
        super().__init__()
        given = {getattr(torch, name) for name in _GIVEN}
        self.makes = {f for f in _device_constructors() if f not in given}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == torch.Tensor.is_meta.__get__:
            return False
        if func == torch.Tensor.device.__get__:
            found = func(*args)
            return torch.device("cpu") if found.type == "meta" else found
        if func == torch.Tensor.cpu:
            return args[0]
        if func in self.makes and kwargs.get("device", "cpu") in _HOST:
            kwargs["device"] = "meta"
        elif func == torch.Tensor.to and _on_meta(args[0]):
            args, kwargs = tree_map(
                lambda x: "meta" if isinstance(x, str | torch.device) and x in _HOST else x,
                (args, kwargs),
            )
        return func(*args, **kwargs)


class _Noting(TorchDispatchMode):  # type: ignore[misc]
    """Notes every op on tensors without values."""

    def __init__(self, deferred: Deferred) -> None:
        super().__init__()
        self.deferred = deferred

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.seeded()
        first, second = tree_map(_noted, (args, kwargs))
        out = func(*args, **kwargs)
        after = tree_map(_noted, out)
        op = _Op(func, first, second, after, _places((first, second, after)))
        if any(isinstance(x, torch.Generator) for x in tree_leaves((args, kwargs))):
            raise NotDeferred("numbers are drawn from a generator of its own")
        if op.touched:
            self.deferred.ops.append(op)
        elif op.draws:
            raise NotDeferred("some numbers are drawn at once")
        return out

    def alone(self, func: Any) -> Any:
        """An initialiser that is noted as one op on the tensor that it fills."""

        def fill(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if any(isinstance(x, torch.Generator) for x in (*args, *kwargs.values())):
                raise NotDeferred("numbers are drawn from a generator of its own")
            self.seeded()
            place = placed(tensor)
            self.deferred.ops.append(_Op(func, (place, *args), kwargs, place, _places(place)))
            return tensor

        return fill

    def seeded(self) -> None:
        """Note a seed that was set since the last op."""
        seed = torch.initial_seed()
        if seed != _SEED:
            self.deferred.ops.append(_Op(None, seed, {}, None, {}))
            torch.manual_seed(_SEED)


@contextmanager
def _unseeded() -> Iterator[None]:
    """Without a way back to an earlier state of the random numbers."""

    def refuse(*_: Any, **__: Any) -> None:
        raise NotDeferred("random numbers are set back")

    with ExitStack() as stack:
        for module in (torch, torch.random):
            stack.enter_context(patch.object(module, "set_rng_state", refuse))
        yield


_KEPT = "_foretell_deferred"


def deferred_of(model: Any) -> Deferred | None:
    """What makes the values of a model, where that was noted."""
    found: Deferred | None = vars(model).get(_KEPT)
    return found


def deferred(make: Callable[[], Any]) -> Any:
    """A model without values that knows how to make them; raises `NotDeferred` where none can be.

    Random numbers are taken as from here on, and are left as they are.
    """
    before = torch.get_rng_state()
    found = Deferred(before)
    noting = _Noting(found)
    try:
        torch.manual_seed(_SEED)
        with ExitStack() as stack:
            for func in _LOOKS:
                stack.enter_context(patch.object(nn.init, func.__name__, noting.alone(func)))
            stack.enter_context(_unseeded())
            stack.enter_context(_OnMeta())
            stack.enter_context(noting)
            model = make()
        noting.seeded()
    except NotDeferred:
        raise
    except Exception as error:  # whatever a script does with values that are not there
        raise NotDeferred(str(error)) from error
    finally:
        torch.set_rng_state(before)
    _check(model, found)
    _make_buffers(model, found)
    vars(model)[_KEPT] = found
    return model


def _make_buffers(model: Any, found: Deferred) -> None:
    """Give those buffers their values that need no random numbers: forwards look at them."""
    rows = [
        (module._buffers, name, placed(buffer))
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.is_meta
    ]
    needed = {place.key for _, _, place in rows}
    ops = []
    for op in reversed(found.ops):
        if needed & op.touched.keys():
            ops.append(op)
            needed |= op.touched.keys()
    if any(op.draws for op in ops):
        return
    some, made = Deferred(found.state, ops[::-1]), dict[int, Any]()
    for op in some.ops:
        some._run(op, made)
    for held, name, place in rows:
        held[name] = place.on(made[place.key])


def _check(model: Any, found: Deferred) -> None:
    """Raise where values were read from elsewhere, or come from no op that was noted."""
    noted = found.keys
    held = [*model.parameters(), *model.buffers()]
    if any(t.is_meta and placed(t).key not in noted for t in held):
        raise NotDeferred("a parameter comes from nowhere")
    constants = {
        id(t): t.untyped_storage().nbytes()
        for op in found.ops
        for t in tree_leaves((op.args, op.kwargs))
        if isinstance(t, torch.Tensor)
    }
    whole = sum(t.numel() * t.element_size() for t in held)
    if sum(constants.values()) > _CONSTANT * whole:
        raise NotDeferred("values are read, not made")


@contextmanager
def with_memory(model: Any) -> Iterator[None]:
    """Tensors without values as tensors of the CPU that nothing has written to.

    For what goes through a model without values: their memory is asked for and never touched.
    """
    kept: list[tuple[Any, str, Tensor]] = []
    made: dict[int, Tensor] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is None or not tensor.is_meta:
                    continue
                kept.append((held, name, tensor))
                if id(tensor) not in made:
                    one = torch.empty_like(tensor, device="cpu")
                    wants = tensor.requires_grad
                    is_parameter = isinstance(tensor, nn.Parameter)
                    made[id(tensor)] = nn.Parameter(one, wants) if is_parameter else one
                held[name] = made[id(tensor)]
    try:
        yield
    finally:
        for held, name, tensor in kept:
            held[name] = tensor
