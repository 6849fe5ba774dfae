"""`foretell schedule`: in which order the blocks of a placement, or of a model, run."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import click

from foretell.cli import arguments
from foretell.cli.output import (
    FILE,
    answer,
    answer_result,
    json_option,
    say,
    verbose_option,
    working,
)
from foretell.errors import InputError

_DECIDE = click.Choice(["no", "yes", "auto"])
STOPPED = 130  # exit code of what Ctrl-C ended


@click.command()
@click.argument("placement", required=False)
@click.option("-n", "--micro-batches", type=click.IntRange(1, 10_000), default=8, show_default=True)
@click.option("-m", "--memory", default="", help="Memory of the devices: 6, or 6,4,4,2.")
@click.option("--speed", default="", help="Speed of the devices: 2, or 1,1,0.5,1.")
@arguments.cluster_option("PLACEMENT is a model: schedule it on this cluster.")
@click.option(
    "--shape", default="auto", show_default=True, help="v, m, nn, k, y, x, loop, wave, tp."
)
@click.option(
    "--plan", "plan", default="", help="Other fields of the plan: micro_batch=2,framework=…"
)
@click.option("--infer", is_flag=True, help="Forward only.")
@click.option(
    "--split", is_flag=True, help="Split backward: input and weight gradients (zero bubble)."
)
@click.option(
    "--recompute",
    type=_DECIDE,
    default="auto",
    help="Recompute stages; auto: where memory needs it.",
)
@click.option(
    "--offload", type=_DECIDE, default="no", help="Offload activations; auto: where it pays."
)
@click.option("--frozen", default="", help="Layers that are not trained: embedding+encoder.")
@click.option("--overlap", type=click.Choice(["beside", "link", "stop"]), default="beside")
@click.option("--method", default="search", show_default=True, help="See --methods.")
@click.option("--methods", is_flag=True, help="List the methods.")
@click.option("--compare", is_flag=True, help="Every method that applies, in one table.")
@click.option(
    "--work",
    type=float,
    default=10.0,
    show_default=True,
    help="Budget in about CPU seconds, counted in solver steps: the same answer anywhere.",
)
@click.option(
    "--time",
    "time_limit",
    type=float,
    default=None,
    help="Time limit in seconds, of all methods with --compare; the answer says if it was reached.",
)
@click.option("--no-cache", is_flag=True, help="Do not use cached schedules.")
@click.option("-o", "--output", type=FILE, multiple=True)
@verbose_option
@json_option
def command(placement: str | None, **options: Any) -> None:
    """Find the order in which the blocks of PLACEMENT run for every micro-batch.

    PLACEMENT is a file, or a shape such as v:devices=4 or m:devices=8,infer=yes; with --on it is a
    model such as gpt:layers=24,… and stages, devices and times are worked out. -o writes a drawing
    (.svg), a plan (.plan, of a model), the placement itself (.json), or what each rank does as
    torch's runtime and torchtitan read it (.csv; .comms.csv with sends and receives).
    """
    if options["methods"]:
        return answer(_methods(), options["as_json"], _methods_text)
    if not placement:
        raise InputError(
            "schedule needs a placement", hint="foretell schedule v:devices=4, a file, or a model"
        )
    if options["compare"]:
        return _compare(_problems(placement, options), options)
    return _schedule(placement, options)


def _methods() -> dict[str, str]:
    from foretell.search.schedule.families import BASELINES

    ours = {"search": "the least time a micro-batch, then the least makespan; proven where it can"}
    ours["tessel"] = "Tessel's two phases (Lin et al., HPCA 2024) on the same solver"
    return ours | {name: (order.__doc__ or "").split("\n")[0] for name, order in BASELINES.items()}


def _methods_text(found: dict[str, str]) -> str:
    return "\n".join(f"{name:12s} {words}" for name, words in found.items())


def _cache(options: dict[str, Any]) -> Path | None:
    from foretell.search.schedule.schedule import cache_folder

    return None if options["no_cache"] else cache_folder()


def _parse_numbers(text: str, option: str) -> list[float] | None:
    """Numbers separated by commas; None where none is given."""
    from foretell import spec

    return [float(spec.read(part, float, option)) for part in text.split(",")] if text else None


def _placement_options(placement: str, options: dict[str, Any]) -> dict[str, Any]:
    """Arguments of the API for a bare placement."""
    sizes = {name: _parse_numbers(options[name], f"--{name}") for name in ("memory", "speed")}
    kept = ("plan", "infer", "split", "recompute", "offload", "overlap")
    return {**sizes, "pipeline": options["shape"], **{name: options[name] for name in kept}}


def _schedule(placement: str, options: dict[str, Any]) -> None:
    began = time.monotonic() - time.process_time()  # what it takes to load the search counts
    from foretell.api import ModelSchedule, schedule

    more = _placement_options(placement, options)
    with working("searching", about=options["time_limit"] or options["work"]) as tell:
        found = schedule(
            placement,
            options["cluster"],
            micro_batches=options["micro_batches"],
            frozen=_frozen(options),
            method=options["method"],
            work=options["work"],
            time_limit=_time_left(options, began),
            cache=_cache(options),
            progress=lambda what, value, bound: tell(f"{what} {value:.4g}, bound {bound:.4g}"),
            **more,
        )
    answer_result(found, options["as_json"], options["verbose"])
    solved = found.every[0] if isinstance(found, ModelSchedule) else None
    for output in options["output"]:
        write(output, found.schedule, solved)
    if found.stopped:
        say("stopped: this is the best schedule so far")
        raise SystemExit(STOPPED)


def _time_left(options: dict[str, Any], began: float, parts: int = 1) -> float | None:
    """What a time limit leaves each of some parts; that of nothing is refused later."""
    limit: float | None = options["time_limit"]
    return limit and max(limit - (time.monotonic() - began), 0.2 * limit) / parts


def _frozen(options: dict[str, Any]) -> list[str]:
    return [name for name in options["frozen"].split("+") if name]


def _problems(placement: str, options: dict[str, Any]) -> list[tuple[str, Any, int]]:
    """The scheduling problems to compare methods on: shape, problem, micro-batches."""
    from foretell.api.scheduling import pipelines, problem_of, require_model

    num, more = options["micro_batches"], _placement_options(placement, options)
    memory, speed = more.pop("memory"), more.pop("speed")
    if options["cluster"]:
        more["shape"] = more.pop("pipeline")
        more |= {"frozen": _frozen(options), "micro_batches": num}
        found = pipelines(placement, options["cluster"], **more)
        return [(m.shape, m.problem, num // m.copies) for m in found]
    require_model({**more, "frozen": _frozen(options)})
    overlap = options["overlap"]
    return [("", problem_of(placement, memory=memory, speed=speed, overlap=overlap), num)]


def _compare(problems: list[tuple[str, Any, int]], options: dict[str, Any]) -> None:
    """One table a placement: all methods that fit it."""
    began = time.monotonic() - time.process_time()
    from foretell.search.schedule.find import compare

    rows = []
    with working("searching", steps=len(problems)) as tell:
        for at, (name, problem, num) in enumerate(problems):
            tell(name or "all methods")
            bare = problem.choosing(()) if problem.choices else problem
            work, limit = options["work"], _time_left(options, began, len(problems) - at)
            found = compare(bare, num, work=work, time_limit=limit, cache=_cache(options))
            rows += [(name, row) for row in found]
    answer(
        [row.answer() | {"shape": n} for n, row in rows], options["as_json"], lambda _: _table(rows)
    )


def _table(rows: list[tuple[str, Any]]) -> str:
    from foretell.report.words import table
    from foretell.search.schedule.find import HEADER

    if not any(name for name, _ in rows):
        return table(HEADER, [row.cells() for _, row in rows])
    return table(("shape", *HEADER), [(name, *row.cells()) for name, row in rows])


# Files of `-o`: a drawing, a plan, a placement, or actions by rank


def write(output: Path, found: Any, solved: Any) -> None:
    """A schedule in the form of the file's ending; `solved` where it is of a model."""
    from foretell.io import write_atomically

    if output.suffix in (".plan", ".toml"):
        _write_plan(output, solved)
    else:
        text = _text(output, found, solved)
        write_atomically(output, lambda file: file.write(text.encode()))
    say(f"written: {output}")


