"""Diagnosis at the head of a page: the bottleneck of a step and where its time goes.

Everything is taken from one window of steady state (→ foretell.survey.window): the verdict,
kernels against the roofline, time by module, idle gaps by cause, collectives and ranks.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from foretell.advise import Advice, Recommendations, Step
from foretell.baseline import shares
from foretell.cluster.node import Device
from foretell.errors import ForetellError
from foretell.graph.graph import Array, Graph, Kind, Phase, word_of
from foretell.report import words
from foretell.simulate import Timeline
from foretell.simulate.timeline import COMMUNICATION, DEVICE, union
from foretell.survey.ranks import (
    Waits,
    assumed_cluster,
    collectives,
    ranks_table,
    straggler,
    waits_of,
)
from foretell.survey.roofline import Work, peaks, utilisation, work_of
from foretell.survey.window import Window
from foretell.whatif.machine import device_of

TOP = 24  # kernels in the table
GAPS = 12  # idle gaps listed, the longest first
NEGLIGIBLE = 5e-4  # of the step: idle time of a cause that is not listed
PACE = 4e-6  # seconds: a shorter gap is the device's own pace from one kernel to the next
SMALL = 5e-6  # seconds: a kernel this short is bound by its own start
BUSY = 0.8  # a device that computes this share of the step binds it, where no host is simulated
_SYNC = re.compile(r"(cuda|hip)\w*Synchronize|^item$|_local_scalar_dense|is_nonzero")
_PLACE = re.compile(r"[./]")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")  # of a layer in a module's path
_NUMBERED = re.compile(r"\.\d+(\.|$)")  # a call that the graph has numbered: no kernel's name
BOUND = {"device": "GPU-bound", "host": "CPU-bound", "network": "communication-bound"}
CAUSES = (
    "launch", "sync", "input", "communication", "other ranks", "bubble", "between kernels",
    "unexplained",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class _Case:
    """The step to diagnose: its window and, where known, its device."""

    step: Step
    window: Window
    device: Device | None
    work: Work
    waits: Waits  # in collectives, for other ranks

    @property
    def graph(self) -> Graph:
        return self.window.line.graph

    @property
    def rank(self) -> int:
        """The rank that is looked at: the first that has device work."""
        device = np.isin(self.graph.kind, DEVICE)
        return int(self.graph.rank[device].min()) if device.any() else 0


@lru_cache(4)
def diagnose(step: Step, found: Window, advised: Recommendations | None = None) -> dict[str, Any]:
    """Everything a page shows of a step before its timeline."""
    graph = found.line.graph
    waits = waits_of(found.around, found.length)
    case = _Case(step, found, _device(step, graph), work_of(graph), waits)
    idle = _idle(case)
    machines = step.cluster or assumed_cluster(graph, case.device.name if case.device else "")
    ranks = ranks_table(found.clipped(), waits, graph.facts)
    profiled = graph.facts.get("measured")
    late = straggler(ranks, found.seconds, float(profiled) if profiled else None)
    return {
        "step_s": found.seconds,
        "verdict": _verdict(case, idle, advised) | {"ranks": late},
        "gpu": _gpu_use(case),
        "kernels": _kernels(case),
        "bound_by": _bound_by(case),
        "roofline": _roof(case),
        "modules": _modules(case),
        "idle": idle,
        "communication": collectives(found.line, case.rank, machines),
        "machines": {
            "name": machines.name if machines else "", "assumed": step.cluster is None,
        },
        "ranks": ranks,
    }  # fmt: skip


def _device(step: Step, graph: Graph) -> Device | None:
    try:
        return device_of(graph, step.setting)
    except ForetellError:
        return None


def _gpu_use(case: _Case) -> dict[str, Any]:
    """GPU, its share of the step, MFU and HFU."""
    graph, device = case.graph, case.device
    used: dict[str, Any] = {"name": str(graph.facts.get("device", ""))}
    used |= {"ranks": len(np.unique(graph.rank)), "busy": 1 - _time_shares(case)["idle"]}
    used |= {"kernels": len(case.work.tasks)}
    if device is None:
        return used
    rates = utilisation(graph, case.work, device, case.window.seconds)
    return used | rates | {"name": device.title, "memory_bytes": device.memory}


def _time_shares(case: _Case) -> dict[str, float]:
    """Shares of the step: computing, exposed communication, and neither."""
    parts, whole = case.window.shown("").parts, case.window.seconds or 1.0
    values = parts["values"] if parts else {}
    compute, wire = values.get("compute", 0.0), values.get("exposed communication", 0.0)
    return {"compute": compute / whole, "wire": wire / whole, "idle": 1 - (compute + wire) / whole}


def _verdict(case: _Case, idle: dict[str, Any], advised: Recommendations | None) -> dict[str, Any]:
    """The bottleneck of the step, and what to change first."""
    most = max(idle["causes"], key=lambda c: c["seconds"], default=None)
    bound = _bound(case, most["cause"] if most else "")
    first, best = (advised.first, advised.best) if advised else (None, None)
    return {
        "bound": bound,
        "sentence": f"{bound[0].upper()}{bound[1:]}: {_reason(case, bound, most)}.",
        "first": _first_sentence(first, case.window.seconds) if first else _no_gain(advised),
        "then": _then_sentence(first, best) if first and best else "",
        "changes": [str(change) for change in first.changes] if first else [],
    }


def _bound(case: _Case, cause: str) -> str:
    """GPU, CPU, input, communication, other ranks or pipeline."""
    if not np.isin(case.graph.kind, (Kind.HOST, Kind.LOAD)).any():
        return _device_bound(_time_shares(case))
    bound = BOUND[shares(case.graph, case.window.seconds).bottleneck]
    known = {"input": "input-bound", "communication": "communication-bound",
             "other ranks": "straggler-bound"}  # fmt: skip
    return known.get(cause, bound) if bound == "CPU-bound" else bound


def _reason(case: _Case, bound: str, most: dict[str, Any] | None) -> str:
    """The evidence of a verdict."""
    parts, step = _time_shares(case), f"of the {words.seconds(case.window.seconds)} step"
    if not len(case.work.tasks):
        return f"the {words.seconds(case.window.seconds)} step launches no kernel"
    if bound == "GPU-bound":
        return f"kernels run {_percent(parts['compute'])} {step}"
    if bound == "communication-bound":
        return f"{_percent(parts['wire'])} {step} is exposed communication"
    if bound == "pipeline-bound":
        return f"stages wait for each other {_percent(parts['idle'])} {step}"
    return f"the GPU is idle {_percent(parts['idle'])} {step}, {_waits_for(most)}"


def _device_bound(parts: dict[str, float]) -> str:
    """The bottleneck of a step whose host is not simulated."""
    if parts["compute"] >= BUSY:
        return "GPU-bound"
    return "pipeline-bound" if parts["idle"] > parts["wire"] else "communication-bound"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _waits_for(most: dict[str, Any] | None) -> str:
    return {
        "launch": "waiting for the CPU to launch kernels",
        "sync": "waiting for the CPU after synchronizations",
        "input": "waiting for the data loader",
        "communication": "waiting for communication",
        "other ranks": "waiting for other ranks in collectives",
    }.get(most["cause"] if most else "", "waiting")


def _first_sentence(first: Advice, seconds: float) -> str:
    return f"First, {first.name}: {words.seconds(seconds)} → {_gain_text(first)}."


def _then_sentence(first: Advice, best: Advice) -> str:
    """The gain of the other changes of the best combination."""
    more = [str(change) for change in best.changes if change not in first.changes]
    return f"Then {' + '.join(more)}: {_gain_text(best)} in all." if more else ""


def _gain_text(advice: Advice) -> str:
    gain = f"{1 / (1 - advice.gain):.2g}× the throughput"
    if advice.gain < 0.1:
        gain = f"{_percent(advice.gain)} less time a sample"
    between = words.interval(advice.low, advice.high)
    return f"{words.seconds(advice.seconds)}, {gain} (80 % interval {between})"


def _no_gain(advised: Recommendations | None) -> str:
    return "None of the changes tried makes it at least 1 % faster." if advised else ""


def _kernels(case: _Case) -> list[dict[str, Any]]:
    """Kernels by time, with what they reach of the device's peak."""
    graph, work = case.graph, case.work
    if not len(work.tasks):
        return []
    titles, whose = _kernel_groups(case)
    spent = graph.seconds[work.tasks]
    ideal_c, ideal_m = _roofline_seconds(case)
    seen = (ideal_c > 0) | (ideal_m > 0) if case.device else np.ones(len(spent), bool)
    columns = {
        "seconds": spent, "flops": work.flops * seen, "bytes": work.moved * seen,
        "compute_s": ideal_c, "memory_s": ideal_m, "ideal_s": np.maximum(ideal_c, ideal_m),
    }  # fmt: skip
    sums = {key: np.bincount(whose, value) for key, value in columns.items()}
    count = np.bincount(whose)
    total = float(spent.sum()) or 1.0
    ranks = max(len(np.unique(graph.rank[work.tasks])), 1)
    return [
        {
            "op": titles[k][0],
            "kernel": titles[k][1],
            "module": _module(graph, work.tasks[whose == k]),
            "share": float(sums["seconds"][k]) / total,
            "step_s": float(sums["seconds"][k]) / ranks,
            **_rates({key: float(v[k]) for key, v in sums.items()}, int(count[k])),
        }
        for k in np.argsort(-sums["seconds"], kind="stable")[:TOP].tolist()
    ]


