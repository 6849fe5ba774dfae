"""What binds a step and where its time goes: the diagnosis at the head of a page.

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
from foretell.advise.advise import WORTH
from foretell.baseline import shares
from foretell.cluster import Cluster
from foretell.cluster.node import Device
from foretell.errors import ForetellError
from foretell.graph.columns import Array, Kind, Phase, word_of
from foretell.graph.graph import Graph
from foretell.graph.groups import ranks_of
from foretell.report import words
from foretell.simulate import Timeline
from foretell.simulate.timeline import (
    COMMUNICATION,
    DEVICE,
    breakdown,
    covered,
    overlap,
    union,
)  # fmt: skip
from foretell.survey.roofline import Work, peaks, utilisation, work_of
from foretell.survey.window import Window
from foretell.whatif.machine import device_of

TOP = 24  # kernels in the table
GAPS = 12  # idle gaps listed, the longest first
PACE = 4e-6  # seconds: a shorter gap is the device's own pace from one kernel to the next
SMALL = 5e-6  # seconds: a kernel this short is bound by its own start
BUSY = 0.8  # a device that computes this share of the step binds it, where no host is simulated
MOST_RANKS = 256  # listed
_SYNC = re.compile(r"(cuda|hip)\w*Synchronize|^item$|_local_scalar_dense|is_nonzero")
_PLACE = re.compile(r"[./]")
BOUND = {"device": "GPU-bound", "host": "CPU-bound", "network": "communication-bound"}
CAUSES = (
    "launch", "sync", "input", "communication", "bubble", "between kernels", "unexplained",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class _Case:
    """What is diagnosed: a step's window, and the device it runs on where that is known."""

    step: Step
    window: Window
    device: Device | None
    work: Work

    @property
    def graph(self) -> Graph:
        return self.window.line.graph

    @property
    def rank(self) -> int:
        """The rank that is looked at: the first that has device work."""
        device = np.isin(self.graph.kind, DEVICE)
        return int(self.graph.rank[device].min()) if device.any() else 0


@lru_cache(4)
def diagnose(step: Step, found: Window, counsel: Recommendations | None = None) -> dict[str, Any]:
    """Everything a page says of a step before it shows its timeline."""
    graph = found.line.graph
    case = _Case(step, found, _device(step, graph), work_of(graph))
    idle = _idle(case)
    used = _used(case)
    return {
        "step_s": found.seconds,
        "verdict": _verdict(case, idle, counsel),
        "gpu": used,
        "kernels": _kernels(case),
        "roofline": _roof(case),
        "modules": _modules(case),
        "idle": idle,
        "communication": _collectives(case),
        "ranks": _ranks(case),
    }


def _device(step: Step, graph: Graph) -> Device | None:
    try:
        return device_of(graph, step.setting)
    except ForetellError:
        return None


def _used(case: _Case) -> dict[str, Any]:
    """GPU, its share of the step, MFU and HFU."""
    graph, device = case.graph, case.device
    told: dict[str, Any] = {"name": str(graph.facts.get("device", ""))}
    told |= {"ranks": len(np.unique(graph.rank)), "busy": 1 - _parts(case)["idle"]}
    told |= {"kernels": len(case.work.tasks)}
    if device is None:
        return told
    rates = utilisation(graph, case.work, device, case.window.seconds)
    return told | rates | {"name": device.title, "memory_bytes": device.memory}


def _parts(case: _Case) -> dict[str, float]:
    """Shares of the step: computing, exposed communication, and neither."""
    parts, whole = case.window.shown("").parts, case.window.seconds or 1.0
    values = parts["values"] if parts else {}
    compute, wire = values.get("compute", 0.0), values.get("exposed communication", 0.0)
    return {"compute": compute / whole, "wire": wire / whole, "idle": 1 - (compute + wire) / whole}


