"""A plan made to run: a model and its optimizer as the plan wants them on this rank.

    deployed = deploy(model, optimizer, plan)
    loss = deployed.step((x,), y)

    model, optimizer = foretell.parallelize(model, optimizer, "dp=2,tp=2,zero=1")
    for x, y in batches:                            # of this data-parallel rank
        loss(model(x), y).backward()                # gradients are whole when it returns
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

`model.foretell` is the `Deployed`: `no_sync()` for accumulation, `share` of this rank's loss.

Every rank calls it with the same model, optimizer and plan, inside an initialised process group.
What the plan asks for and this cannot do is refused before anything is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from foretell.errors import InputError, unknown
from foretell.plan import Plan, read
from foretell.plan.plan import segments_of
from foretell.pytorch.deploy import shard as fsdp
from foretell.pytorch.deploy.actions import Pipeline
from foretell.pytorch.deploy.batch_norm import WORDS as BATCH_NORM
from foretell.pytorch.deploy.batch_norm import norms, synchronize_norms
from foretell.pytorch.deploy.blocks import Blocks
from foretell.pytorch.deploy.buckets import (
    Layout,
    broadcast_state,
    send_buffers,
    sent_buffers,
    share_buffers,
)
from foretell.pytorch.deploy.channels import all_layers, split_channels
from foretell.pytorch.deploy.collective import (
    IMAGE,
    Places,
    agree,
    new_groups,
    one_more,
    place,
    said_by,
)
from foretell.pytorch.deploy.deferred import deferred_of
from foretell.pytorch.deploy.experts import Dispatched, experts_of
from foretell.pytorch.deploy.forward_stages import PipelinedCall
from foretell.pytorch.deploy.graph_split import GraphSplit
from foretell.pytorch.deploy.grouped import Groups, Segments, shaped
from foretell.pytorch.deploy.optimizer import Ema, clip, repoint, tuned
from foretell.pytorch.deploy.pipelined import (
    Stages,
    micro_batches,
    mixing,
    padded,
    pieces,
    placed_stages,
    runtime,
    shape_of,
    stages_of,
    weights_of,
)
from foretell.pytorch.deploy.precision import (
    dtype_of,
    mixed,
    precision_of,
    scale_losses,
    scaler,
    unscale,
    use_fp8,
)
from foretell.pytorch.deploy.recompute import recompute
from foretell.pytorch.deploy.regions import (
    FusedStep,
    compile_regions,
    speaks_of_ops,
)
from foretell.pytorch.deploy.requirements import (
    Splitting,
    check_names,
    require_apart,
    require_batch,
    require_deployable,
    require_fillable,
    require_own_loop,
)
from foretell.pytorch.deploy.spatial import split_spatial
from foretell.pytorch.deploy.sync import Sync, synchronize
from foretell.pytorch.deploy.tensor import blocks, named, split_context, split_tensors
from foretell.pytorch.deploy.units import cut_at, together, units
from foretell.pytorch.deploy.uses import (
    Call,
    aliases,
    here,
    untouched,
)
from foretell.pytorch.script import default_loss

Loss = Callable[[Any, Any], Any]


@dataclass
class Deployed:
    """A model on this rank, and how one step of it runs."""

    model: Any  # the part of it that is here
    optimizer: Any
    plan: Plan
    places: Places
    loss: Loss
    sync: Sync | None = None
    pipeline: Blocks | None = None
    whole: Plan | None = None  # of which `plan` is this rank's segment, where it has segments
    scaler: Any = None
    fused: FusedStep | None = None  # where a plan fuses or orders ops
    here: dict[str, Any] = field(default_factory=dict)  # parameters of this rank, by name
    usage: Any = None  # which sharded parameters a step used
    max_norm: float = 0.0  # to which gradients are clipped; not where 0
    ema: Ema | None = None  # averages of the parameters
    copies: dict[str, int] | None = None  # ranks that have the same gradient (→ `clip`)
    split: Splitting = field(default_factory=Splitting)  # what is known of how it splits
    apart: frozenset[str] = frozenset()  # not those of other data ranks: experts, other stages
    stages: PipelinedCall | None = None  # a pipeline inside the model's own call
    has_run: bool = False
    is_stepping: bool = False  # inside `step`, which shares buffers itself
    buffered: list[Any] | None = None  # what has buffers to share, known from the first step on

    def step(self, inputs: tuple[Any, ...], target: Any) -> Any:
        """Train on this rank's share of a batch; its mean loss, None where that is not known."""
        self.optimizer.zero_grad()
        late = self.pipeline is not None or len(set(self.plan.shares)) > 1
        if not late:
            self._share_buffers()  # as DDP does, before the forward
        self.is_stepping = True
        try:
            loss = self._there_and_back(inputs, target)
        finally:
            self.is_stepping = False
        if late:
            self._share_buffers()
        if self.plan.update == "by-message" and self.sync is not None:
            self.sync.update_by_message(self.optimizer.step)
            return loss
        for part in (self.sync, self.usage):  # make the gradients those of the whole batch
            if part is not None:
                part.finish()
        if self.pipeline is not None:
            self.pipeline.settle()
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

    def _share_buffers(self) -> None:
        """Once a step: ranks with uneven shares take different numbers of micro-batches."""
        if self.buffered is None:
            has_copies = self.plan.dp * self.plan.cp > 1
            self.buffered = [m for m in self.modules if has_copies and sent_buffers(m)]
        for module in self.buffered:
            send_buffers(module, group=self.places.copies()[0])

    @property
    def modules(self) -> list[Any]:
        """What is here: the model, or stages of it."""
        return [self.model] if self.pipeline is None else list(self.pipeline.modules.values())

    def infer(self, inputs: tuple[Any, ...]) -> dict[int, Any]:
        """What the model gives, without gradients: for each micro-batch, by its place in the batch.

        A pipeline gives it on the ranks that have its end, nothing on others.
        """
        if self.pipeline is None:
            with torch.no_grad(), mixed(self._dtype, self.places.device):
                return {0: self.model(*inputs)}
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
            if self.is_sharded and self.pipeline is None:  # a pipeline sees to its stages
                stack.enter_context(fsdp.no_sync(self.model))
            yield

    @property
    def is_sharded(self) -> bool:
        """Whether FSDP holds the parameters."""
        return self.plan.zero >= 2 and self.plan.dp * self.plan.cp > 1

    @property
    def share(self) -> float:
        """By what this rank's mean loss counts, relative to an even share of the batch."""
        if isinstance(self.pipeline, Groups | Segments):
            return self.pipeline.share
        shares = self.plan.shares
        return shares[self.places.at["dp"]] * len(shares) / sum(shares) if shares else 1.0

    def _there_and_back(self, inputs: tuple[Any, ...], target: Any) -> Any:
        inputs, target = tuple(padded(self.plan, x) for x in inputs), padded(self.plan, target)
        if self.pipeline is not None:
            with self.no_sync():
                return self.pipeline.step(inputs, target)
        num, total = micro_batches(self.plan, len(inputs[0])), 0.0
        weights = weights_of(self.plan, self.places, num)
        for k, piece in enumerate(pieces(inputs, target, num)):
            sends = k + 1 == num and self.plan.overlap is not False  # with the last, or after it
            with nullcontext() if sends else self.no_sync():
                total += self._backward(*piece, weights[k])
        if self.is_sharded and self.plan.overlap is False:
            fsdp.reduce(self.model)
        return total / sum(weights)

    def _backward(self, inputs: tuple[Any, ...], target: Any, weight: float) -> Any:
        with mixed(self._dtype, self.places.device):
            whole = (self.fused or self._plain)(inputs, target)
            loss = whole * weight if weight != 1.0 else whole
        (self.scaler.scale(loss) if self.scaler else loss).backward()
        return loss.detach()

    def _plain(self, inputs: tuple[Any, ...], target: Any) -> Any:
        try:
            output = self.model(*inputs)
        except (RuntimeError, ValueError) as error:
            if self.plan.tp == 1 or self.has_run or isinstance(error, InputError):
                raise
            raise InputError(
                f"tp={self.plan.tp}: {type(self.model).__name__} does not run on parts of its "
                f"layers: {str(error).splitlines()[0]}",
                hint="choose a tp that divides its heads",
            ) from error
        self.has_run = True
        return self.loss(output, target)

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
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    split = require_deployable(model, plan, kind, tensor_layout, call)
    places = Places(plan, kind)
    whole = None
    if agree(plan, model):  # some ranks have no values: they are filled in part by part
        require_fillable(plan)
        whole = fsdp.held(model)
    else:
        broadcast_state(model)
    plan = check_names(plan, model)
    before, names, layers = dict(model.named_parameters()), aliases(model), norms(model)
    made = Deployed(model, optimizer, plan, places, loss or default_loss, split=split)
    made.scaler = scaler(precision_of(plan), kind)
    if plan.pp > 1 and own_loop:
        _inside(made, [model])
        made.stages = PipelinedCall(model, plan, places, call)
        made.apart |= made.stages.others
    else:
        _cut(made, names, samples, pipeline, call)
    _normalize(made, batch_norm, layers)
    _across(made, example[0] if example else None)
    if whole is not None:
        fsdp.fill(made.model, whole, torch.device(kind), deferred_of(model))
    _retie(made, names)
    repoint(optimizer, before, made.here)
    if max_norm and plan.update == "by-message":
        raise InputError(
            "gradients cannot be clipped with update=by-message: it updates before all are there",
            hint="leave out the one or the other",
        )
    made.max_norm = max_norm
    made.ema = Ema(ema, made.here) if ema else None
    _make_ready(made, model, example)
    return made