def _kernel_groups(case: _Case) -> tuple[list[tuple[str, str]], Array]:
    """(operator, kernel) of each sort of kernels, and which sort each kernel is of.

    Kernels of one name are one sort; where the graph knows no kernels, calls that do equal work.
    """
    graph, tasks = case.graph, case.work.tasks
    known: dict[tuple[Any, ...], int] = {}
    titles: list[tuple[str, str]] = []
    whose = np.empty(len(tasks), np.int64)
    short = {k: _short(graph.names[k]) for k in np.unique(graph.name[tasks]).tolist()}
    work = zip(case.work.flops.tolist(), case.work.moved.tolist(), strict=True)
    for n, (i, done) in enumerate(zip(tasks.tolist(), work, strict=True)):
        op, name = graph.names[int(graph.op[i])], short[int(graph.name[i])]
        is_call = name == op or name.startswith(f"{op}.") or _NUMBERED.search(name) is not None
        key = (op, done) if is_call else (op, name)
        if key not in known:
            known[key] = len(titles)
            titles.append((op, "" if is_call else name))
        whose[n] = known[key]
    return titles, whose


def _module(graph: Graph, tasks: Array) -> str:
    """Where kernels of one sort run: their module, its numbers left open where they differ."""
    spent = np.bincount(graph.layer[tasks], graph.seconds[tasks])
    used = [graph.names[k] for k in np.flatnonzero(spent).tolist() if graph.names[k]]
    if len(used) < 2:
        return "".join(used)
    found = sorted({_NUMBER.sub("*", name) for name in used})
    parents, leaves = zip(*(name.rpartition(".")[::2] for name in found), strict=True)
    if len(found) == 1:
        return found[0]
    if parents[0] and len(set(parents)) == 1 and len(found) < 4:
        return f"{parents[0]}.{{{','.join(leaves)}}}"
    return f"{len(used)} modules"