def _verdict(case: _Case, idle: dict[str, Any], counsel: Recommendations | None) -> dict[str, Any]:
    bound = BOUND[shares(case.graph, case.window.seconds).bottleneck]
    most = max(idle["causes"], key=lambda c: c["seconds"], default=None)
    if not np.isin(case.graph.kind, (Kind.HOST, Kind.LOAD)).any():
        bound = _device_bound(_parts(case))
    if bound == "CPU-bound" and most and most["cause"] in ("input", "communication"):
        bound = f"{most['cause']}-bound"
    step, parts = words.seconds(case.window.seconds), _parts(case)
    waits = f"the GPU is idle {_percent(parts['idle'])} of the {step} step, {_waits(most)}"
    if not len(case.work.tasks):
        waits = f"the {step} step launches no kernel"
    exposed = f"{_percent(parts['wire'])} of the {step} step is exposed communication"
    waiting = f"stages wait for each other {_percent(parts['idle'])} of the {step} step"
    reasons = {
        "pipeline-bound": waiting,
        "GPU-bound": f"kernels run {_percent(parts['compute'])} of the {step} step",
        "communication-bound": exposed,
    }
    first = _first(counsel)
    return {
        "bound": bound,
        "sentence": f"{bound[0].upper()}{bound[1:]}: {reasons.get(bound, waits)}.",
        "first": _advised(first, case.window.seconds) if first else _nothing(counsel),
        "changes": [str(change) for change in first.changes] if first else [],
    }


def _device_bound(parts: dict[str, float]) -> str:
    """What binds a step whose host is not simulated."""
    if parts["compute"] >= BUSY:
        return "GPU-bound"
    return "pipeline-bound" if parts["idle"] > parts["wire"] else "communication-bound"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _waits(most: dict[str, Any] | None) -> str:
    return {
        "launch": "waiting for the CPU to launch kernels",
        "sync": "waiting for the CPU after synchronizations",
        "input": "waiting for the data loader",
        "communication": "waiting for communication",
    }.get(most["cause"] if most else "", "waiting")


def _first(counsel: Recommendations | None) -> Advice | None:
    """The advice to follow first: the best combination, or the best change that is worth it."""
    if counsel is None:
        return None
    if counsel.best is not None:
        return counsel.best
    return next((a for a in counsel.ranked if a.gain >= WORTH), None)


def _advised(first: Advice, seconds: float) -> str:
    names = " + ".join(str(change) for change in first.changes)
    low, high = words.seconds(first.low), words.seconds(first.high)
    gain = f"{1 / (1 - first.gain):.2g}× the throughput"
    if first.gain < 0.1:
        gain = f"{_percent(first.gain)} less time a sample"
    return (
        f"First, {names}: {words.seconds(seconds)} → {words.seconds(first.seconds)}, "
        f"{gain} (80 % interval {low} to {high})."
    )


def _nothing(counsel: Recommendations | None) -> str:
    if counsel is None:
        return ""
    return "None of the changes tried makes it at least 1 % faster."


def _kernels(case: _Case) -> list[dict[str, Any]]:
    """Kernels by time, with what they reach of the device's peak."""
    graph, work = case.graph, case.work
    if not len(work.tasks):
        return []
    known: dict[str, int] = {}
    names = {k: _short(graph.names[k]) for k in np.unique(graph.name[work.tasks]).tolist()}
    used = {k: known.setdefault(name, len(known)) for k, name in names.items()}
    short = np.array([used[k] for k in graph.name[work.tasks].tolist()])
    titles = list(known)
    kinds, whose = np.unique(np.stack([graph.op[work.tasks], short]), axis=1, return_inverse=True)
    whose = whose.reshape(-1)
    spent = graph.seconds[work.tasks]
    ideal_c, ideal_m = _ideals(case)
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
            "op": graph.names[int(kinds[0, k])],
            "kernel": titles[int(kinds[1, k])],
            "share": float(sums["seconds"][k]) / total,
            "step_s": float(sums["seconds"][k]) / ranks,
            **_rates({key: float(v[k]) for key, v in sums.items()}, int(count[k])),
        }
        for k in np.argsort(-sums["seconds"], kind="stable")[:TOP].tolist()
    ]


