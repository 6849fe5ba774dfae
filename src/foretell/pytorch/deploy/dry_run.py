"""A dry run of a step: the plan on the ranks of the run, with a proxy of the model.

The proxy has the tensors of the model in units and stages of the same sizes, outputs of stages as
large, and the messages of its batch norms. In place of its ops it works for as many core seconds as
they take on a rank by itself (→ op_times.py). Deployed as the plan says it takes steps: messages
have their own sizes, ranks and order, hooks and updates their own tensors, and work and messages
meet each other and the load of the machine as they do in steps of the model. No step of the model
is taken.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from foretell.plan import Plan
from foretell.pytorch import timed
from foretell.pytorch.deploy import run_files
from foretell.pytorch.deploy.actions import pipeline
from foretell.pytorch.deploy.collective import one_more
from foretell.pytorch.deploy.op_times import Part, fits, put_in_buckets
from foretell.pytorch.deploy.units import even_ends, size_of, stage_ends, units

Tensor = Any
_WARM, _FEW, _LEAST, _MOST = 3, 4, 8, 60  # steps
_WHILE = 2.0  # seconds of steps on an idle machine, beyond the least
_BACK = 2.0  # gradients of a matmul, which it is without a pass of a rank alone to tell
_SIDES = (256, 32)  # of the matmuls that stand for ops: many threads share the larger
# what a proxy model has no ops or layers for
_WITHOUT: dict[str, Any] = {
    "layers": (), "recompute": "none", "recompute_layers": 0, "compile": False, "whatifs": (),
}  # fmt: skip


class DryRun(NamedTuple):
    """Seconds of a step of the dry run, by its slowest rank."""

    seconds: float
    unsure: float  # standard error of their logarithm
    load: float  # core and waiting seconds over core seconds, of the rank that waits longest


def can_dry_run(plan: Plan) -> bool:
    """Whether what a plan adds depends on the sizes of tensors alone, and not on what layers do."""
    others = (plan.groups, plan.stages, plan.segments, plan.regions, plan.late, plan.sync,
              plan.buckets, plan.offload, plan.grad_dtype)  # fmt: skip
    formats = {plan.precision, plan.dtype} - {"", "fp32"}
    return plan.ranks == plan.dp * plan.pp > 1 and not any(others) and not formats


@dataclass(frozen=True)
class Role:
    """What a proxy model acts: a model, and what it takes on a rank by itself."""

    model: Any
    optimizer: Callable[[Any], Any]
    samples: int  # of a step on one data-parallel rank
    core: float  # core seconds of a forward and backward of all of them
    again: Callable[[], float] | None = None  # takes these once more
    active: float = 1.0  # threads that were busy meanwhile
    parts: Sequence[Part] = ()  # of an nn.Sequential, in order: what each of its children does
    units: Sequence[Part] = ()  # what is done before the first unit, and in each
    in_buckets: bool = False  # whether these put gradients where they leave from
    is_synced: bool = False  # whether batch norms use the statistics of all ranks
    between: Callable[[], Any] | None = None  # what a rank does between two steps

    def norms(self, module: Any) -> list[int]:
        """Channels of the batch norms that use the statistics of all ranks."""
        own = [m for m in module.modules() if isinstance(m, _BatchNorm)]
        return [m.num_features for m in own] if self.is_synced else []

    def buffers(self) -> list[Tensor]:
        """Buffers that are sent in every step: whatever rank asks, and whatever it has changed."""
        alike = _BatchNorm if self.is_synced else ()
        every = [m for m in self.model.modules() if not isinstance(m, alike)]
        own = {id(b): b for m in every for b in m.buffers(recurse=False)}
        return list(own.values())


def dry_run(role: Role, plan: Plan) -> DryRun | None:
    """Seconds of a step of the proxy model; called on all ranks.

    None where the copies of the tensors do not fit, or there is no such optimizer.
    """
    from foretell.pytorch.deploy.apply import deploy  # which a prediction of others does not need

    if not can_dry_run(plan) or not _agreed(fits(role.model, dist.get_world_size())):
        return None
    proxy = _proxy(_as_long(role, plan), plan)
    update = role.optimizer(proxy)
    if update is None:
        return None
    reduced = plan.but(**_WITHOUT)
    made = deploy(proxy, update, reduced, loss=_total, device="cpu", samples=role.samples)
    if role.is_synced:
        group = one_more(made.places.group("dp"))  # as batch norms have their own
        for unit in proxy.modules():
            if isinstance(unit, _Unit):
                unit.act.group = group
    rows, load = _steps(made, role)
    found = torch.tensor([*rows[_WARM:], load], dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    took = found[:-1]
    unsure = float(took.log().std()) / len(took) ** 0.5
    return DryRun(float(took.median()), unsure, float(found[-1]))


def _steps(made: Any, role: Role) -> tuple[list[float], float]:
    """Seconds of each step, and the load of this rank: the busier it is, the longer they go on."""
    x = torch.zeros(role.samples, 1)
    rows, begun, waited, core, load = list[float](), time.perf_counter(), 0.0, 0.0, 1.0
    while _agreed(
        len(rows) < _WARM + _LEAST
        or (len(rows) < _MOST and time.perf_counter() - begun < _WHILE * load)
    ):
        (role.between or dist.barrier)()
        queued, start, spent = run_files.queued(), time.perf_counter(), time.thread_time()
        made.step((x,), x)
        rows.append(time.perf_counter() - start)
        core += time.thread_time() - spent
        waited += run_files.queued() - queued
        load = 1.0 + waited / max(core, 1e-9)
    return rows, load


def _as_long(role: Role, plan: Plan) -> Role:
    """The role with as much work that the proxy takes as long on a rank alone as the model.

    What it does besides counts, and work of so many core seconds that takes more of them there.
    Both are taken in turn, the model once more where it can be: the machine changes meanwhile.
    """
    takes = [
        role.again or (lambda: role.core),
        *(_alone(replace(role, core=core), plan) for core in (0.0, role.core)),
    ]
    rows, begun = list[list[float]](), time.perf_counter()
    while len(rows) < _FEW or (len(rows) < _LEAST and time.perf_counter() - begun < _WHILE):
        rows.append([take() for take in takes])
    core, bare, whole = (statistics.median(column) for column in zip(*rows[1:], strict=True))
    if whole <= bare:
        return role
    return replace(role, core=role.core * max(core - bare, 0.0) / (whole - bare))


def _alone(role: Role, plan: Plan) -> Callable[[], float]:
    """A forward and backward of the proxy on one rank alone; its core seconds each time."""
    model, many, clock = _proxy(role, plan), _micro_batches(plan, role.samples), timed.clock()
    for unit in model.modules():
        if isinstance(unit, _Unit):
            unit.act.norms = ()
    if role.in_buckets:
        put_in_buckets(model)
    x = torch.zeros(role.samples, 1)

    def take() -> float:
        model.zero_grad()
        start = clock()
        for one in x.chunk(many):
            _total(model(one), one).backward()
        return clock() - start

    return take


def _agreed(here: bool) -> bool:
    """Whether something holds on every rank."""
    found = torch.tensor(int(here))
    dist.all_reduce(found, op=dist.ReduceOp.MIN)
    return bool(found)


def _total(output: Tensor, _: Any) -> Tensor:
    return output.sum()


class Work:
    """Work of any number of seconds, in matmuls: some by all threads, others by one."""

    def __init__(self, active: float = 1.0) -> None:
        others = torch.get_num_threads() - 1
        self.wide = min(max((active - 1) / others, 0.0), 1.0) if others else 1.0
        self.kinds = []
        for side in _SIDES:
            x = torch.randn(side, side)
            self.kinds.append((x, timed.timed(partial(torch.matmul, x, x))))

    def __call__(self, seconds: float) -> None:
        by_all, by_one = seconds * self.wide, seconds * (1 - self.wide)
        (large, long), (small, short) = self.kinds
        for _ in range(int(by_all / long)):
            large @ large
        for _ in range(round((by_one + by_all % long) / short)):
            small @ small


@dataclass
class _Act:
    """What a unit does in place of its ops."""

    work: Work
    core: Part  # core seconds a sample, and numbers of its output: those of its input where 0
    norms: Sequence[int] = ()  # channels of batch norms that use the statistics of all ranks
    group: Any = None

    def there(self, samples: int) -> None:
        """Work as a forward does, and send the sums and squares of batch norms."""
        for channels in self.norms:
            for size in (channels + 1, channels):
                dist.all_reduce(torch.zeros(size), group=self.group)
        self.work(self.core.there * samples)

    def back(self, samples: int) -> None:
        """Work as a backward does, and send the gradients of these."""
        self.work(self.core.back * samples)
        for channels in self.norms:
            for size in (channels, channels + 1):
                dist.all_reduce(torch.zeros(size), group=self.group)


class _Touch(torch.autograd.Function):  # type: ignore[misc]
    """Acts a forward; gradients of parameters are made in the backward."""

    @staticmethod
    def forward(ctx: Any, act: _Act, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(*parameters)
        ctx.act, ctx.shape = act, x.shape
        act.there(len(x))
        return x.new_zeros(len(x), act.core.width) if act.core.width else x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        ctx.act.back(len(gradient))
        made = (torch.full_like(p, 1e-3) for p in ctx.saved_tensors)
        wanted = ctx.needs_input_grad[2:]
        grads = [g if w else None for g, w in zip(made, wanted, strict=True)]
        return None, gradient.new_zeros(ctx.shape), *grads


class _Unit(nn.Module):  # type: ignore[misc]
    """The tensors of a unit, and what it does."""

    def __init__(
        self, act: _Act, tensors: Sequence[Tensor], buffers: Sequence[Tensor] = ()
    ) -> None:
        super().__init__()
        self.act = act
        self.held = nn.ParameterList(
            nn.Parameter(torch.full(p.shape, 0.01, dtype=p.dtype), requires_grad=p.requires_grad)
            for p in tensors
        )
        for place, one in enumerate(buffers):
            self.register_buffer(f"buffer{place}", torch.zeros(one.shape, dtype=one.dtype))

    def forward(self, x: Tensor) -> Tensor:
        return _Touch.apply(self.act, x, *self.held)


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


def _proxy(role: Role, plan: Plan) -> Any:
    """A model with the same tensors, in the units that are sharded or the stages that are cut."""
    model, work, each = role.model, Work(role.active), role.core / role.samples
    if plan.pp > 1:
        return nn.Sequential(*_stages(role, plan, work))
    found = {name: unit for name, unit in units(model).items() if unit is not model}
    inside = {id(p) for unit in found.values() for p in unit.parameters()}
    rest = [p for p in model.parameters() if id(p) not in inside]
    counts = [role.norms(unit) for unit in found.values()]
    others = role.norms(model)
    for some in counts:
        for channels in some:
            others.remove(channels)
    first, *shares = role.units or (_both(0.0),)
    if len(shares) != len(found):
        whole = max(sum(map(size_of, found.values())), 1)
        first = _both(0.0 if found else 1.0)
        shares = [_both(size_of(unit) / whole) for unit in found.values()]
    row = [
        _Unit(_Act(work, _times(part, each)._replace(width=0), norms), list(unit.parameters()))
        for unit, part, norms in zip(found.values(), shares, counts, strict=True)
    ]
    before = _Act(work, _times(first, each)._replace(width=0), others)
    return _Whole(row, _Unit(before, rest, role.buffers()))


def _both(share: float) -> Part:
    """A share of a pass whose backward takes as matmuls do."""
    return Part(share / (1 + _BACK), share * _BACK / (1 + _BACK))


def _times(part: Part, seconds: float) -> Part:
    """Core seconds of a part of a pass of so many."""
    return Part(part.there * seconds, part.back * seconds, part.width)


def _stages(role: Role, plan: Plan, work: Work) -> list[_Unit]:
    """The stages of a pipeline: as an nn.Sequential is cut, else of about as many parameters."""
    model, each = role.model, role.core / role.samples
    num = pipeline(plan, _micro_batches(plan, role.samples)).num_stages
    buffers = role.buffers()
    if isinstance(model, nn.Sequential) and len(role.parts) == len(model):
        held = [size_of(child) for child in model]
        filled = [place for place, size in enumerate(held) if size]
        ends = stage_ends(held, num, plan.layers, range(len(held)), filled)
        spans = [slice(a, b) for a, b in zip([0, *ends[:-1]], ends, strict=True)]
        return [
            _Unit(
                _Act(work, _times(_joined(role.parts[span]), each), role.norms(model[span])),
                list(model[span].parameters()),
                () if span.start else buffers,
            )
            for span in spans
        ]
    every = list(model.parameters())
    ends = even_ends([p.numel() for p in every], num)
    whole = sum(p.numel() for p in every)
    return [
        _Unit(
            _Act(work, _times(_both(sum(p.numel() for p in every[a:b]) / whole), each)),
            every[a:b],
            () if a else buffers,
        )
        for a, b in zip([0, *ends[:-1]], ends, strict=True)
    ]


def _joined(parts: Sequence[Part]) -> Part:
    return reduce(lambda before, part: part.joined(before), parts)


def _micro_batches(plan: Plan, samples: int) -> int:
    return max(samples // plan.micro_batch, 1) if plan.micro_batch else plan.pp
