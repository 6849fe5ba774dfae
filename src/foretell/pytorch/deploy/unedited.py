"""An unchanged training script, run by a plan: its models are deployed as it calls them.

Every rank runs the script; to it the job is one rank and each batch is whole. The
first time it calls a model that an optimizer of its trains, the model is deployed; from then on the
model computes on the rank's share of the samples (→ whole.py). What the script does between
calls, every rank does alike, so losses and parameters are those of `python script`.

It sees a job of one rank, whose files are the first rank's. The plan decides what is split over
ranks, so what the script says of it itself is left out: DDP and FSDP wrap nothing, collectives are
those of one rank. Torch and foretell see the real job: answers go by who asks.

Writes of other ranks than the first go to a place of their own, from where they read them again;
what `torch.save` is given is put together from all ranks first, so that a checkpoint is that of one
process.
"""

from __future__ import annotations

import builtins
import io
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import GradScaler
from torch.nn import Module
from torch.nn.utils import clip_grad
from torch.utils import _pytree as pytree
from torch.utils._pytree import tree_leaves

from foretell import profile as marks
from foretell.errors import InputError
from foretell.plan import Plan
from foretell.plan.unsupported import require_in_script
from foretell.pytorch.deploy import run_files
from foretell.pytorch.deploy.apply import Deployed, in_own_loop
from foretell.pytorch.deploy.checkpoint import still
from foretell.pytorch.deploy.dry_run import copied, freeze
from foretell.pytorch.deploy.optimizer import Several, clip_norm, clip_value
from foretell.pytorch.deploy.precision import mixed, precision_of, unscale_gradients
from foretell.pytorch.deploy.uses import Call
from foretell.pytorch.deploy.whole import Apart, AsWhole, cut_of, on_share
from foretell.pytorch.intake.fake import OneRank
from foretell.pytorch.intake.files import own_places
from foretell.pytorch.intake.watch import Listener, Watch

_TORCH = os.path.dirname(torch.__file__) + os.sep
_DATA = os.path.join(_TORCH, "utils", "data") + os.sep  # samplers ask for the script
_OURS = os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep
_WRITES = set("wax+")
_FLAT = ["all_gather_into_tensor", "reduce_scatter_tensor"]
_FLAT += ["all_gather_single", "reduce_scatter_single"]  # their names since torch 2.13


class AsOne(OneRank):
    """In place of a wrapper that would spread a model over ranks: the model as it is."""

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Any:
        """As FSDP 1 has it."""
        return clip_norm(self.parameters(), max_norm, norm_type)


