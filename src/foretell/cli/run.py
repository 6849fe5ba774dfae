"""`foretell run`: a plan on real ranks, what was measured beside what was predicted."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import click

from foretell.cli.arguments import ScriptCommand, module_option, show_option
from foretell.cli.output import (
    FILE,
    answer,
    is_for_programs,
    is_quiet,
    json_option,
    say,
    terminated_as_stopped,
    working,
)
from foretell.errors import InputError
from foretell.pytorch.deploy import many_nodes

_SLOW = 2.0  # times the others' compute: a rank is named
_IDLE = 1.2  # wall over core seconds of work: above it others use the machine too
_WIDE = 60  # letters of a plan that are shown; placed stages and actions would fill pages


@click.command(cls=ScriptCommand)
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@module_option
@click.option(
    "--plan", default="", help="A file, or a text such as dp=4,zero=1; by default dp=RANKS."
)
@click.option(
    "-n", "--ranks", type=click.IntRange(min=1), help="Ranks on this node; by default the plan's."
)
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    help="Steps to time: 10 by default, or all of a script with a loop of its own.",
)
@click.option(
    "--warmup", type=click.IntRange(min=0), default=3, show_default=True,
    help="Steps before those that are timed.",
)  # fmt: skip
@click.option("-o", "--output", type=FILE, help="Folder for measurements.")
@click.option("--profile", is_flag=True, help="Trace one more step of each rank.")
@click.option("--predicted-ms", type=float, help="A prediction to compare with.")
@click.option(
    "--predict/--no-predict",
    default=True,
    show_default=True,
    help="Predict the step for this machine first, from its ops timed one by one (cached).",
)
@click.option(
    "--timeout-s", type=float, default=120.0, show_default=True,
    help="Seconds without progress after which the run is stopped.",
)  # fmt: skip
@click.option(
    "--device", type=click.Choice(["cpu", "cuda"]), help="By default cuda where there is one."
)
@click.option(
    "--on", "cluster", default="", help="This cluster: a plan made for another is refused."
)
@click.option(
    "--verify/--no-verify",
    default=None,
    help="Compare the first steps with one process; by default once for each plan and model.",
)
@click.option(
    "--batch-norm",
    type=click.Choice(["sync", "local"]),
    default="sync",
    show_default=True,
    help="Batch statistics over all data-parallel ranks, or of each rank, as in DDP.",
)
@click.option("--checkpoint", type=FILE, help="Folder for checkpoints; any plan resumes them.")
@click.option(
    "--every",
    type=click.IntRange(min=1),
    help="Steps between checkpoints; by default one at the end.",
)
@click.option("--resume", is_flag=True, help="Continue from the last checkpoint under this plan.")
@click.option(
    "--restarts",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="How often to restart from the last checkpoint when a rank fails or hangs.",
)
@click.option(
    "--nodes", type=click.IntRange(min=1), default=1, show_default=True, help="Nodes of the run."
)
@click.option("--rendezvous", default="", help="HOST:PORT where nodes meet, as for torchrun.")
@click.option(
    "--on-ray", default=None, help="Run on the nodes of a Ray cluster: its address, or auto."
)
@click.option(
    "--write", type=FILE,
    help="Start nothing: write a job for Slurm (.sbatch) or Kubernetes (.yaml).",
)  # fmt: skip
@show_option
@json_option
def command(script: str, args: tuple[str, ...], **options: Any) -> None:
    """Run SCRIPT unchanged under a plan with torchrun; print the measured and predicted step.

    \b
        foretell run --plan dp=4,zero=3 train.py --lr 0.1
        foretell run --plan best.plan -m package.train

    Every rank runs the script, and its models compute on the rank's share of each batch: losses and
    checkpoints are those of `python train.py`; what the first rank prints goes to stderr. A script
    that only defines model() and batch(rank, size), and optionally loss(output, target) and
    optimizer(parameters), is trained for a few steps, under any plan.
    """
    from foretell.api.step import is_script
    from foretell.plan import read
    from foretell.pytorch.deploy.launcher import launch, train
    from foretell.pytorch.deploy.run_files import RunRequest

    nodes = options["nodes"]
    text = options["plan"] or f"dp={(options['ranks'] or 1) * nodes}"
    plan = read(text)
    _check_machines(plan, options["cluster"])
    is_whole = is_script(script, options["is_module"])
    if args and not is_whole:
        raise InputError(f"`{script}` describes a step, and takes no arguments: {args[0]}")
    _check_checkpoints(script, is_whole, options)
    if _started_on_cluster(script, args, plan, options):
        return
    request = RunRequest(
        script,
        str(plan),
        options["steps"] or (0 if is_whole else 10),
        options["warmup"],
        options["profile"],
        options["timeout_s"],
        options["device"] or "",
        predict=options["predict"] and options["predicted_ms"] is None,
        verify={None: "first", True: "yes", False: "no"}[options["verify"]],
        batch_norm=options["batch_norm"],
        checkpoint=_checkpoint_folder(options["checkpoint"], options["resume"]),
        every=options["every"] or 0,
        resume=options["resume"],
        args=args,
        is_module=options["is_module"],
    )
    with terminated_as_stopped(), working("running") as tell:
        found = (train if is_whole else launch)(
            request,
            ranks=options["ranks"] or 0,
            folder=options["output"],
            nodes=nodes,
            restarts=options["restarts"],
            rendezvous=options["rendezvous"],
            progress=tell,
            say=say,
            show=options["show"] or (is_whole and not is_quiet() and not is_for_programs()),
        )
    summary = _summary(found, str(plan), options["predicted_ms"])
    if not many_nodes.is_first_node():
        return
    answer(summary, options["as_json"], _text)
    for note in summary["notes"]:
        say(note)
    say(f"written: {found['folder']}")


def _check_checkpoints(script: str, is_whole: bool, options: dict[str, Any]) -> None:
    """Raise where checkpoints are the script's own, or there are none to restart from."""
    if is_whole and options["checkpoint"] is not None:
        raise InputError(
            f"--checkpoint: `{script}` has a loop of its own, which writes its own checkpoints",
            hint="what it gives torch.save is put together from all ranks",
        )
    if options["restarts"] and not is_whole and not options["checkpoint"]:
        raise InputError(
            "--restarts without --checkpoint: there is nothing to go on from",
            hint="add --checkpoint FOLDER --every N",
        )


