"""A plan made to run: a model and its optimizer as the plan wants them on this rank.

    deployed = deploy(model, optimizer, plan)
    loss = deployed.step((x,), y)                     # or a plain loop over deployed.model

Every rank calls it with the same model, optimizer and plan, inside an initialised process group.
What the plan asks for and this cannot do is refused before anything is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from foretell.errors import InputError, unknown
from foretell.plan import Plan
from foretell.plan.check import spoken
from foretell.plan.plan import segments_of
from foretell.plan.unsupported import ModelFacts, own_plans, require_runnable
from foretell.pytorch.deploy import shard as fsdp
from foretell.pytorch.deploy.actions import Pipeline
from foretell.pytorch.deploy.batch_norm import WORDS as BATCH_NORM
from foretell.pytorch.deploy.batch_norm import norms, synchronize_norms
from foretell.pytorch.deploy.blocks import Blocks
from foretell.pytorch.deploy.buckets import broadcast_state, send_buffers, share_buffers
from foretell.pytorch.deploy.channels import WHOLE, split_channels, split_parameters
from foretell.pytorch.deploy.collective import new_groups
from foretell.pytorch.deploy.context import split_context
from foretell.pytorch.deploy.deferred import deferred_of
from foretell.pytorch.deploy.experts import Dispatched, experts_of
from foretell.pytorch.deploy.fp8 import require_fp8, require_layers, use_fp8
from foretell.pytorch.deploy.graph_split import GraphSplit, step_splits
from foretell.pytorch.deploy.group_sync import Syncs
from foretell.pytorch.deploy.grouped import Groups
from foretell.pytorch.deploy.layout import Layout
from foretell.pytorch.deploy.mesh import IMAGE, Places, agree, place
from foretell.pytorch.deploy.messages import untouched
from foretell.pytorch.deploy.optimizer import Ema, clip, repoint, tuned
from foretell.pytorch.deploy.pipelined import (
    micro_batches,
    mixing,
    padded,
    runtime,
    shape_of,
    stages_of,
    weights_of,
)
from foretell.pytorch.deploy.pipelined_call import PipelinedCall
from foretell.pytorch.deploy.placed import place as place_stages
from foretell.pytorch.deploy.precision import (
    dtype_of,
    mixed,
    precision_of,
    scale_losses,
    scaler,
    unscale,
)
from foretell.pytorch.deploy.recompute import recompute
from foretell.pytorch.deploy.regions import compile_regions, speaks_of_ops
from foretell.pytorch.deploy.segmented import Segments, shaped
from foretell.pytorch.deploy.sequence import SEQUENCE, blocks
from foretell.pytorch.deploy.spatial import refusal as no_images
from foretell.pytorch.deploy.spatial import split_spatial
from foretell.pytorch.deploy.stages import Staged
from foretell.pytorch.deploy.sync import Sync, synchronize
from foretell.pytorch.deploy.tensor import lone, named, said, split_tensors
from foretell.pytorch.deploy.ties import aliases, here, tied_names
from foretell.pytorch.deploy.traced import require_parameters
from foretell.pytorch.deploy.units import cut_at, together, units
from foretell.pytorch.deploy.uses import Uses, tokens_of, uses_of
from foretell.pytorch.script import default_loss
from foretell.workload.captured.weights import StepSplits

if TYPE_CHECKING:
    from foretell.pytorch.deploy.fused_step import FusedStep

Loss = Callable[[Any, Any], Any]
Call = tuple[tuple[Any, ...], dict[str, Any]]  # positional and keyword arguments of a forward
_LAYERS = (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d, torch.nn.Linear)


@dataclass
class Deployed:
    """A model on this rank, and how one step of it runs."""

    model: Any  # the part of it that is here
    optimizer: Any
    plan: Plan
    places: Places
    loss: Loss
    sync: Sync | Syncs | None = None
    pipeline: Staged | Blocks | Groups | None = None
    whole: Plan | None = None  # of which `plan` is this rank's segment, where it has segments
    scaler: Any = None
    fused: FusedStep | None = None  # where a plan fuses or orders ops
    parts: dict[str, Any] = field(default_factory=dict)  # layers split by filters or channels
    here: dict[str, Any] = field(default_factory=dict)  # parameters of this rank, by name
    usage: Any = None  # which sharded parameters a step used
    max_norm: float = 0.0  # to which gradients are clipped; not where 0
    ema: Ema | None = None  # averages of the parameters
    copies: dict[str, int] | None = None  # ranks that have the same gradient (→ clip.py)
    is_lone: bool = False  # linear layers are split one by one, where any are
    tied: frozenset[str] = frozenset()  # parameters with several names, or used by several layers
    changed: frozenset[str] = frozenset()  # layers whose outputs are changed in place
    splits: dict[int, Any] = field(default_factory=dict)  # by id: dim, sizes and group of a part
    by_graph: StepSplits | None = None  # how its captured step splits, where no layout is known
    apart: frozenset[str] = frozenset()  # not those of other data ranks: experts, other stages
    stages: PipelinedCall | None = None  # a pipeline inside the model's own call
    is_stepping: bool = False  # inside `step`, which shares buffers itself

    def step(self, inputs: tuple[Any, ...], target: Any) -> Any:
        """Train on this rank's share of a batch; its mean loss, None where that is not known."""
        self.optimizer.zero_grad()
        late = self.pipeline is not None or len(set(self.plan.shares)) > 1
        if not late:
            self._share_buffers()  # as DDP does, before the forward
        self.is_stepping = True
        try:
            with fsdp.quiet() if self.is_sharded else nullcontext():
                loss = self._there_and_back(inputs, target)
        finally:
            self.is_stepping = False
        if late:
            self._share_buffers()
        if self.plan.update == "by-message" and isinstance(self.sync, Sync):
            self.sync.update_by_message(self.optimizer.step)
            return loss
        self._settle()
        self._update()
        return loss

    def _update(self) -> None:
        """Clip, step, average: the same decision on every rank."""
        if self.scaler is not None:
            found = unscale(self.scaler, self.optimizer, self.here.values())
            dist.all_reduce(found, op=dist.ReduceOp.MAX)
        if self.max_norm:
            clip(self, self.max_norm)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        if self.ema is not None:
            self.ema.update(self.here)

    def _settle(self) -> None:
        """Make the gradients those of the whole batch."""
        if self.sync is not None:
            self.sync.finish()
        if self.usage is not None:
            self.usage.finish()
        if isinstance(self.pipeline, Segments):
            self.pipeline.settle()

    def _share_buffers(self) -> None:
        """Once a step: ranks with uneven shares take different numbers of micro-batches."""
        if self.plan.dp * self.plan.cp == 1 or isinstance(self.pipeline, Groups):
            return
        group, _ = self.places.copies()
        for module in [self.model] if self.pipeline is None else self.pipeline.modules.values():
            send_buffers(module, group=group)

    def infer(self, inputs: tuple[Any, ...]) -> dict[int, Any]:
        """What the model gives, without gradients: for each micro-batch, by its place in the batch.

        A pipeline gives it on the ranks that have its end, nothing on others.
        """
        if self.pipeline is None:
            with torch.no_grad(), mixed(self._dtype, self.places.device):
                return {0: self.model(*inputs)}
        if isinstance(self.pipeline, Groups):
            raise InputError("layers on ranks of their own only train here")
        return self.pipeline.infer(inputs)

    @property
    def trains(self) -> bool:
        """Whether the plan has a backward; one of forwards alone is for inference."""
        cells = [cell for row in self.plan.actions for cell in row]
        return not cells or any("F" not in cell for cell in cells)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Add gradients up on each rank, for accumulation in a loop of one's own."""
        with ExitStack() as stack:
            if self.sync is not None:
                stack.enter_context(self.sync.no_sync())
            if self.is_sharded and self.pipeline is None:  # torch's runtime sees to its stages
                stack.enter_context(fsdp.no_sync(self.model))
            yield

    @property
    def is_sharded(self) -> bool:
        """Whether FSDP holds the parameters."""
        return self.plan.zero >= 2 and self.plan.dp * self.plan.cp > 1

    @property
    def share(self) -> float:
        """By what this rank's mean loss counts, relative to an even share of the batch."""
        if isinstance(self.pipeline, Groups):
            return self.pipeline.share
        shares = self.plan.shares
        return shares[self.places.at["dp"]] * len(shares) / sum(shares) if shares else 1.0

    def _there_and_back(self, inputs: tuple[Any, ...], target: Any) -> Any:
        inputs, target = tuple(padded(self.plan, x) for x in inputs), padded(self.plan, target)
        if self.pipeline is not None:
            with self.no_sync():
                return self.pipeline.step(inputs, target)
        num = micro_batches(self.plan, len(inputs[0]))
        weights = weights_of(self.plan, self.places, num)
        if num == 1:
            return self._micro_batch(inputs, target, weights[0], is_last=True) / weights[0]
        pieces = zip(*(x.chunk(num) for x in inputs), strict=True)
        targets = [None] * num if target is None else target.chunk(num)
        each = zip(pieces, targets, weights, strict=True)
        total = sum(
            self._micro_batch(piece, wanted, weight, is_last=k + 1 == num)
            for k, (piece, wanted, weight) in enumerate(each)
        )
        return total / sum(weights)

    def _micro_batch(
        self, inputs: tuple[Any, ...], target: Any, weight: float, *, is_last: bool
    ) -> Any:
        """One of several; gradients leave with the last, or after it."""
        sends = is_last and self.plan.overlap is not False
        with nullcontext() if sends else self.no_sync():
            return self._backward(inputs, target, weight)

    def _backward(self, inputs: tuple[Any, ...], target: Any, weight: float) -> Any:
        with mixed(self._dtype, self.places.device):
            whole = (self.fused or self._plain)(inputs, target)
            loss = whole * weight if weight != 1.0 else whole
        (self.scaler.scale(loss) if self.scaler else loss).backward()
        return loss.detach()

    def _plain(self, inputs: tuple[Any, ...], target: Any) -> Any:
        return self.loss(self.model(*inputs), target)

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
    example: tuple[tuple[Any, ...], Any] | None = None,
    call: Call | None = None,
    own_loop: bool = False,
    batch_norm: str = "sync",
    max_norm: float = 0.0,
    ema: float = 0.0,
) -> Deployed:
    """Make a model and its optimizer run as a plan says; see the module for how it is used.

    `samples` are those of one step on this data-parallel rank (a pipeline has to know how many
    micro-batches that makes; the plan's `global_batch` tells where it is given). `pipeline` takes
    the place of the plan's schedule, for shapes that a plan has no words for. With an `example`
    batch, what a plan says of single ops is compared with the model here, not at the first step,
    and a model that does not say how it splits is split as a captured step of it shows; `call` has
    the arguments of such a step where they are more than inputs. In an `own_loop` the model is
    called by someone else: a pipeline then takes its micro-batches inside a call.
    `batch_norm`: `sync` uses the statistics of all data-parallel ranks, as one process does; with
    `local` each rank uses its own, as DistributedDataParallel does. Gradients are clipped to
    `max_norm` and parameters averaged with decay `ema`, where these are not 0.
    """
    call = call or (None if example is None else (example[0], {}))
    widest = _widest(plan)
    by_graph = None if tensor_layout else _by_graph(model, widest, call)
    tensor_layout = tensor_layout or said(model)
    uses = Uses() if by_graph else _uses(model, widest, tensor_layout, call)
    require_runnable(plan, facts(model, tensor_layout, widest.tp, by_graph, uses.outside))
    require_parameters(plan, model)
    _require_sends(plan, device)
    _require_tokens(model, widest, tensor_layout, call)
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if precision_of(plan) == "fp8":
        require_layers(model)
        if kind == "cuda":
            require_fp8("fp8", kind)
    places = Places(plan, kind)
    made_empty = agree(plan, model)
    plan = _check_names(plan, model)
    if made_empty:
        _require_fillable(plan)
    else:
        broadcast_state(model)
    whole = fsdp.held(model) if made_empty else None
    before, names = dict(model.named_parameters()), aliases(model)
    layers = norms(model)
    made = Deployed(model, optimizer, plan, places, loss or default_loss)
    made.tied, made.by_graph = frozenset(tied_names(model) | uses.outside), by_graph
    made.changed = frozenset(uses.changed)
    made.is_lone = not named(model, tensor_layout, made.tied)
    made.scaler = scaler(precision_of(plan), kind)
    if plan.groups:
        _apart(made, tensor_layout)
    elif plan.stages:
        _in_stages(made, tensor_layout, samples)
    elif plan.segments:
        _in_segments(made, tensor_layout, samples, names, call)
    elif plan.pp > 1 and own_loop:
        _inside(made, [model], tensor_layout)
        made.stages = PipelinedCall(model, plan, places, call)
        made.apart |= made.stages.others
    elif plan.pp > 1 or pipeline is not None:
        shape = shape_of(plan, places, samples, pipeline)
        stages = stages_of(model, plan, shape, places, names, call)
        _pipeline(made, stages, tensor_layout, names)
    else:
        _inside(made, [model], tensor_layout)
    if made.scaler is not None and made.pipeline is not None:
        scale_losses(made.pipeline, made.scaler, kind)
    _normalize(made, batch_norm, layers)
    _across(made, example[0] if example else None)
    if whole is not None:
        fsdp.fill(made.model, whole, torch.device(kind), deferred_of(model))
    _retie(made, names)
    repoint(optimizer, before, made.here)
    made.max_norm = _clipping(plan, max_norm)
    made.ema = Ema(ema, made.here) if ema else None
    if made.sync is not None:
        made.sync.attach(optimizer)
    tuned(optimizer, plan)
    if isinstance(made.pipeline, Segments) and example is not None:
        made.pipeline.prepare(example[0])
    if any(spec.partition(":")[0] == "cuda-graph" for spec in plan.whatifs):
        _graphed(made, example)
    if speaks_of_ops(plan, model):
        made.fused = _fused(made)
        if example is not None:
            made.fused.prepare(*example)
    return made


