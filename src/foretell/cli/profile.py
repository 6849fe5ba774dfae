"""`foretell profile`: a training script timed and traced."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from foretell.cli.arguments import ScriptCommand, module_option, show_option
from foretell.cli.output import FILE, answer, json_option, say, working


@click.command(cls=ScriptCommand)
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "-o", "--output", type=FILE, default=Path("step.json.gz"),
    show_default=True, help="The trace to write (.json, .json.gz); a folder with several ranks.",
)  # fmt: skip
@module_option
@click.option(
    "--nproc", type=click.IntRange(min=1), default=1, help="Ranks to start, as torchrun would."
)
@click.option("--device", default="", help="cpu: run as if there were no GPU.")
@click.option("--warmup", type=int, help="Steps before timing, 10 by default.")
@click.option("--timed", type=int, help="Steps timed without the profiler, 20 by default.")
@click.option("--traced", type=int, help="Steps traced, 3 by default.")
@click.option("--layers/--no-layers", default=True, help="Name modules in the trace by hooks.")
@click.option("--memory/--no-memory", default=True, help="Trace allocations.")
@show_option
@json_option
def command(script: str, args: tuple[str, ...], **options: Any) -> None:
    """Run a training SCRIPT, unchanged, until its step is timed and traced.

    \b
        foretell profile train.py --lr 0.1
        foretell profile -o step.json.gz -m package.train --lr 0.1
        foretell profile --nproc 2 train.py
        torchrun --nproc-per-node 8 -m foretell profile train.py

    The step is found by watching optimizers and backward passes, so plain loops, Hugging Face's
    Trainer, Accelerate, Lightning, DDP and FSDP work as they are. Some steps warm up, some are
    timed without the profiler, a few are traced; then the script is ended, and files that it wrote
    meanwhile are removed. What stands behind SCRIPT is passed to it (after `--` all of it).

    Next: foretell whatif step.json.gz amp, or foretell advise step.json.gz.
    """
    from foretell.api.step import require_torch
    from foretell.pytorch.intake.request import Script
    from foretell.pytorch.profile.run import profile

    require_torch()
    request = Script(script, args, options["is_module"])
    with working(f"profiling {Path(script).name}") as tell:
        tell("starting it")
        found = profile(
            request, options["output"], device=_device(options["device"]), progress=tell,
            wanted=_step_counts(options), ranks=options["nproc"], show=options["show"],
        )  # fmt: skip
    if os.environ.get("RANK", "0") == "0":
        answer(_summary(found), options["as_json"], _text)
        for note in found.notes:
            say(note)


def _device(name: str) -> str:
    from foretell.errors import InputError

    if name not in ("", "cpu", "cuda"):
        raise InputError(f"`{name}` is no device to profile on", hint="use cuda or cpu")
    return name


def _step_counts(options: dict[str, Any]) -> Any:
    """The steps of the options; None where the script decides."""
    from foretell.pytorch.intake.request import Wanted

    kinds = ("warmup", "timed", "traced")
    counts = {k: options[k] for k in kinds if options[k] is not None}
    others = {"layers": options["layers"], "memory": options["memory"]}
    return Wanted(**counts, **others) if counts or not all(others.values()) else None


def _summary(found: Any) -> dict[str, Any]:
    return {
        "trace": str(found.trace),
        "unprofiled_s": found.plain.median,
        "low_s": found.plain.low,
        "high_s": found.plain.high,
        "profiled_s": found.profiled,
        "peak_bytes": found.peak,
        "device": found.device,
        "ranks": found.ranks,
    }


def _text(found: dict[str, Any]) -> str:
    from foretell.report import words

    many = f" on each of {found['ranks']} ranks" if found["ranks"] > 1 else ""
    return (
        f"a step takes {words.seconds(found['unprofiled_s'])}{many} "
        f"({words.seconds(found['low_s'])} to {words.seconds(found['high_s'])}), "
        f"{words.seconds(found['profiled_s'])} with the profiler\nwritten: {found['trace']}"
    )
