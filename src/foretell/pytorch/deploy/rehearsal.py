"""What a plan adds to the work of a step: its messages, hooks, copies and updates, rehearsed.

A stand-in has the tensors of the model, units and stages of the same sizes, and next to no work.
It is deployed as the plan says on the ranks of the run, and takes steps. What these take beside a
forward and backward of the stand-in on each rank by itself is what the plan adds: the messages have
their own sizes, ranks and order, and find the caches and the load that steps find.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from foretell.plan import Plan
from foretell.pytorch.deploy.actions import pipeline
from foretell.pytorch.deploy.buckets import sent_buffers
from foretell.pytorch.deploy.op_times import fits, put_in_buckets
from foretell.pytorch.deploy.shard import quiet
from foretell.pytorch.deploy.units import even_ends, units

Tensor = Any
_WARM, _LEAST, _MOST = 2, 6, 24  # steps
_WHILE = 1.0  # seconds of steps, beyond the least
# what a stand-in has no ops or layers for
_WITHOUT: dict[str, Any] = {
    "layers": (), "recompute": "none", "recompute_layers": 0, "compile": False, "whatifs": (),
}  # fmt: skip


class Rehearsed(NamedTuple):
    """Seconds that a plan adds to a step, by its slowest rank."""

    seconds: float
    unsure: float  # standard error of them, as a share


def can_rehearse(plan: Plan) -> bool:
    """Whether what a plan adds depends on the sizes of tensors alone, and not on what layers do."""
    others = (plan.groups, plan.stages, plan.segments, plan.regions, plan.late, plan.sync,
              plan.buckets, plan.offload, plan.grad_dtype)  # fmt: skip
    formats = {plan.precision, plan.dtype} - {"", "fp32"}
    return plan.ranks == plan.dp * plan.pp > 1 and not any(others) and not formats


def rehearsed(
    model: Any, optimizer: Callable[[Any], Any], plan: Plan, samples: int, *, in_buckets: bool
) -> Rehearsed | None:
    """What a plan adds to a step of `samples` on each data-parallel rank; asked on all ranks.

    None where the copies of the tensors do not fit, or there is no such optimizer.
    """
    from foretell.pytorch.deploy.apply import deploy  # which a prediction of others does not need

    if not can_rehearse(plan) or not _agreed(fits(model, dist.get_world_size())):
        return None
    plan = plan.but(**_WITHOUT)
    many = _micro_batches(plan, samples)
    ours, plain = (_stand_in(model, plan, many) for _ in range(2))
    update = optimizer(ours)
    if update is None:
        return None
    if in_buckets:
        put_in_buckets(plain)
    x = torch.zeros(samples, 1)
    made = deploy(ours, update, plan, loss=_total, device="cpu", samples=samples)

    def alone() -> None:
        for one in x.chunk(many):
            _total(plain(one), one).backward()

    with quiet():
        rows = _in_turn(lambda: made.step((x,), x), alone, plain)
    each = rows[:, 0] - rows[:, 1] / plan.pp
    return Rehearsed(*_middle(each))


def _agreed(here: bool) -> bool:
    """Whether something holds on every rank."""
    found = torch.tensor(int(here))
    dist.all_reduce(found, op=dist.ReduceOp.MIN)
    return bool(found)


def _in_turn(ours: Callable[[], Any], alone: Callable[[], Any], plain: Any) -> Tensor:
    """Seconds of both, of the slowest rank, each time."""
    rows: list[tuple[float, float]] = []
    begun = time.perf_counter()
    while _agreed(
        len(rows) < _WARM + _LEAST or (len(rows) < _MOST and time.perf_counter() - begun < _WHILE)
    ):
        plain.zero_grad()
        dist.barrier()
        start = time.perf_counter()
        ours()
        middle = time.perf_counter()
        dist.barrier()
        last = time.perf_counter()
        alone()
        rows.append((middle - start, time.perf_counter() - last))
    found = torch.tensor(rows[_WARM:], dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found


def _middle(seconds: Tensor) -> tuple[float, float]:
    """The median, and how sure it is, from the quartiles."""
    parts = torch.tensor([0.25, 0.5, 0.75], dtype=seconds.dtype)
    low, middle, high = seconds.quantile(parts).tolist()
    middle = max(middle, 0.0)
    return middle, 0.93 * (high - low) / len(seconds) ** 0.5 / max(middle, 1e-9)


def _micro_batches(plan: Plan, samples: int) -> int:
    if plan.micro_batch:
        return max(samples // plan.micro_batch, 1)
    return plan.pp


def _total(output: Tensor, _: Any) -> Tensor:
    return output.sum()


class _Touch(torch.autograd.Function):  # type: ignore[misc]
    """Its input again; the gradients of parameters that come along are made and nothing else."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(*parameters)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        made = (torch.full_like(p, 1e-3) for p in ctx.saved_tensors)
        wanted = ctx.needs_input_grad[1:]
        return gradient, *(g if w else None for g, w in zip(made, wanted, strict=True))


class _Unit(nn.Module):  # type: ignore[misc]
    """The tensors of a unit."""

    def __init__(self, tensors: Sequence[Tensor], buffers: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self.held = nn.ParameterList(
            nn.Parameter(torch.full(p.shape, 0.01, dtype=p.dtype), requires_grad=p.requires_grad)
            for p in tensors
        )
        for place, one in enumerate(buffers):
            self.register_buffer(f"buffer{place}", torch.zeros(one.shape, dtype=one.dtype))

    def forward(self, x: Tensor) -> Tensor:
        return _Touch.apply(x, *self.held)


class _Whole(nn.Module):  # type: ignore[misc]
    """Units in a row, and what belongs to none of them."""

    def __init__(self, row: Sequence[_Unit], rest: _Unit) -> None:
        super().__init__()
        self.units, self.rest = nn.ModuleList(row), rest

    def forward(self, x: Tensor) -> Tensor:
        x = self.rest(x)
        for unit in self.units:
            x = unit(x)
        return x


def _stand_in(model: Any, plan: Plan, many: int) -> Any:
    """A model with the same tensors, in the units that are sharded or the stages that are cut."""
    every, buffers = list(model.parameters()), sent_buffers(model)
    if plan.pp > 1:
        num = pipeline(plan, many).num_stages
        ends = even_ends([p.numel() for p in every], num)
        starts = [0, *ends[:-1]]
        return nn.Sequential(
            *(_Unit(every[a:b], () if a else buffers) for a, b in zip(starts, ends, strict=True))
        )
    inner = [list(unit.parameters()) for unit in units(model).values() if unit is not model]
    seen = {id(p) for some in inner for p in some}
    rest = [p for p in every if id(p) not in seen]
    return _Whole([_Unit(some) for some in inner], _Unit(rest, buffers))