def _widest(plan: Plan) -> Plan:
    """A plan, or the plan of its segment that splits layers over most ranks."""
    if not plan.segments:
        return plan
    return max((one.plan for one in own_plans(plan)), key=lambda one: (one.tp, one.sp))


def facts(
    model: Any,
    layout: Mapping[str, str] | None = None,
    tp: int = 1,
    by_graph: StepSplits | None = None,
    outside: Collection[str] = (),  # parameters that are used outside their layer's call
) -> ModelFacts:
    """What of a model decides which plans can run it."""
    ways = named(model, layout or said(model), outside)
    attentions = by_graph.attentions if by_graph else 0
    layers = sum(way != SEQUENCE for way in ways.values()) or len(lone(model, tp, outside))
    return ModelFacts(
        type(model).__name__,
        tensor_layers=layers + (len(by_graph.parameters) if by_graph else 0),
        token_blocks=len(blocks(model, ways)) or attentions,
        why_no_images=no_images(model),
        expert_layers=len(experts_of(model)),
        is_by_graph=by_graph is not None,
    )


def _uses(model: Any, plan: Plan, layout: Mapping[str, str] | None, call: Call | None) -> Uses:
    """What a forward does with the layers that ranks would split."""
    layers: list[str] = []
    if plan.tp > 1:
        layers += [n for n, way in named(model, layout).items() if way != SEQUENCE]
        layers += lone(model, plan.tp)
    if plan.filter > 1 or plan.channel > 1:
        layers += [n for n, m in model.named_modules() if isinstance(m, _LAYERS)]
    return uses_of(model, dict.fromkeys(layers), call)


