"""What a step is made of, and how a person names it: a model, a batch, a loss and an optimizer.

Models may be given as they are (on a CPU, on `meta`) or as a function that makes them; the latter
runs on fake tensors, so nothing is allocated however large the model is. A person names a step as
`train.py`, `train.py:make` or `package.module:make`. A script with functions `model` and `batch`
(and, where wanted, `loss` and `optimizer`) is a description (→ `foretell.pytorch.script`); so is a
function that answers `(model, batch, loss, optimizer)`, the last two of which may be left out. A
function that answers a module alone takes the others from its script. Options behind a second colon
are passed to the function: `samples.py:llama:size=70b,length=4096`.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import Module, Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from foretell import spec
from foretell.errors import InputError, unknown
from foretell.pytorch.capture.values import SMALL, copy_of, first_line, give, has_data
from foretell.pytorch.capture.words import tensors_in
from foretell.pytorch.script import ask, default_loss, options_of, ordered, takes_model, takes_part

OPTIMIZERS = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
}
_KINDS = ("foreach", "fused", "loop")  # how an optimizer goes over its parameters
REAL = 2 * 2**30  # bytes of weights that are worth allocating to learn what a step does


@dataclass(frozen=True)
class Parts:
    """What a step is made of, as a user or a script gave it."""

    model: Any
    batch: Any
    loss: Any = None
    optimizer: Any = None
    real: Callable[[], tuple[Any, ...]] | None = None  # the same with values, where these have none

    @property
    def four(self) -> tuple[Any, ...]:
        """Model, batch, loss and optimizer."""
        return self.model, self.batch, self.loss, self.optimizer


def find(text: str, batch: int | None = None, ranks: int = 1) -> Parts:
    """The parts of the step that a text names; `batch` is passed on where it is given.

    Of a script's batch the part of the first of so many `ranks` is taken.
    """
    where, _, rest = text.partition(":")  # train.py:make:size=8
    name, _, options = rest.partition(":")
    names, given = _names(where), spec.options(options) if options else {}
    if not name:
        return _described(names, where, batch, ranks)
    if not callable(names.get(name)):
        functions = (k for k, v in names.items() if callable(v) and not k.startswith("_"))
        raise unknown(f"function of `{where}`", name, functions)
    whole = {k: int(v) if spec.is_whole(v) else v for k, v in given.items()}
    return _made(names, name, where, options_of(names[name], whole, batch))


def _names(where: str) -> Mapping[str, Any]:
    """What a script or module defines."""
    path = Path(where)
    if path.suffix == ".py":
        if not path.is_file():
            raise InputError(f"there is no file `{where}`")
        # a script finds the modules beside it, as when Python runs it
        with patch.object(sys, "path", [str(path.resolve().parent), *sys.path]):
            found = _ran(lambda: runpy.run_path(str(path), run_name="foretell_capture"), where)
            return dict(found)
    return dict(vars(_ran(lambda: importlib.import_module(where), where)))


def _ran(run: Callable[[], Any], where: str) -> Any:
    try:
        return run()
    except Exception as error:
        raise InputError(
            f"`{where}` cannot be loaded: {type(error).__name__}: {first_line(error)}",
            hint="name a script or a module: `train.py:make`",
        ) from error


def _described(names: Mapping[str, Any], where: str, batch: int | None, ranks: int) -> Parts:
    missing = [name for name in ("model", "batch") if not callable(names.get(name))]
    if missing:
        raise InputError(
            f"`{where}` does not define {' and '.join(f'`{m}()`' for m in missing)}",
            hint=f"define them, or name a function that makes the step: `{where}:make`",
        )
    return _with_others(names, names["model"], where, batch, ranks)


def _made(names: Mapping[str, Any], name: str, where: str, options: dict[str, Any]) -> Parts:
    """What a function answers: the parts of a step, or a model whose script has the others."""
    if isinstance(names[name], type) and issubclass(names[name], torch.nn.Module):
        return _with_others(names, partial(names[name], **options), where)

    def parts() -> Parts:
        return _parts(names, _ran(lambda: names[name](**options), f"{where}:{name}"), name, where)

    try:
        with torch.device("meta"):  # nothing is allocated, and a capture makes fakes of it
            found = parts()
    except InputError:  # it may read values while it is made
        return parts()
    return replace(found, real=lambda: parts().four)


def _parts(names: Mapping[str, Any], made: Any, name: str, where: str) -> Parts:
    if isinstance(made, torch.nn.Module):
        return _with_others(names, made, where)
    if isinstance(made, Mapping):
        return Parts(**made)
    if isinstance(made, tuple) and 2 <= len(made) <= 4:
        return Parts(*made)
    raise InputError(
        f"`{where}:{name}` answered {type(made).__name__}, which is no step",
        hint="answer (model, batch), (model, batch, loss) or (model, batch, loss, optimizer)",
    )


def _with_others(
    names: Mapping[str, Any], model: Any, where: str, batch: int | None = None, ranks: int = 1
) -> Parts:
    if not callable(names.get("batch")):
        raise InputError(
            f"`{where}` has a model but no `batch()`",
            hint="define `batch()`, or answer (model, batch, loss, optimizer)",
        )
    make = partial(_first_part, names["batch"], ranks, batch)
    return Parts(model, make, names.get("loss"), names.get("optimizer"))


def _first_part(batch: Callable[..., Any], ranks: int, samples: int | None) -> Any:
    """What the first of some ranks has of a script's batch."""
    found = ask(batch, 0, ranks, samples=samples)
    if ranks == 1 or takes_part(batch):
        return found
    return mapped(found, lambda tensor: tensor[: len(tensor) // ranks])


def mapped(value: Any, make: Callable[[Tensor], Any]) -> Any:
    """A batch with others in the place of its tensors, whatever it is made of."""
    if isinstance(value, Tensor):
        return make(value)
    if isinstance(value, Mapping):
        return {key: mapped(v, make) for key, v in value.items()}
    if not isinstance(value, list | tuple):
        return value
    items = [mapped(v, make) for v in value]
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def with_data(given: Parts, stopped: Exception) -> Parts:
    """The same with real weights and a real batch on the CPU; `stopped` is raised where not."""
    if given.real is not None:
        with _bounded(stopped), torch.device("cpu"):
            given = Parts(*given.real())
    model, batch = given.model, given.batch
    if not isinstance(model, Module):
        with _bounded(stopped):
            model = model()
    if callable(batch):
        batch = batch()
    tensors = (*model.parameters(), *model.buffers(), *tensors_in(batch))
    if not all(map(has_data, tensors)) or sum(t.numel() * t.element_size() for t in tensors) > REAL:
        raise stopped
    return Parts(model, batch, given.loss, given.optimizer)


@contextmanager
def _bounded(stopped: Exception) -> Iterator[None]:
    """Whatever is made may fail, and may not grow beyond what is worth it."""
    try:
        with _Bound():
            yield
    except Exception:  # what stopped the step before is what the user should read
        raise stopped from None


class _Bound(TorchDispatchMode):  # type: ignore[misc]
    """Stops where more memory is taken than `REAL`."""

    taken = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func._schema.name.startswith("aten::empty") and isinstance(made, Tensor):
            self.taken += made.untyped_storage().nbytes()
            if self.taken > REAL:
                raise MemoryError
        return made


def real_step(given: Parts) -> Step:
    """A step on real tensors: a copy of the model, so that what was given stays as it is."""
    model = copy.deepcopy(given.model)
    optimizer = fake_optimizer(given.optimizer, given.model, model, on_gpu=False)
    return Step(model, given.batch, given.loss, optimizer)


@dataclass
class Step:
    """One training step, ready to be run."""

    model: Module
    batch: Any
    loss: Callable[..., Any] | None
    optimizer: torch.optim.Optimizer | None

    def run(self) -> Any:
        """The scalar loss of a forward pass."""
        return scalar(self._forward())

    def _forward(self) -> Any:
        loss = self.loss
        if loss is None:
            if not _is_pair(self.model, self.batch):
                return _called(self.model, self.batch)
            loss = default_loss
        if takes_model(loss):
            return loss(self.model, self.batch)
        if not isinstance(self.batch, (list, tuple)) or len(self.batch) < 2:
            raise InputError(
                "a loss of output and target needs a batch of both, not "
                f"{type(self.batch).__name__}",
                hint="give `batch=(x, y)`, or a loss of `(model, batch)`",
            )
        found = ordered(self.batch)
        return loss(_called(self.model, found.inputs), found.target)


def scalar(found: Any) -> Tensor:
    """The loss among what a model returned."""
    inner = found.get("loss") if isinstance(found, Mapping) else getattr(found, "loss", None)
    first = found[0] if isinstance(found, (list, tuple)) and found else None
    for one in (found, inner, first):
        if isinstance(one, Tensor) and one.numel() == 1:
            return one
    what = (
        f"a tensor of {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
    )
    raise InputError(
        f"the step ends in {what}, which is no loss",
        hint="give `loss=`: a function of the output and the target, or of the model and the batch",
    )


def _called(model: Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (list, tuple)) else model(batch)


def _is_pair(model: Module, batch: Any) -> bool:
    """Whether a batch is inputs and a target, and the model takes the inputs alone."""
    if not isinstance(batch, (list, tuple)) or len(batch) < 2:
        return False
    try:
        inspect.signature(model.forward).bind(*batch)
    except TypeError:
        return True
    return isinstance(batch[0], (list, tuple))


def fake_model(
    model: Module | Callable[[], Module], device: torch.device, *, values: bool = False
) -> Module:
    """The model with fake tensors for weights; what was given is not touched.

    With `values`, those of a model that has any stand behind the fake tensors.
    """
    if isinstance(model, Module):
        return _copied(model, device, values)
    with torch.device(device), movable():
        made = model()
    if not isinstance(made, Module):
        raise InputError(f"`model` made {type(made).__name__}, which is no torch.nn.Module")
    tensors = (*made.parameters(), *made.buffers())
    is_fake = all(isinstance(t, FakeTensor) and t.device == device for t in tensors)
    return made if is_fake else _copied(made, device)


@contextmanager
def movable() -> Iterator[None]:
    """Lets `model.half()`, `.to(…)` and the like put new fake tensors in the place of old ones.

    torch swaps the insides of two tensors for that, which fake tensors do not let it do.
    """
    moved: dict[int, tuple[Tensor, Tensor]] = {}  # tied weights stay tied; the old is kept alive

    def once(old: Tensor, make: Callable[[Tensor], Tensor]) -> Tensor:
        if id(old) not in moved:
            moved[id(old)] = (old, make(old))
        return moved[id(old)][1]

    def apply(module: Module, make: Callable[[Tensor], Tensor], recurse: bool = True) -> Module:
        def parameter(old: Tensor) -> Tensor:
            with torch.no_grad():
                return Parameter(make(old), requires_grad=old.requires_grad)

        for inner in module.modules() if recurse else (module,):
            for held, maker in ((inner._parameters, parameter), (inner._buffers, make)):
                held |= {name: once(t, maker) for name, t in held.items() if t is not None}
        moved.clear()
        return module

    with patch.object(Module, "_apply", apply):
        yield


@contextmanager
def copyable() -> Iterator[None]:
    """Lets `copy.deepcopy` copy fake tensors, as layers that are made once and cloned ask for.

    torch would copy all that a tensor refers to, the mode it was made under too, and end the
    process when two modes give back the same memory.
    """
    plain = Tensor.__deepcopy__

    def copied(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
        if not isinstance(tensor, FakeTensor):
            return plain(tensor, memo)
        if id(tensor) not in memo:
            made = fake_like(tensor.detach(), tensor.device)
            if isinstance(tensor, Parameter):
                made = Parameter(made, requires_grad=tensor.requires_grad)
            memo[id(tensor)] = made
        return memo[id(tensor)]

    with patch.object(Tensor, "__deepcopy__", copied):
        yield


def _copied(model: Module, device: torch.device, values: bool = False) -> Module:
    """A copy whose tensors are fake; tied weights stay tied, as the copy knows what it has seen."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        like = Parameter(fake_like(parameter, device), requires_grad=parameter.requires_grad)
        memo[id(parameter)] = give(like, parameter if values else None)
    loose = (t for m in model.modules() for t in vars(m).values() if isinstance(t, Tensor))
    for tensor in (*model.buffers(), *loose):  # some modules hold as plain attributes
        is_known = values or tensor.numel() <= SMALL
        memo[id(tensor)] = give(fake_like(tensor, device), copy_of(tensor) if is_known else None)
    return copy.deepcopy(model, memo)


def fake_like(tensor: Tensor, device: torch.device) -> Tensor:
    """A fake tensor of the same sizes, strides and format."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def fake_batch(batch: Any, device: torch.device, *, values: bool = False) -> Any:
    """A batch with fake tensors on the device; whole numbers and masks keep what they say."""

    def fake(tensor: Tensor) -> Tensor:
        if isinstance(tensor, FakeTensor) and tensor.device == device:
            return tensor
        like = fake_like(tensor, device)
        is_known = values or (not tensor.is_floating_point() and tensor.numel() <= SMALL)
        give(like, copy_of(tensor) if is_known else None)
        return like.requires_grad_(tensor.requires_grad) if tensor.is_floating_point() else like

    return mapped(batch, fake)


def fake_optimizer(
    optimizer: Any, given: Any, model: Module, *, on_gpu: bool
) -> torch.optim.Optimizer | None:
    """The optimizer over the fake model's parameters, as a GPU would run it."""
    if optimizer is None:
        return None
    if isinstance(optimizer, torch.optim.Optimizer):
        made = _rebuilt(optimizer, given, model)
    elif isinstance(optimizer, str):
        made = _by_name(optimizer, model)
    else:
        made = optimizer(_trained(model))
    if not isinstance(made, torch.optim.Optimizer):
        raise InputError(f"`optimizer` made {type(made).__name__}, no torch.optim.Optimizer")
    if on_gpu:
        as_on_gpu(made)
    return made


def as_on_gpu(*optimizers: torch.optim.Optimizer) -> None:
    """Torch's default for parameters on a GPU: all of them in few kernels."""
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        if not group.get("fused") and group.get("foreach", False) is None:
            group["foreach"] = True


def _trained(model: Module) -> list[Tensor]:
    return [p for p in model.parameters() if p.requires_grad]


def _by_name(text: str, model: Module) -> torch.optim.Optimizer:
    """`adamw:kind=fused` → that optimizer; `loop` goes over parameters one by one."""
    name, given = spec.split(text)
    if name not in OPTIMIZERS:
        raise unknown("optimizer", name, OPTIMIZERS)
    kind = given.pop("kind", "foreach")
    if kind not in _KINDS:
        raise unknown("kind of optimizer", kind, _KINDS)
    options: dict[str, Any] = {"foreach": kind == "foreach", "lr": 0.1}
    if kind == "fused":
        options = {"fused": True, "lr": 0.1}
    options |= {key: float(value) for key, value in given.items()}
    try:
        return OPTIMIZERS[name](_trained(model), **options)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"`{text}` makes no optimizer: {error}") from None


def _rebuilt(optimizer: torch.optim.Optimizer, given: Any, model: Module) -> torch.optim.Optimizer:
    """The same optimizer over the fake model's parameters instead of the given model's."""
    if not isinstance(given, Module):
        raise InputError(
            "an optimizer over real parameters goes with a model that is made already",
            hint="give `optimizer=lambda parameters: torch.optim.Adam(parameters)`",
        )
    new = {id(old): p for old, p in zip(given.parameters(), model.parameters(), strict=True)}
    groups = [
        {**group, "params": [new[id(p)] for p in group["params"] if id(p) in new]}
        for group in optimizer.param_groups
    ]
    wanted = inspect.signature(type(optimizer).__init__).parameters
    options = {k: v for k, v in optimizer.defaults.items() if k in wanted}
    return type(optimizer)(groups, **options)


def settle(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> None:
    """Let an optimizer make its state, as it did in the first step of a training."""
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
