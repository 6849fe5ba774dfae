"""The graph of a step of an unchanged script; nothing here imports torch.

Three ways are tried until one works: weights fake on a GPU that the script is told of, weights fake
while the script goes its way for CPUs, and everything real on the CPU.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from foretell.errors import InputError
from foretell.pytorch.intake.launch import check, launch
from foretell.pytorch.intake.request import Request, Script

_WAYS: tuple[tuple[bool, dict[str, Any]], ...] = (
    (False, {"shows_gpu": True}),
    (False, {"shows_gpu": False}),
    (True, {}),
)


def capture_script(
    script: Script,
    output: Path,
    *,
    on: str = "h200",
    share: float | None = None,
    tf32: bool | None = None,
    show: bool = False,
    progress: Callable[[str, float], None] | None = None,
) -> tuple[str, ...]:
    """Write the graph of one training step of a script; what there is to say of how it was made."""
    check(script)
    options = {"on": on, "share": share, "tf32": tf32}
    for is_real, more in _WAYS:
        with tempfile.TemporaryDirectory(prefix="foretell-") as folder:
            request = Request(
                "capture", script, str(output.absolute()), folder,
                options={**options, **more}, is_real=is_real,
            )  # fmt: skip
            (found, *_) = launch(request, 1, progress, show)
        if "graph" in found:
            return _REAL if is_real else ()
        if found.get("ended") is not None and is_real:
            raise _too_few(script, found["ended"])
        if found.get("is_final"):
            break
    raise InputError(found["error"])


_REAL = ("it ran on real tensors on the CPU: operators are those that torch chooses there",)


def _too_few(script: Script, steps: int) -> InputError:
    if not steps:
        return InputError(
            f"`{script}` ended without a step",
            hint="no optimizer stepped and no backward pass ran: does it train with these "
            "arguments? A function that makes the step can be named: train.py:make",
        )
    return InputError(
        f"`{script}` ended after {steps} step{'s' * (steps > 1)}; a capture needs two whole ones",
        hint="let it run longer",
    )