def _require_fillable(plan: Plan) -> None:
    """Raise where a model without values cannot be filled part by part."""
    if not fsdp.fills_parts(plan):
        raise InputError(
            f"a model on the meta device runs with zero=2 or zero=3 and dp alone, not `{plan}`",
            hint="make the model with values on every rank",
        )


def _require_sends(plan: Plan, device: str) -> None:
    """Raise where gloo would carry what it does not from the memory of a GPU.

    Stages abort there (`writev: Bad address`); FSDP of small models ended in SIGSEGV inside gloo
    (torch 2.11, two ranks on one H200).
    """
    on_gpu = (device or ("cuda" if torch.cuda.is_available() else "cpu")) == "cuda"
    staged = plan.pp > 1 or plan.stages or plan.groups or plan.segments
    what = "stages" if staged else f"zero={plan.zero}" if plan.zero >= 2 and plan.dp > 1 else ""
    if what and on_gpu and _cuda_backend() == "gloo":
        raise InputError(
            f"{what} on ranks that share a GPU: gloo does not send what is in its memory",
            hint="give each rank a GPU of its own (NCCL), or run with --device cpu",
        )


def _cuda_backend() -> str:
    """What carries messages of CUDA tensors: `gloo`, or as in `cpu:gloo,cuda:nccl`."""
    word = str(dist.get_backend_config())
    each = dict(part.split(":", 1) for part in word.split(",") if ":" in part)
    return each.get("cuda", word)