class _Done:
    """A collective of one rank: over when it begins."""

    def wait(self, *_: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class _Mesh:
    """A device mesh of one rank."""

    def __init__(self, *args: Any, mesh_dim_names: Any = None, **kwargs: Any) -> None:
        self.mesh_dim_names, self.ndim, self.shape = mesh_dim_names, 1, (1,)

    def __getitem__(self, _: Any) -> _Mesh:
        return self

    def size(self, *_: Any) -> int:
        return 1

    def get_group(self, *_: Any) -> None:
        return None

    def get_rank(self) -> int:
        return 0

    def get_local_rank(self, *_: Any) -> int:
        return 0


@contextmanager
def one_rank() -> Iterator[None]:
    """Let whatever is not torch's or ours take part in a job of one rank."""
    begun = [False]

    def init(*_: Any, **__: Any) -> None:
        begun[0] = True

    def destroy(*_: Any, **__: Any) -> None:
        begun[0] = False

    answers: dict[str, Callable[..., Any]] = {
        "get_rank": lambda *_, **__: 0,
        "get_world_size": lambda *_, **__: 1,
        "get_node_local_rank": lambda *_, **__: 0,
        "is_initialized": lambda: begun[0],
        "init_process_group": init,
        "destroy_process_group": destroy,
        "new_group": lambda *_, **__: None,
        "get_process_group_ranks": lambda *_, **__: [0],
        **dict.fromkeys(("barrier", "monitored_barrier"), _nothing),
        **dict.fromkeys(("all_reduce", "broadcast", "reduce"), _nothing),
        **dict.fromkeys(("broadcast_object_list", "send", "recv"), _nothing),
        **dict.fromkeys(("all_gather", "all_gather_object", "gather"), _to_first),
        **dict.fromkeys((name for name in _FLAT if hasattr(dist, name)), _copied),
        "gather_object": lambda one, every=None, *_, **__: _to_first(every or [], one),
        "init_device_mesh": _Mesh,
    }
    parallel, fsdp = import_module("torch.nn.parallel"), import_module("torch.distributed.fsdp")
    splits = import_module("torch.distributed.tensor.parallel")
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(_answered(dist, name, answer))
        mesh = import_module("torch.distributed.device_mesh")
        stack.enter_context(_answered(mesh, "init_device_mesh", _Mesh))
        stack.enter_context(_answered(fsdp, "fully_shard", lambda module, *_, **__: module))
        stack.enter_context(_answered(splits, "parallelize_module", lambda m, *_, **__: m))
        for owner in (parallel, import_module("torch.nn.parallel.distributed")):
            stack.enter_context(patch.object(owner, "DistributedDataParallel", AsOne))
        stack.enter_context(patch.object(fsdp, "FullyShardedDataParallel", AsOne))
        stack.enter_context(patch.object(parallel, "DataParallel", AsOne))
        yield


def _answered(owner: Any, name: str, answer: Callable[..., Any]) -> Any:
    """A function of torch's that answers the script's questions differently from torch's own."""
    plain = getattr(owner, name)

    def by_caller(*args: Any, **kwargs: Any) -> Any:
        asks = sys._getframe(1).f_code.co_filename
        is_theirs = asks.startswith(_DATA) or not asks.startswith((_TORCH, _OURS))
        return (answer if is_theirs else plain)(*args, **kwargs)

    return patch.object(owner, name, by_caller)


def _nothing(*args: Any, async_op: bool = False, **kwargs: Any) -> _Done | None:
    return _Done() if async_op else None


def _to_first(every: list[Any], one: Any, *args: Any, **kwargs: Any) -> _Done | None:
    if every:
        every[0] = one.clone() if isinstance(one, torch.Tensor) else one
    return _nothing(**kwargs)


def _copied(output: Any, one: Any, *args: Any, **kwargs: Any) -> _Done | None:
    output.copy_(one)
    return _nothing(**kwargs)


@contextmanager
def one_writer(rank: int, scratch: Path) -> Iterator[None]:
    """Let only the first rank write where the script says."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(torch, "save", partial(_whole_save, torch.save, rank)))
        if rank:
            for owner, name, new in _Elsewhere(scratch).changes():
                stack.enter_context(patch.object(owner, name, new))
        yield


def whole(x: Any) -> Any:
    """A tensor as one process has it; all ranks ask together."""
    if isinstance(x, torch.Tensor) and hasattr(x, "full_tensor"):
        found = x.detach().full_tensor()
        return torch.nn.Parameter(found) if isinstance(x, torch.nn.Parameter) else found
    return x


def _whole_save(plain: Any, rank: int, what: Any, *args: Any, **kwargs: Any) -> Any:
    what = pytree.tree_map(whole, what)
    try:
        return plain(what, *args, **kwargs) if rank == 0 else None
    finally:
        dist.barrier()  # others may read it next


class _Elsewhere:
    """Files of a rank other than the first: what it writes is where only it looks."""

    def __init__(self, scratch: Path) -> None:
        self.scratch, self.moved = scratch, dict[str, str]()
        self.free = [os.path.realpath(p) for p in own_places()]
        self.here = os.getcwd() + os.sep  # the user's, even where it is a temporary folder

    def changes(self) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
        """What is put in place of functions that open, make and remove files."""
        plain = builtins.open

        def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            return plain(self._path(file, bool(_WRITES & set(mode))), mode, *args, **kwargs)

        for owner in (builtins, io):
            yield owner, "open", opened
        for name in ("mkdir", "makedirs"):
            yield os, name, partial(_made, getattr(os, name))
        for name in ("remove", "unlink", "rmdir"):
            yield os, name, partial(self._only_mine, 1, getattr(os, name))
        for name in ("rename", "replace"):
            yield os, name, partial(self._only_mine, 2, getattr(os, name))

    def _path(self, file: Any, writes: bool) -> Any:
        """Where a file of this rank is."""
        if not isinstance(file, str | bytes | os.PathLike):  # TensorBoard names files in bytes
            return file
        full = os.path.realpath(os.fsdecode(file))
        if full in self.moved:
            return self.moved[full]
        is_free = any(full.startswith(place + os.sep) for place in self.free)
        if not writes or (is_free and not full.startswith(self.here)):
            return file
        self.moved[full] = str(self.scratch / f"{len(self.moved)}")
        return self.moved[full]

    def _only_mine(self, many: int, plain: Any, *args: Any, **kwargs: Any) -> None:
        """Move or remove a file of this rank; `many` paths are given first."""
        paths = [self._path(path, True) for path in args[:many]]
        if os.path.lexists(paths[0]):
            plain(*paths, *args[many:], **kwargs)


def _made(plain: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    with suppress(FileExistsError):  # the first rank was faster
        plain(*args, **kwargs)


Tensor = Any
_CHECKED = 8  # calls of a shape before ranks no longer compare what a model gave
SEED = 0  # of a script that sets none: ranks have to draw the same batches


@dataclass
class Wanted:
    """What is wanted of a run of a script."""

    steps: int = 0  # after which it ends; at its own end where 0
    batch_norm: str = "sync"
    device: str = "cpu"
    is_still: bool = False  # without dropout, to be compared
    kept: int = 0  # steps whose gradients are kept, to be compared


@dataclass
class Training(Listener):
    """Deploys the models of whatever runs while it is open, and times its steps."""

    plan: Plan | None  # none: the script as it is, watched
    wanted: Wanted = field(default_factory=Wanted)
    enough: Callable[[], None] = lambda: None  # called when as many steps were taken
    fail: Callable[[InputError], None] = lambda error: None  # before the script could catch it
    tell: Callable[[str], None] = lambda words: None
    scratch: Path = Path()
    log: Callable[[int, float, float], None] | None = None  # step, loss, seconds
    # of a model and its optimizers: what predicts a step, its ops timed
    predictor: Callable[[Module, Sequence[Any], Callable[[int], object]], Any] | None = None
    predicted: dict[str, Any] | None = None
    cpu: list[float] = field(default_factory=list)  # core seconds of each step
    waits: list[float] = field(default_factory=list)  # and seconds that it waited for a core
    made: dict[int, Deployed] = field(default_factory=dict)  # by id of the module
    models: dict[int, Module] = field(default_factory=dict)
    # parameters that are not trained, by model
    frozen: dict[int, list[tuple[str, Tensor]]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    whole: set[int] = field(default_factory=set)  # modules whose samples are not computed apart
    seen: Counter[Any] = field(default_factory=Counter)  # calls, by module and shapes
    steps: int = 0
    has_autocast: bool = False  # of the script's own
    times: list[float] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    watch: Watch = field(init=False)
    _depth: int = 0
    _backwards: int = 0
    _began: float = 0.0
    _before: tuple[float, float] = (0.0, 0.0)  # core seconds, and those without a core
    _part: list[Tensor] = field(default_factory=list)  # losses of the step that goes on
    _plain: dict[int, Tensor] = field(default_factory=dict)  # losses before they are scaled

    def __post_init__(self) -> None:
        self.watch = Watch(self)
        if self.plan is not None:
            require_in_script(self.plan)

    @contextmanager
    def open(self) -> Iterator[None]:
        """Run the script in a job of one rank; nothing of torch stays changed behind it."""
        random.seed(SEED)  # the same on every rank, for a script that sets none
        torch.manual_seed(SEED)
        with suppress(ModuleNotFoundError):
            import_module("numpy").random.seed(SEED)
        with ExitStack() as stack:
            enter = stack.enter_context
            enter(one_rank())
            if self.plan is not None:
                enter(one_writer(dist.get_rank(), self.scratch))
                enter(torch.compiler.set_stance("force_eager"))
                for owner in (clip_grad, torch.nn.utils):
                    enter(patch.object(owner, "clip_grad_norm_", clip_norm))
                    enter(patch.object(owner, "clip_grad_value_", clip_value))
            enter(self.watch.open())
            enter(marks.recording_to(self.watch))
            backward = partial(self._backward, torch.autograd.backward)
            enter(patch.object(torch.autograd, "backward", backward))
            enter(patch.object(torch.autograd, "grad", self._grad(torch.autograd.grad)))
            enter(patch.object(GradScaler, "scale", self._scale(GradScaler.scale)))
            if self.plan is not None and self.plan.ranks > 1:
                enter(patch.object(GradScaler, "_unscale_grads_", _unscale))
            enter(patch.object(Module, "__call__", self._call(Module.__call__)))
            if self.plan is not None and (self.plan.tp > 1 or self.plan.zero > 1):
                enter(AsWhole())
            self._begin()
            yield

    def _begin(self) -> None:
        """A step of the script begins."""
        self._began = time.perf_counter()
        self._before = (time.thread_time(), run_files.queued())

    def step_ended(self, is_new: bool) -> None:
        """A step of the script is over."""
        if self.wanted.device == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.times.append(now - self._began)
        core, queued = self._before
        self.cpu.append(time.thread_time() - core)
        self.waits.append(run_files.queued() - queued)
        self.losses.append(sum(self._part) if self._part else torch.tensor(float("nan")))
        self._part = []
        if self.log is not None:
            self.log(self.steps, float(self.losses[-1]), self.times[-1])
        self.steps += 1
        self.tell(f"step {self.steps}")
        if self.wanted.steps and self.steps >= self.wanted.steps:
            self.enough()
        self._begin()

    def backward_ended(self) -> None:
        """Keep gradients that are to be compared."""
        self._backwards += 1
        if len(self.gradients) < self.wanted.kept:
            self.gradients.append(self.whole_gradients())

    def whole_gradients(self) -> dict[str, Tensor]:
        """Gradients of all models, by model and name, as one process has them."""
        found = {}
        for place, model in enumerate(self.models.values()):
            for name, p in model.named_parameters():
                grad = _full(p.grad)
                made = self.made.get(id(model))
                if made is not None and made.stages is not None:
                    grad = made.stages.shared(name, grad, _full(p))
                if grad is not None:
                    found[f"{place}.{name}"] = grad.cpu().clone()
        return found

    def parameters(self) -> dict[str, Tensor]:
        """Parameters of all models, by model and name, as one process has them."""
        for made in self.made.values():
            if made.stages is not None:
                made.stages.share()
        return {
            f"{place}.{name}": _full(p).cpu()
            for place, model in enumerate(self.models.values())
            for name, p in model.named_parameters()
        }

    def _call(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(module: Module, *args: Any, **kwargs: Any) -> Any:
            if self._depth or isinstance(module, AsOne | torch._dynamo.OptimizedModule):
                return plain(module, *args, **kwargs)
            self._depth += 1
            try:
                return self._called(plain, module, args, kwargs)
            finally:
                self._depth -= 1

        return call

    def _called(self, plain: Any, module: Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """A call of the script's own: of a model, a loss, or whatever is a module."""
        self._meet(module, args, kwargs)
        self.has_autocast |= torch.is_autocast_enabled(self.wanted.device)
        made = self.made.get(id(module))
        if made is None or self.plan is None:
            return plain(module, *args, **kwargs)
        self._require_trained(module)

        def call(*args: Any, **kwargs: Any) -> Any:
            word = "" if made.is_sharded else precision_of(made.plan)
            with mixed(word, made.places.device), _without_mode():
                return plain(module, *args, **kwargs)

        cut = None
        if id(module) not in self.whole:
            group = made.places.group("dp")
            cut = cut_of((args, kwargs), self.plan.shares, self.plan.dp, group)
        if cut is None:
            note = f"{type(module).__name__}: samples that cannot be told apart, or are fewer than "
            note += "ranks, are computed by every rank"
            if self.plan.dp > 1 and note not in self.notes:
                self.notes.append(note)
            return call(*args, **kwargs)
        leaves = tree_leaves((args, kwargs))
        key = (id(module), *(tuple(x.shape) for x in leaves if isinstance(x, torch.Tensor)))
        self.seen[key] += 1  # without a GPU all calls are taken to be new
        is_checked = self.wanted.device == "cpu" or self.seen[key] <= _CHECKED
        try:
            return on_share(call, args, kwargs, cut, is_checked=is_checked)
        except Apart:
            self.whole.add(id(module))
            return self._called(plain, module, args, kwargs)

    def _require_trained(self, module: Module) -> None:
        """Refuse parameters that are trained from now on: ranks do not add up their gradients."""
        frozen = self.frozen.get(id(module), [])
        name = next((n for n, p in frozen if p.requires_grad), "")
        if name and self.plan is not None and self.plan.ranks > 1:
            self._refuse(
                f"the script begins to train `{name}` when `{type(module).__name__}` is split over "
                "ranks already",
                "let it require gradients from the first step on (with a learning rate of 0, say), "
                "or run each part of the training by itself",
            )

    def _meet(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Deploy a model when it is first called to be trained."""
        if id(module) in self.models or not torch.is_grad_enabled():
            return
        own = {id(p) for p in module.parameters() if p.requires_grad}
        optimizers = [o for o in (made() for made in self.watch.made) if o is not None]
        trains = [
            o for o in optimizers if own & {id(p) for g in o.param_groups for p in g["params"]}
        ]
        if not own or not (trains or (self._backwards and not optimizers)):
            return
        if any(own & {id(p) for p in m.parameters()} for m in self.models.values()):
            return  # part of a model that is deployed, or tied to one: computed whole
        self.models[id(module)] = module
        if self.wanted.is_still:
            still(module)
        if self.plan is not None:
            try:
                with torch.device("cpu"), self.watch.aside():  # whatever the script's default is
                    predictor = None
                    if self.predictor is not None and not self.made:  # for the first model
                        self.tell("predict")
                        with _aside():
                            take = partial(self._copy, module, trains, (args, kwargs))
                            predictor = self.predictor(module, trains, take)
                    self.tell("deploy")
                    made = _deployed(module, trains, self.plan, self.wanted, (args, kwargs))
                    if predictor is not None:
                        self.tell("predict")
                        with _aside():
                            self.predicted = predictor.predict()
                self.made[id(module)] = made
                self.frozen[id(module)] = [
                    (n, p) for n, p in made.model.named_parameters() if not p.requires_grad
                ]
                if made.stages is not None:
                    self.notes.append(
                        f"{type(module).__name__}: parameters of other stages are those of the "
                        "last `state_dict()`, and have no gradient here"
                    )
                if made.stages is not None and self.plan.schedule != "gpipe":
                    self.notes.append(
                        f"{type(module).__name__}: the script takes its backward itself, so the "
                        "forward of every micro-batch comes before it, as in schedule=gpipe"
                    )
            except InputError as error:
                self.fail(error)
                raise

    def _copy(
        self, module: Module, optimizers: Sequence[Any], call: Call, calls: int
    ) -> Callable[[], object]:
        """A step of a copy of a model, deployed, as the script takes it but for its loss.

        `calls`: how often the model is called, its gradients added up.
        """
        assert self.plan is not None
        (model, own), (args, kwargs) = copied(module, optimizers), call
        made = _deployed(model, own, self.plan, self.wanted, call)
        for one in own:
            freeze(one)

        def take() -> None:
            before, self._part = self._part, []
            self.made[id(model)], self.models[id(model)] = made, model
            try:
                model.zero_grad()
                for _ in range(calls):
                    found = tree_leaves(self._called(Module.__call__, model, args, kwargs))
                    sum(x.sum() for x in found if getattr(x, "requires_grad", False)).backward()
                for one in own:
                    one.step()
            finally:
                del self.made[id(model)], self.models[id(model)]
                self._part = before

        return take

    def _backward(self, plain: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        """Note the loss that a backward begins at."""
        top = tensors if isinstance(tensors, torch.Tensor) else tensors[0]
        if not self.watch.is_in_backward and top.numel() == 1:
            self._part.append(self._plain.pop(id(top), top).detach().float().flatten()[0])
        return plain(tensors, *args, **kwargs)

    def _grad(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Refuse gradients that are not those of one process: no backward hook sees them."""

        def grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            plan = self.plan
            if plan is not None and plan.ranks > 1 and not self.watch.is_in_backward:
                own = {id(p): n for m in self.models.values() for n, p in m.named_parameters()}
                given = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
                name = next((own[id(x)] for x in given if id(x) in own), "")
                if name:
                    self._refuse(
                        f"torch.autograd.grad gives the gradient of `{name}` on one rank's samples",
                        "let `loss.backward()` make the gradients of parameters",
                    )
                if kwargs.get("create_graph") and plan.ranks > plan.dp * (plan.zero < 2):
                    self._refuse(
                        f"create_graph=True: `{plan}` splits layers, which have no second "
                        "derivative",
                        "take a plan with dp alone, and zero=0 or zero=1",
                    )
            return plain(outputs, inputs, *args, **kwargs)

        return grad

    def _refuse(self, why: str, hint: str) -> None:
        error = InputError(why, hint=hint)
        self.fail(error)
        raise error

    def _scale(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def scale(scaler: Any, outputs: Any) -> Any:
            found = plain(scaler, outputs)
            if isinstance(outputs, torch.Tensor):
                self._plain = {id(found): outputs}
            return found

        return scale


def _full(x: Tensor) -> Tensor:
    """A tensor whole, where ranks have parts of it; None where there is none."""
    whole = x.full_tensor() if hasattr(x, "full_tensor") else x
    return None if whole is None else whole.detach()


@contextmanager
def _aside() -> Iterator[None]:
    """Measure something: the script's random numbers stay as they are."""
    with torch.random.fork_rng(), torch.enable_grad(), _without_mode():
        yield


@contextmanager
def _without_mode() -> Iterator[None]:
    """Inside a model nothing is mixed: its calls need not be looked at."""
    is_on = bool(torch.overrides._get_current_function_mode_stack())
    with torch.overrides._pop_mode_temporarily() if is_on else nullcontext():
        yield


def _deployed(
    module: Module, optimizers: Sequence[Any], plan: Plan, wanted: Wanted, call: Call
) -> Deployed:
    """A model of the script deployed, for a loop that is the script's."""
    device = next(module.parameters()).device.type  # where the script has put it
    options: dict[str, Any] = {"device": device, "batch_norm": wanted.batch_norm}
    own = plan.but(shares=(), micro_batch=plan.micro_batch if plan.pp > 1 else 0)
    hooked = [
        n for n, p in module.named_parameters()
        if p._post_accumulate_grad_hooks or p._backward_hooks
    ]  # fmt: skip
    if hooked:
        raise InputError(
            f"the script does something with the gradient of `{hooked[0]}` inside the backward, "
            "before ranks have added theirs up",
            hint="let it update its parameters behind the backward",
        )
    flat = [o for o in optimizers if isinstance(o, torch.optim.LBFGS)]
    if flat and (plan.tp > 1 or plan.zero > 0):
        raise InputError(
            f"LBFGS takes all parameters for one vector: tp={plan.tp} and zero={plan.zero} would "
            "split it",
            hint="take a plan with dp alone",
        )
    options |= {"call": call, "example": None if call[1] else (call[0], None)}
    one = optimizers[0] if len(optimizers) == 1 else Several(optimizers)
    return in_own_loop(module, one, own, **options)


def _unscale(_: Any, optimizer: Any, factor: Tensor, *__: Any) -> dict[torch.device, Tensor]:
    """In place of a scaler's own: of split gradients too, an overflow on one rank is one on all."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    found = unscale_gradients(parameters, factor)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return {found.device: found}
