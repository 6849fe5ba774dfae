"""A trace read and turned into the graph of one of its steps.

    trace = read("step.json.gz")
    trace.graph              one step, to be simulated once or over and over
    trace.start, trace.end   when each of its tasks was measured to run
    trace.warm               the step as it was: behind what the device was still doing

A step is a `ProfilerStep` range where there are any; otherwise what lies between the ends of two
calls of the optimizer; otherwise the whole trace.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from foretell.errors import InputError
from foretell.graph import Dtype, Graph, Kind, LaneKind, concat
from foretell.graph.graph import NONE, Array, frozen, word_of
from foretell.operators import PRODUCTS
from foretell.trace.decode import FORMS, Opened, opened
from foretell.trace.events import ALLOCATED, Events, What, read_events
from foretell.trace.join import Whole, graph_of, whole
from foretell.trace.ranks import Match, balance, late, match, notes_on, shifts
from foretell.trace.runs import distinct
from foretell.trace.source import members
from foretell.trace.step.compose import part
from foretell.trace.step.tasks import RankStep, Work, device_work, rank_step
from foretell.trace.words import (
    GRAPH_LAUNCHES,
    MEASURED,
    RangeKind,
    Texts,
    by_name,
    is_compiled,
    library,
    range_kind,
    step_number,
)


@dataclass(frozen=True, eq=False)
class Steps:
    """When every step begins and ends on the host, and on which thread."""

    number: Array  # as the trace counts them
    start: Array
    end: Array
    thread: int
    found_by: str  # `ProfilerStep`, `optimizer` or `trace`

    def __len__(self) -> int:
        return len(self.number)


def find_steps(events: Events) -> Steps:
    """All steps of a trace, first to last, cut so that none overlaps the next."""
    tells = np.where(
        events.what == What.NOTE,
        by_name(events.texts, events.name, lambda text: int(range_kind(text))),
        0,
    )
    marked = np.flatnonzero(tells & RangeKind.STEP)
    steps = _by_notes(events, marked) if len(marked) else None
    if steps is not None and len(steps):
        return steps
    updates = np.flatnonzero(tells & RangeKind.UPDATE)
    updates = updates[_are_optimizer_steps(events, updates)]
    steps = _by_updates(events, updates) if len(updates) > 2 else None
    return steps if steps is not None and len(steps) else _whole(events)


def lengths(events: Events, work: Work, steps: Steps) -> Array:
    """How long each step took, measured from where the one before left the device.

    A step ends when its host and all device work that it launched are done; it could begin when its
    host began it and the device was done with what was launched before.
    """
    issued = np.where(work.call != NONE, events.start[work.call], -np.inf)
    ranked = np.argsort(issued, kind="stable")
    high = np.append(-np.inf, np.maximum.accumulate(work.end[ranked]))
    done = high[np.searchsorted(issued[ranked], steps.start, side="left")]
    owner = np.searchsorted(steps.start, issued, side="right") - 1
    own = (owner >= 0) & (issued < steps.end[owner])
    end = steps.end.copy()
    np.maximum.at(end, owner[own], work.end[own])
    found: Array = end - np.where(done < end, np.maximum(steps.start, done), steps.start)
    return found


def choose(events: Events, steps: Steps, seconds: Array, wanted: int | None) -> int:
    """The place of the wanted step, or of the one of median length (the shorter of two).

    Steps in which hardly anything happened (the last range of a profiler that was stopped) do not
    count for the median.
    """
    if wanted is None:
        full = np.flatnonzero(_is_full(events, steps))
        return int(full[np.argsort(seconds[full], kind="stable")[(len(full) - 1) // 2]])
    source = events.source
    places = np.flatnonzero(steps.number == wanted)
    if not len(places):
        known = ", ".join(map(str, steps.number.tolist()[:12]))
        raise InputError(f"`{source}` has no step {wanted}", hint=f"its steps are {known}")
    return int(places[0])


def _is_full(events: Events, steps: Steps) -> Array:
    """Which steps have at least half as many host events as the fullest."""
    host = events.start[events.is_(What.OP, What.CALL)]
    step = np.searchsorted(steps.start, host, side="right") - 1
    count = np.bincount(step[step >= 0], minlength=len(steps))
    found: Array = 2 * count >= count.max(initial=0)
    return found


def _by_notes(events: Events, marked: Array) -> Steps:
    thread = np.bincount(events.place[marked]).argmax()
    mine = marked[events.place[marked] == thread]
    mine = mine[np.argsort(events.start[mine], kind="stable")]
    start, end = events.start[mine], events.end[mine].copy()
    end[:-1] = np.minimum(end[:-1], start[1:])  # overlapping ranges: the next one begins anew
    number = np.array([step_number(events.texts[k]) for k in events.name[mine].tolist()])
    real = end > start
    return Steps(number[real], start[real], end[real], int(thread), "ProfilerStep")


def _are_optimizer_steps(events: Events, updates: Array) -> Array:
    return by_name(
        events.texts, events.name[updates], lambda text: int("step" in text.lower())
    ).astype(bool)


def _by_updates(events: Events, updates: Array) -> Steps:
    thread = np.bincount(events.place[updates]).argmax()
    mine = updates[events.place[updates] == thread]
    ends = distinct(events.end[mine])
    return Steps(np.arange(1, len(ends)), ends[:-1], ends[1:], int(thread), "optimizer")


def _whole(events: Events) -> Steps:
    """One step: from the first event on the host to the last, on the thread that spans most."""
    host = np.flatnonzero(events.is_(What.OP, What.CALL, What.NOTE))
    if not len(host):  # the device alone
        first, last = events.start.min(), events.end.max()
        return Steps(np.zeros(1, np.int64), first[None], last[None], 0, "trace")
    first = np.full(int(events.place[host].max()) + 1, np.inf)
    last = np.full(len(first), -np.inf)
    np.minimum.at(first, events.place[host], events.start[host])
    np.maximum.at(last, events.place[host], events.end[host])
    thread = int(np.argmax(last - first))
    return Steps(np.zeros(1, np.int64), first.min()[None], last.max()[None], thread, "trace")


_BUSY = 0.05  # share of the device's seconds from which a stream counts
_AMD = ("hip", "Cijk_", "__amd")  # how calls and kernels under ROCm begin


def remarks(graph: Graph) -> list[str]:
    """What answers depend on: how the step ran, custom libraries, several streams, the device."""
    found = (_modes(graph), _libraries(graph), _streams(graph), _amd(graph), _cpu_only(graph))
    return [note for notes in found for note in notes]


def _modes(graph: Graph) -> Iterator[str]:
    """Compiled, in half precision, launched as a CUDA graph: where what-ifs begin."""
    matmuls = graph.select(kind="kernel", op=(*PRODUCTS, "convolution", "cudnn_convolution"))
    half = [int(d) for d in graph.dtype[matmuls] if d in (Dtype.BF16, Dtype.FP16)]
    if len(half) > len(matmuls) / 2:
        word = word_of(Dtype, max(set(half), key=half.count))
        yield f"this step runs in half precision ({word}): changes are added to that"
    if is_compiled(graph):
        yield "this step is compiled (Inductor): changes are added to its fused kernels as they are"
    if len(graph.select(kind="host", op=GRAPH_LAUNCHES)):
        yield (
            "this step is launched as a CUDA graph: the operators and shapes behind its kernels "
            "are not in the trace, so changes of formats, layouts and batch find nothing"
        )


def _cpu_only(graph: Graph) -> Iterator[str]:
    if not np.isin(graph.kind, (Kind.KERNEL, Kind.COPY, Kind.COLLECTIVE)).any():
        yield (
            "no GPU in this trace: only changes of the host can be tried on it; "
            "`foretell whatif train.py … --on h100` captures the step for a GPU"
        )


def _texts(graph: Graph, column: str, *kinds: Kind) -> set[str]:
    words, rows = list(graph.names), getattr(graph, column)[np.isin(graph.kind, kinds)]
    return {words[k] for k in set(rows.tolist())}


def _libraries(graph: Graph) -> Iterator[str]:
    found = sorted(set(map(library, _texts(graph, "name", Kind.COLLECTIVE, Kind.SEND))) - {""})
    if found:
        yield (
            f"communication kernels of {', '.join(found)}: counted as communication as measured; "
            "changes of ranks or network price them as NCCL's"
        )


def _streams(graph: Graph) -> Iterator[str]:
    """Streams of one rank that kernels of some weight run on."""
    kernels = graph.kind == Kind.KERNEL
    spent = np.bincount(graph.lane[kernels], graph.seconds[kernels], minlength=len(graph.lanes))
    compute = graph.lanes.kind == LaneKind.COMPUTE
    for rank in sorted(set(graph.lanes.rank[compute].tolist()))[:1]:
        own = compute & (graph.lanes.rank == rank)
        many = int((spent[own] > _BUSY * max(spent[own].sum(), 1e-12)).sum())
        if many > 1:
            yield (
                f"kernels run on {many} streams at once: each keeps the seconds it was measured "
                "with beside the others"
            )


def _amd(graph: Graph) -> Iterator[str]:
    calls, kernels = _texts(graph, "op", Kind.HOST), _texts(graph, "name", Kind.KERNEL)
    if any(text.startswith(_AMD) for text in calls | kernels):
        yield (
            "kernels of an AMD GPU: their times are as measured; ratios of changed kernels were "
            "measured on NVIDIA's"
        )


@dataclass(frozen=True, eq=False)
class Trace:
    """One step of a trace: its graph, and what was measured of it.

    `graph` begins with an idle device, so that copies of it in a row are steps in a row. `warm`
    begins as the measured step did: its first `ahead` tasks are what was still running then (and
    how much later some ranks began), and `found` is when the last of them ended. Simulated
    unchanged, `warm` less `found` is the length of the measured step, `graph.facts["measured"]`.
    """

    graph: Graph
    start: Array  # seconds after the step began on the host of the first rank
    end: Array
    recorded: Array  # operators and calls that the profiler recorded in each task, two columns
    warm: Graph
    ahead: int
    found: float
    notes: tuple[str, ...] = ()

    @property
    def real(self) -> float | None:
        """Seconds of an un-profiled step, where they were timed when the trace was made."""
        seconds = self.graph.facts.get("unprofiled")
        return float(seconds) if seconds is not None else None

    def __repr__(self) -> str:
        seconds = self.graph.facts.get("measured", 0.0)
        return f"<Trace {self.graph.size} tasks, {seconds:.6g} s measured>"


@dataclass(frozen=True, eq=False)
class Recording:
    """All that one file says: its events, its device work and its steps."""

    events: Events
    work: Work
    steps: Steps
    seconds: Array  # measured length of each step
    rank: int
    is_rank_known: bool = field(default=True)


def read(
    path: str | os.PathLike[str],
    step: int | None = None,
    ranks: Iterable[int] | None = None,
    *,
    memory: bool = True,
) -> Trace:
    """The graph of one step of a trace: of the step of that number, or of median length.

    Several ranks in a folder or archive become one graph; `ranks` leaves some out. Execution traces
    and Chakra traces are read too: they measure no step, so `start` and `end` are empty. Without
    `memory` nothing is worked out of what the step holds, which takes a third of the time.
    """
    files = recognised(path)
    wanted = None if ranks is None else set(ranks)
    if files[0].form != "events":
        return _unmeasured(files, path, wanted)
    recordings = recorded_ranks(files, path, wanted)
    first = recordings[0]
    chosen = choose(first.events, first.steps, first.seconds, step)
    steps = [_same_step(r, chosen, first) for r in recordings]
    tape: dict[str, str] = {}
    if memory:
        from foretell.trace.operators import held

        tape = held(steps[0])
    made, facts, begun, notes = _joined(recordings, steps, chosen)
    return _trace(made, facts | tape, begun, notes)


def recognised(path: str | os.PathLike[str]) -> list[Opened]:
    """The files of a path that hold traces, all of the same form."""
    files = [opened(m) for m in members(path)]
    for form in FORMS:
        found = [f for f in files if f.form == form]
        if found:
            return found
    raise InputError(
        f"`{files[0].name}` is not a trace: no list of events, no nodes",
        hint="foretell reads what torch.profiler exports, execution traces and Chakra traces",
    )


def _joined(
    recordings: Sequence[Recording], steps: Sequence[RankStep], chosen: int
) -> tuple[Whole, dict[str, Any], float, tuple[str, ...]]:
    """All ranks as one step, facts about it, when it began, and notes on it."""
    texts = Texts()
    parts = [part(step, texts) for step in steps]
    notes = [note for r in recordings for note in r.events.notes]
    found = match(parts, texts) if len(parts) > 1 else Match([], [])
    shift = shifts(parts, found) if len(parts) > 1 else np.zeros(1)
    begun = min(float(s) + d.found for s, d in zip(shift, steps, strict=True))
    ended = max(float(s) + d.end for s, d in zip(shift, steps, strict=True))
    facts = _facts(recordings, chosen, ended - begun, shift)
    if len(parts) > 1:
        facts["balance"] = balance(parts, found, shift)
        notes += found.notes + notes_on(facts["ranks"], shift, facts["balance"], ended - begun)
        parts = [late(p, float(s), texts) for p, s in zip(parts, shift, strict=True)]
    made = whole(parts, texts, found.sets)
    return made, facts, begun, tuple(dict.fromkeys(notes))


def _trace(made: Whole, facts: dict[str, Any], begun: float, notes: tuple[str, ...]) -> Trace:
    own = ~made.is_ahead
    graph = graph_of(made, own, facts)
    return Trace(
        graph,
        frozen(made.start[own]),
        frozen(made.end[own]),
        frozen(made.recorded[own]),
        graph if own.all() else graph_of(made, np.ones(len(own), bool), facts),
        int((~own).sum()),
        begun,
        (*notes, *remarks(graph)),
    )


def _unmeasured(
    files: Sequence[Opened], path: str | os.PathLike[str], wanted: set[int] | None
) -> Trace:
    """One graph of files that tell what depends on what but not when it ran."""
    named = [_file_rank(f.name) for f in files]
    apart = None not in named and len(set(named)) == len(named)
    ranks = [r if apart and r is not None else k for k, r in enumerate(named)]
    if len(files) == 1:
        ranks = [0]
    _check_ranks(path, ranks, wanted)
    graphs = [
        _parsed(f, r) for f, r in zip(files, ranks, strict=True) if wanted is None or r in wanted
    ]
    graph = graphs[0] if len(graphs) == 1 else concat(graphs)
    none = frozen(np.zeros(0))
    return Trace(graph, none, none, frozen(np.zeros((0, 2), np.int32)), graph, 0, 0.0)


def _parsed(file: Opened, rank: int) -> Graph:
    if file.form == "execution":
        from foretell.trace.execution import graph_of_execution, parse_execution

        return graph_of_execution(parse_execution(file.whole(), file.name), file.name, rank)
    from foretell.trace.chakra import graph_of_nodes, parse_json, parse_nodes

    parse = parse_nodes if file.form == "chakra" else parse_json
    return graph_of_nodes(parse(file.whole(), file.name), file.name, rank)


def recorded_ranks(
    files: Sequence[Opened], path: str | os.PathLike[str], ranks: set[int] | None = None
) -> list[Recording]:
    """Recordings of the wanted ranks, by rank."""
    found = _distinct_ranks([_recording(f, k, len(files) > 1) for k, f in enumerate(files)])
    _check_ranks(path, [r.rank for r in found], ranks)
    chosen = [r for r in found if ranks is None or r.rank in ranks]
    return sorted(chosen, key=lambda r: r.rank)


def _check_ranks(
    path: str | os.PathLike[str], there: Sequence[int], wanted: set[int] | None
) -> None:
    missing = (wanted or set()) - set(there)
    if missing or wanted == set():
        known = ", ".join(map(str, sorted(there)))
        absent = f"rank {min(missing)}" if missing else "such rank"
        raise InputError(f"`{path}` has no {absent}", hint=f"its ranks are {known}")


def _recording(file: Opened, place: int, is_one_of_many: bool) -> Recording:
    """The recording in one file; a single file counts as rank 0."""
    events = read_events(file)
    work, steps = device_work(events), find_steps(events)
    rank = _rank(events) if is_one_of_many else 0
    return Recording(
        events, work, steps, lengths(events, work, steps), place if rank is None else rank,
        rank is not None,
    )  # fmt: skip


def _rank(events: Events) -> int | None:
    """The rank that a trace gives itself, or else its file name."""
    info = events.facts.get("distributedInfo")
    rank = info.get("rank") if isinstance(info, dict) else None
    if isinstance(rank, int):
        return rank
    return _file_rank(events.source)


def _file_rank(path: str) -> int | None:
    """The rank in a file name: `rank-3`, `worker7`, `trace_0.json`, `chakra.5.et`."""
    name = re.split(r"[/\\:]", path)[-1]
    found = re.search(r"(?:rank|worker)[-_]?(\d+)", name) or re.search(
        r"[._-](\d{1,5})\.(?:et|json)", name
    )
    return int(found[1]) if found else None


def _distinct_ranks(found: Sequence[Recording]) -> list[Recording]:
    """Recordings with ranks of their own."""
    from dataclasses import replace

    ranks = [r.rank for r in found]
    if len(set(ranks)) == len(ranks):
        return list(found)
    twice = next(r for r in found if ranks.count(r.rank) > 1)
    if all(r.is_rank_known for r in found):
        raise InputError(
            f"two traces say they are rank {twice.rank}, among them `{twice.events.source}`",
            hint="read one file, or a folder with one trace a rank",
        )
    return [replace(r, rank=k) for k, r in enumerate(found)]


def _same_step(r: Recording, chosen: int, first: Recording) -> RankStep:
    """This rank's part of the step chosen on the first rank."""
    place = chosen
    if r is not first:
        same = np.flatnonzero(r.steps.number == first.steps.number[chosen])
        place = int(same[0]) if len(same) else min(chosen, len(r.steps) - 1)
    window = (float(r.steps.start[place]), float(r.steps.end[place]), r.steps.thread)
    return rank_step(r.events, r.work, r.rank, int(r.steps.number[place]), window)