def _require_tokens(
    model: Any, plan: Plan, layout: Mapping[str, str] | None, call: Call | None
) -> None:
    """Raise where ranks cannot share the tokens of a block evenly."""
    over = {"cp": plan.cp, "sp": plan.tp if plan.sp else 1}
    if max(over.values()) == 1:
        return
    found = tokens_of(model, blocks(model, named(model, layout)) or units(model), call)
    for word, size in over.items():
        odd = next((name for name, tokens in found.items() if tokens % size), None)
        if odd is not None:
            raise InputError(
                f"{word}: `{odd or type(model).__name__}` is given {found[odd]} tokens, which "
                f"{size} ranks cannot share evenly",
                hint="choose a number of ranks that divides them, or pad the batch",
            )


def _by_graph(model: Any, plan: Plan, call: Call | None) -> StepSplits | None:
    """How a captured step of a model splits, where the plan asks for more than is known of it."""
    asks_tokens = plan.cp > 1 or (plan.sp and plan.tp > 1)
    if call is None or plan.tp * plan.cp == 1 or plan.pp > 1 or plan.stages or plan.groups:
        return None
    ways = named(model, said(model))
    layers = any(w != SEQUENCE for w in ways.values()) or bool(lone(model, plan.tp))
    known = bool(blocks(model, ways)) if asks_tokens else layers
    if known and not (experts_of(model) and not asks_tokens):
        return None
    try:
        found = step_splits(model, *call)
    except Exception:  # what cannot be captured is split as far as its structure shows
        return None
    splits = any(one.kind != "words" for one in found.parameters.values())
    return found if found.attentions and (asks_tokens or splits) else None