def _bound_by(case: _Case) -> dict[str, float]:
    """Seconds of kernels by what bounds them, and what all would take at the roofline."""
    graph, work = case.graph, case.work
    spent = graph.seconds[work.tasks]
    compute, memory = _roofline_seconds(case)
    ideal = np.maximum(compute, memory)
    latency = (ideal > 0) & (ideal < 0.1 * spent) & (spent < SMALL)
    sorts = {
        "compute": (ideal > 0) & ~latency & (compute > memory),
        "memory": (ideal > 0) & ~latency & (compute <= memory),
        "latency": latency, "unknown": ideal == 0,
    }  # fmt: skip
    ranks = max(len(np.unique(graph.rank[work.tasks])), 1)
    found = {name: float(spent[which].sum()) / ranks for name, which in sorts.items()}
    known = ideal > 0
    return found | {
        "known_s": float(spent[known].sum()) / ranks,
        "roofline_s": float(ideal[known].sum()) / ranks,
    }


def _rates(sums: dict[str, float], count: int) -> dict[str, Any]:
    """Compute and bandwidth that kernels of one kind reach together."""
    seconds = sums["seconds"] or 1e-30
    bound = "compute" if sums["compute_s"] > sums["memory_s"] else "memory"
    if sums["ideal_s"] < 0.1 * seconds and seconds / count < SMALL:
        bound = "latency"
    return {
        "count": count,
        "seconds": sums["seconds"],
        "flops_s": sums["flops"] / seconds,
        "bytes_s": sums["bytes"] / seconds,
        "intensity": sums["flops"] / sums["bytes"] if sums["bytes"] else 0.0,
        "bound": bound if sums["ideal_s"] else "",
        "roofline": min(sums["ideal_s"] / seconds, 1.0),
    }


