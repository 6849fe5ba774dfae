"""The calls of the page by name, and their functions: plain values in, plain values out.

Quick answers come at once; whatever lowers a plan, reads a file or searches runs in a process of
its own (→ foretell.studio.child, foretell.studio.jobs).
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Any

from foretell.advise import TRIED, Recommendations, Step
from foretell.cluster import Cluster
from foretell.errors import InputError
from foretell.report.page import packed
from foretell.studio import views
from foretell.studio.child import call
from foretell.studio.desk import Desk, build_step, open_file, predicted
from foretell.studio.jobs import Jobs
from foretell.studio.machines import Machines
from foretell.studio.uploads import safe_name
from foretell.survey.survey import known_outcome
from foretell.whatif import ordered, parse

MOST_SPECS, LONGEST = 24, 300
# Beside what a line of PyTorch changes: more devices, other links, another host.
OFFERED = (
    *TRIED, "data-parallel:ranks=8", "fsdp:ranks=8", "network:times=2", "faster-host:times=2",
)  # fmt: skip
Request = Mapping[str, Any]
Answer = Callable[["Studio", Request], Any]


@dataclass(frozen=True, eq=False)
class Studio:
    """The state that calls work on: desk, jobs, machines, files."""

    desk: Desk
    jobs: Jobs
    machines: Machines


def answer(studio: Studio, name: str, request: Request) -> Any:
    """The answer to a call of the page."""
    if name not in CALLS:
        raise InputError(f"the studio has no call `{name[:40]}`")
    return CALLS[name](studio, request)


def text(request: Request, key: str, most: int = LONGEST) -> str:
    """A text of a call, or an error where it is none or too long."""
    value = request.get(key) or ""
    if not isinstance(value, str) or len(value) > most:
        raise InputError(f"`{key}` of the call is no text of at most {most} letters")
    return value


def changes(request: Request) -> tuple[str, ...]:
    """The changes of a call, in canonical order."""
    given = request.get("changes") or []
    if not isinstance(given, list) or not all(isinstance(s, str) for s in given):
        raise InputError("`changes` of the call is no list of texts")
    if len(given) > MOST_SPECS or any(len(s) > LONGEST for s in given):
        raise InputError(f"{len(given)} changes", hint=f"at most {MOST_SPECS}, each a short text")
    return tuple(str(change) for change in ordered([parse(spec) for spec in given]))


def _step(studio: Studio, request: Request) -> Step:
    return studio.desk.on(text(request, "step"), studio.machines.of(text(request, "cluster")))


def _cluster(studio: Studio, request: Request) -> Cluster:
    found = studio.machines.of(text(request, "cluster"))
    if found is None:
        raise InputError("no machines are chosen", hint="choose a GPU and how many")
    return found


def _desk(studio: Studio, request: Request) -> dict[str, Any]:
    """The steps and scenarios of the desk."""
    with studio.desk.lock:
        steps = [{"key": key, "name": one.name} for key, one in studio.desk.steps.items()]
        kept = [dataclasses.asdict(s) for s in studio.desk.scenarios]
    return {"steps": steps, "scenarios": kept}


def _choices(studio: Studio, request: Request) -> dict[str, Any]:
    """The choices offered: changes, models and their sizes, machines, fields of a plan."""
    return choices()


def _whatif(studio: Studio, request: Request) -> dict[str, Any]:
    """The step with changes made, under the keys of `foretell whatif --json`."""
    step, specs, advised = _step(studio, request), changes(request), _advised(studio, request)
    found = (known_outcome(step, specs, advised) if advised else None) or predicted(step, specs)
    code = [line for spec in specs if (line := parse(spec).code)]
    return {**found, "specs": list(specs), "code": code}


def _view(studio: Studio, request: Request) -> str:
    """Everything a report shows of the step and its changes, packed as in a report."""
    step, specs, advised = _step(studio, request), changes(request), _advised(studio, request)
    return packed(views.step(step, specs, advised))


def _advised(studio: Studio, request: Request) -> Recommendations | None:
    """The answer of the search that tried every change on the step, where it is done."""
    job = text(request, "advice")
    found = studio.jobs[job].answer if job in studio.jobs else None
    return found if isinstance(found, Recommendations) else None


def _rank(studio: Studio, request: Request) -> dict[str, str]:
    """Try every change on a step, in a process of its own; once, however often it is asked for."""
    key = text(request, "step"), text(request, "cluster")
    job = studio.desk.rankings.get(key, "")
    if job not in studio.jobs or studio.jobs[job].state not in ("running", "done"):
        job = studio.jobs.start("changes", partial(views.ranked, _step(studio, request)))
        studio.desk.rankings[key] = job
    return {"job": job}


def _cluster_text(studio: Studio, request: Request) -> dict[str, Any]:
    """Machines that a preset names or a text describes; what they are."""
    given = text(request, "text", 200_000)
    key = studio.machines.put(given) if given else text(request, "cluster")
    found = studio.machines.of(key)
    if found is None:
        return {"cluster": "", "text": "", "ranks": 0}
    return {
        "cluster": key, "text": found.text(), "ranks": found.size, "nodes": found.num_nodes,
        "devices": {name: len(ranks) for name, ranks in found.devices_by_kind().items()},
        "price": found.price,
    }  # fmt: skip


def _build(studio: Studio, request: Request) -> dict[str, str]:
    """Put the step of a model under a plan on the desk."""
    machines = _cluster(studio, request)
    key = build_step(studio.desk, text(request, "workload"), text(request, "plan", 4000), machines)
    return {"step": key}


def _plan(studio: Studio, request: Request) -> Any:
    """A plan's prediction, drawings and timeline, packed as a report packs them."""
    machines = _cluster(studio, request)
    return call(views.plan, text(request, "workload"), text(request, "plan", 100_000), machines)