def _started_on_cluster(
    script: str, args: tuple[str, ...], plan: Any, options: dict[str, Any]
) -> bool:
    """Write a job file, or start this command on every node, where an option says so."""
    from foretell.io import write_text
    from foretell.plan.unsupported import require_runnable

    nodes, write = options["nodes"], options["write"]
    many = nodes > 1 and not options["rendezvous"] and many_nodes.in_allocation()
    if write is None and options["on_ray"] is None and not many:
        return False
    require_runnable(plan)
    if plan.ranks % nodes:
        raise InputError(
            f"the plan `{plan}` has {plan.ranks} ranks, which {nodes} nodes do not share"
        )
    words = _arguments(script, args, options)
    if write is not None:
        gpus = 0 if options["device"] == "cpu" else plan.ranks // nodes
        write_text(write, many_nodes.job_file(write, words, nodes, gpus))
        say(f"written: {write}")
    elif options["on_ray"] is not None:
        address = "" if options["on_ray"] == "auto" else options["on_ray"]
        click.echo(many_nodes.on_ray(address, words, nodes), nl=False)
    else:
        code = many_nodes.on_slurm(words, nodes)
        if code:
            raise click.exceptions.Exit(code)
    return True


def _arguments(script: str, args: tuple[str, ...], options: dict[str, Any]) -> list[str]:
    """This command's options and arguments, but for where it is started."""
    left = {"nodes", "rendezvous", "on_ray", "write"}
    given: list[str] = []
    for parameter in command.params:
        value = options.get(parameter.name or "")
        if not isinstance(parameter, click.Option) or parameter.name in left:
            continue
        if value is None or value == parameter.get_default(click.get_current_context()):
            continue
        if parameter.is_flag:
            given += (parameter.opts if value else parameter.secondary_opts)[-1:]
        else:
            given.append(f"{parameter.opts[-1]}={value}")
    return [*given, script, *args]


def _checkpoint_folder(path: Path | None, resume: bool) -> str:
    """Where checkpoints are; raise where there is none to go on from, or none can be written."""
    if path is None:
        if resume:
            raise InputError(
                "--resume without --checkpoint", hint="name the folder it goes on from"
            )
        return ""
    if not resume and any(path.glob("step-*")):
        raise InputError(
            f"`{path}` has checkpoints of a run before",
            hint="go on from them with --resume, or name another folder",
        )
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"`{path}` cannot be written: {error.strerror}") from None
    return str(path.resolve())


def _check_machines(plan: Any, cluster: str) -> None:
    """Refuse a plan made for other machines; warn where these are unknown."""
    from foretell.cluster import load
    from foretell.plan.check import require_made_for

    if cluster:
        require_made_for(plan, load(cluster))
    elif plan.cluster:
        say("the plan was made for certain machines: with --on CLUSTER others are refused")


def _summary(found: dict[str, Any], plan: str, predicted_ms: float | None) -> dict[str, Any]:
    from foretell.plan import Plan

    each = list(found["ranks"].values())
    steps = [max(times) for times in zip(*(r["steps_s"] for r in each), strict=True)]
    measured = statistics.median(steps)
    here = each[0].get("predicted") or {}
    during = {"load_during": max(r.get("load", 1.0) for r in each)}
    predicted = here.get("step_s") if predicted_ms is None else predicted_ms / 1e3
    return {
        "plan": plan,
        "ranks": Plan.parse(plan).ranks,
        "ranks_here": len(each),
        "measured_s": measured,
        "step_s": measured,
        "steps_s": steps,
        "low_s": min(steps),
        "high_s": max(steps),
        "predicted_s": predicted,
        "error": None if predicted is None else predicted / measured - 1,
        "prediction": here | during if here else None,
        "peak_bytes": [r["peak_bytes"] for r in each],
        "losses": [_mean(step, each) for step in zip(*(r["losses"] for r in each), strict=True)],
        "verified": each[0].get("verified"),
        "restarts": found.get("restarts", 0),
        "notes": each[0].get("notes", []) + _slow_ranks(found["ranks"]),
        "folder": found["folder"],
    }