def _graphed(made: Deployed, example: tuple[tuple[Any, ...], Any] | None) -> None:
    """Let forward and backward be replayed as CUDA graphs; batches have one shape from then on."""
    if made.places.device != "cuda" or example is None:
        raise InputError(
            "cuda-graph needs a GPU, and a batch to record",
            hint="run it with --device cuda, or deploy(…, example=(inputs, target))",
        )
    inputs = example[0][0]
    num = micro_batches(made.plan, len(inputs))
    pieces = tuple(x.chunk(num)[0].clone() for x in example[0])
    dtype = dtype_of(made._dtype)
    short = torch.autocast("cuda", dtype=dtype, enabled=dtype is not None, cache_enabled=False)
    with untouched(made.model), short:
        torch.cuda.make_graphed_callables(made.model, pieces)


def _clipping(plan: Plan, most: float) -> float:
    if most and plan.update == "by-message":
        raise InputError(
            "gradients cannot be clipped with update=by-message: it updates before all are there",
            hint="leave out the one or the other",
        )
    return most


def _fused(made: Deployed) -> FusedStep:
    """The step with its ops fused and ordered; gradients go to the buckets as they are made."""
    from foretell.pytorch.deploy.fused_step import FusedStep  # loads torch's compiler

    if made.tied:
        raise InputError(
            f"fused or ordered ops: `{min(made.tied)}` is tied, its gradient made in two places",
            hint="untie them, or leave `regions` and `late` out of the plan",
        )
    buckets = made.sync.buckets if isinstance(made.sync, Sync) else None
    ready = buckets.gave if buckets is not None else None
    return FusedStep(made.model, made.loss, made.plan, ready=ready)


def _pipeline(
    made: Deployed, stages: Any, layout: Mapping[str, str] | None, names: Mapping[str, str]
) -> None:
    """Run the stages of this rank on torch's pipeline runtime."""
    modules = stages.modules
    made.model = together(modules)
    _inside(made, list(modules.values()), layout)
    _require_apart(made.plan, modules)
    made.here = here(modules.values(), names)
    shared = [(made.here[name], ranks) for name, ranks in stages.held]
    made.pipeline = runtime(stages, made.plan, made.places, made.loss, shared)


