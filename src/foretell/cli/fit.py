"""`foretell fit`: prices calibrated with measured runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from foretell.cli.lab_package import lab_module
from foretell.cli.output import FILE, answer, json_option, say, working


@click.command()
@click.argument("runs", type=FILE, nargs=-1, required=True)
@click.option("--workload", default="", help="The workload, if RUNS do not name it.")
@click.option("--on", "cluster", default="", help="The cluster, if RUNS do not name it.")
@click.option(
    "--noise",
    type=float,
    default=0.03,
    show_default=True,
    help="Relative spread between equal runs.",
)
@click.option(
    "--share", type=float, default=0.1, show_default=True, help="Share of a lab's runs to fit."
)
@click.option("-o", "--output", type=FILE, help="File for the calibration.")
@json_option
def command(runs: tuple[Path, ...], output: Path | None, as_json: bool, **options: Any) -> None:
    """Calibrate prices with measured RUNS, and report how much they moved.

    RUNS are tables (CSV or lines of JSON with workload, on, plan and step_s) and folders of
    `foretell run`, or the folder of one `foretell lab`. Tables and runs make a calibration file for
    `predict`, `oracle` and `plan` (`--calibration`); a lab's folder makes what `lab` predicts with.
    """
    if runs[0].is_dir() and not (runs[0] / "run.json").exists():
        lab_module("cli.fit").fit_folder(_single_folder(runs), options["share"], output, as_json)
    else:
        _fit_runs(runs, output, as_json, **options)


def _single_folder(runs: tuple[Path, ...]) -> Path:
    from foretell.errors import InputError

    if len(runs) > 1:
        raise InputError(
            f"`{runs[0]}` is a lab's folder and not the only one", hint="fit it by itself"
        )
    return runs[0]


def _fit_runs(
    paths: tuple[Path, ...], output: Path | None, as_json: bool, *, workload: str, cluster: str,
    noise: float, share: float,
) -> None:  # fmt: skip
    from foretell.io import write_text
    from foretell.predict.fit import fit, table

    known = [
        run
        for path in paths
        for run in (
            [_measured_run(path, workload, cluster)]
            if path.is_dir()
            else table(path, workload, cluster)
        )
    ]
    with working(f"fitting to {len(known)} runs") as tell:
        found = fit(known, noise, tell)
    learned = _calibration(found)
    first = paths[0]
    target = output or (
        first / "calibration.json" if first.is_dir() else first.with_suffix(".calibration.json")
    )
    write_text(target, json.dumps(learned, indent=1) + "\n")
    answer(learned, as_json, _calibration_text)
    say(f"written: {target}")


def _measured_run(folder: Path, workload: str, cluster: str) -> Any:
    """Measurements of a `foretell run`: its median step and breakdown."""
    from foretell.cluster import load as load_cluster
    from foretell.errors import InputError
    from foretell.plan import check, read
    from foretell.predict.fit import Run
    from foretell.pytorch.deploy import measured
    from foretell.pytorch.deploy.run_files import read_request
    from foretell.workload import load
    from foretell.workload.load import is_built_in

    if not (folder / "run.json").exists():
        raise InputError(f"`{folder}` is no folder of a run", hint="make one: foretell run … -o")
    if not cluster:
        raise InputError(
            f"`{folder}` has times but names no cluster",
            hint="give --on: a cluster, or the file that `foretell bench` writes",
        )
    request = read_request(folder)
    plan = read(request.plan)
    if not plan.global_batch:
        plan = plan.but(global_batch=measured.samples(folder))
    if not workload and not is_built_in(request.script.partition(":")[0]):
        raise InputError(
            f"`{folder}` was a run of `{request.script}`; a script runs only where you name it",
            hint=f"add --workload {request.script}",
        )
    model = load(workload, scripts=True) if workload else load(request.script, files=False)
    machines = load_cluster(cluster)
    found = measured.spent(folder)
    return Run(
        model, machines, check(plan, model, machines), found.seconds, found.parts, found.noise,
        found.unsure,
    )  # fmt: skip


def _calibration(found: Any) -> dict[str, Any]:
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

    factors = [
        (
            f["name"],
            f"{f['value']:.3g} ×",
            f"± {100 * f['sigma']:.0f} %",
            f"{100 * f['moves']:+.1f} %",
        )
        for f in found["factors"]
    ]
    runs = [
        (r["run"], *(words.seconds(r[k]) for k in ("measured_s", "before_s", "after_s")))
        for r in found["fitted_on"]
    ]
    return "\n\n".join([
        words.table(("factor", "measured/priced>", "uncertainty>", "effect on step>"), factors),
        words.table(("run", "measured>", "predicted before>", "after>"), runs),
        f"accuracy on these runs: {100 * found['accuracy_before']:.1f} % before, "
        f"{100 * found['accuracy_after']:.1f} % after; factors without a run stay at 1 (± 69 %)",
    ])  # fmt: skip