_FIRST = 256  # a process counts the operators that it has recorded, from one on


def _facts(
    recordings: Sequence[Recording], chosen: int, seconds: float, shift: Array
) -> dict[str, Any]:
    """Facts of the whole step."""
    first = recordings[0]
    about = first.events.facts
    devices = about.get("deviceProperties")
    first_device = devices[0] if isinstance(devices, list) and devices else None
    facts: dict[str, Any] = {
        "measured": seconds,
        "profiled": True,
        "step": int(first.steps.number[chosen]),
        "steps": [float(s) for s in first.seconds],
        "found_by": first.steps.found_by,
        "start": first.events.origin + float(first.steps.start[chosen]),
        "source": os.path.basename(first.events.source),
    }
    numbers = first.events.external[first.events.external > 0]
    if len(numbers) and int(numbers.min()) > _FIRST:
        facts["profiled_before"] = True
    if isinstance(first_device, dict) and isinstance(first_device.get("name"), str):
        facts["device"] = first_device["name"]
    for key in ("cuda_runtime_version", "cuda_driver_version", "record_shapes", "with_stack"):
        if isinstance(about.get(key), (int, str)):
            facts[key] = about[key]
    if about.get(ALLOCATED):  # recorded with profile_memory
        facts["peak_bytes"] = float(about[ALLOCATED])
    facts |= _timed(about.get(MEASURED))
    if len(recordings) > 1:
        facts["ranks"] = [r.rank for r in recordings]
        facts["late"] = [float(s) for s in shift]
    return facts


def _timed(clocks: Any) -> dict[str, float]:
    """The step time without the profiler, if `foretell profile` made the trace."""
    if not isinstance(clocks, dict):
        return {}
    found = {}
    for key, name in (("unprofiled_s", "unprofiled"), ("peak_bytes", "peak_bytes")):
        value = clocks.get(key)
        if isinstance(value, (int, float)) and 0 < value < float("inf"):
            found[name] = float(value)
    return found
