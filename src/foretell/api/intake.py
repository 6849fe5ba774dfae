"""A training script turned into a step: profiled on this machine's GPU, or captured without one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from foretell.errors import InputError
from foretell.graph import Graph, save
from foretell.graph import load as load_graph


@dataclass(frozen=True)
class CaptureOptions:
    """How a step is captured; the first five are for functions that make a step."""

    batch: int | None = None
    ranks: int = 1
    optimizer: str | None = None
    autocast: str = ""
    device: str = ""
    tf32: bool | None = None
    share: float | None = None
    kernels_of: str = "h200"  # device whose kernels are chosen
    is_module: bool = False  # the script is a module's name, as with `python -m`
    show: bool = False  # let through what the script prints


_OF_FUNCTIONS = ("batch", "ranks", "optimizer", "autocast", "device")


def require_torch() -> None:
    """Raise where torch is missing, without loading it."""
    if find_spec("torch") is None:
        raise InputError(
            "running a training script needs torch, which is not installed",
            hint="pip install 'foretell[torch]'",
        )


def is_script(name: str, is_module: bool = False) -> bool:
    """Whether a name is a training script to run as it is, and no file, function or description."""
    if is_module:
        return True
    path = Path(name)
    if path.suffix != ".py":
        return False
    if not path.is_file():
        raise InputError(f"there is no file `{name}`", hint="name a training script")
    from foretell.pytorch.intake.request import is_description

    return not is_description(path)


def profiled(
    script: str,
    args: tuple[str, ...],
    folder: Path,
    progress: Callable[..., None],
    is_module: bool = False,
) -> Path:
    """The trace of a script's step, profiled on this machine."""
    from foretell.pytorch.intake.request import Script
    from foretell.pytorch.profile.run import profile

    asked = Script(script, args, is_module)
    return profile(asked, folder / "step.json.gz", progress=progress).trace


def captured(
    source: str,
    args: tuple[str, ...],
    folder: Path,
    device: str,
    progress: Callable[..., None],
    is_module: bool = False,
) -> tuple[Graph, tuple[str, ...]]:
    """The graph of a script's step without times, and notes on how it was captured."""
    options = CaptureOptions(kernels_of=device, is_module=is_module)
    return capture_source(source, args, folder / "captured.graph", options, progress)


def capture_source(
    source: str,
    args: tuple[str, ...],
    output: Path,
    options: CaptureOptions,
    progress: Callable[..., None],
) -> tuple[Graph, tuple[str, ...]]:
    """The step of a script, a module or a function that makes one; written to `output` too."""
    if not is_script(source, options.is_module):
        graph = _of_function(source, options, progress)
        save(graph, output)
        return graph, ()
    notes = _of_script(source, args, output, options, progress)
    return load_graph(output), notes


def _of_script(
    source: str,
    args: tuple[str, ...],
    output: Path,
    options: CaptureOptions,
    progress: Callable[..., None],
) -> tuple[str, ...]:
    """Run an unchanged script and record one of its steps."""
    require_torch()
    from foretell.pytorch.intake.capture import capture_script
    from foretell.pytorch.intake.request import Script

    plain = CaptureOptions()
    given = [name for name in _OF_FUNCTIONS if getattr(options, name) != getattr(plain, name)]
    if given:
        raise InputError(
            f"--{given[0]} is for functions that make a step, and `{source}` is run as it is",
            hint=f"set it in the script's own arguments, or name a function: {source}:make",
        )
    return capture_script(
        Script(source, args, options.is_module), output, on=options.kernels_of,
        share=options.share, tf32=options.tf32, show=options.show, progress=progress,
    )  # fmt: skip


def _of_function(source: str, options: CaptureOptions, progress: Callable[..., None]) -> Graph:
    """The step that `train.py:make` describes."""
    try:
        from foretell.pytorch.capture import capture
        from foretell.pytorch.capture.source import find
    except ModuleNotFoundError as error:
        raise InputError(
            f"a capture needs PyTorch: {error}", hint="pip install 'foretell[torch]'"
        ) from None
    parts: Any = find(source, options.batch, options.ranks)
    return capture(
        parts.model, parts.batch, parts.loss, options.optimizer or parts.optimizer,
        on=options.kernels_of, real=parts.real, autocast=options.autocast, tf32=options.tf32,
        share=options.share, device=options.device, progress=progress,
    )  # fmt: skip
