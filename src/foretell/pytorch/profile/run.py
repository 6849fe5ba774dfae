"""Run a training script, time its steps as they are, then trace a few of them.

What the profiler adds to a step is known from the two and can be taken off again.
"""

from __future__ import annotations

import platform
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from foretell import profile as marks
from foretell.errors import InputError
from foretell.pytorch.profile.clock import Times
from foretell.pytorch.profile.record import Finished, Recorder, Wanted
from foretell.pytorch.profile.script import run_script
from foretell.pytorch.profile.write import write


@dataclass(frozen=True)
class Found:
    """What was measured, and where the trace of it is."""

    trace: Path
    plain: Times  # un-profiled steps
    profiled: Times
    peak: float  # bytes of the device, 0 without one
    device: str


def profile(
    script: Path,
    output: Path,
    args: Sequence[str] = (),
    *,
    device: str = "",
    wanted: Wanted | None = None,
    progress: Callable[[str, float], None] = lambda words, share: None,
) -> Found:
    """Time and trace the steps of a script; the trace holds both times.

    `progress` is told every step, and the share of all of them that is done.
    """
    chosen, wanted = _device(device), wanted or Wanted()
    _check(wanted)
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        recorder = Recorder(wanted, chosen.type == "cuda", trace, progress)
        _run(recorder, script, args, chosen)
        assert recorder.plain is not None
        assert recorder.profiled is not None
        found = Found(output, recorder.plain, recorder.profiled, recorder.peak, _title(chosen))
        write(trace, output, _measured(found, wanted))
    return found


def _run(recorder: Recorder, script: Path, args: Sequence[str], device: torch.device) -> None:
    try:
        with marks.told_to(recorder):
            run_script(script, args, device)
    except Finished:
        return
    except SystemExit as left:
        if left.code not in (None, 0):
            raise InputError(f"`{script}` exited with {left.code}") from None
    finally:
        recorder.close()
    raise _too_few(recorder, script)


def _too_few(recorder: Recorder, script: Path) -> InputError:
    w = recorder.wanted
    if not recorder.done:
        return InputError(
            f"`{script}` ended without a step",
            hint="define model() and batch(), or mark steps: with foretell.profile.step(): …",
        )
    return InputError(
        f"`{script}` ended after {recorder.done} steps of {w.warmup} to warm up, {w.timed} to time "
        f"and {w.traced} to trace",
        hint="let it run longer, or ask for fewer: --warmup, --timed, --traced",
    )


def _check(wanted: Wanted) -> None:
    if wanted.warmup < 1 or wanted.timed < 2 or wanted.traced < 1:
        raise InputError(
            f"{wanted.warmup} steps to warm up, {wanted.timed} to time, {wanted.traced} to trace",
            hint="at least 1, 2 and 1 are needed",
        )


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise InputError(f"`{name}` is no device: {str(error).splitlines()[0]}") from None
    if device.type not in ("cuda", "cpu"):
        raise InputError(f"steps on `{device.type}` cannot be profiled", hint="use cuda or cpu")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InputError("there is no CUDA device on this machine", hint="use --device cpu")
    return device


def _title(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()


def _measured(found: Found, wanted: Wanted) -> dict[str, Any]:
    """What the trace's reader finds: seconds and bytes."""
    return {
        "unprofiled_s": found.plain.median,
        "unprofiled_low_s": found.plain.low,
        "unprofiled_high_s": found.plain.high,
        "unprofiled_steps": wanted.timed,
        "profiled_s": found.profiled.median,
        "peak_bytes": found.peak,
        "torch": torch.__version__,
    }
