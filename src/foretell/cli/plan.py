"""`foretell plan`: look for the plan with the shortest step."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from foretell.cli import arguments
from foretell.cli.arguments import StepCommand
from foretell.cli.output import (
    FILE,
    answer_result,
    calibration_option,
    json_option,
    pool_options,
    require_place,
    say,
    verbose_option,
    working,
)
from foretell.errors import InputError

OBJECTIVES = ("time", "energy", "money")
STOPPED = 130  # exit code of what Ctrl-C ended


@click.command(cls=StepCommand)
@arguments.workload_argument
@arguments.cluster_option("The cluster: a spec or a file.", required=True)
@click.option(
    "--with",
    "planner",
    shell_complete=arguments.planners,
    default="joint",
    show_default=True,
    help="The planner, with its options.",
)
@click.option("-o", "--output", type=FILE, help="Write the plan to this file.")
@click.option(
    "--seeds", type=click.IntRange(min=1), default=1, show_default=True,
    help="Number of searches with different seeds; the best plan wins.",
)  # fmt: skip
@click.option("--only", default="", metavar="AXES", help="Search only these axes: dp,tp,zero.")
@click.option("--fix", default="", metavar="FIELDS", help="Fix fields of the plan: dp=8,zero=1.")
@click.option(
    "--runnable/--any-plan", default=None,
    help="Keep to plans that `foretell run` executes; the default where WORKLOAD is a script.",
)  # fmt: skip
@click.option(
    "--time", "seconds", type=click.FloatRange(min=0, min_open=True),
    help="Time limit in seconds: the best plan so far.",
)  # fmt: skip
@click.option("--resume", type=FILE, help="Checkpoint file: continue an earlier search.")
@click.option(
    "--objective", type=click.Choice(OBJECTIVES), default="time", show_default=True,
    help="Minimize seconds, joules or the price of a step.",
)  # fmt: skip
@click.option("--tokens", help="Choose GPUs instead: the cheapest for so many tokens (300B, 2T).")
@click.option(
    "--days", type=click.FloatRange(min=0), default=0.0, help="With --tokens: the deadline."
)
@click.option(
    "--gpus", default="8..2048", show_default=True, help="With --tokens: GPU counts to try."
)
@click.option("--batch", type=click.IntRange(0), default=0, help="With --tokens: samples a step.")
@click.option("--prices", type=FILE, help="TOML file: device = price per hour.")
@calibration_option
@pool_options
@verbose_option
@json_option
def command(
    workload: str | None, cluster: str, planner: str, output: Path | None, seeds: int,
    only: str, fix: str, runnable: bool | None, seconds: float | None, resume: Path | None,
    objective: str, tokens: str | None, days: float, gpus: str, batch: int, prices: Path | None,
    jobs: int, on_ray: str, calibration: Path | None, verbose: bool, as_json: bool,
) -> None:  # fmt: skip
    """Find the plan with the shortest step of WORKLOAD on a cluster; compare it with baselines.

    \b
        foretell plan llama-3.1-8b --on dgx-h100:nodes=2 -o best.plan
        foretell plan train.py --on h100:gpus=8 -- --lr 0.1
        foretell plan llama-3.1-70b --on h100+b200 --tokens 1T --days 30
    """
    from foretell.api.planning import plan
    from foretell.pool import opened
    from foretell.search.kit import parse

    named = arguments.require_workload(workload)
    if output is not None:
        require_place(output)  # not after minutes of search
    if tokens:
        alone = not (runnable or only or fix or resume or seeds > 1 or objective != "time")
        if not alone or calibration is not None or planner != "joint":
            raise InputError(
                "--tokens beside --with, --only, --fix, --runnable, --seeds or --calibration",
                hint="it compares the oracle's layouts on every number of GPUs: leave them out",
            )
        options = {"tokens": tokens, "days": days, "gpus": gpus, "batch": batch, "prices": prices}
        bought = _cheapest(named, cluster, options)
        if output is not None:
            bought.save(output)
        answer_result(bought, as_json, verbose)
        return
    if days or batch or (prices is not None and objective != "money"):
        raise InputError(
            "--days, --batch or --prices without --tokens",
            hint="say how many: --tokens 300B, or for prices --objective money",
        )
    chosen = parse(planner)
    if runnable is None:
        runnable = hasattr(chosen, "runnable") and _is_script(named)
    options = {"runnable": runnable, "only": only, "fix": fix, "objective": objective}
    options["own_loop"] = bool(runnable) and _is_loop(named)
    options["resume"] = str(resume) if resume is not None else ""
    spent = time.process_time()  # what it takes to load the search counts
    options["seconds"] = max(seconds - spent, 0.2 * seconds) if seconds else 0.0
    chosen = _restricted(chosen, options)
    what, most = f"looking for a plan with {chosen}", getattr(chosen, "seconds", 0.0)
    with opened(jobs, on_ray) as pool, working(what, about=most) as tell:

        def progress(doing: str, best: float) -> None:
            from foretell.report import words

            tell(f"{doing}, best {words.seconds(best)}" if best < float("inf") else doing)

        found = plan(
            named, _at_prices(cluster, prices), chosen, seeds=seeds, calibration=calibration,
            pool=pool, progress=progress,
        )  # fmt: skip
    if output is not None:
        found.save(output)
    answer_result(found, as_json, verbose)
    if found.stopped:
        say("stopped: this is the best plan so far")
        raise SystemExit(STOPPED)


def _at_prices(cluster: str, prices: Path | None) -> Any:
    """The cluster, its devices or nodes at the prices of a file."""
    if prices is None:
        return cluster
    from foretell.api.scaling import at_prices, prices_of
    from foretell.cluster import load

    return at_prices(load(cluster), None, prices_of(prices))


def _is_script(workload: str) -> bool:
    """Whether a workload is a training script, with or without a function behind its name."""
    from foretell.workload.load import has_arguments

    return workload.endswith(".py") or ".py:" in workload or has_arguments(workload)


def _is_loop(workload: str) -> bool:
    from foretell.workload.load import is_loop

    return is_loop(workload)


def _restricted(planner: Any, options: dict[str, Any]) -> Any:
    """The planner with what its options ask for; only the joint search has them."""
    from dataclasses import fields, replace

    usual = {f.name: f.default for f in fields(planner)}
    more = {n: v for n, v in options.items() if v and v != usual.get(n, "time")}
    for name in more:
        if name not in usual:
            raise InputError(
                f"--{'time' if name == 'seconds' else name} with `{planner.name}`",
                hint="the joint search has it: leave --with away",
            )
    return replace(planner, **more) if more else planner


def _cheapest(workload: str, devices: str, options: dict[str, Any]) -> Any:
    """The cheapest number and kind of GPUs; `--on` names the kinds, with `+` between them."""
    from foretell.api.scaling import buy

    with working("looking for the cheapest GPUs") as tell:
        return buy(workload, devices.split("+"), progress=tell, **options)