def _cut(
    made: Deployed,
    names: Mapping[str, str],
    samples: int,
    pipeline: Pipeline | None,
    call: Call | None,
) -> None:
    """Leave on this rank the part of the model that its plan gives it, layers split as it says."""
    plan = made.plan
    if plan.groups:
        _apart(made)
    elif plan.stages:
        require_batch(plan, samples)
        _pipeline(made, placed_stages(made.model, plan, names, dist.get_rank()), names)
    elif plan.segments:
        _in_segments(made, samples, names, call)
    elif plan.pp > 1 or pipeline is not None:
        shape = shape_of(plan, made.places, samples, pipeline)
        _pipeline(made, stages_of(made.model, plan, shape, made.places, names, call), names)
    else:
        if samples:
            micro_batches(plan, samples)  # raises where they do not come out even
        _inside(made, [made.model])
    if made.scaler is not None and made.pipeline is not None:
        scale_losses(made.pipeline, made.scaler, made.places.device)


def _make_ready(made: Deployed, model: Any, example: tuple[tuple[Any, ...], Any] | None) -> None:
    """What is done around the steps of a model that is split; `model`: as it was given."""
    plan = made.plan if made.whole is None else made.whole
    for one in (made.sync, made.pipeline):
        if one is not None:
            one.attach(made.optimizer)
    tuned(made.optimizer, plan)
    if isinstance(made.pipeline, Segments) and example is not None:
        made.pipeline.prepare(example[0])
    if any(spec.partition(":")[0] == "cuda-graph" for spec in plan.whatifs):
        _graphed(made, example)
    if speaks_of_ops(plan, model):
        made.fused = _fused(made)
        if example is not None:
            made.fused.prepare(*example)