def _slow_ranks(ranks: dict[int, dict[str, Any]]) -> list[str]:
    """Ranks that compute much longer than the others, for which every step waits."""
    rows = {
        rank: statistics.median(step["compute_s"] for step in row["spent"]) / row["weight"]
        for rank, row in ranks.items()
        if row.get("spent") and row.get("weight")
    }
    usual = statistics.median(rows.values()) if len(rows) > 2 else min(rows.values(), default=0.0)
    return [
        f"rank {rank} computes {took / usual:.1f} times as long as the others: steps wait for it"
        for rank, took in rows.items()
        if usual and took > _SLOW * usual
    ]


def _mean(losses: tuple[float | None, ...], ranks: list[dict[str, Any]]) -> float | None:
    """The loss of a step: of ranks that know theirs, by their share of the batch."""
    pairs = [(x, r["weight"]) for x, r in zip(losses, ranks, strict=True) if x is not None]
    return sum(x * w for x, w in pairs) / sum(w for _, w in pairs) if pairs else None


def _text(found: dict[str, Any]) -> str:
    """Measured beside predicted in a sentence, then what else is known of the run."""
    from foretell.report import words

    plan = words.cut(found["plan"], _WIDE)
    here = f", {found['ranks_here']} of them here" if found["ranks_here"] < found["ranks"] else ""
    ranks = f"{found['ranks']} rank{'s' if found['ranks'] > 1 else ''}{here}"
    head = f"{plan} on {ranks}: {words.seconds(found['step_s'])} a step measured"
    rows = [
        ("steps", _steps_text(found)),
        *_prediction_rows(found),
        *_verify_rows(found["verified"]),
    ]
    if found["restarts"]:
        rows.append(("restarts", f"{found['restarts']}, each from the last checkpoint"))
    rows.append(("memory", f"{words.size(max(found['peak_bytes']))} at most on a rank"))
    return f"{words.fitted(head + _prediction_text(found))}\n{words.listed(rows)}"


def _prediction_text(found: dict[str, Any]) -> str:
    """The prediction behind the measured time, where there is one."""
    from foretell.report import words

    if found["predicted_s"] is None:
        return ""
    text = f", {words.seconds(found['predicted_s'])} predicted ({100 * found['error']:+.1f} %"
    prediction = found["prediction"]
    if not prediction or "why" in prediction:
        return f"{text})"
    inside = prediction["low_s"] <= found["step_s"] <= prediction["high_s"]
    between = words.interval(prediction["low_s"], prediction["high_s"])
    return f"{text}; {'inside' if inside else 'outside'} the 80 % interval, {between})"


def _steps_text(found: dict[str, Any]) -> str:
    from foretell.report import words

    return f"median of {len(found['steps_s'])}, {words.interval(found['low_s'], found['high_s'])}"


def _prediction_rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Why there is no prediction; else how busy the machine was, and the first op that differs."""
    from foretell.report import words

    prediction = found["prediction"] or {}
    if "why" in prediction:
        return [("predicted", f"no: {prediction['why']}")]
    if found["predicted_s"] is None or not prediction:
        return []
    before, during = prediction["load"], prediction["load_during"]
    busy = "idle" if max(before, during) < _IDLE else "busy"
    rows = [("machine", f"{busy}: work took {before:.1f} × its CPU time before, {during:.1f} × in "
                        "the steps")]  # fmt: skip
    if busy == "busy":
        then = words.seconds(found["predicted_s"] * during / before)
        rows.append(("at that load", f"{then} predicted"))
    if apart := prediction.get("first_apart"):
        times = (words.seconds(apart[key]) for key in ("predicted_s", "measured_s"))
        rows.append(
            ("first op off", "{}: {} predicted, {} measured alone".format(apart["op"], *times))
        )
    return rows


def _verify_rows(found: dict[str, Any] | None) -> list[tuple[str, str]]:
    """Result of comparing the first steps with a single process."""
    if found is None:
        return []
    if "skipped" in found:
        return [("verified", f"no: {found['skipped']}")]
    text = (
        f"{found['steps']} steps equal one process: losses to {found['loss_off']:.0e}, "
        f"{found['tensors']} tensors to {found['gradient_off']:.0e}"
    )
    return [("verified", f"{text} (in an earlier run)" if found.get("before") else text)]
