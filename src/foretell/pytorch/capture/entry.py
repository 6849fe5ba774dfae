"""A whole training step from a model alone: forward, loss, backward and optimizer.

    graph = foretell.capture(model, (x, y), loss=F.cross_entropy, optimizer="adamw")

The step is run once on fake tensors and every operator is written down; nothing is computed and no
weights are allocated. Where what the step does depends on its data (masks, routing, `.item()`), it
is run again with real weights and a real batch on the CPU behind the fake tensors, and where fake
tensors cannot stand for it at all, on real tensors alone. Random numbers have a fixed seed, so that
the answer repeats. The graph has no times yet: `foretell.price(graph, cluster)` gives them.

Recorded operators become a graph: a host task each, kernels behind it, and memory.

host     one thread issues all operators in order; its shape says what it issues, for a price
stream   one stream runs the kernels; each waits for its launch and for what it uses
buffers  from the first kernel that needs the memory to the last before it was given back
"""

from __future__ import annotations

import logging
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from foretell.cluster.read import devices
from foretell.errors import ForetellError, InputError, unknown
from foretell.graph import BufferKind, Builder, Dtype, Graph, Kind, Phase
from foretell.graph.graph import NONE, Array
from foretell.operators import PRODUCTS
from foretell.pytorch.capture import gpu
from foretell.pytorch.capture.gpu import ON_CPU, chosen
from foretell.pytorch.capture.record import BLOCK, Pace, Recorder, Row, Stay, workspace
from foretell.pytorch.capture.step import (
    Parts,
    Step,
    copyable,
    fake_batch,
    fake_model,
    fake_optimizer,
    real_step,
    settle,
    with_data,
)
from foretell.pytorch.capture.values import (
    INSTEAD,
    NeedsData,
    Stopped,
    Values,
    first_line,
    seeded,
    users_line,
)
from foretell.pytorch.capture.words import tensors_in

# Medians of H200 traces, rounded: between two queued kernels, and from a launch to its kernel.
TURNAROUND, LATENCY = 1e-6, 1e-6
_HOST, _STREAM = 0, 1  # lanes
Held = list[tuple[Stay, int, int]]  # memory, and the kernels it is born for and dies behind


def compose(
    rows: list[Row], stays: list[Stay], formats: Formats, facts: Mapping[str, Any]
) -> Graph:
    """The graph of a recorded step."""
    made, last = Builder(), np.full(len(rows), NONE, np.int64)
    for i, row in enumerate(rows):
        host = _host(made, row)
        for part in range(len(row.parts)):
            last[i] = _kernel(made, row, part, host, last, formats)
    made.lane("thread main", kind="host")
    made.lane("stream 0", kind="compute")
    held = _held(stays, last)
    for stay, born, dies in held:
        made.buffer(stay.bytes, born=born, dies=dies, name=stay.name, kind=stay.kind.name)
    return made.made({**facts, "peak_bytes": _peak(held)})


@dataclass(frozen=True)
class Formats:
    """Which fp32 work runs as tf32."""

    products: bool
    convolutions: bool

    @classmethod
    def from_setting(cls, tf32: bool | None) -> Formats:
        """As given, by default as torch is set."""
        if tf32 is not None:
            return cls(tf32, tf32)
        return cls(torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)

    def of(self, row: Row, word: str) -> Dtype:
        is_conv = row.op.startswith("convolution") and word != "bias"
        is_tf32 = (self.products and row.op in PRODUCTS) or (self.convolutions and is_conv)
        return Dtype.TF32 if is_tf32 and row.dtype == Dtype.FP32 else row.dtype


def _host(made: Builder, row: Row) -> int:
    """The call that issues an operator; one that asks for a number waits for the stream."""
    said = {"kernels": len(row.parts), "modules": row.modules, "nodes": row.nodes}
    said |= {"tensors": row.tensors, "update": row.phase == Phase.UPDATE}
    more = "".join(f",{key}={int(value)}" for key, value in said.items() if value)
    task = made.task(
        kind=Kind.HOST, op=row.op, name=row.name, lane=_HOST, layer=row.layer, phase=row.phase,
        shape=f"direction={row.direction}{more}",
    )  # fmt: skip
    if row.waits:
        made.task(
            kind=Kind.SYNC, op="cudaStreamSynchronize", name=row.op, lane=_HOST, layer=row.layer,
            phase=row.phase, drains=(_STREAM,),
        )  # fmt: skip
    return task


