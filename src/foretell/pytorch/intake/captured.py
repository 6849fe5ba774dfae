"""A script watched for a capture: the operators of one of its own steps, written down.

The script runs on real data with fake weights (→ `fake`), or with everything real on the CPU where
that does not work. Once a step is understood, the next whole one is recorded: forward and loss,
backward, update, as often and in whatever order the script has them.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import _disable_current_modes

from foretell import profile as marks
from foretell.cluster.read import devices
from foretell.graph import BufferKind, Phase, save
from foretell.graph.graph import NONE
from foretell.pytorch.capture import gpu, words
from foretell.pytorch.capture.entry import Formats, compose
from foretell.pytorch.capture.gpu import ON_CPU, chosen
from foretell.pytorch.capture.record import Ledger, Recorder, is_work, workspace
from foretell.pytorch.capture.step import as_on_gpu
from foretell.pytorch.capture.values import Values
from foretell.pytorch.intake import fake
from foretell.pytorch.intake.files import Journal
from foretell.pytorch.intake.profiled import Leave, journalled_saves, progress_in
from foretell.pytorch.intake.request import Request
from foretell.pytorch.intake.watch import Listener, Watch, watched_processes
from foretell.pytorch.profile.layers import Parents

_FORMATS = {torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass
class StepRecorder(Recorder):
    """Writes down the operators of a script's step: those on the device, and all in its modules."""

    fakes: fake.Fakes | None = None

    def begin(self) -> None:
        """Forget what was written down so far."""
        self.rows, self.ledger, self.weights = [], Ledger(), {}
        self._made, self._counts = {}, Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.phase == Phase.NONE:
            if self.fakes is not None and fake.has_fake((args, kwargs)):
                args, kwargs = self.fakes.met(func, args, kwargs)
                return self._run(func, args, kwargs)
            return func(*args, **kwargs)
        if self.fakes is not None and fake.has_fake((args, kwargs)):
            args, kwargs = self.fakes.met(func, args, kwargs)
            return super().__torch_dispatch__(func, types, args, kwargs)
        if not is_work(func) or not self._is_in_step((args, kwargs)):
            return func(*args, **kwargs)
        if self.fakes is None:
            return super().__torch_dispatch__(func, types, args, kwargs)
        return self._host_data(func, args, kwargs)

    def _is_in_step(self, values: Any) -> bool:
        """Whether real tensors are the model's and not those of something that loads data."""
        if self._stack:
            return True
        return self.fakes is None and any(self.ledger.stay(t) for t in words.tensors_in(values))

    def _host_data(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """An operator on real data inside a module: a GPU would run it, so it is written down."""
        assert self.fakes is not None
        number = torch.autograd._get_sequence_nr() - 1
        made = func(*args, **kwargs)
        like_args, like_kwargs, like = self.fakes.all_of((args, kwargs, made))
        self._note(func, words.inputs_of(func, like_args, like_kwargs), like, number)
        return made


@dataclass
class Capturing(Listener):
    """Writes the graph of a step of whatever runs while it is open, then leaves."""

    request: Request
    journal: Journal
    leave: Leave
    steps: int = 0
    fakes: fake.Fakes | None = field(init=False)
    recorder: StepRecorder = field(init=False)
    watch: Watch = field(init=False)
    parents: Parents = field(default_factory=Parents)
    roots: dict[int, Module] = field(default_factory=dict)
    samples: list[int] = field(default_factory=list)  # of each forward of the recorded step
    autocast: str = ""
    tell: Callable[[str, float], None] = field(init=False)
    _is_recording: bool = False

    def __post_init__(self) -> None:
        self.fakes = None if self.request.is_real else fake.Fakes()
        place = gpu.CPU if self.fakes is None else gpu.GPU
        values = Values(share=self.request.options.get("share"))
        self.recorder = StepRecorder({}, values, place, fakes=self.fakes)
        self.watch = Watch(self)

    @property
    def arch(self) -> str:
        """The architecture whose kernels are chosen."""
        on = self.request.options["on"]
        return ON_CPU if self.fakes is None or on == ON_CPU else devices()[on].arch

    @contextmanager
    def open(self) -> Iterator[None]:
        """Run the script with the tensors that the request asks for, and watch it."""
        logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
        shows = bool(self.request.options.get("shows_gpu", True))
        with ExitStack() as stack:
            enter = stack.enter_context
            enter(self.parents.noted())
            enter(self.watch.open())
            enter(marks.recording_to(self.watch))
            enter(journalled_saves(self.journal))
            enter(torch.compiler.set_stance("force_eager"))
            enter(watched_processes(self.request))
            if self.fakes is not None:
                enter(fake.pretended(self.fakes, shows_gpu=shows))
            enter(self.recorder)
            enter(chosen(self.arch, self.recorder.loss_begins))
            if self.fakes is not None:
                enter(fake.Calls(self.fakes))
            stack.callback(register_module_forward_pre_hook(self._module_called).remove)
            stack.callback(
                register_optimizer_step_pre_hook(lambda *_: self.backward_ended()).remove
            )
            stack.callback(register_optimizer_step_post_hook(self._update_ended).remove)
            enter(self.recorder.watching_modules())
            self.journal.begin()
            self.tell = progress_in(Path(self.request.folder))
            yield

    def step_ended(self, is_new: bool) -> None:
        """Record the step behind the first that is understood; then that is all."""
        self.steps += 1
        if self._is_recording and not is_new and self.watch.is_sure:
            self._finish()
        self.tell(f"step {self.steps}", 0.4)
        self._begin()

    def backward_begins(self) -> None:
        if self._is_recording:
            self.recorder.phase = Phase.BACKWARD

    def backward_ended(self) -> None:
        if self._is_recording:
            self.recorder.phase = Phase.UPDATE

    def _update_ended(self, *_: Any) -> None:
        if self._is_recording and self.watch.is_in_backward:
            self.recorder.phase = Phase.BACKWARD

    def _begin(self) -> None:
        """From here to the next end of a step everything is written down."""
        self._is_recording = True
        self.samples.clear()
        if self.fakes is not None:
            as_on_gpu(*self.watch.optimizers)
        self.recorder.begin()
        self._enter()
        self.recorder.phase = Phase.UPDATE

    def _module_called(self, module: Module, args: Any) -> None:
        if self.recorder._stack:
            return
        root = self.parents.root(module)
        if id(root) not in self.roots:
            self.roots[id(root)] = root
            if self.fakes is not None:
                fake.adopt(root, self.fakes, self.watch.optimizers)
        if not self._is_recording:
            return
        self.recorder.phase = Phase.FORWARD
        for tensor in words.tensors_in(args):
            self.recorder.ledger.meet(self._like(tensor), NONE, BufferKind.INPUT, "batch")
            if tensor.dim() and torch.is_grad_enabled():
                self.samples.append(int(tensor.shape[0]))
        kind = self.recorder.device.type
        if torch.is_autocast_enabled(kind):
            self.autocast = _FORMATS.get(torch.get_autocast_dtype(kind), "")

    def _enter(self) -> None:
        """Make known what is there before the step: weights, buffers and optimizer state."""
        recorder = self.recorder
        outer = map(self.parents.root, self.roots.values())  # some were put into others since
        self.roots = {id(root): root for root in outer}
        for root in self.roots.values():
            recorder.enter(root, self._like)
        for optimizer in self.watch.optimizers:
            for state in optimizer.state.values():
                for tensor in words.tensors_in(state):
                    if tensor.dim():
                        kind, like = BufferKind.OPTIMIZER, self._like(tensor)
                        recorder.ledger.meet(like, NONE, kind, "optimizer state")

    def _like(self, tensor: Tensor) -> Tensor:
        return tensor if self.fakes is None else self.fakes.of(tensor)

    def _finish(self) -> None:
        recorder = self.recorder
        recorder.phase = Phase.NONE
        with _disable_current_modes():
            recorder.ledger.close(*self.roots.values())
            recorder.ledger.stays += workspace(recorder.rows, self.arch)
            formats = Formats.from_setting(self.request.options.get("tf32"))
            graph = compose(recorder.rows, recorder.ledger.stays, formats, self._facts())
            save(graph, self.request.output)
        self.leave({"graph": self.request.output, "is_real": self.fakes is None})

    def _facts(self) -> dict[str, Any]:
        optimizers = self.watch.optimizers
        trained = {id(p) for o in optimizers for g in o.param_groups for p in g["params"]}
        roots = list(self.roots.values())
        held = [r for r in roots if any(id(p) in trained for p in r.parameters())] or roots
        name = " and ".join(dict.fromkeys(type(r).__name__ for r in held)) or "step"
        first = optimizers[0] if optimizers else None
        facts = self.recorder.facts(name, self.request.options["on"], self.autocast, first)
        facts["script"] = Path(self.request.script.name).name
        if self.samples:
            facts["batch"] = max(set(self.samples), key=self.samples.count)
        return facts
