"""`foretell whatif`: what changes would make of a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from foretell.cli import offered
from foretell.cli.output import answer, json_option, output_option, write_output
from foretell.cli.script import StepCommand


@click.command(cls=StepCommand)
@click.argument("file", type=click.Path(path_type=Path))
@click.argument("specs", shell_complete=offered.changes, nargs=-1, required=True)
@click.option(
    "--on",
    "cluster",
    shell_complete=offered.clusters,
    help="The cluster the step runs on: a spec or a file.",
)
@click.option("--real-ms", type=float, help="Of a trace: milliseconds of an un-profiled step.")
@click.option("--real-mib", type=float, help="Of a trace: MiB at the measured peak of the step.")
@output_option
@json_option
def command(
    file: Path,
    specs: tuple[str, ...],
    cluster: str | None,
    real_ms: float | None,
    real_mib: float | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """Say what SPECS, made together, would do to the step in FILE: script, graph or trace.

    \b
        foretell whatif train.py amp compile -- --lr 0.1
        foretell whatif step.json.gz amp
        foretell whatif step.graph amp --on h100

    A training script is run unchanged, with what stands behind `--`: profiled on this machine's
    GPU, or, without one or with --on, captured without a GPU and priced.

    A spec is a name with options, such as faster:op=gemm,times=2 or remove:select=op=dropout*.
    """
    from foretell.cli.step import load_step
    from foretell.simulate import simulate
    from foretell.whatif import Setting, applied, parse

    changes = [parse(spec) for spec in specs]
    step = load_step(file, cluster, None if real_ms is None else real_ms / 1e3)
    changed = applied(changes, step.graph, Setting(step.cluster))
    before, after = simulate(step.graph), simulate(changed)
    found = _summary(changes, step, before, after)
    found |= _peaks(before, after, None if real_mib is None else real_mib * 2**20)
    answer(found, as_json, _text)
    write_output([("before", before), (" ".join(specs), after)], output)


def _summary(changes: list[Any], step: Any, before: Any, after: Any) -> dict[str, Any]:
    from foretell.baseline import why
    from foretell.simulate.questions import path_seconds

    low, high = step.interval(after.graph, changes)
    return {
        "changes": [str(change) for change in changes],
        "baseline_s": step.seconds,
        "predicted_s": step.predicted(after.graph),
        "low_s": low,
        "high_s": high,
        "why": why(before.graph, after.graph),
        "assumptions": [text for change in changes for text in change.assumes],
        "notes": step.notes,
        "path_before": path_seconds(before, "op"),
        "path_after": path_seconds(after, "op"),
    }


def _peaks(before: Any, after: Any, real: float | None) -> dict[str, float]:
    """Peak memory before and after: by tensors where a trace tells of them, else by buffers."""
    from foretell.simulate.memory import peak_bytes as by_buffers
    from foretell.whatif import peak_bytes

    def peak(timeline: Any) -> float:
        found = peak_bytes(timeline.graph, real)
        return by_buffers(timeline) if found is None else found

    return {"peak_bytes": peak(after), "baseline_peak_bytes": peak(before)}


def _text(found: dict[str, Any]) -> str:
    from foretell.report import words
    from foretell.report.terminal import table, wrapped

    before, after = found["baseline_s"], found["predicted_s"]
    ratio = after / before if before else 1.0
    head = (
        f"{words.seconds(before)} → {words.seconds(after)} "
        f"({words.percent(abs(1 - ratio))} {'shorter' if ratio <= 1 else 'longer'})"
    )
    head += f", {words.seconds(found['low_s'])} to {words.seconds(found['high_s'])} (80 % interval)"
    if found["peak_bytes"]:
        peaks = (words.size(found[k]) for k in ("baseline_peak_bytes", "peak_bytes"))
        head += f"; memory {' → '.join(peaks)}"
    ops = list(dict.fromkeys([*found["path_before"], *found["path_after"]]))[:8]
    rows = [
        (
            words.cut(op, 40),
            *(words.seconds(found[p].get(op, 0.0)) for p in ("path_before", "path_after")),
        )
        for op in ops
    ]
    taken = [f"assuming {text}" for text in dict.fromkeys(found["assumptions"])]
    shown = table(("on the critical path", "before>", "after>"), rows)
    said = [wrapped(text) for text in (*found["notes"], *taken)]
    return "\n".join([wrapped(head), wrapped(found["why"]), shown, *said])
