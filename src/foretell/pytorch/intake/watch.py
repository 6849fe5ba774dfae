"""The steps of a training script, found by watching its optimizers and backward passes.

A step ends when an optimizer has stepped. Where several optimizers take turns (a GAN, an optimizer
a parameter), a step is the shortest pattern of turns that repeats. Gradient accumulation is
backward passes without an optimizer's step, so it needs no rule of its own. A script without any
optimizer of torch's kind is recognized by its backward passes, and one that marks its steps by the
marks.
"""

from __future__ import annotations

import multiprocessing
import site
import sys
import sysconfig
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from foretell.pytorch.intake.request import Request, is_rank

_BACKWARD = -1  # the turn of a script without optimizers
_PATIENT = 24  # turns after which an optimizer that never had one is not waited for
_LONG = 4096  # turns after which a pattern that never repeats is no longer looked for


class Listener:
    """Observer of the steps of a script; of no interest are those that it does not say."""

    def runs_itself(self, path: Path) -> bool:
        """Whether a script only describes a step, which is run without it."""
        return False

    def step_ended(self, is_new: bool) -> None:
        """A step has ended; `is_new`: what a step is has just been understood anew."""

    def backward_begins(self) -> None:
        """A backward pass begins."""

    def backward_ended(self) -> None:
        """A backward pass has ended."""


@dataclass
class Pattern:
    """The turns that optimizers take; says when a turn ends a step."""

    unit: list[int] = field(default_factory=list)
    place: int = 0  # in the unit
    turns: list[int] = field(default_factory=list)
    is_lost: bool = False  # the unit was wrong and no other is known yet
    rarest: int | None = None  # the turn that ends a step where nothing repeats

    def ends(self, turn: int) -> tuple[bool, bool]:
        """Whether a turn ends a step, and whether what a step is was just understood anew."""
        if self.rarest is not None:
            return turn == self.rarest, False
        self.unit = self.unit or [turn]
        self.turns.append(turn)
        if not self.is_lost and turn == self.unit[self.place]:
            self.place = (self.place + 1) % len(self.unit)
            return self.place == 0, False
        return self._learn()

    def _learn(self) -> tuple[bool, bool]:
        period = repeated(self.turns)
        self.is_lost = not period
        if period:
            self.unit, self.place = self.turns[-period:], 0
        elif len(self.turns) > _LONG:
            self.rarest = min(set(self.turns), key=self.turns.count)
        return bool(period), bool(period)


