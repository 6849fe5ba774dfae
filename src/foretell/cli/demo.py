"""`foretell demo`: the whole loop on embedded data, ending with a report."""

from __future__ import annotations

import subprocess
import sys
from importlib.resources import as_file, files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from foretell.cli.output import say

TRACE = ("samples", "traces", "resnet18-h200.json.gz")  # one profiled step of ResNet-18 on an H200
REAL = 0.0482  # seconds of the same step without the profiler, by CUDA events
BEST = ("amp:dtype=bf16", "channels-last")
MODEL = "gpt:layers=24,hidden=2048,heads=16,seq=2048,vocab=51200,dtype=bf16"
MACHINES = "dgx-a100"


@click.command()
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    default=Path("foretell-demo.html"),
    show_default=True,
    help="Where the report goes.",
)
def command(output: Path) -> None:
    """Replay a trace, try changes, ask the oracle, find a plan, run one, and write a report."""
    with as_file(files("foretell").joinpath(*TRACE)) as trace:
        step = _replayed(trace)
    _advised(step)
    _asked()
    _ran()
    _reported(step, output)


def _replayed(trace: Path) -> Any:
    from foretell.advise import Step
    from foretell.baseline import unprofiled
    from foretell.report import words
    from foretell.simulate import simulate
    from foretell.trace import read

    say("1. a trace: one profiled step of ResNet-18 on an H200, replayed")
    found = read(trace)
    measured = float(found.graph.facts["measured"])
    played = simulate(found.warm).seconds - found.found
    click.echo(
        f"measured {words.seconds(measured)}, replayed {words.seconds(played)} "
        f"({words.percent(abs(played / measured - 1))} off), {found.graph.size} tasks"
    )
    base = unprofiled(found, REAL)
    return Step(base.graph, None, base)


def _advised(step: Any) -> None:
    from foretell.advise import advise
    from foretell.advise.advise import shown
    from foretell.cli.advise import text

    say("\n2. what would help?")
    click.echo(text(shown(step.graph, advise(step)) | {"notes": step.notes}))


def _asked() -> None:
    from foretell.cli.oracle import found_on, text

    say(f"\n3. from the model alone: a GPT of 1.3 billion parameters on 8 to 64 GPUs ({MACHINES})")
    click.echo(text(found_on(MODEL, MACHINES, "8..64", batch=512)))


def _ran() -> None:
    if find_spec("torch") is None:
        say("\n4. running a plan needs torch: pip install 'foretell[torch]'")
        return
    say("\n4. then do it: a small model under `dp=2,bucket_mb=1` on two processes of this machine")
    script = files("foretell").joinpath("samples", "train.py")
    words = ["run", str(script), "--plan", "dp=2,bucket_mb=1", "--steps", "5"]
    done = subprocess.run(
        [sys.executable, "-m", "foretell", *words], text=True, capture_output=True, timeout=300
    )
    click.echo(done.stdout.strip() or done.stderr.strip())


def _reported(step: Any, output: Path) -> None:
    from foretell.report import write
    from foretell.simulate import simulate
    from foretell.whatif import applied, parse

    before = simulate(step.graph)
    after = simulate(applied([parse(s) for s in BEST], step.graph, step.setting))
    write([("the step as it is", before), (" ".join(BEST), after)], output)
    say(f"\n5. the report: {output}")
