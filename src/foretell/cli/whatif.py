"""`foretell whatif`: what changes would make of a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from foretell.cli.output import answer, json_option, output_option, write_output


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.argument("specs", nargs=-1, required=True)
@click.option("--on", "cluster", help="The cluster the step runs on: a spec or a file.")
@click.option("--real-ms", type=float, help="Of a trace: milliseconds of an un-profiled step.")
@output_option
@json_option
def command(
    file: Path,
    specs: tuple[str, ...],
    cluster: str | None,
    real_ms: float | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """Say what SPECS, made one after the other, would do to the step in FILE: graph or trace.

    A spec is a name with options, such as faster:op=gemm,times=2 or remove:select=op=dropout*.
    """
    from foretell.cli.step import load_step
    from foretell.simulate import simulate
    from foretell.whatif import Setting, applied, parse

    changes = [parse(spec) for spec in specs]
    step = load_step(file, cluster, None if real_ms is None else real_ms / 1e3)
    changed = applied(changes, step.graph, Setting(step.cluster))
    before, after = simulate(step.graph), simulate(changed)
    answer(_summary(changes, step, before, after), as_json, _text)
    write_output([("before", before), (" ".join(specs), after)], output)


def _summary(changes: list[Any], step: Any, before: Any, after: Any) -> dict[str, Any]:
    from foretell.simulate.memory import peak_bytes
    from foretell.simulate.questions import path_seconds

    return {
        "changes": [str(change) for change in changes],
        "baseline_s": step.seconds,
        "predicted_s": step.predicted(after.graph),
        "peak_bytes": peak_bytes(after),
        "assumptions": [text for change in changes for text in change.assumes],
        "notes": step.notes,
        "path_before": path_seconds(before, "op"),
        "path_after": path_seconds(after, "op"),
    }


def _text(found: dict[str, Any]) -> str:
    from foretell.report import words
    from foretell.report.terminal import table

    before, after = found["baseline_s"], found["predicted_s"]
    ratio = after / before if before else 1.0
    head = (
        f"{words.seconds(before)} → {words.seconds(after)} "
        f"({words.percent(abs(1 - ratio))} {'shorter' if ratio <= 1 else 'longer'})"
    )
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
    return "\n".join([head, shown, *found["notes"], *taken])
