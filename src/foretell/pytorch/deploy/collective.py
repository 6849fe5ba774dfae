"""Ranks of a plan: process groups, what ranks ask each other, communication that autograd knows.

Ranks are numbered as plans number them (→ foretell.plan.plan): tensor innermost, pipeline
outermost. A plan's `placement` says which rank of the run is which of those; of a cluster that it
leaves ranks out of, the others are the run's, counted in order.

What goes forward as a copy comes back as a sum.

    copy_in     forward: as it is          backward: sum over ranks       before a split layer
    sum_out     forward: sum over ranks    backward: as it is             after partial sums
    sum_both    forward: sum over ranks    backward: sum over ranks       statistics of split data
    gather      forward: parts of a dim    backward: one's own part       after a split dim
    cut         forward: one's own part    backward: parts of all         before a split dim

Outputs of `sum_out` and `gather` are the same on every rank, and so must their gradients be.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from foretell.errors import InputError
from foretell.graph.graph import ranks_of
from foretell.plan import Plan
from foretell.plan.plan import ORDER
from foretell.plan.unsupported import own_plans
from foretell.pytorch.deploy.deferred import deferred_of

Tensor = Any
Map = Callable[[Tensor], Tensor]
# torch 2.13 renamed them and warns of the older names
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
SPLIT = "foretell_split"  # attribute of a parameter of which this rank has a part: a `Split`
Shared = Sequence[tuple[Tensor, tuple[int, ...]]]  # a parameter, and the ranks that hold it


class Split(NamedTuple):
    """How ranks share a parameter that is no DTensor."""

    dim: int
    sizes: list[int]  # of each rank's part
    group: Any


def split_of(parameter: Tensor) -> Split | None:
    """How ranks share a parameter; None where this one has all of it, or it is a DTensor."""
    return getattr(parameter, SPLIT, None)


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


def everyones(value: Any, group: Any = None) -> list[Any]:
    """What each rank of a group says, in their order; all are asked at once."""
    each: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(each, value, group=group)
    return each


def said_by(source: int, value: Any, group: Any = None) -> Any:
    """What one rank of the run says, on all ranks of a group; all are asked at once."""
    box = [value]
    dist.broadcast_object_list(box, src=source, group=group)
    return box[0]


def new_groups(wanted: Iterable[Sequence[int]]) -> dict[tuple[int, ...], Any]:
    """New process groups, by their ranks. Every rank of the run asks at once for those it is in.

    All ranks make all groups in one order: torch names groups by how many there are, so ranks that
    make different numbers of them wait for each other for ever later on.
    """
    mine = sorted({tuple(ranks) for ranks in wanted})
    every = sorted({ranks for rows in everyones(mine) for ranks in rows})
    made = {ranks: dist.new_group(list(ranks)) for ranks in every}
    return {ranks: made[ranks] for ranks in mine}


def one_more(group: Any) -> Any:
    """Another process group of the same ranks; every rank of the run asks for one at once."""
    ranks = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
    return new_groups([ranks])[ranks]


IMAGE = ("height", "width", "depth")
HYBRID = ("dp_replicate", "dp_shard")  # axes of copies and of parts
EXPERTS = ("copies", "ep")
_COPIES = ("dp", "cp")  # axes along which parameters are the same


def fingerprint(plan: Plan, model: Any, *, noted: bool = False) -> str:
    """The same on two ranks exactly when plan and parameters are: names, shapes and formats.

    And whether its values are yet to be made.
    """
    rows = [
        f"{n} {tuple(p.shape)} {p.dtype} {p.requires_grad}" for n, p in model.named_parameters()
    ]
    rows += ["noted"] if noted else []
    return hashlib.sha256("\n".join([str(plan), *rows]).encode()).hexdigest()[:16]


def agree(plan: Plan, model: Any) -> bool:
    """Raise on every rank, naming those that differ from most, unless all have one fingerprint.

    Whether some ranks have made the model without values, on the meta device.
    """
    empty = any(p.is_meta for p in model.parameters())
    noted = deferred_of(model) is not None
    mine = {"plan": str(plan), "print": fingerprint(plan, model, noted=noted), "empty": empty}
    each = everyones(mine)
    if len({e["print"] for e in each}) == 1:
        return any(e["empty"] for e in each)
    usual = Counter(e["print"] for e in each).most_common(1)[0][0]
    odd = [r for r, e in enumerate(each) if e["print"] != usual]
    most = next(e for e in each if e["print"] == usual)
    what = "plan" if any(each[r]["plan"] != most["plan"] for r in odd) else "model"
    raise InputError(
        f"rank {', '.join(map(str, odd))} has another {what} than the others",
        hint="every rank has to make the same model and read the same plan",
    )


def found_by_first(
    ranks: Sequence[int], found: Callable[[], Any], hint: str, group: Any = None
) -> Any:
    """What the first of some ranks finds, on all of a group; where it cannot, all raise its words.

    The others of `ranks` do the same: what is split over them takes all.
    """
    mine, why = None, ""
    if dist.get_rank() in ranks:
        try:
            mine = found()
        except InputError as error:
            why = error.message
    mine, why = said_by(ranks[0], (mine, why), group)
    if why:
        raise InputError(why, hint=hint)
    return mine


def place(plan: Plan, rank: int) -> dict[str, int]:
    """Where a rank stands on each axis; of segments, which it is in."""
    if plan.segments:
        stages = [k for k, row in enumerate(plan.segments) if rank in ranks_of(row[1])]
        return dict.fromkeys(ORDER, 0) | {"pp": stages[0] if stages else 0}
    logical = placed(plan).index(rank) if plan.placement else rank
    found = {}
    for axis in ORDER:
        logical, found[axis] = divmod(logical, plan.degrees().get(axis, 1))
    return found


def replica(plan: Plan, rank: int) -> int:
    """Which of the replicas a rank is in: ranks of one work on the same samples."""
    at = place(plan, rank)
    if not plan.segments:
        return at["dp"]
    one = own_plans(plan)[at["pp"]]
    return one.ranks.index(rank) // (len(one.ranks) // one.plan.dp)


def placed(plan: Plan) -> list[int]:
    """The rank of the run that is each of a plan's: of a part of a cluster, in the same order.

    Ranks that share layers, tokens or images take their parts in the order of their numbers, as
    torch numbers the ranks of a group: another order of the same ranks is no other plan.
    """
    order = sorted(plan.placement)
    found = [order.index(rank) for rank in plan.placement]
    axes = [(axis, plan.degrees().get(axis, 1)) for axis in reversed(ORDER)]
    if not found or math.prod(n for _, n in axes) != len(found):
        return found
    grid = torch.tensor(found, device="cpu").reshape([n for _, n in axes])
    for dim in reversed(range(len(axes))):  # inner first: they stay in order
        if axes[dim][0] not in ("dp", "pp"):
            grid = grid.sort(dim).values
    return list(grid.flatten().tolist())


class Places:
    """The groups of this rank, one for each axis of a plan that has more than one rank.

    `among`: the ranks of the run that the plan is for, where they are a part; all ranks ask.
    """

    def __init__(self, plan: Plan, device: str, among: Sequence[int] = ()) -> None:
        size = len(among) or dist.get_world_size()
        self.among = list(among)
        if plan.ranks != size:
            raise InputError(
                f"the plan `{plan}` needs {plan.ranks} ranks, there are {size}",
                hint=f"run it with -n {plan.ranks}",
            )
        degrees = {axis: plan.degrees().get(axis, 1) for axis in reversed(ORDER)}
        self.plan, self.degrees, self.device, self._replicas = plan, degrees, device, None
        if plan.groups or plan.stages or plan.segments:  # no axes: layers have ranks of their own
            self.at = dict.fromkeys(degrees, 0)
            return
        every = self.among or placed(plan) or range(size)
        ranks = torch.tensor(every, device="cpu").reshape(tuple(degrees.values()))
        self.at = self._place(dist.get_rank())
        shape = {a: n for a, n in degrees.items() if n > 1} or {"dp": 1}
        if self.is_hybrid:  # data-parallel ranks are two axes, and one besides
            parts = dict(zip(HYBRID, (plan.dp // plan.sharing, plan.sharing), strict=True))
            pairs = [parts.items() if a == "dp" else [(a, n)] for a, n in shape.items()]
            shape = dict(pair for some in pairs for pair in some)
        grid = ranks.reshape(tuple(shape.values()))
        if self.is_hybrid:  # torch numbers the ranks of a group upwards, whatever their places
            grid = grid.sort(list(shape).index(HYBRID[1])).values
        self.mesh = DeviceMesh(device, grid, mesh_dim_names=tuple(shape))
        self._replicas = self.mesh[HYBRID]._flatten("dp") if self.is_hybrid else None
        self._ranks = ranks

    def _place(self, rank: int) -> dict[str, int]:
        """Where a rank of the run stands on each axis."""
        if not self.among:
            return place(self.plan, rank)
        return place(self.plan, self.among.index(rank) if rank in self.among else 0)

    @property
    def is_hybrid(self) -> bool:
        """Whether parameters are sharded over some of the data-parallel ranks and copied to all."""
        return self.plan.zero >= 2 and self.plan.sharing != self.plan.dp

    def group(self, axis: str) -> Any:
        """The ranks that differ from this one along an axis only; None where it is alone."""
        if axis == "dp" and self._replicas is not None:
            return self._replicas.get_group()
        return self.mesh.get_group(axis) if self.degrees[axis] > 1 else None

    def order(self, axis: str) -> list[int]:
        """The place on an axis of each rank of its group, which numbers its ranks upwards."""
        if self.degrees[axis] == 1:
            return [0]
        ranks = dist.get_process_group_ranks(self.group(axis))
        return [self._place(rank)[axis] for rank in ranks]

    def copies(self) -> tuple[Any, list[int]]:
        """The ranks that hold the same parameters, and the place on `dp` of each of them.

        Ranks that share the tokens of a sample (`cp`) are among them.
        """
        if self.degrees["cp"] == 1:
            return self.group("dp"), self.order("dp")
        group = self._sharing_parameters().get_group()
        return group, [self._place(rank)["dp"] for rank in dist.get_process_group_ranks(group)]

    def _sharing_parameters(self) -> Any:
        """The mesh of the ranks that hold the same parameters, where they share tokens."""
        axes = tuple(a for a in self.mesh.mesh_dim_names if a in _COPIES)
        return self.mesh[axes]._flatten("copies") if len(axes) > 1 else self.mesh["cp"]

    def line(self, axis: str) -> Any:
        """The mesh of one axis."""
        return self.mesh[axis]

    def split_mesh(self) -> Any:
        """The mesh of the axes that split layers: those of `cp` and `tp` that there are."""
        return self.mesh[tuple(a for a in ("cp", "tp") if self.degrees[a] > 1)]

    def expert_mesh(self) -> Any:
        """Copies × parts of the experts: neighbours among data-parallel ranks share them.

        Beside them the axes of `cp` and `tp` that there are.
        """
        plan, more = self.plan, tuple(a for a in ("cp", "tp") if self.degrees[a] > 1)
        order = [list(self.degrees).index(a) for a in ("pp", "dp", *more)]
        rest = [d for d in range(self._ranks.dim()) if d not in order]
        sizes = [self.degrees[a] for a in more]
        shape = (plan.pp, plan.dp // plan.ep, plan.ep, *sizes)
        grid = self._ranks.permute(*order, *rest).reshape(shape)
        grid = grid.sort(2).values  # as torch numbers the ranks of a group
        axes = (*EXPERTS, *more)
        return DeviceMesh(self.device, grid, mesh_dim_names=("pp", *axes))[axes]

    def image_group(self) -> Any:
        """The ranks that hold parts of the same image; they are neighbours in number."""
        axes = [list(self.degrees).index(a) for a in IMAGE]
        rest = [d for d in range(self._ranks.dim()) if d not in axes]
        rows = self._ranks.permute(*rest, *reversed(axes)).flatten(0, len(rest) - 1)
        mine = next(row for row in rows.flatten(1).tolist() if dist.get_rank() in row)
        return new_groups([mine])[tuple(mine)]

    def sharding(self) -> Any:
        """The mesh that parameters are sharded over: copies × parts where sharding is hybrid."""
        if self.is_hybrid:
            return self.mesh[HYBRID]
        return self._sharing_parameters() if self.plan.cp > 1 else self.mesh["dp"]
