"""`foretell fit`: measured runs fed back, so that the next prediction is better."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from foretell.cli.output import answer, json_option, say
from foretell.cli.progress import working


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--share", type=float, default=0.1, show_default=True, help="Of what was run.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="FOLDER/fitted.json.")
@json_option
def command(folder: Path, share: float, output: Path | None, as_json: bool) -> None:
    """Learn from some of the runs in a lab's FOLDER, and tell how well the others are foretold.

    What is learned is written beside them; `foretell lab` predicts with it from then on.
    """
    from foretell.errors import InputError
    from foretell.pytorch.lab import fit, table
    from foretell.pytorch.lab.foretold import Known

    known, rows = Known.read(folder), table.rows(folder)
    configs = list(table.by_config(rows))
    if not configs:
        raise InputError(f"`{folder}` has no runs", hint="measure some: foretell lab -o FOLDER")
    chosen = set(fit.chosen(configs, share))
    with working("fitting"):
        knobs = fit.fit(known, [row for row in rows if row.config in chosen])
    told = _told(known, [r for r in rows if r.config not in chosen] or rows, knobs, len(chosen))
    path = output or folder / fit.FITTED
    fit.save(path, knobs, told)
    answer({"knobs": asdict(knobs), **told}, as_json, _text)
    say(f"written: {path}")


def _told(known: Any, rows: list[Any], knobs: Any, fitted: int) -> dict[str, Any]:
    from foretell.pytorch.lab.foretold import held
    from foretell.pytorch.lab.judge import judged

    return {
        "fitted_on": fitted,
        "before": judged(held(known, rows)),
        "after": judged(held(known, rows, knobs)),
    }


def _text(found: dict[str, Any]) -> str:
    from foretell.pytorch.lab.judge import text

    turned = ", ".join(
        f"{name} {value:.3g}" for name, value in found["knobs"].items() if type(value) is float
    )
    lines = [f"fitted on {found['fitted_on']} configurations: {turned}"]
    lines += [text(found[key], f"{key}, on the others") for key in ("before", "after")]
    return "\n".join(lines)