def _in_stages(made: Deployed, layout: Mapping[str, str] | None, samples: int) -> None:
    """Stages placed freely: each on the ranks that the plan names."""
    plan, places = made.plan, made.places
    wanted = plan.global_batch or samples
    if samples and samples != wanted:
        raise InputError(
            f"a batch of {samples} samples for a plan of {wanted} a step",
            hint=f"let the batch have {wanted}, or schedule with another micro_batch or -n",
        )
    found = place_stages(made.model, plan, dist.get_rank())
    _inside(made, list(found.modules.values()), layout)
    lossy = mixing(found.modules, plan, places, made.loss)
    made.model, made.here = together(found.modules), found.parameters
    made.splits = found.splits
    device = torch.device(places.device)
    if found.pipeline.is_line and found.is_plain and not found.shared:
        made.pipeline = Staged(found.pipeline, found.modules, lossy, device=device)
    else:
        made.pipeline = Blocks(
            found.pipeline, found.modules, lossy, device=device, shared=found.shared
        )


def _in_segments(
    made: Deployed,
    layout: Mapping[str, str] | None,
    samples: int,
    names: Mapping[str, str],
    call: Call | None,
) -> None:
    """Stages with meshes of their own; this rank goes by the plan of its segment from here on."""
    plan, device = made.plan, made.places.device
    whole = samples or plan.global_batch
    if not whole or plan.global_batch not in (0, whole):
        raise InputError(
            f"a batch of {samples} samples for a plan of {plan.global_batch} a step",
            hint="every rank is given the whole batch, and takes its own samples itself",
        )
    parts = segments_of(plan.but(global_batch=whole), 0)
    every = [Places(one.plan.but(pp=1, layers=()), device, one.ranks) for one in parts]
    at = place(plan, dist.get_rank())["pp"]
    shape, pieces = shaped(made.model, parts, whole, call)
    homes: dict[str, list[int]] = {name: [] for name in names.values()}
    for stage, piece in enumerate(pieces):
        for name in {names[n] for n, _ in piece.named_parameters()}:
            homes[name].append(stage)
    made.whole, made.plan, made.places, mine = plan, parts[at].plan, every[at], {at: pieces[at]}
    made.model = together(mine)
    _inside(made, [*mine.values()], layout)
    lossy = mixing(mine, made.plan, made.places, made.loss)
    made.here = here(mine.values(), names)
    made.pipeline = Segments(shape, mine, lossy, parts, device=torch.device(device))
    tied = [
        (made.here[name], tuple(sorted(r for s in stages for r in parts[s].ranks)))
        for name, stages in homes.items()
        if len(stages) > 1 and at in stages
    ]
    for name, stages in homes.items():
        if len(stages) > 1 and any(parts[s].plan.zero for s in stages):
            raise InputError(
                f"segments {' and '.join(map(str, stages))} share `{name}` and shard it each",
                hint="take zero=0 there, or let layers with tied weights be in one segment",
            )
    made.pipeline.tie(tied)


def _apart(made: Deployed, layout: Mapping[str, str] | None) -> None:
    """Runs of layers on ranks of their own; they keep their ranks together themselves."""
    plan, places = made.plan, made.places
    pieces = cut_at(made.model, [(row[0], row[1]) for row in plan.groups])
    held = {q: m for q, m in enumerate(pieces) if f"{dist.get_rank()}" in _ranks(plan.groups[q])}
    _inside(made, list(held.values()), layout)
    lossy = mixing(held, plan, places, made.loss)
    made.pipeline = Groups(plan, pieces, lossy, torch.device(places.device))
    made.model, made.sync = together(held), made.pipeline.sync
    made.splits = made.pipeline.splits


def _ranks(row: tuple[str, ...]) -> set[str]:
    return {part.partition(":")[0] for part in row[3:]}


