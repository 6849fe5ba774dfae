"""Communication that autograd knows: what goes forward as a copy comes back as a sum.

    copy_in     forward: as it is          backward: sum over ranks       before a split layer
    sum_out     forward: sum over ranks    backward: as it is             after partial sums
    sum_both    forward: sum over ranks    backward: sum over ranks       statistics of split data
    gather      forward: parts of a dim    backward: one's own part       after a split dim
    cut         forward: one's own part    backward: parts of all         before a split dim

Outputs of `sum_out` and `gather` are the same on every rank, and so must their gradients be.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

Tensor = Any
Shared = Sequence[tuple[Tensor, tuple[int, ...]]]  # a parameter, and the ranks that hold it


class _CopyIn(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return summed(g, ctx.group), None


class _SumOut(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        return summed(x, group)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g, None


class _SumBoth(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, weight: float) -> Tensor:
        ctx.group, ctx.weight = group, weight
        return summed(x, group)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return summed(g * ctx.weight, ctx.group) / ctx.weight, None, None


class _Gather(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, sizes: list[int], group: Any) -> Tensor:
        ctx.dim, ctx.sizes, ctx.rank = dim, sizes, dist.get_rank(group)
        return gathered(x, dim, sizes, group)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g.split(ctx.sizes, ctx.dim)[ctx.rank].contiguous(), None, None, None


class _Cut(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, sizes: list[int], group: Any) -> Tensor:
        ctx.dim, ctx.sizes, ctx.group = dim, sizes, group
        return x.split(sizes, dim)[dist.get_rank(group)].contiguous()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return gathered(g, ctx.dim, ctx.sizes, ctx.group), None, None, None


class _Times(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g * ctx.factor, None


def times(x: Tensor, factor: float) -> Tensor:
    """The same tensor; its gradient so many times as large."""
    return _Times.apply(x, factor)


def copy_in(x: Tensor, group: Any = None) -> Tensor:
    """The same tensor; its gradient is the sum of those of all ranks."""
    return _CopyIn.apply(x, group)


def sum_out(x: Tensor, group: Any = None) -> Tensor:
    """The sum over all ranks; its gradient goes to each as it is."""
    return _SumOut.apply(x, group)


def sum_both(x: Tensor, group: Any = None, weight: float = 1.0) -> Tensor:
    """The sum over all ranks, each of which goes on differently from there.

    `weight`: what this rank's loss counts by, where gradients are weighed after the backward.
    """
    return _SumBoth.apply(x, group, weight)


def gather(x: Tensor, dim: int, sizes: list[int], group: Any = None) -> Tensor:
    """All ranks' parts along a dim, in order of rank."""
    return _Gather.apply(x, dim, sizes, group)


def cut(x: Tensor, dim: int, sizes: list[int], group: Any = None) -> Tensor:
    """This rank's part along a dim of a tensor that all ranks hold."""
    return _Cut.apply(x, dim, sizes, group)


def gathered(x: Tensor, dim: int, sizes: list[int], group: Any) -> Tensor:
    """Parts of all ranks, which may differ in size, put together; outside autograd."""
    shape, most = list(x.shape), max(sizes)
    shape[dim] = most
    padded = x.new_zeros(shape)
    padded.narrow(dim, 0, x.shape[dim]).copy_(x)
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([p.narrow(dim, 0, n) for p, n in zip(parts, sizes, strict=True)], dim)


def even(total: int, ranks: int) -> list[int]:
    """A length cut as evenly as it goes, the longer parts first."""
    return [total // ranks + (r < total % ranks) for r in range(ranks)]


def summed(x: Tensor, group: Any) -> Tensor:
    """The sum over all ranks, outside autograd."""
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def shared_groups(shared: Shared, group: Any) -> list[tuple[Tensor, Any]]:
    """Parameters with the process group of those that hold them; one group for each set."""
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    named = [tuple(ranks[r] for r in holders) for _, holders in shared]
    made = new_groups(named)
    pairs = zip(shared, named, strict=True)
    return [(p, made[holders]) for (p, _), holders in pairs if p.requires_grad]


def new_groups(wanted: Iterable[Sequence[int]]) -> dict[tuple[int, ...], Any]:
    """New process groups, by their ranks. Every rank of the run asks at once for those it is in.

    All ranks make all groups in one order: torch names groups by how many there are, so ranks that
    make different numbers of them wait for each other for ever later on.
    """
    mine = sorted({tuple(ranks) for ranks in wanted})
    each: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(each, mine)
    every = sorted({ranks for rows in each for ranks in rows})
    made = {ranks: dist.new_group(list(ranks)) for ranks in every}
    return {ranks: made[ranks] for ranks in mine}