def _short(name: str) -> str:
    """A kernel's name without its return type, namespaces and template arguments."""
    plain = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    head, _, inside = plain.partition("<")
    head = head.partition("(")[0].rsplit("::", 1)[-1]
    if head.startswith("Kernel"):  # CUTLASS: its first argument is the name
        head = re.split(r"[<>(,]", inside, maxsplit=1)[0].rsplit("::", 1)[-1]
    return words.cut(head or name, 48)


def _roofline_seconds(case: _Case) -> tuple[Array, Array]:
    """Seconds each kernel takes at the device's peak flop/s, and at its peak bandwidth."""
    work, device = case.work, case.device
    if device is None:
        return np.zeros(len(work.tasks)), np.zeros(len(work.tasks))
    compute, memory = work.flops / peaks(device, work.formats), work.moved / device.memory_bandwidth
    # What reads a few rows of a large table moves less than its inputs hold: nothing is known then.
    seen = np.maximum(compute, memory) <= 1.2 * case.graph.seconds[work.tasks]
    return np.where(seen, compute, 0.0), np.where(seen, memory, 0.0)


def _roof(case: _Case) -> dict[str, Any] | None:
    """The roofs of the device in the formats the step computes in."""
    if case.device is None:
        return None
    used = {w for w, f in zip(case.work.formats, case.work.flops.tolist(), strict=True) if f}
    roofs = {word: float(peaks(case.device, (word,))[0]) for word in sorted(used)}
    return {"bandwidth": case.device.memory_bandwidth, "peaks": roofs} if roofs else None


def _modules(case: _Case) -> dict[str, Any]:
    """Device time as a tree of modules, operators last; forward, backward and the rest apart."""
    graph = case.graph
    kinds = (*DEVICE, *COMMUNICATION)
    tasks = np.flatnonzero(np.isin(graph.kind, kinds) & (graph.rank == case.rank))
    tree: dict[str, Any] = {"name": "step", "seconds": 0.0, "phases": [0.0] * 3, "parts": {}}
    keys = np.stack([graph.layer[tasks], graph.op[tasks], graph.phase[tasks]])
    if not keys.size:
        return _as_lists(tree)
    found, whose = np.unique(keys, axis=1, return_inverse=True)
    spent = np.bincount(whose.reshape(-1), graph.seconds[tasks])
    for (layer, op, phase), seconds in zip(found.T.tolist(), spent.tolist(), strict=True):
        _add_to_tree(tree, _path(graph, layer, op, phase), _phase_column(phase), seconds)
    return _as_lists(tree)


def _path(graph: Graph, layer: int, op: int, phase: int) -> list[str]:
    """Where work stands: its module's path, or its phase where it has none; then its operator."""
    names = [part for part in _PLACE.split(graph.names[layer]) if part]
    if not names:
        names = ["optimizer" if phase == Phase.UPDATE else f"({word_of(Phase, phase)})"]
    return [*names, graph.names[op] or "(none)"]


def _phase_column(phase: int) -> int:
    if phase in (Phase.FORWARD, Phase.LOSS):
        return 0
    return 1 if phase == Phase.BACKWARD else 2


def _add_to_tree(node: dict[str, Any], path: list[str], column: int, seconds: float) -> None:
    node["seconds"] += seconds
    node["phases"][column] += seconds
    if path:
        fresh = {"name": path[0], "seconds": 0.0, "phases": [0.0] * 3, "parts": {}}
        _add_to_tree(node["parts"].setdefault(path[0], fresh), path[1:], column, seconds)


def _as_lists(node: dict[str, Any]) -> dict[str, Any]:
    """A tree whose parts are lists, in the order they were met (the model's)."""
    return node | {"parts": [_as_lists(part) for part in node["parts"].values()]}