def _kernel(made: Builder, row: Row, part: int, host: int, last: Array, formats: Formats) -> int:
    """One kernel of an operator, behind its launch and behind what it uses."""
    word, flops, moved = row.parts[part]
    said = f",part={word}" if word else ""
    task = made.task(
        kind=Kind.COPY if row.is_copy else Kind.KERNEL, op=row.op, name=row.name, lane=_STREAM,
        gap=TURNAROUND, flops=flops, bytes=moved / 2 if row.is_copy else moved,  # a bus: once
        layer=row.layer, phase=row.phase, dtype=formats.of(row, word), shape=row.shape + said,
    )  # fmt: skip
    made.wait(task, host, lag=LATENCY, kind="launch")
    if word == "bias" and row.op == "convolution":
        made.wait(task, task - 1)
    for source in row.after:
        if last[source] != NONE and last[source] < task:
            made.wait(task, int(last[source]))
    return task


def _held(stays: list[Stay], last: Array) -> Held:
    """Memory by the kernels it is needed for; what no kernel sees takes none."""
    before = np.maximum.accumulate(last) if len(last) else last
    after = _next(last)
    found = []
    for stay in stays:
        born = NONE if stay.born == NONE else int(after[stay.born])
        dies = NONE if stay.dies == NONE else int(before[stay.dies])
        is_seen = stay.dies == NONE or dies != NONE
        is_late = stay.born != NONE and born == NONE  # reserved behind the last kernel of the step
        if stay.bytes and is_seen and (dies == NONE or born <= dies) and not is_late:
            found.append((stay, born, dies))
    return found


def _peak(held: Held) -> float:
    """Most bytes at once when tasks run in the order they were issued."""
    change = np.zeros(max((max(born, dies) for _, born, dies in held), default=0) + 3)
    for stay, born, _ in held:
        change[born + 1] += stay.bytes
    for stay, _, dies in held:
        if dies != NONE:
            change[dies + 2] -= stay.bytes
    return float(np.cumsum(change).max(initial=0.0))


def _next(last: Array) -> Array:
    """For each operator the first kernel at or behind it."""
    far = np.iinfo(np.int64).max
    filled = np.where(last == NONE, far, last)
    found = np.minimum.accumulate(filled[::-1])[::-1] if len(last) else filled
    return np.where(found == far, NONE, found)


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
    real: Callable[[], tuple[Any, ...]] | None = None,
) -> Graph:
    """One training step as a graph, without a GPU, weights or data.

    `model` is a module, or a function that makes one (then nothing is allocated). `batch` is what
    the model takes: a tensor, a tuple, a dict, or a function that makes it. `loss` is a function of
    output and target (the last of the batch), or of the model and the batch for any code of your
    own; without it the model returns its loss. `optimizer` is a name (`adamw`, `sgd:kind=loop`,
    `adam:kind=fused`), a function of the parameters, or an optimizer of the model's parameters.

    `autocast` (`bf16`, `fp16`) runs forward and loss in mixed precision. `tf32` lets fp32 matmuls
    and convolutions use it; unsaid, torch's own settings count. `share` answers for data that is
    not there (→ `foretell.pytorch.capture.values`). `on` names the device whose kernels are chosen;
    `on="cpu"` leaves the choice to torch, as it is made where no GPU is. `device="cpu"` makes fake
    CPU tensors where a GPU cannot be pretended. `progress` receives what is done, and the share of
    the capture that is. `real` makes model, batch, loss and optimizer with values, where those that
    are given have none (are on `meta`); it is called only where the step depends on them.
    """
    given = Parts(model, batch, loss, optimizer, real)
    options = _CaptureOptions(autocast, tf32, share, on, progress)
    _arch(on)
    if autocast and autocast not in _AUTOCAST:
        raise unknown("autocast format", autocast, _AUTOCAST)
    place = _place("cpu" if on == ON_CPU else device)
    try:
        with seeded():
            return _on_fakes(given, options, place, Values(share=share))
    except Stopped as error:
        stopped = error
    return _with_data(given, options, place, stopped)


def _with_data(
    given: Parts, options: _CaptureOptions, place: torch.device, stopped: Stopped
) -> Graph:
    """The step once more with real weights and a real batch, where those can be had."""
    with seeded():
        found = with_data(given, stopped)
    try:
        with seeded():
            return _on_fakes(found, options, place, Values(every=True, share=options.share))
    except Stopped:
        try:
            with seeded(), _quiet():
                return _recorded(found, options, gpu.CPU, Values(is_off=True, share=options.share))
        except Stopped as error:  # it does not run on real tensors either
            raise error if isinstance(stopped, NeedsData) else stopped from error.__cause__


@dataclass(frozen=True)
class _CaptureOptions:
    """How to capture."""

    autocast: str
    tf32: bool | None
    share: float | None
    on: str
    progress: Callable[[str, float], None]


def _on_fakes(given: Parts, options: _CaptureOptions, place: torch.device, values: Values) -> Graph:
    """The step on fake tensors, as a GPU would run it."""
    with gpu.pretended(place), _quiet(), copyable(), gpu.fake_mode(place):
        return _recorded(given, options, place, values)


