"""A training script run: its steps timed as they are, then a few traced and written.

What the profiler adds to a step is known from the two and can be taken off again. The script runs
in a process of its own, one a rank.

How long steps take that follow one another, without making any of them wait. On a GPU an event is
put on the stream at the end of every step and read when all are done; without one the host's clock
is read. Either way the time of a step is that from its predecessor's end.

A script that describes a training step: functions that make a model and a batch. With functions
`model` and `batch` at its top level, a script is a description as defined in
`foretell.pytorch.script`. Otherwise it is run as it is and its steps are watched (→
`foretell.pytorch.intake`).

Steps are counted as they end: some to warm up, some timed, some traced, and then enough.
"""

from __future__ import annotations

import gzip
import json
import os
import runpy
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, BinaryIO

import torch

from foretell import profile as marks
from foretell.errors import InputError
from foretell.io import write_atomically
from foretell.pytorch.capture.step import Step, mapped
from foretell.pytorch.intake.launch import check, launch
from foretell.pytorch.intake.request import Request, Script, Wanted, no_step
from foretell.pytorch.intake.watch import Listener
from foretell.pytorch.profile.layers import Parents, named_layers
from foretell.pytorch.script import ask
from foretell.trace.words import MEASURED

_HEAD = 64  # bytes in which the first brace stands
_ENOUGH = 6  # steps of a script that are enough: one to warm up, two to time, three to trace


@dataclass(frozen=True)
class Times:
    """Seconds of steps: the middle one and, between them, the middle half."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, seconds: list[float]) -> Times:
        ranked = sorted(seconds)
        quarter = len(ranked) // 4
        return cls(median(ranked), ranked[quarter], ranked[-1 - quarter])


@dataclass
class Clock:
    """Notes the ends of steps; on a GPU by events, elsewhere by the host's clock."""

    on_gpu: bool
    ticks: list[Any] = field(default_factory=list)

    def tick(self) -> None:
        """A step has ended."""
        if not self.on_gpu:
            self.ticks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.ticks.append(event)

    def seconds(self) -> list[float]:
        """Seconds of every step but the first, whose beginning was not noted."""
        if self.on_gpu:
            torch.cuda.synchronize()
            pairs = zip(self.ticks, self.ticks[1:], strict=False)
            return [a.elapsed_time(b) / 1e3 for a, b in pairs]
        return [b - a for a, b in zip(self.ticks, self.ticks[1:], strict=False)]


def write(trace: Path, output: Path, measured: dict[str, Any]) -> None:
    """Copy a trace, with one more key at its top, packed where the name says so."""
    head = json.dumps({MEASURED: measured}).encode()[:-1] + b","

    def copy(file: Any) -> None:
        with open(trace, "rb") as source:
            begin, _, rest = source.read(_HEAD).partition(b"{")
            if begin.strip() or not rest:
                raise InputError(f"the profiler wrote no trace but `{begin[:20]!r}`")
            file.write(head + rest)
            shutil.copyfileobj(source, file, 1 << 20)

    def pack(file: BinaryIO) -> None:
        with gzip.GzipFile("", "wb", 6, file) as packed:
            copy(packed)

    write_atomically(output, pack if output.suffix == ".gz" else copy)


def trained_forever(path: Path, device: torch.device) -> None:
    """Take the step that a script describes over and over."""
    described = runpy.run_path(str(path), run_name="foretell_profile")
    train = training_step(described, path, device)
    while True:
        with marks.step():
            train()


def training_step(names: Mapping[str, Any], path: Path, device: torch.device) -> Callable[[], None]:
    """One step of what a description describes: forward, loss, backward, update."""
    model = names["model"]()
    if not isinstance(model, torch.nn.Module):
        raise InputError(f"`model()` of `{path}` made {type(model).__name__}, no torch.nn.Module")
    model = model.to(device).train()
    batch = mapped(ask(names["batch"]), lambda tensor: tensor.to(device))
    make = names.get("optimizer")
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = make(trained) if make is not None else None
    step = Step(model, batch, names.get("loss"), optimizer)

    def train() -> None:
        for p in trained if optimizer is None else ():
            p.grad = None
        if optimizer is not None:
            optimizer.zero_grad(set_to_none=True)
        step.run().backward()
        if optimizer is not None:
            optimizer.step()

    return train


