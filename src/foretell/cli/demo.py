"""`foretell demo`: the whole loop on embedded data, ending with a report."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from importlib.resources import as_file, files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from foretell.cli.output import FILE, say

TRACE = ("samples", "traces", "resnet18-h200.json.gz")  # one profiled step of ResNet-18 on an H200
REAL = 0.0482  # seconds of the same step without the profiler, by CUDA events
BEST = ("amp:dtype=bf16", "channels-last")
MODEL = "gpt:layers=24,hidden=2048,heads=16,seq=2048,vocab=51200,dtype=bf16"
MACHINES = "dgx-a100"
PAIR = "dgx-a100:gpus=2"
PLANNER = "fusion:runs=yes"
RANKS = 2


@click.command()
@click.option(
    "-o",
    "--output",
    type=FILE,
    default=Path("foretell-demo.html"),
    show_default=True,
    help="Where the report goes.",
)
def command(output: Path) -> None:
    """Replay a trace, try changes, ask the oracle, find a plan, run it, and write a report."""
    with as_file(files("foretell").joinpath(*TRACE)) as trace:
        _replay(trace)
        step = _advise(trace)
    found = _oracle()
    with tempfile.TemporaryDirectory() as folder:
        plan = _plan_and_run(Path(folder))
        _write_report(step, found, plan, output)


def _replay(trace: Path) -> None:
    from foretell.report import words
    from foretell.simulate import simulate
    from foretell.trace import read

    say("1. a trace: one profiled step of ResNet-18 on an H200, replayed")
    found = read(trace)
    measured = float(found.graph.facts["measured"])
    replayed = simulate(found.warm).seconds - found.found
    click.echo(
        f"measured {words.seconds(measured)}, replayed {words.seconds(replayed)} "
        f"({words.percent(abs(replayed / measured - 1))} off), {found.graph.size} tasks"
    )


def _advise(trace: Path) -> Any:
    from foretell.api import Step

    say("\n2. what would help?")
    step = Step.from_trace(trace, unprofiled=REAL)
    click.echo(step.advise())
    return step


def _oracle() -> dict[str, Any]:
    from foretell.api import oracle

    say(f"\n3. from the model alone: a GPT of 1.3 billion on 8 to 64 GPUs ({MACHINES})")
    found = oracle(MODEL, MACHINES, "8..64", batch=512)
    click.echo(found)
    return found.to_dict()


def _plan_and_run(folder: Path) -> Path | None:
    """A plan for a script on other machines; on this one a step predicted and run. Needs torch."""
    if find_spec("torch") is None:
        say("\n4. finding a plan for a script needs torch: pip install 'foretell[torch]'")
        return None
    script = str(files("foretell").joinpath("samples", "train.py"))
    graph, plan = folder / "step.graph", folder / "best.plan"
    say(f"\n4. a plan: a script's step, captured here, for two GPUs that are not ({PAIR})")
    _run_command("capture", script, "-o", str(graph))
    _run_command("plan", str(graph), "--on", PAIR, "--with", PLANNER, "-o", str(plan))
    say("\n5. then do it: two processes of this machine, predicted from its ops timed one by one")
    _run_command("run", script, "--plan", f"dp={RANKS}", "--steps", "30", "--verify")
    return plan if plan.exists() else None


def _run_command(*words: str) -> None:
    """Run a command as a person would, and show it with what it answers."""
    say(f"$ foretell {' '.join(Path(w).name if '/' in w else w for w in words)}")
    done = subprocess.run(
        [sys.executable, "-m", "foretell", *words], text=True, capture_output=True, timeout=300
    )
    if shown := done.stdout.strip() or (done.stderr.strip() if done.returncode else ""):
        click.echo(shown)


def _write_report(step: Any, found: dict[str, Any], plan: Path | None, output: Path) -> None:
    from foretell.cluster import load as machines
    from foretell.plan import load as load_plan
    from foretell.report import write
    from foretell.report.drawings import drawn_plan
    from foretell.report.layouts import layouts
    from foretell.survey.inputs import Sections
    from foretell.survey.survey import survey

    scales = layouts(found, "GPT of 1.3 billion parameters")
    pair = [drawn_plan(load_plan(plan), "best.plan", machines(PAIR))] if plan else []
    page = survey([step], BEST, Sections(oracle=[scales] if scales else [], plans=pair))
    write(page.timelines, output, page.content)
    say(f"\nthe report: {output}")
