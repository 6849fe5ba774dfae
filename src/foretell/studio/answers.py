"""What the page asks, answered: plain functions from what is ticked to what is shown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from foretell.advise import Step
from foretell.advise.advise import TRIED
from foretell.baseline import why
from foretell.cluster import Cluster
from foretell.errors import InputError
from foretell.report import words
from foretell.simulate import Timeline, simulate
from foretell.studio.desk import Desk, after
from foretell.studio.guard import known
from foretell.whatif import parse

_LATE = {"compile": 1, "cuda-graph": 2}  # they build on what formats and layouts make
MOST_SPECS, LONGEST = 24, 300


def ordered(ticked: Sequence[str], own: str | None) -> tuple[str, ...]:
    """What is ticked in the order changes build on each other, then what was written."""
    place = {spec: k for k, spec in enumerate(TRIED)}
    first = sorted(ticked, key=lambda s: (_LATE.get(s.partition(":")[0], 0), place.get(s, 99)))
    specs = (*first, *(own or "").split())
    if len(specs) > MOST_SPECS or any(len(s) > LONGEST for s in specs):
        raise InputError(f"{len(specs)} changes", hint=f"at most {MOST_SPECS}, each a short text")
    for spec in specs:
        parse(spec)
    return specs


def timelines(step: Step, specs: tuple[str, ...]) -> list[tuple[str, Timeline]]:
    """The step before and after."""
    lines = [("as it is", simulate(step.graph))]
    if specs:
        lines.append(("with " + " ".join(specs), simulate(after(step, specs))))
    return lines


def reason(step: Step, specs: tuple[str, ...]) -> str:
    """Why the changes help or not."""
    return why(step.graph, after(step, specs)) if specs else ""


def cards(found: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(what, value, more) for the headline."""
    shown = [("a step as it is", words.seconds(found["baseline_s"]), "")]
    if found["changes"]:
        way = "shorter" if found["gain"] >= 0 else "longer"
        gain = f"{abs(found['gain']):.1%} {way} a {found['per']}"
        low, high = words.seconds(found["low_s"]), words.seconds(found["high_s"])
        more = f"{gain}; {low} to {high} (80 % interval)"
        shown.append(("with the changes", words.seconds(found["predicted_s"]), more))
    if found["peak_bytes"]:
        shown.append(("peak memory", words.size(found["peak_bytes"]), ""))
    return shown


def strategies(
    workload: str, cluster: str, gpus: str, tell: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Every strategy at every scale."""
    from foretell.search.oracle import counts, scaling
    from foretell.studio.machines import chosen
    from foretell.workload import load

    model, numbers = load(workload, files=False), counts(gpus)
    name, _, given = (cluster or "").partition(":")
    kept = [o for o in given.split(",") if o and not o.startswith(("gpus=", "nodes="))]

    def sized(n: int) -> Cluster:
        machines = chosen(f"{name}:{','.join([*kept, f'gpus={n}'])}")
        if machines is None:
            raise InputError("no cluster is named", hint="name a preset on the side")
        return machines

    rows = scaling(model, sized, numbers, lambda n: model.batch * n, progress=tell)
    return [
        {
            "gpus": r.gpus, "strategy": r.strategy, "step_s": r.step, "peak_bytes": r.peak,
            "fits": r.missing == 0, "plan": str(r.plan), "samples_per_s": r.samples,
            "says": "; ".join(f.name for f in r.findings),
        }
        for r in rows
    ]  # fmt: skip


def planned(
    workload: str, machines: Cluster | None, planner: str, tell: Callable[[str], None]
) -> list[dict[str, Any]]:
    """What a planner finds, and its baselines."""
    from foretell.workload import load

    chosen = allowed(planner)
    model = load(workload, files=False)
    if machines is None:
        raise InputError("no cluster is named", hint="name a preset on the side")
    found = chosen.plan(model, machines, lambda what, best: tell(f"{what}, best {best:.4g} s"))
    rows = [("the plan found", found.predicted, str(found.plan))]
    rows += [(name, seconds, "") for name, seconds in found.baselines.items()]
    return [
        {
            "gpus": machines.size, "strategy": name, "step_s": seconds, "peak_bytes": 0.0,
            "fits": True, "plan": plan, "samples_per_s": 1 / seconds, "says": "",
        }
        for name, seconds, plan in rows
    ]  # fmt: skip


def allowed(planner: str) -> Any:
    """The planner a text names; its options that are files are refused: the page opens none."""
    from foretell import spec
    from foretell.search.planners import parse

    _, given = spec.split(planner)
    named = sorted({"resume", "start"} & set(given))
    if named:
        raise InputError(
            f"`{named[0]}` of a planner names a file, and the studio opens none",
            hint="leave it out, or use `foretell plan` on the command line",
        )
    return parse(planner)


def exported(desk: Desk, key: str, step: Step, specs: Sequence[str], form: str) -> str:
    """Write a report or a trace of what is shown; the name of the file."""
    from foretell.report import write
    from foretell.survey import Loaded, survey

    one = desk.step(key)
    found = survey([Loaded(one.name, step, one.measured)], specs, advice=form == "report")
    ending = ".html" if form == "report" else ".trace.json.gz"
    name = known(one.name.partition(".")[0]) + ending
    folder = desk.folder / "out"
    folder.mkdir(exist_ok=True)
    write(found.timelines, folder / name, found.content)
    return name


def plan_file(desk: Desk, plan: str) -> str:
    """Write a plan that was found; the name of the file."""
    from foretell.plan import Plan, save

    folder = desk.folder / "out"
    folder.mkdir(exist_ok=True)
    save(Plan.parse(plan), folder / "best.plan")
    return "best.plan"
