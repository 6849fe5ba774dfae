"""`foretell profile`: a training script timed and traced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from foretell.cli.output import answer, json_option


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("script", type=click.Path(path_type=Path))
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), default=Path("step.json.gz"),
    show_default=True, help="Where to write the trace (.json, .json.gz).",
)  # fmt: skip
@click.option("--device", default="", help="cuda or cpu; cuda where there is one.")
@click.option("--warmup", type=int, default=10, show_default=True, help="Steps before timing.")
@click.option("--timed", type=int, default=20, show_default=True, help="Steps timed as they are.")
@click.option("--traced", type=int, default=3, show_default=True, help="Steps traced.")
@click.option("--layers/--no-layers", default=True, help="Name modules in the trace by hooks.")
@click.option("--memory/--no-memory", default=True, help="Trace allocations.")
@json_option
def command(
    script: Path,
    args: tuple[str, ...],
    output: Path,
    device: str,
    warmup: int,
    timed: int,
    traced: int,
    layers: bool,
    memory: bool,
    as_json: bool,
) -> None:
    """Run SCRIPT, time its steps, then trace a few: what-ifs then start from the real step.

    SCRIPT defines model() and batch() (and loss, optimizer), or marks its steps with
    foretell.profile.step(). ARGS are handed to it.
    """
    from foretell.cli.progress import working

    with working(f"profiling {script.name}") as tell:
        tell("loading torch")
        profile, wanted = _loaded()
        found = profile(
            script, output, args, device=device, progress=tell,
            wanted=wanted(warmup, timed, traced, layers, memory),
        )  # fmt: skip
    answer(_summary(found), as_json, _text)


def _loaded() -> tuple[Any, Any]:
    from foretell.errors import InputError

    try:
        from foretell.pytorch.profile import profile
        from foretell.pytorch.profile.record import Wanted
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise InputError(
            "profiling needs torch, which is not installed", hint="pip install 'foretell[torch]'"
        ) from None
    return profile, Wanted


def _summary(found: Any) -> dict[str, Any]:
    return {
        "trace": str(found.trace),
        "unprofiled_s": found.plain.median,
        "low_s": found.plain.low,
        "high_s": found.plain.high,
        "profiled_s": found.profiled.median,
        "peak_bytes": found.peak,
        "device": found.device,
    }


def _text(found: dict[str, Any]) -> str:
    from foretell.report import words

    return (
        f"a step takes {words.seconds(found['unprofiled_s'])} "
        f"({words.seconds(found['low_s'])} to {words.seconds(found['high_s'])}), "
        f"{words.seconds(found['profiled_s'])} with the profiler\nwritten: {found['trace']}"
    )