@dataclass(frozen=True)
class Found:
    """What was measured, and where the trace of it is: a file, or a folder with one a rank."""

    trace: Path
    plain: Times  # un-profiled steps, of the first rank
    profiled: float
    peak: float  # bytes of the device, 0 without one
    device: str
    ranks: int = 1
    notes: tuple[str, ...] = ()


def profile(
    script: str | os.PathLike[str] | Script,
    output: Path,
    args: Sequence[str] = (),
    *,
    device: str = "",
    wanted: Wanted | None = None,
    ranks: int = 1,
    show: bool = False,
    progress: Callable[[str, float], None] | None = None,
) -> Found:
    """Time and trace the steps of a script; the trace holds both times.

    `ranks` processes run it as `torchrun` would; `show` lets what it prints through to stderr.
    `progress` receives every step, and the share of all of them that is done. Without `wanted`, a
    script that ends too soon is run again for fewer steps.
    """
    target = script if isinstance(script, Script) else Script(os.fspath(script), tuple(args))
    check(target)
    _check(wanted or Wanted())
    once = partial(_once, target, output, device, ranks=ranks, show=show, progress=progress)
    found = once(wanted or Wanted())
    notes: tuple[str, ...] = ()
    ended = _ended(found)
    if ended is not None and wanted is None and ended >= _ENOUGH:
        fewer = _fitting(ended)
        notes = (f"the script ends after {ended} steps: {fewer.timed} were timed",)
        found = once(fewer)
        ended = _ended(found)
    if ended is not None:
        raise _too_few(ended, wanted or Wanted(), target)
    return _summed(found, output, notes)


def _once(
    script: Script, output: Path, device: str, wanted: Wanted, **how: Any
) -> list[dict[str, Any]]:
    """Run the script for so many steps; what each rank answered."""
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}  # else it may take a GPU
    with tempfile.TemporaryDirectory(prefix="foretell-") as folder:
        request = Request("profile", script, str(output.absolute()), folder, device, wanted)
        found = launch(request, environment=hidden, **how)
    for answer in found:
        if "error" in answer:
            raise InputError(answer["error"])
    return found


def _ended(found: list[dict[str, Any]]) -> int | None:
    """Steps after which a script ended too soon, None where all was seen."""
    if any("trace" in answer for answer in found):
        return None
    return min(int(answer["ended"]) for answer in found)


