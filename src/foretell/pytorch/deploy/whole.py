"""Modules that compute on a share of the samples while the code around them sees the whole batch.

    inputs whole ─ part ─► module on this rank's samples ─ join ─► outputs whole, on every rank

A loss, a metric or a second model behind it is computed on every rank alike, whatever it does with
the samples: gradients are those of one process for any loss. Gradients of parameters leave a rank
as so many times its part of the sum as there are ranks: DDP and FSDP take the mean over ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils import checkpoint

from foretell.pytorch.deploy import collective
from foretell.pytorch.deploy.collective import even, times

Tensor = Any
ITEMS = "num_items_in_batch"  # by which a model of transformers divides the sum of its losses


@dataclasses.dataclass(frozen=True)
class Cut:
    """How many samples each rank of a group has, and which rank this is."""

    sizes: list[int]
    rank: int
    group: Any

    @property
    def weight(self) -> float:
        """This rank's share of the samples."""
        return self.sizes[self.rank] / sum(self.sizes)


def cut_of(values: Any, shares: Sequence[int], ranks: int, group: Any) -> Cut | None:
    """How the arguments of a call are split by samples; None where they are not."""
    args, kwargs = values
    if ranks == 1 or any(isinstance(x, PackedSequence) for x in (*args, *kwargs.values())):
        return None
    samples = _samples(values)
    if samples < ranks:
        return None
    sizes = list(shares) if sum(shares) == samples else even(samples, ranks)
    return Cut(sizes, dist.get_rank(group), group)


# What ends a forward that activation checkpointing runs again as soon as it has all it needs.
_STOPS: Any = getattr(checkpoint, "_StopRecomputationError", ())


class Apart(Exception):
    """What a module gives for some samples cannot be put together with what others give."""


def on_share(
    call: Callable[..., Any], args: Any, kwargs: dict[str, Any], cut: Cut, *, is_checked: bool
) -> Any:
    """What a module gives for the whole batch, each rank computing its samples alone.

    With `is_checked` ranks compare what they have first, and raise `Apart` together.
    """
    samples = sum(cut.sizes)

    def part(x: Any) -> Any:
        is_by_sample = isinstance(x, torch.Tensor) and x.dim() and len(x) == samples
        if not is_by_sample:
            return x
        mine = collective.cut(times(x, 1 / len(cut.sizes)), 0, cut.sizes, cut.group)
        return mine if mine.requires_grad else mine.clone()  # the module may write into it

    given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    args, kwargs = pytree.tree_map(part, (args, kwargs))
    parts = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    before = [x._version for x in parts]
    if kwargs.get(ITEMS) is not None:
        kwargs[ITEMS] = kwargs[ITEMS] * cut.weight
    with own_numbers(cut.rank):
        try:
            found = call(*args, **kwargs)
        except _STOPS:  # enough was run again
            raise
        except Exception:
            if not is_checked:
                raise
            found = torch.empty(0)  # of no sample: all ranks compute the whole, or raise this there
    changed = [x._version != version for x, version in zip(parts, before, strict=True)]
    for x, mine, is_changed in zip(given, parts, changed, strict=True):
        if is_changed and len(x) == samples:  # the module has written into its input
            with torch.no_grad():
                x.copy_(collective.gathered(mine.detach(), 0, cut.sizes, cut.group))
    if is_checked:
        _require_alike(found, cut)
    return _mapped(lambda x: _joined(x, cut), found)


def _require_alike(found: Any, cut: Cut) -> None:
    """Raise on every rank unless all have tensors of the same shapes, but for their samples."""
    rows: list[Any] = []

    def note(x: Any) -> None:
        if not isinstance(x, torch.Tensor) or not x.dim():
            rows.append("")
        else:
            is_mine = len(x) == cut.sizes[cut.rank]
            rows.append((str(x.dtype), tuple(x.shape[1:])) if is_mine else "?")

    _mapped(note, found)
    if any(row != rows for row in collective.everyones(rows, cut.group)) or "?" in rows:
        raise Apart


def _joined(x: Any, cut: Cut) -> Any:
    if not isinstance(x, torch.Tensor) or (not x.is_floating_point() and not x.dim()):
        return x
    counted = times(x, len(cut.sizes))
    if x.dim():
        return collective.gather(counted, 0, cut.sizes, cut.group)
    return collective.sum_out(counted * cut.weight, cut.group)  # a mean on each rank


# What gives numbers, no tensors: torch would give those of a rank's own part.
_VALUES = {getattr(torch.Tensor, f"__{name}__") for name in ("float", "int", "bool", "format")}
_VALUES |= {getattr(torch.Tensor, name) for name in ("item", "tolist", "numpy", "__repr__")}