def _rates(sums: dict[str, float], count: int) -> dict[str, Any]:
    """What kernels of one sort reach together."""
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


def _ideals(case: _Case) -> tuple[Array, Array]:
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
        return _plain(tree)
    found, whose = np.unique(keys, axis=1, return_inverse=True)
    spent = np.bincount(whose.reshape(-1), graph.seconds[tasks])
    for (layer, op, phase), seconds in zip(found.T.tolist(), spent.tolist(), strict=True):
        _grow(tree, _path(graph, layer, op, phase), _column(phase), seconds)
    return _plain(tree)


def _path(graph: Graph, layer: int, op: int, phase: int) -> list[str]:
    """Where work stands: its module's path, or its phase where it has none; then its operator."""
    names = [part for part in _PLACE.split(graph.names[layer]) if part]
    if not names:
        names = ["optimizer" if phase == Phase.UPDATE else f"({word_of(Phase, phase)})"]
    return [*names, graph.names[op] or "(none)"]


def _column(phase: int) -> int:
    if phase in (Phase.FORWARD, Phase.LOSS):
        return 0
    return 1 if phase == Phase.BACKWARD else 2


def _grow(node: dict[str, Any], path: list[str], column: int, seconds: float) -> None:
    node["seconds"] += seconds
    node["phases"][column] += seconds
    if path:
        fresh = {"name": path[0], "seconds": 0.0, "phases": [0.0] * 3, "parts": {}}
        _grow(node["parts"].setdefault(path[0], fresh), path[1:], column, seconds)


def _plain(node: dict[str, Any]) -> dict[str, Any]:
    """A tree whose parts are lists, in the order they were met (the model's)."""
    return node | {"parts": [_plain(part) for part in node["parts"].values()]}


def _idle(case: _Case) -> dict[str, Any]:
    """Gaps between device work in the window, by what the device waited for."""
    around, length = case.window.around, case.window.length
    mine = around.graph.rank == case.rank
    kind = around.graph.kind
    device = mine & np.isin(kind, DEVICE)
    start, end = _gaps(around, device, length)
    parts = {
        "communication": _inside(around, mine & np.isin(kind, COMMUNICATION), start, end),
        "input": _inside(around, mine & (kind == Kind.LOAD), start, end),
    }
    left = end - start
    for name in ("communication", "input"):
        parts[name] = np.minimum(parts[name], left)
        left = left - parts[name]
    works = _inside(around, mine & (kind == Kind.HOST), start, end) > 0
    short, synced = end - start < PACE, _synced(around, mine, start, end)
    parts["between kernels"] = np.where(short, left, 0.0)
    parts["sync"] = np.where(~short & synced, left, 0.0)
    parts["launch"] = np.where(~short & ~synced & works, left, 0.0)
    alone = ~short & ~synced & ~works
    others = _inside(around, ~mine & np.isin(kind, DEVICE), start, end) > 0.5 * (end - start)
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
        "causes": [c for c in causes if c["seconds"] > 0],
        "gaps": _longest(around, device, start, end, parts),
    }


def _gaps(line: Timeline, device: Array, length: float) -> tuple[Array, Array]:
    """When the device does nothing inside a window."""
    busy = union(line.start[device].clip(0, length), line.end[device].clip(0, length))
    start, end = np.append(0.0, busy[1]), np.append(busy[0], length)
    there = end > start
    return start[there], end[there]


def _inside(line: Timeline, which: Array, start: Array, end: Array) -> Array:
    """How much of each gap some tasks cover."""
    a, b = union(line.start[which], line.end[which])
    done = np.append(0.0, np.cumsum(b - a))

    def until(x: Array) -> Array:
        k = np.searchsorted(a, x, "right")
        over = np.where(k > 0, np.maximum(np.append(0.0, b)[k] - x, 0.0), 0.0)
        found: Array = done[k] - over
        return found

    return until(end) - until(start)


def _synced(line: Timeline, mine: Array, start: Array, end: Array) -> Array:
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


