"""A training script run: its steps timed as they are, then a few traced and written.

What the profiler adds to a step is known from the two and can be taken off again. The script runs
in a process of its own, one a rank; nothing here imports torch.

How long steps take that follow one another, without making any of them wait. On a GPU an event is
put on the stream at the end of every step and read when all are done; without one the host's clock
is read. Either way the time of a step is that from its predecessor's end.

A script that describes a training step: functions that make a model and a batch. With functions
`model` and `batch` at its top level, a script is a description as defined in
`foretell.pytorch.script`. Otherwise it is run as it is and its steps are watched (→
`foretell.pytorch.intake`).
"""

from __future__ import annotations

import gzip
import json
import os
import runpy
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, BinaryIO

import torch

from foretell import profile as marks
from foretell.errors import InputError
from foretell.io import write_atomically
from foretell.pytorch.capture.step import Step, mapped
from foretell.pytorch.intake.launch import check, launch
from foretell.pytorch.intake.request import Request, Script, Wanted
from foretell.pytorch.script import ask
from foretell.trace.words import MEASURED

_HEAD = 64  # bytes in which the first brace stands
_FEWEST = 6  # steps of a script that are enough: one to warm up, two to time, three to trace


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
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.ticks.append(event)

    def seconds(self) -> list[float]:
        """Seconds of every step but the first, whose beginning was not noted."""
        if self.on_gpu:
            import torch

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
    asked = script if isinstance(script, Script) else Script(os.fspath(script), tuple(args))
    check(asked)
    _check(wanted or Wanted())
    run = _Run(asked, output, device, ranks, show, progress)
    found = run.once(wanted or Wanted())
    notes: tuple[str, ...] = ()
    ended = _ended(found)
    if ended is not None and wanted is None and ended >= _FEWEST:
        fewer = _fitting(ended)
        notes = (f"the script ends after {ended} steps: {fewer.timed} were timed",)
        found = run.once(fewer)
        ended = _ended(found)
    if ended is not None:
        raise _too_few(ended, wanted or Wanted(), asked)
    return _summed(found, output, notes)


@dataclass(frozen=True)
class _Run:
    script: Script
    output: Path
    device: str
    ranks: int
    show: bool
    progress: Callable[[str, float], None] | None

    def once(self, wanted: Wanted) -> list[dict[str, Any]]:
        """Run the script for so many steps; what each rank answered."""
        with tempfile.TemporaryDirectory(prefix="foretell-") as folder:
            request = Request(
                "profile", self.script, str(self.output.absolute()), folder, self.device, wanted
            )
            found = launch(request, self.ranks, self.progress, self.show, _hidden(self.device))
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


def _hidden(device: str) -> dict[str, str]:
    """A script that takes a GPU where there is one takes none where none is seen."""
    return {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}


def _too_few(ended: int, wanted: Wanted, script: Script) -> InputError:
    if not ended:
        return InputError(
            f"`{script}` ended without a step",
            hint="no optimizer stepped and no backward pass ran: does it train with these "
            "arguments? Steps of another kind can be marked: with foretell.profile.step(): …",
        )
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