_DRAWS = ("normal_", "uniform_", "bernoulli_", "exponential_", "random_", "log_normal_")
_DRAWN = ("randn_like", "rand_like", "randint_like")


class AsWhole(TorchFunctionMode):  # type: ignore[misc]
    """Lets a script mix parameters that are split over ranks with tensors of its own.

    What it writes into a split one is split; anything else is computed with the whole. Sums over
    parts are completed at once, and numbers are those of the whole.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        split = [x for x in leaves if isinstance(x, DTensor)]
        if not split:
            return func(*args, **kwargs)
        first: Any = args[0] if args else None
        name = getattr(func, "__name__", "")
        if isinstance(first, DTensor) and (name == "__setitem__" or name in _DRAWS):
            return _written(first, func, args, kwargs)
        if isinstance(first, DTensor) and name in _DRAWN:  # the numbers of one process
            return like(func(first.full_tensor(), *args[1:], **kwargs), first)
        has_own = any(not isinstance(x, DTensor) and (x.dim() or x.requires_grad) for x in leaves)
        if func in _VALUES or has_own:
            is_written = name.endswith("_") and isinstance(first, DTensor) and func not in _VALUES

            def change(x: Any) -> Any:
                if isinstance(x, DTensor):
                    return x if is_written else x.full_tensor()
                if not is_written or not isinstance(x, torch.Tensor) or x.shape != first.shape:
                    return x
                return like(x, first)

            args, kwargs = pytree.tree_map(change, (args, kwargs))
        return pytree.tree_map(_completed, func(*args, **kwargs))


def _written(x: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """Write into the whole of a split tensor, and keep this rank's part."""
    whole = x.detach().full_tensor()
    others = pytree.tree_map(
        lambda y: y.full_tensor() if isinstance(y, DTensor) else y, (args[1:], kwargs)
    )
    with torch.no_grad():
        func(whole, *others[0], **others[1])
        x.detach().to_local().copy_(like(whole, x).to_local())
    return x


def like(whole: Any, split: Any) -> Any:
    """A whole tensor that all ranks have, split as another."""
    return distribute_tensor(whole, split.device_mesh, split.placements, src_data_rank=None)


def _completed(x: Any) -> Any:
    """A tensor whose sums over ranks are done; anything else as it is."""
    if not isinstance(x, DTensor) or not any(p.is_partial() for p in x.placements):
        return x
    whole = [Replicate() if p.is_partial() else p for p in x.placements]
    return x.redistribute(placements=whole)


def _mapped(call: Callable[[Any], Any], found: Any) -> Any:
    """A result with its tensors changed; dataclasses are looked into as torch's containers are."""
    if dataclasses.is_dataclass(found) and not isinstance(found, type | dict):
        values = {f.name: getattr(found, f.name) for f in dataclasses.fields(found) if f.init}
        return dataclasses.replace(found, **pytree.tree_map(call, values))
    return pytree.tree_map(call, found)


def _samples(values: Any) -> int:
    """How many samples a call has: the length of its first tensor; 0 where that is one sample.

    A line of floating-point numbers is the features of one sample; a table of whole numbers that is
    not by samples is one of indices, of edges between samples maybe.
    """
    tensors = [x for x in pytree.tree_leaves(values) if isinstance(x, torch.Tensor) and x.dim()]
    if not tensors or (tensors[0].dim() == 1 and tensors[0].is_floating_point()):
        return 0
    samples = len(tensors[0])
    tables = [x for x in tensors if x.dim() > 1 and x.dtype in (torch.int64, torch.int32)]
    return 0 if any(len(x) != samples for x in tables) else samples


@contextmanager
def own_numbers(place: int) -> Iterator[None]:
    """Random numbers of a rank's own inside; behind it all ranks draw the same again."""
    before = torch.get_rng_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    on_gpu = [torch.cuda.get_rng_state(d) for d in devices]
    seed = int.from_bytes(before[:8].numpy().tobytes(), "little") ^ int(before.sum())
    torch.manual_seed((seed + place) % 2**63)
    mine = torch.get_rng_state()
    mine_on_gpu = [torch.cuda.get_rng_state(d) for d in devices]
    try:
        yield
    finally:
        drew = not torch.equal(mine, torch.get_rng_state()) or any(
            not torch.equal(m, torch.cuda.get_rng_state(d))
            for m, d in zip(mine_on_gpu, devices, strict=True)
        )
        torch.set_rng_state(before)
        for state, device in zip(on_gpu, devices, strict=True):
            torch.cuda.set_rng_state(state, device)
        if drew:  # the next call draws other numbers
            torch.rand(1, device="cpu")
            for device in devices:
                torch.rand(1, device=f"cuda:{device}")