def _recorded(given: Parts, options: _CaptureOptions, place: torch.device, values: Values) -> Graph:
    """The graph of one step, recorded while it runs."""
    arch = ON_CPU if values.is_off else _arch(options.on)
    recorder = Recorder({}, values, place, pace=Pace(options.progress))
    recorder.ledger.block = 1 if options.on == ON_CPU else BLOCK
    with recorder, chosen(arch, recorder.loss_begins):
        with torch.autograd.set_multithreading_enabled(False), _errors_explained(recorder):
            step = real_step(given) if values.is_off else _made(given, place, values.every)
            word = options.autocast
            short = torch.autocast(place.type, dtype=_AUTOCAST[word]) if word else nullcontext()
            _run(step, recorder, short)
        recorder.ledger.close(step.model)
    recorder.ledger.stays += workspace(recorder.rows, _arch(options.on))
    facts = _facts(step, recorder, options.autocast, options.on)
    del step
    return compose(recorder.rows, recorder.ledger.stays, Formats.from_setting(options.tf32), facts)


def _place(device: str) -> torch.device:
    if device and device not in _DEVICES:
        raise unknown("device", device, _DEVICES)
    can_pretend = gpu.is_possible()
    if device == "cuda" and not can_pretend:
        raise InputError(
            "this build of torch does not let a GPU be pretended",
            hint="capture with device='cpu', or on a machine with a GPU",
        )
    return _DEVICES[device or ("cuda" if can_pretend else "cpu")]


def _arch(on: str) -> str:
    known = devices()
    if on == ON_CPU:
        return ON_CPU
    if on not in known:
        raise unknown("device", on, [*known, ON_CPU])
    return known[on].arch


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch's warnings about fake devices."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL)  # it reports errors that are raised as well
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        log.setLevel(level)


def _made(given: Parts, place: torch.device, values: bool) -> Step:
    made = fake_model(given.model, place, values=values)
    batch = given.batch
    if callable(batch):
        with torch.device(place):
            batch = batch()
    data = fake_batch(batch, place, values=values)
    optimizer = fake_optimizer(given.optimizer, given.model, made, on_gpu=place.type == "cuda")
    return Step(made, data, given.loss, optimizer)


def _run(step: Step, recorder: Recorder, autocast: Any) -> None:
    """One step as training has it from the second on: the optimizer has its state."""
    _enter(step, recorder)
    with ExitStack() as stack:
        stack.enter_context(recorder.watching_modules())
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        recorder.phase = Phase.FORWARD
        with autocast:
            loss = step.run()
        recorder.phase = Phase.BACKWARD
        recorder.values.is_over = True
        loss.backward()
        del loss
        recorder.phase = Phase.UPDATE
        if step.optimizer is not None:
            step.optimizer.step()
        recorder.phase = Phase.NONE


def _enter(step: Step, recorder: Recorder) -> None:
    """Make known what is there before the step: weights, buffers, state and the batch."""
    model, ledger = step.model, recorder.ledger
    if step.optimizer is not None:
        with recorder.values.paused():
            settle(step.optimizer, [p for p in model.parameters() if p.requires_grad])
    recorder.enter(model)
    recorder.pace.modules = len(recorder.names)
    kinds = {p.device.type for p in model.parameters()}
    for tensor in tensors_in([*step.optimizer.state.values()] if step.optimizer else []):
        if tensor.device.type in kinds:
            ledger.meet(tensor, NONE, BufferKind.OPTIMIZER, "optimizer state")
    for tensor in tensors_in(step.batch):
        ledger.meet(tensor, NONE, BufferKind.INPUT, "batch")


def _facts(step: Step, recorder: Recorder, autocast: str, on: str) -> dict[str, Any]:
    facts = recorder.facts(type(step.model).__name__, on, autocast, step.optimizer)
    forward = [row for row in recorder.rows if row.direction == "fwd"]
    facts["batch_ops"] = sorted({row.name for row in forward if row.reads_batch})
    sides = {int(t.shape[0]) for t in tensors_in(step.batch) if t.dim()}
    if len(sides) == 1:  # of all tensors of the batch: its samples
        facts["batch"] = sides.pop()
    if recorder.values.every or recorder.values.is_off:
        facts["data"] = "real"  # weights and batch had values
    return facts


@contextmanager
def _errors_explained(recorder: Recorder) -> Iterator[None]:
    """Errors of the user's code with the line and the layer they came from."""
    try:
        yield
    except ForetellError:
        raise
    except Exception as error:
        line = users_line(traceback.extract_tb(error.__traceback__))
        where = f"{f' at {line}' if line else ''}{recorder.stopped}"
        raise Stopped(
            f"the step stopped{where}: {type(error).__name__}: {first_line(error)}",
            hint=f"if it runs on real tensors, {INSTEAD}, or capture with device='cpu'",
        ) from error
