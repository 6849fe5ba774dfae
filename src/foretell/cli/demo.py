"""`foretell demo`: the loop on embedded data, ending with a report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from foretell.cli.output import say

CLUSTER = "dgx-a100:nodes=1"
TRIED = (
    "faster:op=gemm,times=2",
    "faster:op=all_reduce,times=2",
    "faster:op=launch,times=2",
    "remove:select=op=elementwise",
)


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
    """Price a training step, play it, ask what some changes would do, and write a report."""
    from foretell.cluster import load
    from foretell.cost import price
    from foretell.report import write
    from foretell.report.summary import timeline_summary, timeline_text
    from foretell.samples import transformer
    from foretell.simulate import simulate
    from foretell.whatif import Setting, parse

    say(f"1. a transformer step on 8 ranks, priced on {CLUSTER}")
    step = price(transformer(ranks=8), load(CLUSTER))
    before = simulate(step)
    click.echo(timeline_text(timeline_summary(before)))
    say("\n2. what would help?")
    tried = [(spec, simulate(parse(spec).apply(step, Setting()), before=before)) for spec in TRIED]
    click.echo(_ranking(before, tried))
    write([("the step as it is", before), *tried], output)
    say(f"\n3. the report: {output}")


def _ranking(before: Any, tried: list[tuple[str, Any]]) -> str:
    from foretell.report import words
    from foretell.report.terminal import table

    ranked = sorted(tried, key=lambda one: one[1].seconds)
    rows = [("as it is", words.seconds(before.seconds), "")]
    rows += [
        (name, words.seconds(after.seconds), words.percent(1 - after.seconds / before.seconds))
        for name, after in ranked
    ]
    return table(("change", "step>", "shorter by>"), rows)
