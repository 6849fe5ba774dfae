"""A plan made to run: a model and its optimizer as the plan wants them on this rank.

    deployed = deploy(model, optimizer, plan)
    loss = deployed.step((x,), y)                     # or a plain loop over deployed.model

Every rank calls it with the same model, optimizer and plan, inside an initialised process group.
What the plan asks for and this cannot do is refused before anything is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from foretell.errors import InputError, unknown
from foretell.plan import Plan
from foretell.pytorch.deploy import shard as fsdp
from foretell.pytorch.deploy.actions import Pipeline
from foretell.pytorch.deploy.agree import agree
from foretell.pytorch.deploy.blocks import Blocks
from foretell.pytorch.deploy.buckets import broadcast_state
from foretell.pytorch.deploy.channels import split_channels
from foretell.pytorch.deploy.layout import Layout
from foretell.pytorch.deploy.mesh import IMAGE, Places
from foretell.pytorch.deploy.optimizer import repoint, tuned
from foretell.pytorch.deploy.pipelined import (
    micro_batches,
    runtime,
    shape_of,
    stages_of,
)
from foretell.pytorch.deploy.precision import dtype_of, mixed, precision_of, scaler
from foretell.pytorch.deploy.recompute import recompute
from foretell.pytorch.deploy.refuse import require_runnable
from foretell.pytorch.deploy.regions import compile_regions
from foretell.pytorch.deploy.spatial import split_spatial
from foretell.pytorch.deploy.stages import Staged
from foretell.pytorch.deploy.sync import Sync, synchronize
from foretell.pytorch.deploy.tensor import split_tensors
from foretell.pytorch.deploy.units import together, units

Loss = Callable[[Any, Any], Any]
_LAYERS = (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d, torch.nn.Linear)


def default_loss(output: Any, target: Any) -> Any:
    """Cross entropy for classes, the mean square for numbers; a model may give its loss itself."""
    if target is None:
        return getattr(output, "loss", output)
    call = torch.nn.functional.mse_loss
    if not target.is_floating_point():
        call = torch.nn.functional.cross_entropy
    return call(output, target)


@dataclass
class Deployed:
    """A model on this rank, and how one step of it runs."""

    model: Any  # the part of it that is here
    optimizer: Any
    plan: Plan
    places: Places
    loss: Loss
    sync: Sync | None = None
    pipeline: Staged | Blocks | None = None
    scaler: Any = None
    parts: dict[str, Any] = field(default_factory=dict)  # layers split by filters or channels

    def step(self, inputs: tuple[Any, ...], target: Any) -> Any:
        """Train on this rank's share of a batch; its mean loss, None where that is not known."""
        self.optimizer.zero_grad()
        with fsdp.quiet() if self.is_sharded else nullcontext():
            loss = self._there_and_back(inputs, target)
        if self.sync is not None:
            self.sync.finish()
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        return loss

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Add gradients up on each rank, for accumulation in a loop of one's own."""
        with ExitStack() as stack:
            if self.sync is not None:
                stack.enter_context(self.sync.no_sync())
            if self.is_sharded:
                stack.enter_context(fsdp.no_sync(self.model))
            yield

    @property
    def is_sharded(self) -> bool:
        """Whether FSDP holds the parameters."""
        return self.plan.zero >= 2 and self.plan.dp > 1

    @property
    def share(self) -> float:
        """By what this rank's mean loss counts, relative to an even share of the batch."""
        shares = self.plan.shares
        return shares[self.places.at["dp"]] * len(shares) / sum(shares) if shares else 1.0

    def _there_and_back(self, inputs: tuple[Any, ...], target: Any) -> Any:
        if self.pipeline is not None:
            with self.no_sync():
                return self.pipeline.step(inputs, target)
        num = micro_batches(self.plan, len(inputs[0]))
        pieces = list(zip(*(x.chunk(num) for x in inputs), strict=True))
        targets = [None] * num if target is None else target.chunk(num)
        total: Any = 0.0
        for k, (piece, wanted) in enumerate(zip(pieces, targets, strict=True)):
            with ExitStack() as stack:
                if k + 1 < num or self.plan.overlap is False:
                    stack.enter_context(self.no_sync())
                total = total + self._backward(piece, wanted, num)
        return total

    def _backward(self, inputs: tuple[Any, ...], target: Any, num: int) -> Any:
        with mixed(self._dtype, self.places.device):
            loss = self.loss(self.model(*inputs), target) / num
        # FSDP gives the plain mean over ranks; our own sync weighs by share itself
        scaled = loss * self.share if self.sync is None else loss
        (self.scaler.scale(scaled) if self.scaler else scaled).backward()
        return loss.detach()

    @property
    def _dtype(self) -> str:
        return "" if self.is_sharded else precision_of(self.plan)


