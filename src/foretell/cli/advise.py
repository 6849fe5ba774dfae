"""`foretell advise`: every change that applies to a step, tried and ranked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from foretell.cli import offered
from foretell.cli.output import answer, json_option
from foretell.cli.script import StepCommand


@click.command(cls=StepCommand)
@click.argument("file", type=click.Path(path_type=Path))
@click.argument("specs", shell_complete=offered.changes, nargs=-1)
@click.option(
    "--on",
    "cluster",
    shell_complete=offered.clusters,
    help="The cluster the step runs on: a spec or a file.",
)
@click.option("--real-ms", type=float, help="Of a trace: milliseconds of an un-profiled step.")
@json_option
def command(
    file: Path, specs: tuple[str, ...], cluster: str | None, real_ms: float | None, as_json: bool
) -> None:
    """Try changes on the step in FILE (all that apply, or SPECS) and rank them by gain."""
    from foretell.advise import advise
    from foretell.advise.advise import TRIED, shown
    from foretell.cli.progress import working
    from foretell.cli.step import load_step

    step = load_step(file, cluster, None if real_ms is None else real_ms / 1e3)
    with working("trying changes", steps=2 * len(specs or TRIED)) as tell:  # alone, then together
        counsel = advise(step, specs or TRIED, tell)
    found = shown(step.graph, counsel) | {"notes": step.notes}
    answer(found, as_json, text)


def text(found: dict[str, Any]) -> str:
    """A counsel for a terminal."""
    from foretell.report import words
    from foretell.report.terminal import table, wrapped

    rows = [_row(a) for a in found["ranked"]]
    head = f"a step takes {words.seconds(found['baseline_s'])}"
    if found["baseline_peak_bytes"]:
        head += f" and {words.size(found['baseline_peak_bytes'])}"
    columns = ("change", "step>", "80 % interval>", "gain>", "memory>")
    lines = [head, table(columns, rows), *_whys(found["ranked"])]
    if found["together"]:
        lines += ["", *_together(found["together"])]
    refused = [f"{r['change']}: {r['reason']}" for r in found["refused"]]
    said = [wrapped(text) for text in (*refused, *found["notes"])]
    return "\n".join([*lines, "", "does not apply, or could not be tried:", *said])


def _row(advice: dict[str, Any]) -> tuple[str, ...]:
    from foretell.report import words

    low, high = (words.seconds(advice[k]) for k in ("low_s", "high_s"))
    peak = advice["peak_bytes"]
    return (
        " ".join(advice["changes"]), words.seconds(advice["predicted_s"]), f"{low} – {high}",
        f"{advice['gain']:+.1%}", words.size(peak) if peak else "",
    )  # fmt: skip


def _whys(ranked: list[dict[str, Any]]) -> list[str]:
    from foretell.report.terminal import wrapped

    return [wrapped(f"{a['changes'][0]}: {a['why']}") for a in ranked[:3]]


def _together(best: dict[str, Any]) -> list[str]:
    from foretell.report import words
    from foretell.report.terminal import wrapped

    names = " ".join(best["changes"])
    head = f"together: {names} → {words.seconds(best['predicted_s'])} ({best['gain']:+.1%})"
    return [wrapped(head), *(f"    {line}" for line in best["code"])]
