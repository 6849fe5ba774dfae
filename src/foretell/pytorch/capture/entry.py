"""A whole training step from a model alone: forward, loss, backward and optimizer.

    graph = foretell.capture(model, (x, y), loss=F.cross_entropy, optimizer="adamw")

The step is run once on fake tensors and every operator is written down; nothing is computed and no
weights are allocated. The graph has no times yet: `foretell.price(graph, cluster)` gives them.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch

from foretell.cluster.preset import devices
from foretell.errors import ForetellError, InputError, unknown
from foretell.graph import BufferKind, Graph, Phase
from foretell.graph.columns import NONE
from foretell.pytorch.capture import gpu
from foretell.pytorch.capture.assume import INSTEAD, Assumed, first_line, is_users
from foretell.pytorch.capture.choices import CPU, chosen
from foretell.pytorch.capture.compose import Formats, compose
from foretell.pytorch.capture.pace import Pace
from foretell.pytorch.capture.record import Recorder
from foretell.pytorch.capture.step import (
    Step,
    copyable,
    fake_batch,
    fake_model,
    fake_optimizer,
    settle,
)
from foretell.pytorch.capture.workspace import workspace

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
_DEVICES = {"cuda": gpu.GPU, "cpu": gpu.CPU}


def capture(
    model: torch.nn.Module | Callable[[], torch.nn.Module],
    batch: Any,
    loss: Callable[..., Any] | None = None,
    optimizer: Any = None,
    *,
    autocast: str = "",
    tf32: bool | None = None,
    share: float | None = None,
    on: str = "h200",
    device: str = "",
    progress: Callable[[str, float], None] = lambda words, share: None,
) -> Graph:
    """One training step as a graph, without a GPU, weights or data.

    `model` is a module, or a function that makes one (then nothing is allocated). `batch` is what
    the model takes: a tensor, a tuple, a dict, or a function that makes it. `loss` is a function of
    output and target (the last of the batch), or of the model and the batch for any code of your
    own; without it the model returns its loss. `optimizer` is a name (`adamw`, `sgd:kind=loop`,
    `adam:kind=fused`), a function of the parameters, or an optimizer of the model's parameters.

    `autocast` (`bf16`, `fp16`) runs forward and loss in mixed precision. `tf32` lets fp32 products
    and convolutions use it; unsaid, torch's own settings count. `share` answers for data that is
    not there (→ `foretell.pytorch.capture.assume`). `on` names the device whose kernels are chosen;
    `on="cpu"` leaves the choice to torch, as it is made where no GPU is. `device="cpu"` makes fake
    CPU tensors where a GPU cannot be pretended. `progress` is told what is done, and the share of
    the capture that is.
    """
    place = _place("cpu" if on == CPU else device)
    arch = _arch(on)
    with gpu.pretended(place), _quiet(), copyable(), gpu.fake_mode(place):
        recorder = Recorder({}, Assumed(share), place, pace=Pace(progress))
        choices = chosen(arch, recorder.loss_begins)
        with recorder, choices, torch.autograd.set_multithreading_enabled(False):
            with _errors_explained(recorder):
                step = _made(model, batch, loss, optimizer, place)
                _run(step, recorder, _autocast(autocast, place))
            _claim(step, recorder)
            recorder.ledger.stays += workspace(recorder.rows, arch)
        facts = _facts(step, recorder, autocast, on)
        del step
    return compose(recorder.rows, recorder.ledger.stays, _formats(tf32), facts)


def _place(device: str) -> torch.device:
    if device and device not in _DEVICES:
        raise unknown("device", device, _DEVICES)
    if device == "cuda" and not gpu.is_possible():
        raise InputError(
            "this build of torch does not let a GPU be pretended",
            hint="capture with device='cpu', or on a machine with a GPU",
        )
    chosen = device or ("cuda" if gpu.is_possible() else "cpu")
    return _DEVICES[chosen]


def _arch(on: str) -> str:
    known = devices()
    if on == CPU:
        return CPU
    if on not in known:
        raise unknown("device", on, [*known, CPU])
    return known[on].arch


@contextmanager
def _quiet() -> Iterator[None]:
    """What torch warns of when devices are pretended is no news to the user."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL)  # it reports errors that are raised as well
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)


def _made(model: Any, batch: Any, loss: Any, optimizer: Any, place: torch.device) -> Step:
    made = fake_model(model, place)
    if callable(batch):
        with torch.device(place):
            batch = batch()
    data = fake_batch(batch, place)
    on_gpu = place.type == "cuda"
    return Step(made, data, loss, fake_optimizer(optimizer, model, made, on_gpu=on_gpu))