def _explore(studio: Studio, request: Request) -> dict[str, str]:
    """Look for layouts: every strategy, or with a planner."""
    machines, workload = _cluster(studio, request), text(request, "workload")
    planner = text(request, "planner") or "strategies"
    if planner == "strategies":
        counts = text(request, "gpus") or str(machines.size)
        work = partial(views.strategies, workload, text(request, "cluster"), counts)
    else:
        views.allowed(planner)
        work = partial(views.planned, workload, machines, planner)
    return {"job": studio.jobs.start(planner, work)}


def _job(studio: Studio, request: Request) -> dict[str, Any]:
    """How far a search is, and its answer."""
    key = text(request, "job")
    if key not in studio.jobs:
        return {"state": "gone", "says": ""}
    job = studio.jobs[key]
    return {
        "state": job.state, "says": job.says, "seconds": job.seconds, "trail": job.trail,
        "answer": views.plain_answer(job.answer) if job.state == "done" else job.partial,
    }  # fmt: skip


def _stop(studio: Studio, request: Request) -> dict[str, Any]:
    key = text(request, "job")
    if key in studio.jobs:
        studio.jobs[key].stop.set()
    return {}


def _save(studio: Studio, request: Request) -> dict[str, Any]:
    """Keep what is shown, to be compared."""
    step, specs = _step(studio, request), changes(request)
    title = " ".join(specs) or "current step"
    found = predicted(step, specs, memory=True)
    studio.desk.save(title, text(request, "step"), {**found, "specs": list(specs)})
    return _desk(studio, request)


def _save_plan(studio: Studio, request: Request) -> dict[str, Any]:
    """Keep a predicted plan, to be compared."""
    machines, workload = _cluster(studio, request), text(request, "workload")
    plan = text(request, "plan", 100_000)
    found = call(views.plan_outcome, workload, plan, machines)
    studio.desk.keep(plan or "dp=1", f"{workload} on {machines.name}", found)
    return _desk(studio, request)


def _sample(studio: Studio, request: Request) -> dict[str, str]:
    """Put the trace that comes with foretell on the desk."""
    from foretell.samples import TRACE

    return {"step": open_file(studio.desk, TRACE, TRACE.name)}


def _forget(studio: Studio, request: Request) -> dict[str, Any]:
    numbers = request.get("numbers") or []
    studio.desk.forget([n for n in numbers if isinstance(n, int)])
    return _desk(studio, request)


