"""`foretell schedule`: in which order the blocks of a placement, or of a model, run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from foretell.cli.output import answer, json_option, say
from foretell.cli.progress import working
from foretell.errors import InputError

_DECIDE = click.Choice(["no", "yes", "auto"])


@click.command()
@click.argument("placement", required=False)
@click.option("-n", "--micro-batches", type=click.IntRange(min=1), default=8, show_default=True)
@click.option("-m", "--memory", type=float, help="What each device holds at most.")
@click.option("--on", "cluster", help="PLACEMENT is a model: schedule it on this cluster.")
@click.option("--shape", default="auto", show_default=True, help="v, m, nn, k, x, tp: of a model.")
@click.option("--plan", "plan", default="", help="What else a model needs: micro_batch=2,stack=…")
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
    (.svg), a plan (.plan, of a model) or the placement itself (.json).
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

    path = Path(placement)
    is_file = path.exists() or path.suffix == ".json" or "/" in placement
    problem = load(path) if is_file else shape(placement)
    if asked["compare"]:
        _compared([("", problem, asked["micro_batches"])], asked)
        return
    with working("searching") as tell:
        found = schedule(
            problem,
            micro_batches=asked["micro_batches"],
            memory=asked["memory"],
            method=asked["method"],
            time_limit=asked["time_limit"],
            cache=_cache(asked),
            progress=lambda what, value, bound: tell(f"{what} {value:g}, bound {bound:g}"),
        )
    answer(found.answer(), asked["as_json"], lambda _: _text(found))
    for output in asked["output"]:
        _write(output, found, None)


def _of_model(workload: str, asked: dict[str, Any]) -> None:
    from foretell.search.schedule.best import best

    found = _models(workload, asked)
    num = asked["micro_batches"]
    if asked["compare"]:
        _compared([(m.shape, m.problem, num // m.copies) for m in found], asked)
        return
    with working("searching") as tell:
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
        _write(output, every[0].schedule, every[0])


def _models(workload: str, asked: dict[str, Any]) -> list[Any]:
    from foretell.cluster import load as load_cluster
    from foretell.plan import Plan
    from foretell.search.schedule.model import model, models
    from foretell.workload import load

    where = load(workload), load_cluster(asked["cluster"])
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
    from foretell.search.schedule.compare import compare

    rows = []
    with working("searching") as tell:
        for name, problem, num in problems:
            tell(name or "all methods")
            bare = problem.choosing(()) if problem.choices else problem
            limit = asked["time_limit"]
            found = compare(bare, num, asked["memory"], time_limit=limit, cache=_cache(asked))
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


def _write(output: Path, found: Any, solved: Any) -> None:
    """A drawing, a plan or a placement, by the name's ending."""
    import json

    from foretell.graph.file import write_atomically
    from foretell.search.schedule.draw import svg
    from foretell.search.schedule.placement import write

    if output.suffix in (".plan", ".toml"):
        if solved is None:
            raise InputError(
                f"`{output}` would be a plan, and a bare placement has no model to plan",
                hint="give a model and --on CLUSTER, or write .svg or .json",
            )
        from foretell.plan import save
        from foretell.plan.places import as_degrees

        # a plain pipeline in degrees: other programs read that
        save(as_degrees(solved.plan, solved.model.prices.workload) or solved.plan, output)
    elif output.suffix == ".json":
        text = json.dumps(write(found.problem), indent=1) + "\n"
        write_atomically(output, lambda file: file.write(text.encode()))
    else:
        write_atomically(output, lambda file: file.write(svg(found).encode()))
    say(f"written: {output}")


def _text(found: Any) -> str:
    is_proven = "proven minimal" if found.proven else f"{100 * found.gap:.1f} % above the bound"
    before = ", found before" if found.is_cached else ""
    return (
        f"{found.per_micro_batch:g} a micro-batch ({is_proven}), "
        f"makespan {found.makespan:g} for {found.micro_batches} micro-batches, "
        f"peak memory {max(found.peak_memory):g}, {found.search_cpu:.2f} CPU-s{before}"
        f"\n\n{_drawn(found)}"
    )


def _model_text(every: list[Any]) -> str:
    from foretell.report import words
    from foretell.report.terminal import table

    first = every[0]
    found, told = first.schedule, first.prediction
    head = (
        f"shape {first.model.shape}: {words.seconds(told.step)} a step of "
        f"{first.plan.global_batch} samples, {100 * found.bubble:.1f} % bubble, "
        f"{told.peak / 2**30:.1f} GiB on the fullest rank, {found.search_cpu:.2f} CPU-s"
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
    from foretell.search.schedule.draw import text

    drawn: str = text(found, width())
    return drawn