def _graphed(made: Deployed, example: tuple[tuple[Any, ...], Any] | None) -> None:
    """Let forward and backward be replayed as CUDA graphs; batches have one shape from then on."""
    if made.places.device != "cuda" or example is None:
        raise InputError(
            "cuda-graph needs a GPU, and a batch to record",
            hint="run it with --device cuda, or deploy(…, example=(inputs, target))",
        )
    inputs = example[0][0]
    num = micro_batches(made.plan, len(inputs))
    first = tuple(x.chunk(num)[0].clone() for x in example[0])
    dtype = dtype_of(made._dtype)
    short = torch.autocast("cuda", dtype=dtype, enabled=dtype is not None, cache_enabled=False)
    with untouched(made.model), short:
        torch.cuda.make_graphed_callables(made.model, first)


def _fused(made: Deployed) -> FusedStep:
    """The step with its ops fused and ordered; gradients go to the buckets as they are made."""
    tied = made.split.tied
    if tied:
        raise InputError(
            f"fused or ordered ops: `{min(tied)}` is tied, its gradient made in two places",
            hint="untie them, or leave `regions` and `late` out of the plan",
        )
    buckets = made.sync.buckets if made.sync is not None else None
    ready = buckets.gave if buckets is not None else None
    return FusedStep(made.model, made.loss, made.plan, ready=ready)


