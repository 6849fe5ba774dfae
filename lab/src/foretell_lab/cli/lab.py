"""`foretell lab`: a matrix of small runs on ranks behind shaped links, beside predictions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from foretell.cli.output import (
    Command,
    answer,
    json_option,
    ray_option,
    say,
    terminated_as_stopped,
    working,
)


def _words(default: str, text: str, *names: str) -> Callable[[Command], Command]:
    return click.option(*names, default=default, show_default=True, help=text)


@click.command()
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), default=Path("lab"), show_default=True,
    help="Folder of rows; a run that was stopped goes on there.",
)  # fmt: skip
@_words("mlp,wide,cnn,encoder,rnn,embedding", "By comma.", "--models")
@_words("ddp,1mb,one,layers,late", "By comma; or a plan as `run` takes it.", "--plans")
@_words("100mbit,1gbit,loopback", "By comma: 100mbit, 1gbit+100mbit, 100mbit~5ms.", "--networks")
@_words("2", "By comma, 1 to 16.", "--ranks")
@_words("1", "Threads of each rank, such as 2+1.", "--threads")
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--steps", type=click.IntRange(min=1), default=5, show_default=True)
@click.option("--warmup", type=click.IntRange(min=0), default=1, show_default=True)
@click.option("--minutes", type=float, default=20.0, show_default=True, help="No run begins later.")
@click.option("--notes", is_flag=True, help="Write predicted and measured timelines of every run.")
@click.option("--pin", is_flag=True, help="Each rank keeps to cores of its own, if there are.")
@click.option("--no-run", is_flag=True, help="Only tell of what is in the folder.")
@ray_option
@json_option
def command(**options: Any) -> None:
    """Run models x plans x networks on this machine, again and again, and hold predictions to it.

    Ranks live in network namespaces with shaped links; without the rights for that all runs are on
    loopback.
    """
    from foretell_lab.emulation import fit, table
    from foretell_lab.emulation.predicted import Known

    _check_ray(options)
    done = {} if options["no_run"] else _run(options["output"], options)
    for folder in map(Path, done.get("folders", [options["output"]])):
        known, rows = Known.read(folder), table.rows(folder)
        knobs = fit.load(folder / fit.FITTED) if (folder / fit.FITTED).exists() else None
        answer(_summary(known, rows, knobs, done), options["as_json"], _text)
        if options["notes"]:
            from foretell_lab.emulation.timelines import write

            paths = write(folder, known, knobs)
            say(f"{len(paths)} timelines in {folder / 'timelines'}; lay two beside each other with "
                "`foretell compare`")  # fmt: skip
        say(f"written: {folder}")


def _check_ray(options: dict[str, Any]) -> None:
    from foretell.errors import InputError

    if options["on_ray"] and options["notes"]:
        raise InputError("--notes beside --on-ray", hint="timelines are written on one machine")


def _run(folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    from foretell_lab.emulation.matrix import MatrixRequest

    request = MatrixRequest(
        tuple(_configs(options)), options["rounds"], options["steps"], options["warmup"],
        60.0 * options["minutes"], options["notes"], options["pin"],
    )  # fmt: skip
    with terminated_as_stopped(), working("lab") as tell:
        done = (_run_on_ray if options["on_ray"] else _run_here)(folder, request, tell, options)
    if done["fallback"]:
        say(f"{done['fallback']}: every network is loopback")
    return done


def _run_here(folder: Path, request: Any, tell: Any, _: dict[str, Any]) -> dict[str, Any]:
    from dataclasses import replace

    from foretell_lab.emulation.matrix import permitted, run

    configs, why = permitted(request.configs)
    return {**run(folder, replace(request, configs=configs), tell), "fallback": why}


def _run_on_ray(folder: Path, request: Any, tell: Any, options: dict[str, Any]) -> dict[str, Any]:
    from foretell.pool import opened
    from foretell_lab.emulation.remote import run_on

    with opened(on_ray=options["on_ray"]) as pool:
        return run_on(pool, folder, request, tell)


def _configs(options: dict[str, Any]) -> list[Any]:
    from foretell.errors import InputError
    from foretell.pytorch.ranks.wires import network
    from foretell_lab.emulation.table import Config

    ranks = [int(r) if r.isdecimal() else 0 for r in options["ranks"].split(",")]
    if not all(0 < r <= 16 for r in ranks):
        raise InputError(f"`{options['ranks']}` ranks", hint="use 1 to 16, such as 1,2,4")
    if not all(t.isdecimal() and int(t) > 0 for t in options["threads"].split("+")):
        raise InputError(f"`{options['threads']}` threads", hint="use 1, or 2+1 for each rank")
    networks = [network(n).name for n in options["networks"].split(",")]
    _check_names(options)
    _check_cores(options, max(ranks))
    plans = options["plans"].split(";") if "=" in options["plans"] else options["plans"].split(",")
    return [
        Config(model, plan, net if r > 1 else "loopback", r, options["threads"])
        for r in ranks
        for net in (networks if r > 1 else networks[:1])
        for model in options["models"].split(",")
        for plan in plans
    ]


def _check_cores(options: dict[str, Any], ranks: int) -> None:
    from foretell.errors import InputError
    from foretell.pytorch.ranks.pin import cores, cores_of_ranks

    if options["pin"] and not cores_of_ranks(ranks):
        raise InputError(
            f"--pin of {ranks} ranks, there are {len(cores())} cores",
            hint="use fewer ranks, or leave --pin away",
        )


def _check_names(options: dict[str, Any]) -> None:
    """An error for an unknown model or plan, before anything is written."""
    from foretell.errors import unknown
    from foretell_lab.emulation.models import MODELS
    from foretell_lab.emulation.plans import PLANS

    for what, known in (("models", MODELS), ("plans", PLANS)):
        for name in options[what].split(","):
            if "=" not in options[what] and name not in known:
                raise unknown(f"{what.removesuffix('s')} of the lab", name, known)


def _summary(known: Any, rows: list[Any], knobs: Any, done: dict[str, Any]) -> dict[str, Any]:
    from foretell_lab.emulation.accuracy import picks, summary
    from foretell_lab.emulation.predicted import compared

    found = compared(known, rows, knobs)
    return {
        "machine": known.machine["machine"],
        "rows": [
            vars(h.config)
            | {"measured_s": h.measured, "predicted_s": h.predicted, "error": h.error}
            | {"spread": h.spread, "stretch": h.stretch, "runs": h.runs}
            for h in found
        ],
        "picks": picks(found),
        "figures": summary(found) if found else {},
        "is_fitted": knobs is not None,
        "done": done,
    }


def _text(value: dict[str, Any]) -> str:
    from foretell.report import words
    from foretell.report.words import fitted, table

    rows = [
        (f"{row['model']} {row['plan']}", f"{row['ranks']} × {row['network']}",
         words.seconds(row["measured_s"]), f"± {row['spread']:.0%}",
         words.seconds(row["predicted_s"]), f"{row['error']:+.1%}")
        for row in value["rows"]
    ]  # fmt: skip
    head = ("model, plan", "ranks", "measured>", "runs>", "predicted>", "error>")
    lines = [table(head, rows)] if rows else []
    if value["figures"]:
        from foretell_lab.emulation.accuracy import text

        figures = value["figures"]
        lines += ["", f"runs of the same lie {figures['spread']:.1%} apart (mean)"]
        lines.append(text(figures, "after fit" if value["is_fitted"] else "as predicted"))
    return fitted("\n".join(lines))
