"""`foretell fit`: measured runs fed back, so that the next prediction is better."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from foretell.cli.output import answer, json_option, say
from foretell.cli.progress import working


@click.command()
@click.argument("runs", type=click.Path(path_type=Path))
@click.option("--workload", default="", help="What was run, where RUNS does not say.")
@click.option("--on", "cluster", default="", help="Where it was run, likewise.")
@click.option("--noise", type=float, default=0.03, show_default=True, help="Between equal runs.")
@click.option("--share", type=float, default=0.1, show_default=True, help="Of a lab's runs.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="File for what is learned.")
@json_option
def command(runs: Path, output: Path | None, as_json: bool, **asked: Any) -> None:
    """Learn from measured RUNS what prices do not know, and say how much that moved.

    RUNS is a table (CSV or lines of JSON with workload, on, plan and step_s), the folder of a
    `foretell run`, or that of a `foretell lab`. From a table or a run comes a calibration, with
    which `predict`, `oracle` and `plan` answer (`--calibration`); from a lab's folder what `lab`
    predicts with.
    """
    if runs.is_dir() and not (runs / "run.json").exists():
        _from_lab(runs, asked["share"], output, as_json)
    else:
        _from_runs(runs, output, as_json, **asked)


def _from_runs(
    path: Path, output: Path | None, as_json: bool, *, workload: str, cluster: str, noise: float,
    share: float,
) -> None:  # fmt: skip
    from foretell.predict import runs
    from foretell.predict.fit import fit

    known = (
        [_ran(path, workload, cluster)] if path.is_dir() else runs.table(path, workload, cluster)
    )
    with working(f"fitting to {len(known)} runs") as tell:
        found = fit(known, noise, tell)
    told = _calibrated(found)
    target = output or (
        path / "calibration.json" if path.is_dir() else path.with_suffix(".calibration.json")
    )
    target.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    answer(told, as_json, _calibration_text)
    say(f"written: {target}")


def _ran(folder: Path, workload: str, cluster: str) -> Any:
    """What a `foretell run` has measured: the median step of its slowest rank."""
    from foretell.cluster import load as load_cluster
    from foretell.errors import InputError
    from foretell.plan import check, read
    from foretell.predict.fit import Run
    from foretell.pytorch.deploy.run_files import asked, results
    from foretell.workload import load

    if not workload or not cluster:
        raise InputError(
            f"`{folder}` says how long a step took, not of what and where",
            hint="give --workload and --on",
        )
    each = [r["steps_s"] for r in results(folder).values()]
    if not each or not min(map(len, each)):
        raise InputError(f"`{folder}` has no steps that were measured")
    seconds = statistics.median(max(times) for times in zip(*each, strict=True))
    model, machines = load(workload), load_cluster(cluster)
    return Run(model, machines, check(read(asked(folder).plan), model, machines), seconds)


def _calibrated(found: Any) -> dict[str, Any]:
    return {
        "calibration": found.calibration.plain(),
        "factors": [vars(f) for f in found.factors],
        "fitted_on": [
            {"run": r.name, "measured_s": r.seconds, "before_s": b, "after_s": a}
            for r, b, a in zip(found.runs, found.before, found.after, strict=True)
        ],
        "accuracy_before": found.accuracy(found.before),
        "accuracy_after": found.accuracy(found.after),
    }


def _calibration_text(found: dict[str, Any]) -> str:
    from foretell.report import words
    from foretell.report.terminal import table

    factors = [
        (f["name"], f"{f['value']:.3g} ×", f"± {f['sigma']:.0%}", f"{f['moves']:+.1%}")
        for f in found["factors"]
    ]
    runs = [
        (r["run"], *(words.seconds(r[k]) for k in ("measured_s", "before_s", "after_s")))
        for r in found["fitted_on"]
    ]
    return "\n\n".join([
        table(("factor", "as long as priced>", "sure to>", "moves the step>"), factors),
        table(("run", "measured>", "foretold before>", "after>"), runs),
        f"accuracy on these runs: {found['accuracy_before']:.1%} before, "
        f"{found['accuracy_after']:.1%} after; what no run told of stays at 1 (± 69 %)",
    ])  # fmt: skip


def _from_lab(folder: Path, share: float, output: Path | None, as_json: bool) -> None:
    """What a lab predicts with from then on."""
    from foretell.errors import InputError
    from foretell.pytorch.lab import fit, table
    from foretell.pytorch.lab.foretold import Known

    known, rows = Known.read(folder), table.rows(folder)
    configs = list(table.by_config(rows))
    if not configs:
        raise InputError(f"`{folder}` has no runs", hint="measure some: foretell lab -o FOLDER")
    chosen = set(fit.chosen(configs, share))
    with working("fitting") as tell:
        knobs = fit.fit(known, [row for row in rows if row.config in chosen], progress=tell)
    told = _told(known, [r for r in rows if r.config not in chosen] or rows, knobs, len(chosen))
    path = output or folder / fit.FITTED
    fit.save(path, knobs, told)
    answer({"knobs": asdict(knobs), **told}, as_json, _lab_text)
    say(f"written: {path}")


def _told(known: Any, rows: list[Any], knobs: Any, fitted: int) -> dict[str, Any]:
    from foretell.pytorch.lab.foretold import held
    from foretell.pytorch.lab.judge import judged

    return {
        "fitted_on": fitted,
        "before": judged(held(known, rows)),
        "after": judged(held(known, rows, knobs)),
    }


def _lab_text(found: dict[str, Any]) -> str:
    from foretell.pytorch.lab.judge import text
    from foretell.report.terminal import fitted

    turned = ", ".join(
        f"{name} {value:.3g}" for name, value in found["knobs"].items() if type(value) is float
    )
    lines = [f"fitted on {found['fitted_on']} configurations: {turned}"]
    lines += [text(found[key], f"{key}, on the others") for key in ("before", "after")]
    return fitted("\n".join(lines))
