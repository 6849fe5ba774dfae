"""`foretell fit` of the folder of a `foretell lab`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from foretell.cli.output import answer, say, working


def fit_folder(folder: Path, share: float, output: Path | None, as_json: bool) -> None:
    """Fit the knobs of `foretell lab` to some of a folder's runs; judge them on the others."""
    from foretell.errors import InputError
    from foretell_lab.emulation import fit, table
    from foretell_lab.emulation.predicted import Known

    known, rows = Known.read(folder), table.rows(folder)
    configs = list(table.by_config(rows))
    if not configs:
        raise InputError(f"`{folder}` has no runs", hint="measure some: foretell lab -o FOLDER")
    chosen = set(fit.chosen(configs, share))
    with working("fitting") as tell:
        knobs = fit.fit(known, [row for row in rows if row.config in chosen], progress=tell)
    unseen = [r for r in rows if r.config not in chosen] or rows
    found = _accuracy(known, unseen, knobs, len(chosen))
    path = output or folder / fit.FITTED
    fit.save(path, knobs, found)
    answer({"knobs": asdict(knobs), **found}, as_json, _lab_text)
    say(f"written: {path}")


def _accuracy(known: Any, rows: list[Any], knobs: Any, fitted: int) -> dict[str, Any]:
    from foretell_lab.emulation.accuracy import summary
    from foretell_lab.emulation.predicted import compared

    return {
        "fitted_on": fitted,
        "before": summary(compared(known, rows)),
        "after": summary(compared(known, rows, knobs)),
    }


def _lab_text(found: dict[str, Any]) -> str:
    from foretell.report.words import fitted
    from foretell_lab.emulation.accuracy import text

    turned = ", ".join(
        f"{name} {value:.3g}" for name, value in found["knobs"].items() if type(value) is float
    )
    lines = [f"fitted on {found['fitted_on']} configurations: {turned}"]
    lines += [text(found[key], f"{key}, on the others") for key in ("before", "after")]
    return fitted("\n".join(lines))