def _autocast(name: str, place: torch.device) -> Any:
    if not name:
        return nullcontext()
    if name not in _AUTOCAST:
        raise unknown("autocast format", name, _AUTOCAST)
    return torch.autocast(place.type, dtype=_AUTOCAST[name])


def _run(step: Step, recorder: Recorder, autocast: Any) -> None:
    """One step as training has it from the second on: the optimizer has its state."""
    _enter(step, recorder)
    recorder.assumed.shadow.begin()
    with ExitStack() as stack:
        stack.enter_context(recorder.watching_modules())
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        recorder.phase = Phase.FORWARD
        with autocast:
            loss = step.run()
        recorder.phase = Phase.BACKWARD
        loss.backward()
        del loss
        recorder.phase = Phase.UPDATE
        if step.optimizer is not None:
            step.optimizer.step()
        recorder.phase = Phase.NONE


def _enter(step: Step, recorder: Recorder) -> None:
    """Make known what is there before the step: weights, buffers, state and the batch."""
    model, ledger = step.model, recorder.ledger
    recorder.names |= {id(m): name for name, m in reversed(list(model.named_modules()))}
    recorder.pace.modules = len(recorder.names)
    recorder.parameters |= {id(p): name for name, p in model.named_parameters()}
    if step.optimizer is not None:
        settle(step.optimizer, [p for p in model.parameters() if p.requires_grad])
    for name, parameter in model.named_parameters():
        ledger.meet(parameter, NONE, BufferKind.PARAMETER, name)
    for name, buffer in model.named_buffers():
        ledger.meet(buffer, NONE, BufferKind.PARAMETER, name)
    for tensor in _state(step):
        ledger.meet(tensor, NONE, BufferKind.OPTIMIZER, "optimizer state")
    for tensor in _tensors(step.batch):
        ledger.meet(tensor, NONE, BufferKind.INPUT, "batch")


def _state(step: Step) -> list[Any]:
    """The optimizer's state on the device."""
    if step.optimizer is None:
        return []
    found = [t for state in step.optimizer.state.values() for t in _tensors(state)]
    kinds = {p.device.type for p in step.model.parameters()}
    return [t for t in found if t.device.type in kinds]


def _tensors(values: Any) -> list[Any]:
    if isinstance(values, torch.Tensor):
        return [values]
    inner = values.values() if isinstance(values, dict) else values
    if isinstance(values, (dict, list, tuple)):
        return [t for v in inner for t in _tensors(v)]
    return []


def _claim(step: Step, recorder: Recorder) -> None:
    """Gradients are known as such when the step is over."""
    for name, parameter in step.model.named_parameters():
        if parameter.grad is not None:
            recorder.ledger.claim(parameter.grad, BufferKind.GRADIENT, name)
    recorder.ledger.is_closed = True


def _facts(step: Step, recorder: Recorder, autocast: str, on: str) -> dict[str, Any]:
    parameters = list(step.model.parameters())
    facts: dict[str, Any] = {
        "captured": type(step.model).__name__,
        "parameters": sum(p.numel() for p in parameters),
        "torch": torch.__version__,
        "kernels_of": on,
    }
    sides = {int(t.shape[0]) for t in _tensors(step.batch) if t.dim()}
    if len(sides) == 1:  # of all tensors of the batch: its samples
        facts["batch"] = sides.pop()
    if autocast:
        facts["autocast"] = autocast
    if step.optimizer is not None:
        facts["optimizer"] = type(step.optimizer).__name__
    if recorder.assumed.used:
        facts["assumed"] = sorted(set(recorder.assumed.used))
    return facts


def _formats(tf32: bool | None) -> Formats:
    """Whether fp32 products and convolutions may be tf32: as said, or as torch is set."""
    if tf32 is not None:
        return Formats(tf32, tf32)
    return Formats(torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)


@contextmanager
def _errors_explained(recorder: Recorder) -> Iterator[None]:
    """Errors of the user's code with the line and the layer they came from."""
    try:
        yield
    except ForetellError:
        raise
    except Exception as error:
        where = f"{_where(error)}{recorder.stopped}"
        raise InputError(
            f"the step stopped{where}: {type(error).__name__}: {first_line(error)}",
            hint=f"if it runs on real tensors, {INSTEAD}, or capture with device='cpu'",
        ) from error


def _where(error: BaseException) -> str:
    """The innermost line of the user's own code that an error passed through."""
    found, trace = "", error.__traceback__
    while trace is not None:
        path = trace.tb_frame.f_code.co_filename
        if is_users(path):
            found = f" at {path}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found
