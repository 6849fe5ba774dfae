"""`foretell capture`: the graph of a training step from its script, without a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from foretell.cli.arguments import ScriptCommand, module_option, show_option
from foretell.cli.output import FILE, answer, json_option, say, working


@click.command(cls=ScriptCommand)
@click.argument("what")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "-o", "--output", type=FILE, default=Path("step.graph"),
    show_default=True, help="Where to write the graph (.graph, .txt).",
)  # fmt: skip
@module_option
@click.option("--batch", type=int, help="Samples a step, where the function takes `batch`.")
@click.option("--ranks", type=click.IntRange(min=1), default=1, help="Data-parallel ranks.")
@click.option("--optimizer", help="adamw, sgd:kind=loop, adam:kind=fused; instead of the script's.")
@click.option("--autocast", default="", help="Mixed precision for forward and loss: bf16, fp16.")
@click.option("--tf32/--no-tf32", default=None, help="fp32 matmuls as tf32; else as torch is set.")
@click.option("--share", type=float, help="Share of elements that masks pick, for routing.")
@click.option(
    "--kernels-of", default="h200", show_default=True, help="Device whose kernels are chosen."
)
@click.option("--device", default="", help="cuda, or cpu where a GPU cannot be pretended.")
@show_option
@json_option
def command(what: str, args: tuple[str, ...], output: Path, as_json: bool, **options: Any) -> None:
    """Write the graph of one training step of WHAT: forward, loss, backward and optimizer.

    \b
        foretell capture train.py --lr 0.1          a training script, unchanged
        foretell capture -m package.train --lr 0.1
        foretell capture train.py:make              make() answers (model, batch, loss, optimizer)

    A script is run with fake weights, so that nothing is computed and no GPU is needed, until one
    of its own steps is recorded; then it is ended, and files that it wrote meanwhile are removed.
    What stands behind WHAT is passed to it (after `--` all of it). With train.py:make, or a script
    that defines model() and batch(), nothing but these is run; --batch, --ranks, --optimizer,
    --autocast and --device are for those.

    Next: foretell whatif step.graph amp --on h100.
    """
    from foretell.api.step import CaptureOptions, capture_source

    with working(f"capturing {Path(what).name}") as tell:
        tell("loading torch and the script")
        graph, notes = capture_source(what, args, output, CaptureOptions(**options), tell)
    answer(_summary(graph), as_json, _text)
    for note in notes:
        say(note)
    say(f"written: {output}")


def _summary(graph: Any) -> dict[str, Any]:
    from foretell.report.summary import graph_summary

    phases = ("forward", "loss", "backward", "update")
    by_phase = {phase: graph.select(kind="kernel", phase=phase) for phase in phases}
    return {
        **graph_summary(graph),
        "parameters": graph.facts["parameters"],
        "peak_bytes": graph.facts["peak_bytes"],
        "phases": {
            phase: {
                "kernels": len(tasks),
                "flops": float(graph.flops[tasks].sum()),
                "bytes": float(graph.bytes[tasks].sum()),
            }
            for phase, tasks in by_phase.items()
        },
        "assumed": list(graph.facts.get("assumed", ())),
    }


def _text(found: dict[str, Any]) -> str:
    from foretell.report import words

    head = (
        f"{found['facts']['captured']}: {found['parameters']:,} parameters, "
        f"{found['tasks']:,} tasks, peak memory {words.size(found['peak_bytes'])}"
    )
    rows = [
        (phase, f"{p['kernels']:,}", words.count(p["flops"]), words.size(p["bytes"]))
        for phase, p in found["phases"].items()
    ]
    taken = [f"assumed the data of {text}" for text in found["assumed"]]
    return "\n".join(
        [head, words.table(("phase", "kernels>", "flop>", "memory traffic>"), rows), *taken]
    )