def _write_plan(output: Path, solved: Any) -> None:
    from foretell.plan import save
    from foretell.plan.stage_placement import as_degrees

    if solved is None:
        raise InputError(
            f"`{output}` would be a plan, and a bare placement has no model to plan",
            hint="give a model and --on CLUSTER, or write .svg, .csv or .json",
        )
    # a plain pipeline in degrees: other programs read that
    save(as_degrees(solved.plan, solved.model.prices.workload) or solved.plan, output)


def _text(output: Path, found: Any, solved: Any) -> str:
    from foretell.search.schedule.problem import write as written
    from foretell.search.schedule.schedule import svg

    if output.suffix == ".csv":
        return _actions_csv(found, solved, with_comms=output.name.endswith(".comms.csv"))
    if output.suffix == ".json":
        return json.dumps(written(found.problem), indent=1) + "\n"
    return svg(found)


def _actions_csv(found: Any, solved: Any, *, with_comms: bool) -> str:
    """Actions as CSV: a row per rank, a cell per action."""
    from foretell.plan.export import schedule_csv, with_messages
    from foretell.search.schedule.schedule import actions

    rows = solved.plan.actions if solved else actions(found)
    if with_comms:
        if not _is_linear_pipeline(found, solved, rows):
            raise InputError(
                "torch's runtime sends along one line of stages, each on one rank",
                hint="leave .comms out, or run the plan with `foretell run`",
            )
        rows = with_messages(rows)
    return schedule_csv(rows)


def _is_linear_pipeline(found: Any, solved: Any, rows: Any) -> bool:
    """Whether each stage follows the one before, on a rank of its own."""
    from foretell.plan.stage_placement import edges
    from foretell.search.schedule.schedule import after

    if solved:
        links = edges(solved.model.places, solved.model.prices.workload)
        befores = [sorted(e.first for e in links if e.then == s) for s in range(len(links) + 1)]
    else:
        befores = [list(b) for b in after(found.problem)]
    cells = [cell for row in rows for cell in row]
    in_line = all(b == ([s - 1] if s else []) for s, b in enumerate(befores))
    return in_line and len(set(cells)) == len(cells)
