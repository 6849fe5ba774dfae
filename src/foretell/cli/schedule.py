"""`foretell schedule`: in which order the blocks of a placement run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from foretell.cli.output import answer, json_option, say
from foretell.cli.progress import working


@click.command()
@click.argument("placement")
@click.option("-n", "--micro-batches", type=click.IntRange(min=1), default=8, show_default=True)
@click.option("-m", "--memory", type=float, help="What each device holds at most.")
@click.option("--method", default="search", show_default=True, help="search, or tessel.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write a drawing (.svg).")
@json_option
def command(
    placement: str,
    micro_batches: int,
    memory: float | None,
    method: str,
    output: Path | None,
    as_json: bool,
) -> None:
    """Find the order in which the blocks of PLACEMENT run for every micro-batch.

    PLACEMENT is a file, or a shape such as v:devices=4 or m:devices=8,mode=infer.
    """
    from foretell.search.schedule import load, schedule, shape

    path = Path(placement)
    is_file = path.exists() or path.suffix == ".json" or "/" in placement
    problem = load(path) if is_file else shape(placement)
    with working("searching") as tell:
        found = schedule(
            problem,
            micro_batches=micro_batches,
            memory=memory,
            method=method,
            progress=lambda what, value, bound: tell(f"{what} {value:g}, bound {bound:g}"),
        )
    answer(found.answer(), as_json, lambda _: _text(found))
    if output is not None:
        from foretell.graph.file import write_atomically
        from foretell.search.schedule.draw import svg

        write_atomically(output, lambda file: file.write(svg(found).encode()))
        say(f"written: {output}")


def _text(found: Any) -> str:
    is_proven = "proven minimal" if found.proven else f"{100 * found.gap:.1f} % above the bound"
    return (
        f"{found.per_micro_batch:g} a micro-batch ({is_proven}), "
        f"makespan {found.makespan:g} for {found.micro_batches} micro-batches, "
        f"peak memory {max(found.peak_memory):g}, {found.search_cpu:.2f} CPU-s"
        f"\n\n{_drawn(found)}"
    )


def _drawn(found: Any) -> str:
    from foretell.report.terminal import width
    from foretell.search.schedule.draw import text

    drawn: str = text(found, width())
    return drawn