def deploy(
    model: Any,
    optimizer: Any,
    plan: Plan,
    *,
    loss: Loss | None = None,
    device: str = "",
    tensor_layout: Mapping[str, str] | None = None,
    pipeline: Pipeline | None = None,
    samples: int = 0,
) -> Deployed:
    """Make a model and its optimizer run as a plan says; see the module for how it is used.

    `samples` are those of one step on this data-parallel rank (a pipeline has to know how many
    micro-batches that makes; the plan's `global_batch` tells where it is given). `pipeline` takes
    the place of the plan's schedule, for shapes that a plan has no words for.
    """
    require_runnable(plan)
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    places = Places(plan, kind)
    agree(plan, model)
    _check_names(plan, model)
    broadcast_state(model)
    before = dict(model.named_parameters())
    made = Deployed(model, optimizer, plan, places, loss or default_loss)
    made.scaler = scaler(precision_of(plan), kind)
    if plan.pp > 1 or pipeline is not None:
        shape = shape_of(plan, places, samples, pipeline)
        modules = stages_of(model, plan, shape, places)
        made.model = together(modules)
        _inside(made, list(modules.values()), tensor_layout)
        made.pipeline = runtime(shape, modules, plan, places, made.loss)
    else:
        _inside(made, [model], tensor_layout)
    _across(made)
    repoint(optimizer, before, _named(made))
    if made.sync is not None:
        made.sync.attach(optimizer)
    tuned(optimizer, plan.whatifs)
    return made


def _inside(made: Deployed, modules: list[Any], layout: Mapping[str, str] | None) -> None:
    """What changes the layers themselves: splits, recompute, regions, formats."""
    plan, places = made.plan, made.places
    names = {spec.partition(":")[0] for spec in plan.whatifs}
    for module in modules:
        if plan.tp > 1:
            split_tensors(
                module, places.line("tp"), layout or getattr(made.model, "tensor_layout", None)
            )
        if max(plan.spatial, default=1) > 1:
            group = places.image_group() if plan.dp > 1 else None
            split_spatial(module, [plan.degrees()[a] for a in IMAGE[: len(plan.spatial)]], group)
        for way in ("filter", "channel"):
            if getattr(plan, way) > 1:
                made.parts |= split_channels(
                    module, _all_layers(module, way, plan), places.group(way)
                )
        if plan.recompute != "none" or "checkpoint" in names:
            recompute(units(module), selective=plan.recompute == "selective")
        if plan.regions:
            compile_regions(module, plan.regions)
        if "channels-last" in names:
            module.to(memory_format=torch.channels_last)
        if "compile" in names:
            module.compile()
    if "tf32" in names or plan.dtype == "tf32":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True


def _all_layers(model: Any, way: str, plan: Plan) -> dict[str, str]:
    """Every layer that has enough filters or channels; the first reads too few channels."""
    dim, size = (0 if way == "filter" else 1), getattr(plan, way)
    found = {
        n: way
        for n, m in model.named_modules()
        if isinstance(m, _LAYERS) and m.weight.shape[dim] >= size and getattr(m, "groups", 1) == 1
    }
    if not found:
        raise InputError(f"no layer of the model can be split by {way} over {size} ranks")
    return found


def _across(made: Deployed) -> None:
    """What keeps data-parallel ranks together."""
    plan, places = made.plan, made.places
    if plan.dp == 1:
        return
    if plan.zero >= 2:
        word = precision_of(plan)
        fsdp.shard(
            made.model,
            places.sharding(),
            keep=plan.zero == 2,
            dtype=dtype_of(word),
            reduce_dtype=dtype_of(plan.grad_dtype),
            offload=plan.offload,
        )
        return
    names = {n for n, p in made.model.named_parameters() if p.requires_grad}
    order = places.order("dp")
    choices = _choices(plan, names, order)
    made.sync = synchronize(
        made.model,
        layout=_layout(plan, names, choices),
        choices=choices,
        shares=[plan.shares[place] for place in order] if plan.shares else None,
        group=places.group("dp"),
        dtype=dtype_of(plan.grad_dtype),
    )


def _layout(plan: Plan, names: set[str], choices: Mapping[str, str]) -> Layout | float:
    """The plan's buckets, of those parameters that are here and reduced so."""
    if not plan.buckets:
        return plan.bucket_mb * 2**20
    reduced = {n for n in names if choices.get(n, "all-reduce") == "all-reduce"}
    kept = [tuple(n for n in bucket if n in reduced) for bucket in plan.buckets]
    return Layout(tuple(bucket for bucket in kept if bucket))


def _choices(plan: Plan, names: set[str], order: list[int]) -> dict[str, str]:
    """How each parameter is kept together; servers as their group numbers them."""
    if plan.zero == 1:
        return dict.fromkeys(names, "sharded")
    served = {f"ps:{place}": f"ps:{rank}" for rank, place in enumerate(order)}
    return {name: served.get(way, way) for name, way in plan.sync if name in names}


def _check_names(plan: Plan, model: Any) -> None:
    """Raise where a plan speaks of parameters that the model does not have."""
    known = dict(model.named_parameters())
    for name in [row[0] for row in plan.sync] + [n for bucket in plan.buckets for n in bucket]:
        if name not in known:
            raise unknown("parameter in the plan", name, known)


def _named(made: Deployed) -> dict[str, Any]:
    """Parameters by the names they had in the whole model."""
    if made.pipeline is None:
        return dict(made.model.named_parameters())
    found: dict[str, Any] = {}
    for stage in made.pipeline.modules.values():
        found |= dict(stage.named_parameters())
    return found