def _inside(made: Deployed, modules: list[Any], layout: Mapping[str, str] | None) -> None:
    """What changes the layers themselves: splits, recompute, regions, formats."""
    plan, places = made.plan, made.places
    names = {spec.partition(":")[0] for spec in plan.whatifs}
    if plan.ep > 1:
        _shard_experts(made)
    if made.by_graph is not None:
        GraphSplit(made.model, places.split_mesh(), made.by_graph, sp=plan.sp)
    for module in modules:
        ways = named(
            module, layout, made.tied
        )  # a stage may have none of the layers that are split
        if made.by_graph is None and plan.tp > 1 and (ways or made.is_lone):
            has_blocks = bool(blocks(module, ways))
            tokens = plan.sp and has_blocks
            split_tensors(
                module, places.line("tp"), layout, tokens=tokens, tied=made.tied,
                changed=made.changed,
            )  # fmt: skip
        if made.by_graph is None and plan.cp > 1 and blocks(module, ways):
            split_context(module, places.line("cp"), ways)
        if max(plan.spatial, default=1) > 1:
            group = places.image_group() if plan.dp > 1 else None
            parts = [plan.degrees()[a] for a in IMAGE[: len(plan.spatial)]]
            among = dist.new_group() if plan.dp > 1 and norms(module) else None
            split_spatial(module, parts, group, among)
        for way in ("filter", "channel"):
            if getattr(plan, way) > 1:
                group = places.group(way)
                found = split_channels(module, _all_layers(module, way, plan, made.tied), group)
                made.parts |= found
                made.splits |= {id(p): how for p, how in split_parameters(module, found, group)}
        if precision_of(plan) == "fp8":
            use_fp8(module)
        if plan.recompute != "none" or "checkpoint" in names:
            mine = list(units(module).items())
            some = dict(mine[: plan.recompute_layers or len(mine)])
            recompute(some, selective=plan.recompute == "selective")
        if plan.regions and not speaks_of_ops(plan, made.model):
            compile_regions(module, plan.regions)
        if "channels-last" in names:
            module.to(memory_format=torch.channels_last)
        if "compile" in names or plan.compile:
            module.compile()
    if "tf32" in names or precision_of(plan) == "tf32":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    if plan.precision == "fp32-ieee":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False


def _shard_experts(made: Deployed) -> None:
    """Let data-parallel ranks share the experts of every layer."""
    mesh = made.places.expert_mesh()
    for name in experts_of(made.model):
        module = made.model.get_submodule(name)
        Dispatched(name, module, mesh)
        made.apart |= {f"{name}.{key}" for key, _ in module.named_parameters()}


def _all_layers(model: Any, way: str, plan: Plan, tied: Collection[str]) -> dict[str, str]:
    """Every layer that has enough filters or channels; the first reads too few channels."""
    dim, size = (0 if way == "filter" else 1), getattr(plan, way)
    tied = {*tied, *tied_names(model)}
    closed = tuple(f"{n}." for n, m in model.named_modules() if isinstance(m, WHOLE))
    found = {
        n: way
        for n, m in model.named_modules()
        if isinstance(m, _LAYERS)
        and "weight" in m._parameters  # not made of others
        and m.weight.shape[dim] >= size
        and getattr(m, "groups", 1) == 1
        and not {f"{n}.weight", f"{n}.bias"} & tied
        and not n.startswith(closed)
    }
    if not found:
        raise InputError(f"no layer of the model can be split by {way} over {size} ranks")
    return found


def _across(made: Deployed, inputs: tuple[Any, ...] | None) -> None:
    """What keeps data-parallel ranks together."""
    plan, places = made.plan, made.places
    if plan.dp * plan.cp == 1:
        return
    if plan.zero >= 2:
        options = {"keep": plan.zero == 2, "dtype": dtype_of(precision_of(plan))}
        options |= {"reduce_dtype": dtype_of(plan.grad_dtype), "offload": plan.offload}
        stages = made.pipeline.modules.values() if made.pipeline else [made.model]
        if made.pipeline is None:  # the first rank says: others may have no values to try it with
            box = [fsdp.always_called(made.model, inputs) if dist.get_rank() == 0 else None]
            dist.broadcast_object_list(box, src=0)
            options["in_units"] = box[0]
        for module in stages:
            fsdp.shard(module, places.sharding(), **options)
        group, _ = places.copies()
        made.usage = fsdp.Usage(stages, group)
        if made.pipeline is None:
            share_buffers(made.model, group, unless=lambda: made.is_stepping)
        return
    names = {n for n, p in made.model.named_parameters() if p.requires_grad} - made.apart
    group, order = places.copies()
    choices = _choices(plan, names, order)
    made.sync = synchronize(
        made.model,
        layout=_layout(plan, names, choices),
        choices=choices,
        shares=[plan.shares[place] for place in order] if plan.shares else None,
        group=group,
        dtype=dtype_of(plan.grad_dtype),
        own=_factor_group(plan, group),
        apart=made.apart,
        is_stepping=lambda: made.is_stepping,
    )


def _factor_group(plan: Plan, group: Any) -> Any:
    """A group of their own for factors, on every rank where any has some."""
    if not any(row[1:] == ("factors",) for row in plan.sync):
        return None
    ranks = dist.get_process_group_ranks(group)
    return new_groups([ranks])[tuple(ranks)]