def repeated(turns: Sequence[int]) -> int:
    """The length of the shortest ending that comes twice in a row and has every turn in it."""
    every = set(turns)
    for period in range(len(every), len(turns) // 2 + 1):
        if turns[-1] != turns[-1 - period]:
            continue
        last = turns[-period:]
        if last == turns[-2 * period : -period] and set(last) == every:
            return period
    return 0


@dataclass
class Watch:
    """Tells a listener of the steps and backward passes of whatever runs while it is open."""

    listener: Listener
    pattern: Pattern = field(default_factory=Pattern)
    is_marked: bool = False  # whether the script marks its steps itself
    optimizers: list[Any] = field(default_factory=list)  # in the order they were met
    made: list[Any] = field(default_factory=list)  # optimizers so far, weakly
    turns: int = 0
    _inside: int = 0  # calls of GradScaler.step that are open
    _backwards: int = 0  # backward passes that are open
    _ended: bool | None = None  # a step ended in the backward pass that is open; as `is_new` says

    @contextmanager
    def open(self) -> Iterator[None]:
        """Watch; nothing of torch stays changed behind it."""
        with ExitStack() as stack:
            hook = register_optimizer_step_post_hook(lambda optimizer, *_: self._turn(optimizer))
            stack.callback(hook.remove)
            changes: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
                (Optimizer, "__init__", self._optimizer_made(Optimizer.__init__)),
                (GradScaler, "step", self._scaler_steps(GradScaler.step)),
                (torch.autograd, "backward", partial(self._backward, torch.autograd.backward)),
            )
            for owner, name, new in changes:
                stack.enter_context(patch.object(owner, name, new))
            yield

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Look away: what runs inside is no step of the script's."""
        self._inside, self._backwards = self._inside + 1, self._backwards + 1
        try:
            yield
        finally:
            self._inside, self._backwards = self._inside - 1, self._backwards - 1

    def end(self) -> None:
        """The script has marked the end of a step."""
        is_new, self.is_marked = not self.is_marked, True
        self.listener.step_ended(is_new)

    def _turn(self, optimizer: Any) -> None:
        """An optimizer has stepped."""
        if self._inside or self.is_marked:
            return
        known = [k for k, o in enumerate(self.optimizers) if o is optimizer]
        if not known:
            self.optimizers.append(optimizer)
        self._count(known[0] if known else len(self.optimizers) - 1)

    @property
    def is_sure(self) -> bool:
        """Whether what a step is can be relied on: no optimizer still waits for its first turn."""
        living = [o for o in (made() for made in self.made) if o is not None]
        waiting = [o for o in living if not any(o is known for known in self.optimizers)]
        return self.is_marked or not waiting or self.turns >= _PATIENT

    @property
    def is_in_backward(self) -> bool:
        """Whether a backward pass is going on."""
        return bool(self._backwards)

    def _count(self, turn: int) -> None:
        self.turns += 1
        is_end, is_new = self.pattern.ends(turn)
        if is_end and self._backwards:  # an optimizer that steps in a backward pass: at its end
            self._ended = is_new or bool(self._ended)
        elif is_end:
            self.listener.step_ended(is_new)

    def _optimizer_made(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def init(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            self.made.append(weakref.ref(optimizer))
            plain(optimizer, *args, **kwargs)

        return init

    def _scaler_steps(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """A scaler that skips an overflowed update has taken its turn all the same."""

        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            self._inside += 1
            try:
                found = plain(scaler, optimizer, *args, **kwargs)
            finally:
                self._inside -= 1
            self._turn(optimizer)
            return found

        return step

    def _backward(self, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._backwards:  # of recomputed activations, inside another
            return plain(*args, **kwargs)
        self._backwards += 1
        self.listener.backward_begins()
        try:
            found = plain(*args, **kwargs)
        finally:
            self._backwards -= 1
        self.listener.backward_ended()
        if self._ended is not None:
            is_new, self._ended = self._ended, None
            self.listener.step_ended(is_new)
        if not self.made and not self.is_marked:
            self._count(_BACKWARD)
        return found


# Processes that a script starts itself: what trains in them is watched too. Only functions of the
# script's own are: workers of loaders, pools and managers stay as they are.


@dataclass(frozen=True)
class Watched:
    """A function that a script runs in a process of its own; it is sent there."""

    request: Request
    function: Callable[..., Any]
    ranks: int = 0  # where the first argument is a rank: of how many

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from foretell.pytorch.intake.child import job_of

        if self.ranks:
            is_rank(args[0], self.ranks)
        with job_of(self.request, is_started=True).open():
            return self.function(*args, **kwargs)


@contextmanager
def watched_processes(request: Request) -> Iterator[None]:
    """Watch what the script starts by torch.multiprocessing.spawn or as a process of its own."""
    spawning = import_module("torch.multiprocessing.spawn")  # a function has its name too
    many, one = spawning.start_processes, BaseProcess.start

    def start_many(fn: Any, args: Any = (), nprocs: int = 1, *more: Any, **options: Any) -> Any:
        return many(Watched(request, fn, nprocs), args, nprocs, *more, **options)

    def start(process: Any) -> None:
        method = getattr(process, "_start_method", None) or multiprocessing.get_start_method()
        # one that is forked begins with what is open here
        if method != "fork" and _is_own(process._target):
            process._target = Watched(request, process._target)
        one(process)

    with ExitStack() as stack:
        stack.enter_context(patch.object(spawning, "start_processes", start_many))
        stack.enter_context(patch.object(BaseProcess, "start", start))
        yield


def _is_own(function: Any) -> bool:
    """Whether a function is the script's or of what lies beside it, and not of a package."""
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    file = str(getattr(module, "__file__", None) or "")
    packages = (*site.getsitepackages(), *sysconfig.get_paths().values())
    inner = ("site-packages", "dist-packages")
    return bool(file) and not file.startswith(packages) and not any(p in file for p in inner)