def _export(studio: Studio, request: Request) -> dict[str, Any]:
    """Write a report, a trace or a plan, the name of the file; or a plan as settings, as text."""
    form = text(request, "form")
    if form == "settings":
        from foretell.plan import Plan
        from foretell.plan.export import export

        return {"files": export(Plan.parse(text(request, "plan", 100_000)), text(request, "to"))}
    folder = studio.desk.folder / "out"
    folder.mkdir(exist_ok=True)
    if form == "plan":
        from foretell.plan import Plan, save

        save(Plan.parse(text(request, "plan", 100_000)), folder / "best.plan")
        return {"file": "best.plan"}
    if form not in ("report", "trace"):
        raise InputError(
            f"`{form[:40]}` cannot be exported", hint="report, trace, plan or settings can"
        )
    step = _step(studio, request)
    name = safe_name(step.name.partition(".")[0])
    name += ".html" if form == "report" else ".trace.json.gz"
    views.write(step, changes(request), folder / name)
    return {"file": name}


CALLS: dict[str, Answer] = {
    "desk": _desk, "choices": _choices, "whatif": _whatif, "view": _view,
    "rank": _rank, "cluster": _cluster_text, "build": _build, "plan": _plan, "explore": _explore,
    "job": _job, "stop": _stop, "save": _save, "save-plan": _save_plan, "forget": _forget,
    "export": _export, "sample": _sample,
}  # fmt: skip


# Sizes of a model family that people change; the rest keep their defaults.
SIZES = (
    "layers", "hidden", "heads", "groups", "inner", "experts", "top", "depth", "image", "seq",
    "vocab", "batch",
)  # fmt: skip
PLAN_FIELDS = (
    "dp", "tp", "pp", "cp", "ep", "sp", "micro_batch", "global_batch", "zero", "schedule", "chunks",
    "recompute", "precision", "compile", "offload",
)  # fmt: skip
START = {"layers": 24, "hidden": 1024, "heads": 16}  # of sizes that have no default


@cache
def choices() -> dict[str, Any]:
    """The choices the page offers."""
    from foretell.cluster import names as clusters
    from foretell.cluster.read import devices
    from foretell.plan.export import EXPORTS
    from foretell.workload.load import FAMILIES, NAMED, published

    gpus = [name for name, device in devices().items() if device.vendor != "cpu"]
    machines = [name for name in clusters() if name not in devices()]
    return {
        "changes": [{"spec": spec, "does": _does(spec)} for spec in OFFERED],
        "models": {"published": sorted(published()), "named": sorted(NAMED), "family": [*FAMILIES]},
        "sizes": {name: _sizes(name) for name in FAMILIES},
        "gpus": sorted(gpus),
        "machines": machines,
        "plan": [_field(name) for name in PLAN_FIELDS],
        "planners": ["strategies", "oracle", "joint", "placement", "fusion"],
        "programs": [*EXPORTS],
    }


def _does(spec: str) -> str:
    """The help of a change, in a sentence."""
    return (type(parse(spec)).__doc__ or "").partition("\n")[0]


def _sizes(name: str) -> list[dict[str, Any]]:
    from foretell.workload.load import family

    fields = {f.name: f for f in dataclasses.fields(typing.cast("Any", family(name)))}
    found = []
    for size in SIZES:
        field = fields.get(size)
        if field is None:
            continue
        missing = field.default is dataclasses.MISSING
        default = START.get(size) if missing else field.default
        if isinstance(default, int) and not isinstance(default, bool):
            found.append({"name": size, "default": default})
    return found


@lru_cache(64)
def _field(name: str) -> dict[str, Any]:
    """A field of a plan: a number, a choice or a tick, and its plain value."""
    from foretell.plan import Plan
    from foretell.plan.framework import PRECISIONS
    from foretell.plan.program import FAMILIES

    default = getattr(Plan(), name)
    options: Sequence[str] = ()
    if name == "zero":
        options = ("0", "1", "2", "3")
    elif name == "schedule":
        options = tuple(FAMILIES)
    elif name == "recompute":
        options = ("none", "selective", "full")
    elif name == "precision":
        options = ("", *PRECISIONS)
    kind = "tick" if isinstance(default, bool) else "choice" if options else "number"
    return {"name": name, "kind": kind, "default": default, "options": list(options)}
