"""Run a training script, time its steps as they are, then trace a few of them.

What the profiler adds to a step is known from the two and can be taken off again. The script runs
in a process of its own, one a rank; nothing here imports torch.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretell.errors import InputError
from foretell.pytorch.intake.launch import check, launch
from foretell.pytorch.intake.request import Request, Script, Wanted
from foretell.pytorch.profile.clock import Times

_FEWEST = 6  # steps of a script that are enough: one to warm up, two to time, three to trace


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
    return Found(
        output if trace == output.absolute() else trace.parent, plain, first["profiled_s"],
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