def _fitting(steps: int) -> Wanted:
    """Steps to take of a script that has so many."""
    traced = 2 if steps >= 12 else 1
    rest = steps - traced - 2  # the profiler settles in two
    warmup = max(1, rest // 3)
    return Wanted(warmup, rest - warmup, traced)


def _summed(found: list[dict[str, Any]], output: Path, notes: tuple[str, ...]) -> Found:
    done = [answer for answer in found if "trace" in answer]
    first = done[0]
    plain = Times(*(first[f"unprofiled_{k}s"] for k in ("", "low_", "high_")))
    trace = Path(first["trace"])
    is_named = output.absolute() in (trace, trace.parent)  # a file, or a folder with one a rank
    return Found(
        output if is_named else trace.parent, plain, first["profiled_s"],
        max(answer["peak_bytes"] for answer in done), first["device"], len(done), notes,
    )  # fmt: skip


def _too_few(ended: int, wanted: Wanted, script: Script) -> InputError:
    if not ended:
        more = "Steps of another kind can be marked: with foretell.profile.step(): …"
        return no_step(script, more)
    w = wanted
    return InputError(
        f"`{script}` ended after {ended} steps of {w.warmup} to warm up, {w.timed} to time "
        f"and {w.traced} to trace",
        hint="let it run longer, or ask for fewer: --warmup, --timed, --traced",
    )


def _check(wanted: Wanted) -> None:
    if wanted.warmup < 1 or wanted.timed < 2 or wanted.traced < 1:
        raise InputError(
            f"{wanted.warmup} steps to warm up, {wanted.timed} to time, {wanted.traced} to trace",
            hint="at least 1, 2 and 1 are needed",
        )


_SETTLE = 2  # steps a profiler is given before what it records counts
_PATIENCE = 20.0  # seconds for warming up, and again for timing, where steps are slow
_SLOW = 4.0  # seconds of a step of which one is traced, behind one to settle
_FEWEST = 3  # steps timed, however slow


@dataclass
class Recorder(Listener):
    """Called at the end of every step; leaves times and a trace.

    Where steps are slow and no other rank has to agree, fewer than wanted are taken.
    """

    wanted: Wanted
    trace: Path  # where the trace is written, as plain JSON
    progress: Callable[[str, float], None] = lambda words, share: None
    finish: Callable[[], None] = lambda: None  # called when all is done
    parents: Parents = field(default_factory=Parents)
    is_alone: bool = True  # no other rank has to stop at the same step
    steps: int = 0  # ended so far
    plain: Times | None = None
    profiled: Times | None = None
    peak: float = 0.0  # bytes of the device, un-profiled
    timed: int = 0
    on_gpu: bool = False
    _done: int = 0  # steps of the present sort
    _began: float = field(default_factory=time.monotonic)
    _clock: Clock | None = None
    _settle: int = 0
    _active: int = 0
    _profiler: Any = None
    _open: ExitStack = field(default_factory=ExitStack)

    def step_ended(self, is_new: bool) -> None:
        """A step has ended; where what a step is has changed, counting begins anew."""
        if is_new and self._profiler is None:
            self._clock, self._done, self._began = None, 0, time.monotonic()
        self.end()

    def end(self) -> None:
        """A step has ended: go on to what comes next."""
        self.steps, self._done = self.steps + 1, self._done + 1
        if self._profiler is not None:
            self._traced()
        elif self._clock is not None:
            self._clock.tick()
            self._tell("timed", 0.3, self.wanted.timed)
            if self._is_enough(self.wanted.timed, _FEWEST):
                self._end_timing()
        else:
            self._tell("to warm up", 0.0, self.wanted.warmup)
            if self._is_enough(self.wanted.warmup, 1):
                self._begin_timing()

    def close(self) -> None:
        """Leave nothing behind in torch, however the script ended."""
        with _quiet():
            self._open.close()

    def measured(self) -> dict[str, Any]:
        """Measurements for the trace's reader: seconds and bytes."""
        assert self.plain is not None
        assert self.profiled is not None
        return {
            "unprofiled_s": self.plain.median,
            "unprofiled_low_s": self.plain.low,
            "unprofiled_high_s": self.plain.high,
            "unprofiled_steps": self.timed,
            "profiled_s": self.profiled.median,
            "peak_bytes": self.peak,
            "torch": torch.__version__,
        }

    def _tell(self, sort: str, share: float, of: int) -> None:
        self.progress(f"step {self.steps}, {sort}", share + 0.3 * min(self._done / of, 1.0))

    def _is_enough(self, wanted: int, fewest: int) -> bool:
        spent = time.monotonic() - self._began
        is_slow = self.is_alone and self._done >= fewest and spent > _PATIENCE
        return self._done >= wanted or is_slow

    def _begin_timing(self) -> None:
        self.on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
        if self.on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        self._clock, self._done, self._began = Clock(self.on_gpu), 0, time.monotonic()
        self._clock.tick()

    def _end_timing(self) -> None:
        assert self._clock is not None
        self.plain, self.timed = Times.of(self._clock.seconds()), self._done
        if self.on_gpu:
            self.peak = float(torch.cuda.max_memory_allocated())
        self._clock, self._done = Clock(self.on_gpu), 0
        self._begin_trace(self.is_alone and self.plain.median > _SLOW)
        self._clock.tick()

    def _begin_trace(self, is_slow: bool) -> None:
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if self.on_gpu:
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        self._settle = 1 if is_slow else _SETTLE
        self._active = 1 if is_slow else self.wanted.traced
        profiler = torch.profiler.profile(
            activities=kinds,
            schedule=torch.profiler.schedule(wait=0, warmup=self._settle, active=self._active),
            record_shapes=True,
            profile_memory=self.wanted.memory,
            on_trace_ready=lambda p: p.export_chrome_trace(str(self.trace)),
        )
        dynamo = sys.modules.get("torch._dynamo.utils")
        is_compiled = dynamo is not None and dynamo.counters["frames"].get("ok")
        if self.wanted.layers and not is_compiled:  # else hooks would make it compile again
            self._open.enter_context(named_layers(self.parents))
        with _quiet():
            self._profiler = self._open.enter_context(profiler)

    def _traced(self) -> None:
        assert self._clock is not None
        self._clock.tick()
        with _quiet():
            self._profiler.step()
        self._tell("traced", 0.6, self._settle + self._active)
        if self._done == self._settle + self._active:
            self.profiled = Times.of(self._clock.seconds()[self._settle :])
            self.close()
            self.finish()


def _quiet() -> warnings.catch_warnings[None]:
    """No warnings: torch's profiler warns of what is meant here, that it forgets earlier steps."""
    return warnings.catch_warnings(action="ignore")