def _pipeline(made: Deployed, stages: Stages, names: Mapping[str, str]) -> None:
    """Run the stages of this rank."""
    modules = stages.modules
    made.model = together(modules)
    _inside(made, list(modules.values()))
    require_apart(made.plan, modules)
    made.here = here(modules.values(), names)
    shared = [(made.here[name], ranks) for name, ranks in stages.held]
    made.pipeline = runtime(stages, made.plan, made.places, made.loss, shared)


def _in_segments(
    made: Deployed,
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
    own = parts[at].plan.but(shares=())  # which losses are weighed by
    made.whole, made.plan, made.places, mine = plan, own, every[at], {at: pieces[at]}
    made.model = together(mine)
    _inside(made, [*mine.values()])
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


def _apart(made: Deployed) -> None:
    """Runs of layers on ranks of their own; they keep their ranks together themselves."""
    plan, places = made.plan, made.places
    pieces = cut_at(made.model, [(row[0], row[1]) for row in plan.groups])
    own = f"{dist.get_rank()}:"
    held = {
        q: m for q, m in enumerate(pieces) if any(s.startswith(own) for s in plan.groups[q][3:])
    }
    _inside(made, list(held.values()))
    lossy = mixing(held, plan, places, made.loss)
    made.pipeline = Groups(plan, pieces, lossy, torch.device(places.device))
    made.model = together(held)


def _inside(made: Deployed, modules: list[Any]) -> None:
    """What changes the layers themselves: splits, recompute, regions, formats."""
    plan, places, split = made.plan, made.places, made.split
    names = {spec.partition(":")[0] for spec in plan.whatifs}
    mesh = places.expert_mesh() if plan.ep > 1 else None
    for name in experts_of(made.model) if mesh is not None else ():
        module = made.model.get_submodule(name)
        if split.by_graph is None:
            Dispatched(name, module, mesh)
        made.apart |= {f"{name}.{key}" for key, _ in module.named_parameters()}
    if split.by_graph is not None:
        GraphSplit(
            made.model, places.split_mesh(), split.by_graph, sp=plan.sp, expert_mesh=mesh
        )  # fmt: skip
    for module in modules:
        # a stage may have none of the layers that are split
        ways = named(module, split.layout, split.tied)
        if split.by_graph is None and plan.tp > 1 and (ways or split.is_lone):
            has_blocks = bool(blocks(module, ways))
            tokens = plan.sp and has_blocks
            split_tensors(
                module, places.line("tp"), split.layout, tokens=tokens, tied=split.tied,
                changed=split.changed,
            )  # fmt: skip
        if split.by_graph is None and plan.cp > 1 and blocks(module, ways):
            split_context(module, places.line("cp"), ways)
        if max(plan.spatial, default=1) > 1:
            group = places.image_group() if plan.dp > 1 else None
            parts = [plan.degrees()[a] for a in IMAGE[: len(plan.spatial)]]
            among = dist.new_group() if plan.dp > 1 and norms(module) else None
            split_spatial(module, parts, group, among, made.share)
        for way in ("filter", "channel"):
            if getattr(plan, way) > 1:
                layers = all_layers(module, way, getattr(plan, way), split.tied)
                split_channels(module, layers, places.group(way))
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


def _across(made: Deployed, inputs: tuple[Any, ...] | None) -> None:
    """What keeps data-parallel ranks together."""
    plan, places = made.plan, made.places
    if plan.dp * plan.cp == 1:
        return
    if plan.zero >= 2:
        options = {"keep": plan.zero == 2, "dtype": dtype_of(precision_of(plan))}
        options |= {"reduce_dtype": dtype_of(plan.grad_dtype), "offload": plan.offload}
        stages = made.modules
        if made.pipeline is None:  # the first rank says: others may have no values to try it with
            is_first = dist.get_rank() == 0
            mine = fsdp.always_called(made.model, inputs) if is_first else None
            options["in_units"] = said_by(0, mine)
        options["apart"] = {p for n, p in made.model.named_parameters() if n in made.apart}
        for module in stages:
            fsdp.shard(module, places.sharding(), **options)
        group, _ = places.copies()
        made.usage = fsdp.Usage(stages, group)
        if made.pipeline is None:
            share_buffers(made.model, group, unless=lambda: made.is_stepping)
        return
    names = {n for n, p in made.model.named_parameters() if p.requires_grad} - made.apart
    group, order = places.copies()
    choices = dict.fromkeys(names, "sharded") if plan.zero == 1 else {}
    if plan.zero != 1:  # servers as their group numbers them
        served = {f"ps:{place}": f"ps:{rank}" for rank, place in enumerate(order)}
        choices = {name: served.get(way, way) for name, way in plan.sync if name in names}
    has_factors = any(row[1:] == ("factors",) for row in plan.sync)
    made.sync = synchronize(
        made.model,
        layout=_layout(plan, names, choices),
        choices=choices,
        shares=[plan.shares[place] for place in order] if plan.shares else None,
        group=group,
        dtype=dtype_of(plan.grad_dtype),
        own=one_more(group) if has_factors else None,  # a group of theirs, on every rank
        apart=made.apart,
        is_stepping=lambda: made.is_stepping,
    )


def _layout(plan: Plan, names: set[str], choices: Mapping[str, str]) -> Layout | float:
    """The plan's buckets, of those parameters that are here and reduced so."""
    if not plan.buckets:
        return plan.bucket_mb * 2**20
    reduced = {n for n in names if choices.get(n, "all-reduce") == "all-reduce"}
    kept = [tuple(n for n in bucket if n in reduced) for bucket in plan.buckets]
    parts = plan.parts or (1,) * len(kept)
    here = [(bucket, n) for bucket, n in zip(kept, parts, strict=True) if bucket]
    return Layout(tuple(b for b, _ in here), parts=tuple(n for _, n in here))


def _retie(made: Deployed, names: Mapping[str, str]) -> None:
    """Find the parameters again: FSDP has put its own in their places."""
    before = {id(p): name for name, p in made.here.items()}
    made.here = here(made.modules, names)
    if made.pipeline is not None:
        shared = made.pipeline.shared
        made.pipeline.shared = [(made.here[before[id(p)]], group) for p, group in shared]


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
    if plan.dp == 1 and made.whole is None:
        return
    if len(set(plan.shares)) > 1 and plan.micro_batch:
        raise InputError(
            f"`{layers[0]}` needs the statistics of all ranks, and with uneven shares and "
            f"micro_batch={plan.micro_batch} they take different numbers of micro-batches",
            hint="leave micro_batch out, or take batch_norm=local",
        )
    if max(plan.spatial, default=1) > 1:  # done with the split of the images
        return
    ranks = dist.get_process_group_ranks(places.group("dp")) if plan.dp > 1 else []
    groups = new_groups([ranks] if ranks else [])  # of segments, all ask at once
    if not ranks:
        return
    group = groups[tuple(ranks)]
    weight = 1.0 if made.is_sharded or made.whole is not None else made.share
    for stage in {id(s): s for s in made.modules}.values():
        synchronize_norms(stage, group, weight)


def parallelize(model: Any, optimizer: Any, plan: Plan | str, **options: Any) -> tuple[Any, Any]:
    """The model and optimizer as a plan wants them on this rank, for a plain loop over them.

    Every rank calls it inside an initialised process group; options are those of `deploy`.
    """
    made = in_own_loop(model, optimizer, read(plan) if isinstance(plan, str) else plan, **options)
    object.__setattr__(made.model, "foretell", made)
    return made.model, optimizer


def in_own_loop(model: Any, optimizer: Any, plan: Plan, **options: Any) -> Deployed:
    """A model deployed for a loop that is not ours: gradients are whole when a backward ends."""
    require_own_loop(plan)
    made = deploy(model, optimizer, plan, own_loop=True, **options)
    if made.stages is not None:
        for one in getattr(optimizer, "each", [optimizer]):
            made.stages.share_state(one)
        made.stages.sync = made.sync
    if made.sync is not None:
        made.sync.finish_with_backward(made.model.parameters(), optimizer)
    if made.usage is not None:
        made.usage.average_in_backward(made.model)
        optimizer.register_step_pre_hook(lambda *_: made.usage.finish())
    return made
