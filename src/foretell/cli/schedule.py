"""`foretell schedule`: in which order the blocks of a placement, or of a model, run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from foretell.cli import offered
from foretell.cli.output import answer, json_option
from foretell.cli.progress import working
from foretell.cli.schedule_files import write
from foretell.errors import InputError

_DECIDE = click.Choice(["no", "yes", "auto"])


@click.command()
@click.argument("placement", required=False)
@click.option("-n", "--micro-batches", type=click.IntRange(1, 10_000), default=8, show_default=True)
@click.option("-m", "--memory", default="", help="What devices hold at most: 6, or 6,4,4,2.")
@click.option("--speed", default="", help="Of devices, where not 1: 2, or 1,1,0.5,1.")
@click.option(
    "--on",
    "cluster",
    shell_complete=offered.clusters,
    help="PLACEMENT is a model: schedule it on this cluster.",
)
@click.option("--shape", default="auto", show_default=True, help="v, m, nn, k, x, loop, wave, tp.")
@click.option(
    "--plan", "plan", default="", help="What else a model needs: micro_batch=2,framework=…"
)
@click.option("--infer", is_flag=True, help="Forward only.")
@click.option("--split", is_flag=True, help="Gradients of inputs and of weights apart.")
@click.option("--recompute", type=_DECIDE, default="auto", help="Run stages again; or decide it.")
@click.option("--offload", type=_DECIDE, default="no", help="Keep on the host; or decide it.")
@click.option("--frozen", default="", help="Layers that are not trained: embedding+encoder.")
@click.option("--overlap", type=click.Choice(["beside", "link", "stop"]), default="beside")
@click.option("--method", default="search", show_default=True, help="See --methods.")
@click.option("--methods", is_flag=True, help="List the methods.")
@click.option("--compare", is_flag=True, help="All methods that fit, in one table.")
@click.option("--time", "time_limit", type=float, default=7.0, show_default=True)
@click.option("--no-cache", is_flag=True, help="Search again what was found before.")
@click.option("-o", "--output", type=click.Path(path_type=Path), multiple=True)
@json_option
def command(placement: str | None, **asked: Any) -> None:
    """Find the order in which the blocks of PLACEMENT run for every micro-batch.

    PLACEMENT is a file, or a shape such as v:devices=4 or m:devices=8,infer=yes; with --on it is a
    model such as gpt:layers=24,… and stages, devices and times are worked out. -o writes a drawing
    (.svg), a plan (.plan, of a model), the placement itself (.json), or what each rank does as
    torch's runtime and torchtitan read it (.csv; .comms.csv with sends and receives).
    """
    if asked["methods"]:
        return answer(_methods(), asked["as_json"], _listed)
    if not placement:
        raise InputError(
            "schedule needs a placement", hint="foretell schedule v:devices=4, a file, or a model"
        )
    if asked["cluster"]:
        return _of_model(placement, asked)
    return _of_placement(placement, asked)


def _methods() -> dict[str, str]:
    from foretell.search.schedule.baselines import BASELINES

    ours = {"search": "the least time a micro-batch, then the least makespan; proven where it can"}
    ours["tessel"] = "Tessel's two phases (Lin et al., HPCA 2024) on the same solver"
    return ours | {name: (order.__doc__ or "").split("\n")[0] for name, order in BASELINES.items()}


def _listed(found: dict[str, str]) -> str:
    return "\n".join(f"{name:12s} {words}" for name, words in found.items())


def _cache(asked: dict[str, Any]) -> Path | None:
    from foretell.search.schedule.cache import folder

    return None if asked["no_cache"] else folder()


def _of_placement(placement: str, asked: dict[str, Any]) -> None:
    from foretell.search.schedule import load, schedule, shape
    from foretell.search.schedule.best import decided

    _check_options(asked)
    path = Path(placement)
    is_file = path.exists() or path.suffix == ".json" or "/" in placement
    problem = _changed(load(path) if is_file else shape(placement), asked)
    if asked["compare"]:
        _compared([("", problem, asked["micro_batches"])], asked)
        return
    with working("searching", about=asked["time_limit"]) as tell:

        def find(one: Any, limit: float = asked["time_limit"]) -> Any:
            return schedule(
                one,
                micro_batches=asked["micro_batches"],
                method=asked["method"],
                time_limit=limit,
                cache=_cache(asked),
                progress=lambda what, value, bound: tell(f"{what} {value:g}, bound {bound:g}"),
            )

        taken = decided(problem, find) if problem.choices else ()
        found = find(problem.choosing(taken) if problem.choices else problem)
    more = {"choices": list(taken)} if problem.choices else {}
    answer(found.answer() | more, asked["as_json"], lambda _: _text(found, taken))
    for output in asked["output"]:
        write(output, found, None)


def _check_options(asked: dict[str, Any]) -> None:
    """Raise where something is asked of a bare placement that only a model has."""
    given = [name for name in ("plan", "infer", "split", "frozen") if asked[name]]
    given += ["shape"] if asked["shape"] != "auto" else []
    if given:
        raise InputError(
            f"--{given[0]} is for a model, and this is a placement",
            hint="name a cluster with --on, or say it in the shape: v:devices=4,split=yes",
        )


def _changed(problem: Any, asked: dict[str, Any]) -> Any:
    """A placement on devices of other sizes and speeds, its messages as they are asked for."""
    from dataclasses import replace

    from foretell.search.schedule.problem import occupying

    num = problem.num_devices
    if asked["overlap"] != "beside":
        problem = occupying(problem, asked["overlap"])
    links = problem.num_devices - num  # they hold nothing, and are as quick as they are
    if asked["memory"]:
        each = _numbers(asked["memory"], "--memory", num)
        problem = replace(problem, capacity=(*each, *problem.capacity[num:]))
    if asked["speed"]:
        each = _numbers(asked["speed"], "--speed", num)
        problem = replace(problem, speed=(*each, *(1.0,) * links))
    return problem


def _numbers(text: str, option: str, devices: int) -> tuple[float, ...]:
    """One number for all devices, or one for each."""
    from foretell import spec

    found = [float(spec.read(part, float, option)) for part in text.split(",")]
    if len(found) not in (1, devices):
        raise InputError(
            f"{option} {text} for {devices} devices", hint="give one number, or one for each"
        )
    return tuple(found) if len(found) == devices else (found[0],) * devices


def _of_model(workload: str, asked: dict[str, Any]) -> None:
    from foretell.search.schedule.best import best

    found = _models(workload, asked)
    num = asked["micro_batches"]
    if asked["compare"]:
        _compared([(m.shape, m.problem, num // m.copies) for m in found], asked)
        return
    with working("searching", about=asked["time_limit"]) as tell:
        every = best(
            found,
            num,
            method=asked["method"],
            time_limit=asked["time_limit"] / len(found),
            cache=_cache(asked),
            progress=lambda what, value, bound: tell(f"{what} {value:.4g}, bound {bound:.4g}"),
        )
    answer(_told(every), asked["as_json"], lambda _: _model_text(every))
    for output in asked["output"]:
        write(output, every[0].schedule, every[0])


def _models(workload: str, asked: dict[str, Any]) -> list[Any]:
    from foretell.cluster import load as load_cluster
    from foretell.plan import Plan
    from foretell.search.schedule.model import model, models
    from foretell.workload import load

    where = load(workload, scripts=True), load_cluster(asked["cluster"])
    options: dict[str, Any] = {
        "plan": Plan.parse(asked["plan"]) if asked["plan"] else None,
        "mode": "infer" if asked["infer"] else "train",
        "frozen": [name for name in asked["frozen"].split("+") if name],
    }
    options |= {k: asked[k] for k in ("micro_batches", "split", "recompute", "offload", "overlap")}
    if asked["shape"] == "auto":
        return models(*where, **options)
    return [model(*where, asked["shape"], **options)]


def _told(every: list[Any]) -> dict[str, Any]:
    """The answer of a schedule, and what the model adds to it."""
    first = every[0]
    more: dict[str, Any] = {
        "shape": first.model.shape,
        "step_s": first.prediction.step,
        "peak_bytes": first.prediction.peak,
        "fits": first.prediction.fits,
        "stages": [list(texts) for texts in first.plan.stages],
        "choices": list(first.taken),
        "shapes": {s.model.shape: s.per_sample for s in every},
    }
    return {**first.schedule.answer(), **more}


def _compared(problems: list[tuple[str, Any, int]], asked: dict[str, Any]) -> None:
    """One table a placement: all methods that fit it."""
    from foretell.search.schedule.find import compare

    rows = []
    with working("searching", steps=len(problems)) as tell:
        for name, problem, num in problems:
            tell(name or "all methods")
            bare = problem.choosing(()) if problem.choices else problem
            limit = asked["time_limit"]
            found = compare(bare, num, time_limit=limit, cache=_cache(asked))
            rows += [(name, row) for row in found]
    answer(
        [row.answer() | {"shape": n} for n, row in rows], asked["as_json"], lambda _: _table(rows)
    )


def _table(rows: list[tuple[str, Any]]) -> str:
    from foretell.report.terminal import table

    named = any(name for name, _ in rows)
    head = ("method", "each>", "bubble>", "makespan>", "memory>", "open>", "note")
    cells = [row.cells() for _, row in rows]
    if not named:
        return table(head, cells)
    return table(("shape", *head), [(n, *c) for (n, _), c in zip(rows, cells, strict=True)])


def _text(found: Any, taken: Sequence[str] = ()) -> str:
    from foretell.report.terminal import wrapped

    before = ", found before" if found.is_cached else ""
    head = wrapped(
        f"{found.per_micro_batch:g} a micro-batch ({_rate_bound(found)}), "
        f"makespan {found.makespan:g} for {found.micro_batches} micro-batches "
        f"({_makespan_bound(found)}), peak memory {max(found.peak_memory):g}, "
        f"{found.search_cpu:.2f} CPU-s{before}"
    )
    return f"{head}{_decided(taken)}\n\n{_drawn(found)}"


def _rate_bound(found: Any) -> str:
    """How far the time a micro-batch may be from the least."""
    if found.proven_unroll is None:
        return "proven minimal"
    upto = f", least up to {found.proven_unroll} a pattern" if found.proven_unroll else ""
    return f"bound {found.lower_bound:.4g}, gap {100 * found.gap:.1f} %{upto}"


def _makespan_bound(found: Any) -> str:
    if found.makespan_gap < 1e-9:
        return "proven minimal"
    return f"bound {found.makespan_bound:.4g}, gap {100 * found.makespan_gap:.1f} %"


def _decided(taken: Sequence[str]) -> str:
    return f"\ndecided: {', '.join(taken)}" if taken else ""


def _model_text(every: list[Any]) -> str:
    from foretell.report import words
    from foretell.report.terminal import table

    first = every[0]
    found, told = first.schedule, first.prediction
    head = (
        f"shape {first.model.shape}: {words.seconds(told.step)} a step of "
        f"{first.plan.global_batch} samples, {100 * found.bubble:.1f} % bubble, "
        f"{told.peak / 2**30:.1f} GiB on the fullest rank, {found.search_cpu:.2f} CPU-s\n"
        f"a micro-batch {words.seconds(found.per_micro_batch)} ({_rate_bound(found)}), "
        f"makespan {words.seconds(found.makespan)} ({_makespan_bound(found)})"
    )
    stages = [(str(s), t[0], " ".join(t[1:])) for s, t in enumerate(first.plan.stages)]
    others = [
        (s.model.shape, words.seconds(s.per_sample), f"{s.per_sample / first.per_sample:.2f} x")
        for s in every
    ]
    parts = [head, table(("stage", "ranks", "layers"), stages), _drawn(found)]
    if first.taken:
        parts.insert(1, f"decided: {', '.join(first.taken)}")
    if len(every) > 1:
        parts.append(table(("shape", "a sample>", "against the best>"), others))
    return "\n\n".join(parts)


def _drawn(found: Any) -> str:
    from foretell.report.terminal import width
    from foretell.search.schedule.formats import text

    drawn: str = text(found, width())
    return drawn