def _layout(plan: Plan, names: set[str], choices: Mapping[str, str]) -> Layout | float:
    """The plan's buckets, of those parameters that are here and reduced so."""
    if not plan.buckets:
        return plan.bucket_mb * 2**20
    reduced = {n for n in names if choices.get(n, "all-reduce") == "all-reduce"}
    kept = [tuple(n for n in bucket if n in reduced) for bucket in plan.buckets]
    parts = plan.parts or (1,) * len(kept)
    here = [(bucket, n) for bucket, n in zip(kept, parts, strict=True) if bucket]
    return Layout(tuple(b for b, _ in here), parts=tuple(n for _, n in here))


def _choices(plan: Plan, names: set[str], order: list[int]) -> dict[str, str]:
    """How each parameter is kept together; servers as their group numbers them."""
    if plan.zero == 1:
        return dict.fromkeys(names, "sharded")
    served = {f"ps:{place}": f"ps:{rank}" for rank, place in enumerate(order)}
    return {name: served.get(way, way) for name, way in plan.sync if name in names}


def _check_names(plan: Plan, model: Any) -> Plan:
    """The plan with the model's names for parameters; raise where it has no such parameter."""
    known = dict(model.named_parameters())

    def own(name: str) -> str:
        found = next((word for word in spoken(name) if word in known), None)
        if found is None:
            raise unknown("parameter in the plan", name, known)
        return found

    sync = tuple((own(row[0]), *row[1:]) for row in plan.sync)
    return plan.but(sync=sync, buckets=tuple(tuple(map(own, b)) for b in plan.buckets))


def _retie(made: Deployed, names: Mapping[str, str]) -> None:
    """Find the parameters again: FSDP has put its own in their places."""
    before = {id(p): name for name, p in made.here.items()}
    made.here = _here(made, names)
    if isinstance(made.pipeline, Staged | Blocks):
        shared = made.pipeline.shared
        made.pipeline.shared = [(made.here[before[id(p)]], group) for p, group in shared]


def _here(made: Deployed, names: Mapping[str, str]) -> dict[str, Any]:
    """Parameters by the names they had in the whole model; of tied ones, the first."""
    if made.plan.stages:
        return made.here
    stages = [made.model] if made.pipeline is None else list(made.pipeline.modules.values())
    return here(stages, names)


def _require_apart(plan: Plan, modules: Mapping[int, Any]) -> None:
    """Raise where stages of one rank share a parameter that FSDP would shard twice."""
    if plan.zero < 2 or plan.dp * plan.cp == 1:
        return
    seen: dict[int, int] = {}
    for stage, module in modules.items():
        for name, parameter in module.named_parameters():
            if seen.setdefault(id(parameter), stage) != stage:
                raise InputError(
                    f"zero={plan.zero}: stages {seen[id(parameter)]} and {stage} of one rank share "
                    f"`{name}`, which FSDP can shard only once",
                    hint="take zero=1, or let stages with tied weights be on different ranks",
                )


def _normalize(made: Deployed, way: str, layers: list[str]) -> None:
    """Let batch norms see the samples of all data-parallel ranks; `layers`: of the whole model."""
    if way not in BATCH_NORM:
        raise unknown("batch_norm", way, BATCH_NORM)
    plan, places = made.plan, made.places
    if way == "local" or not layers or plan.regions or plan.late:
        return  # a plan of single ops names those of the model as it is
    if isinstance(made.pipeline, Groups):
        made.pipeline.synchronize_norms()
        return
    if (plan.dp == 1 and made.whole is None) or max(plan.spatial, default=1) > 1:
        return
    if len(set(plan.shares)) > 1 and plan.micro_batch:
        raise InputError(
            f"`{layers[0]}` needs the statistics of all ranks, and with uneven shares and "
            f"micro_batch={plan.micro_batch} they take different numbers of micro-batches",
            hint="leave micro_batch out, or take batch_norm=local",
        )
    ranks = dist.get_process_group_ranks(places.group("dp")) if plan.dp > 1 else []
    groups = new_groups([ranks] if ranks else [])  # of segments, all ask at once
    if not ranks:
        return
    group = groups[tuple(ranks)]
    weight = 1.0 if made.is_sharded else made.share
    stages = [made.model] if made.pipeline is None else list(made.pipeline.modules.values())
    for stage in {id(s): s for s in stages}.values():
        synchronize_norms(stage, group, weight)