def _collectives(case: _Case) -> list[dict[str, Any]]:
    """Collectives of one rank by op and group: bandwidth reached, and what the links allow."""
    graph, line = case.graph, case.window.line
    held = graph.held.task[graph.lanes.rank[graph.held.lane] == case.rank]
    own = np.flatnonzero(np.isin(graph.kind, COMMUNICATION))
    tasks = own[(graph.rank[own] == case.rank) | np.isin(own, held)]
    if not len(tasks):
        return []
    device = np.flatnonzero(np.isin(graph.kind, DEVICE) & (graph.rank == case.rank))
    busy = line.start[device], line.end[device]
    keys, whose = np.unique(
        np.stack([graph.op[tasks], graph.group[tasks]]), axis=1, return_inverse=True
    )
    cluster = _cluster(case)
    rows = []
    for k, (op, group) in enumerate(keys.T.tolist()):
        mine = tasks[whose.reshape(-1) == k]
        spans = line.start[mine], line.end[mine]
        rows.append(
            _collective(graph, mine, graph.names[op], graph.names[group], cluster)
            | {"exposed_s": covered(*spans) - overlap(spans, busy)}
        )
    return sorted(rows, key=lambda r: -float(r["seconds"]))


def _collective(
    graph: Graph, tasks: Array, op: str, group: str, cluster: Cluster | None
) -> dict[str, Any]:
    spent, sent = float(graph.seconds[tasks].sum()), graph.comm_bytes[tasks]
    ranks = list(ranks_of(group)) if group else np.unique(graph.rank).tolist()
    best = _possible(op, sent, ranks, cluster)
    moved = float(sent.sum())
    return {
        "op": op, "ranks": len(ranks) if group else None, "count": len(tasks), "bytes": moved,
        "seconds": spent,
        "reached": moved / spent if spent else 0.0,
        "possible": moved / best if best else None,
        "possible_s": best,
    }  # fmt: skip


def _possible(op: str, sent: Array, ranks: list[int], cluster: Cluster | None) -> float | None:
    """Seconds these collectives take where nothing disturbs them."""
    from foretell.cost.collective import price

    if cluster is None or len(ranks) < 2 or max(ranks) >= cluster.size or not sent.sum():
        return None
    try:
        return float(np.sum(price(op, sent.astype(float), cluster.levels(ranks)).seconds))
    except (ForetellError, KeyError):
        return None


def _cluster(case: _Case) -> Cluster | None:
    """The machines of a step; of a trace, boxes of its device as the preset has them."""
    from foretell.cluster import load

    if case.step.cluster is not None:
        return case.step.cluster
    ranks = int(case.graph.rank.max(initial=0)) + 1
    if case.device is None or ranks < 2:
        return None
    try:
        return load(f"{case.device.name}:gpus={ranks}")
    except ForetellError:
        return None


def _ranks(case: _Case) -> list[dict[str, Any]]:
    """What each rank does with the step, and which one the others wait for."""
    graph = case.graph
    if len(np.unique(graph.rank)) < 2:
        return []
    told = graph.facts.get("balance")
    late = told if isinstance(told, dict) else {}
    names = graph.facts.get("ranks")
    order = {int(r): k for k, r in enumerate(names)} if isinstance(names, (list, tuple)) else {}
    return [
        {
            "rank": part.rank, "compute_s": part.compute, "exposed_s": part.exposed,
            "hidden_s": part.hidden, "host_s": part.host, "idle_s": part.idle,
            "waits_s": _balance_of(late, "waiting_s", order.get(part.rank)),
            "waited_for_s": _balance_of(late, "waited_for_s", order.get(part.rank)),
        }
        for part in breakdown(case.window.clipped())[:MOST_RANKS]
    ]  # fmt: skip


def _balance_of(balance: dict[str, Any], key: str, place: int | None) -> float | None:
    values = balance.get(key)
    if place is None or not isinstance(values, (list, tuple)) or place >= len(values):
        return None
    return float(values[place])