def _idle(case: _Case) -> dict[str, Any]:
    """Gaps between device work in the window, by what the device waited for."""
    around, length = case.window.around, case.window.length
    mine = around.graph.rank == case.rank
    kind = around.graph.kind
    device = mine & np.isin(kind, DEVICE)
    start, end = _gaps(around, device, length)
    parts = {
        "communication": _overlap_with(around, mine & np.isin(kind, COMMUNICATION), start, end),
        "input": _overlap_with(around, mine & (kind == Kind.LOAD), start, end),
        "other ranks": _overlap(*case.waits.of(case.rank), start, end),
    }
    left = end - start
    for name in ("communication", "other ranks", "input"):
        parts[name] = np.minimum(parts[name], left)
        left = left - parts[name]
    works = _overlap_with(around, mine & (kind == Kind.HOST), start, end) > 0
    short, synced = end - start < PACE, _after_sync(around, mine, start, end)
    parts["between kernels"] = np.where(short, left, 0.0)
    parts["sync"] = np.where(~short & synced, left, 0.0)
    parts["launch"] = np.where(~short & ~synced & works, left, 0.0)
    alone = ~short & ~synced & ~works
    others = _overlap_with(around, ~mine & np.isin(kind, DEVICE), start, end) > 0.5 * (end - start)
    parts["bubble"] = np.where(alone & others, left, 0.0)
    parts["unexplained"] = np.where(alone & ~others, left, 0.0)
    missed = max(case.window.seconds - length, 0.0)  # what the graph misses of the known time
    parts["unexplained"] = np.append(parts["unexplained"], missed)
    causes: list[dict[str, Any]] = [
        {"cause": name, "seconds": float(parts[name].sum()), "gaps": int((parts[name] > 0).sum())}
        for name in CAUSES
    ]
    return {
        "rank": case.rank if len(np.unique(around.graph.rank)) > 1 else None,
        "seconds": sum(float(c["seconds"]) for c in causes),
        "causes": [c for c in causes if c["seconds"] > NEGLIGIBLE * case.window.seconds],
        "gaps": _longest(around, device, start, end, parts),
    }


def _gaps(line: Timeline, device: Array, length: float) -> tuple[Array, Array]:
    """When the device does nothing inside a window."""
    busy = union(line.start[device].clip(0, length), line.end[device].clip(0, length))
    start, end = np.append(0.0, busy[1]), np.append(busy[0], length)
    there = end > start
    return start[there], end[there]


def _overlap_with(line: Timeline, which: Array, start: Array, end: Array) -> Array:
    """How much of each gap some tasks cover."""
    return _overlap(*union(line.start[which], line.end[which]), start, end)


def _overlap(a: Array, b: Array, start: Array, end: Array) -> Array:
    """How much of each gap intervals that do not overlap cover."""
    done = np.append(0.0, np.cumsum(b - a))

    def until(x: Array) -> Array:
        k = np.searchsorted(a, x, "right")
        over = np.where(k > 0, np.maximum(np.append(0.0, b)[k] - x, 0.0), 0.0)
        found: Array = done[k] - over
        return found

    return until(end) - until(start)


def _after_sync(line: Timeline, mine: Array, start: Array, end: Array) -> Array:
    """Whether a synchronization of the host ended in or right at the begin of each gap."""
    graph = line.graph
    names = {k for k in np.unique(graph.op).tolist() if _SYNC.search(graph.names[k])}
    waits = np.sort(line.end[mine & np.isin(graph.op, sorted(names))])
    found: Array = np.searchsorted(waits, end, "right") > np.searchsorted(waits, start - 1e-9)
    return found


def _longest(
    line: Timeline, device: Array, start: Array, end: Array, parts: dict[str, Array]
) -> list[dict[str, Any]]:
    tasks = np.flatnonzero(device)
    tasks = tasks[np.argsort(line.start[tasks], kind="stable")]
    starts = line.start[tasks]
    causes = np.stack([parts[name][: len(start)] for name in CAUSES])
    found = []
    for k in np.argsort(start - end, kind="stable")[:GAPS].tolist():
        nearest = int(np.searchsorted(starts, end[k] - 1e-12))
        after = int(tasks[nearest]) if nearest < len(tasks) else None
        found.append(
            {
                "at_s": float(start[k]), "seconds": float(end[k] - start[k]),
                "cause": CAUSES[int(np.argmax(causes[:, k]))],
                "before": "" if after is None else line.graph.text_of("op", after),
                "module": "" if after is None else line.graph.text_of("layer", after),
            }
        )  # fmt: skip
    return found
