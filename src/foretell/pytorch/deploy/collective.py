"""Communication that autograd knows: what goes forward as a copy comes back as a sum.

    copy_in     forward: as it is          backward: sum over ranks       before a split layer
    sum_out     forward: sum over ranks    backward: as it is             after partial sums
    sum_both    forward: sum over ranks    backward: sum over ranks       statistics of split data
    gather      forward: parts of a dim    backward: one's own part       after a split dim
    cut         forward: one's own part    backward: parts of all         before a split dim

Outputs of `sum_out` and `gather` are the same on every rank, and so must their gradients be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

Tensor = Any
Map = Callable[[Tensor], Tensor]
SPLIT = "foretell_split"  # attribute of a parameter of which this rank has a part: a `Split`
Shared = Sequence[tuple[Tensor, tuple[int, ...]]]  # a parameter, and the ranks that hold it


class Split(NamedTuple):
    """How ranks share a parameter that is no DTensor."""

    dim: int
    sizes: list[int]  # of each rank's part
    group: Any


def split_of(parameter: Tensor) -> Split | None:
    """How ranks share a parameter; None where this one has all of it, or it is a DTensor."""
    found: Split | None = getattr(parameter, SPLIT, None)
    return found


class _BothWays(torch.autograd.Function):  # type: ignore[misc]
    """A linear map, and the map that its gradient goes through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Map, back: Map) -> Tensor:
        ctx.there, ctx.back = there, back
        return there(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return _BothWays.apply(g, ctx.back, ctx.there), None, None


def both_ways(x: Tensor, there: Map, back: Map) -> Tensor:
    """What one function makes of a tensor, and another of its gradient."""
    return _BothWays.apply(x, there, back)


def same(x: Tensor) -> Tensor:
    """The tensor as it is."""
    return x.view_as(x)


def times(x: Tensor, factor: float) -> Tensor:
    """The same tensor; its gradient so many times as large."""
    return both_ways(x, same, lambda g: g * factor)


def copy_in(x: Tensor, group: Any = None) -> Tensor:
    """The same tensor; its gradient is the sum of those of all ranks."""
    return both_ways(x, same, partial(summed, group=group))


def sum_out(x: Tensor, group: Any = None) -> Tensor:
    """The sum over all ranks; its gradient goes to each as it is."""
    return both_ways(x, partial(summed, group=group), same)


def sum_both(x: Tensor, group: Any = None, weight: float = 1.0) -> Tensor:
    """The sum over all ranks, each of which goes on differently from there.

    `weight`: what this rank's loss counts by, where gradients are weighed after the backward.
    """
    back = partial(summed, group=group)
    return both_ways(x, back, lambda g: back(g * weight) / weight)


def gather(x: Tensor, dim: int, sizes: list[int], group: Any = None) -> Tensor:
    """All ranks' parts along a dim, in order of rank."""
    how = {"dim": dim, "sizes": sizes, "group": group}
    return both_ways(x, partial(gathered, **how), partial(part_of, **how))


def cut(x: Tensor, dim: int, sizes: list[int], group: Any = None) -> Tensor:
    """This rank's part along a dim of a tensor that all ranks hold."""
    how = {"dim": dim, "sizes": sizes, "group": group}
    return both_ways(x, partial(part_of, **how), partial(gathered, **how))


def part_of(x: Tensor, dim: int, sizes: list[int], group: Any) -> Tensor:
    """This rank's part along a dim; outside autograd."""
    return x.split(sizes, dim)[dist.get_rank(group)].contiguous()


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


def one_more(group: Any) -> Any:
    """Another process group of the same ranks; every rank of the run asks for one at once."""
    ranks = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
    return new_groups([ranks])[ranks]
