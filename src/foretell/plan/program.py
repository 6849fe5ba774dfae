"""The step of a plan as a program, whatever syntax the plan is in, and the program as a task graph.

stages      chains of tasks, action by action, on the compute lanes that a stage holds
messages    what stages send each other, micro-batch by micro-batch
epilogue    gradient reductions when parts of the last backward are done, optimizer, all-gathers
buffers     what ranks hold for good, and from a forward to its backward
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from foretell.cluster import Cluster
from foretell.graph import COLUMNS, BufferKind, Buffers, Graph, Lanes, Names, assemble, edges
from foretell.graph.columns import (
    NONE,
    Held,
    Kind,
    LaneKind,
    Links,
    Phase,
    Source,
    Used,
    code_of,
    coded,
)
from foretell.plan.framework import slowdown
from foretell.plan.order import BACKWARD, FORWARD, WEIGHT
from foretell.plan.plan import Plan
from foretell.whatif import Setting, applied, parse
from foretell.workload import Workload

if TYPE_CHECKING:
    from foretell.plan.costs import Costs
    from foretell.plan.layer_cost import LayerCost

Ids = npt.NDArray[np.int64]
Place = tuple[int, int]  # stage of the program, chunk


class Piece(NamedTuple):
    """One task of a chain; `after` counts back to pieces of the same chain."""

    kind: str
    op: str
    seconds: float
    layer: str = ""
    after: tuple[int, ...] = (1,)
    flops: float = 0.0
    comm_bytes: float = 0.0
    axis: str = ""  # of an exchange
    name: str = ""
    group: str = ""
    phase: str = ""  # that of its action where empty


class StageTasks(NamedTuple):
    """What one stage runs on its lanes, an entry an action."""

    rank: int
    lanes: tuple[int, ...]  # of compute, all held at once
    collective: int  # its lane
    chain: Ids  # which of the program's chains
    way: Ids
    chunk: Ids
    micro: Ids
    order: Ids | None = None  # among all actions of the program; as they are listed where None
    groups: Mapping[str, str] = {}  # the ranks of its exchanges, by axis


class Message(NamedTuple):
    """What a stage sends another for every micro-batch; it only waits where nothing is sent."""

    way: int
    here: Place
    there: Place
    seconds: float = 0.0
    rank: int = NONE  # who sends; none where nothing is sent
    lane: int = NONE
    comm_bytes: float = 0.0
    group: str = ""
    links: tuple[int, ...] = ()


class EndTask(NamedTuple):
    """A reduction, optimizer step or all-gather at the end of a step; one task a part."""

    kind: str
    op: str
    rank: int
    lanes: tuple[int, ...]
    seconds: Any  # of each part
    phase: str
    stages: tuple[int, ...] = ()  # whose last action it waits for
    parts: tuple[int, ...] = (-1,)  # kernel of that action a part; none: all micro-batches' ends
    behind: tuple[int, ...] = ()  # end tasks it waits for
    comm_bytes: Any = 0.0
    name: str = ""
    group: str = ""
    links: tuple[int, ...] = ()
    order: int | None = None


class Buffer(NamedTuple):
    """Bytes of a rank: for good, or of every micro-batch of a stage until its last backward."""

    rank: int
    kind: str
    name: str
    bytes: float
    stage: int = NONE


@dataclass
class Program:
    """One step: stages, messages, end tasks and buffers on lanes and links."""

    is_ordered: bool = True  # lanes take tasks in order; else as they are ready, backward first
    lanes: list[tuple[int, str, str]] = field(default_factory=list)  # rank, name, kind
    links: list[str] = field(default_factory=list)
    chains: list[list[Piece]] = field(default_factory=list)
    stages: list[StageTasks] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    turns: list[Place] = field(default_factory=list)  # whose backward follows its own forward
    epilogue: list[EndTask] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)
    slowdown: float = 1.0  # how many times as long as it says everything takes

    def lane(self, rank: int, name: str, kind: str) -> int:
        """A new lane; its number."""
        self.lanes.append((rank, name, kind))
        return len(self.lanes) - 1

    def end(self, *values: Any, **fields: Any) -> int:
        """A new task of the epilogue; its number."""
        self.epilogue.append(EndTask(*values, **fields))
        return len(self.epilogue) - 1


@dataclass(frozen=True)
class ResolvedStep:
    """A checked plan with its prices, on the machines its ranks are."""

    plan: Plan
    workload: Workload
    cluster: Cluster

    @property
    def advice(self) -> str:
        """What to do where it does not fit; empty where changes of its degrees can be tried."""
        return ""

    @property
    def work(self) -> float:
        """What of a training step's work is done."""
        return 1.0

    @property
    def slowdown(self) -> float:
        """How many times as long as priced everything takes (→ foretell.plan.framework)."""
        return slowdown(self.plan, self.cluster)

    def program(self, detail: str) -> Program:
        """What every rank runs, sends and holds."""
        raise NotImplementedError

    def memory(self) -> tuple[float, float, dict[str, float]]:
        """Bytes of the fullest rank, how many are missing there, and what they are."""
        raise NotImplementedError

    @property
    def away(self) -> dict[str, float] | None:
        """How far it is from what was measured, where another step says so."""
        return None

    def priced_layers(self) -> list[tuple[tuple[int, ...], Costs, Sequence[float]]]:
        """Of every stage its ranks, the prices of all layers, and how often each runs there.

        None where ops are priced one by one; such a step says itself how far `away` it is.
        """
        return []

    def layer_prices(self) -> tuple[list[tuple[LayerCost, float]], float]:
        """Every layer priced and how often it runs; how host and device overlap (an exponent)."""
        found = self.priced_layers()
        pairs = [zip(costs.layers, times, strict=True) for _, costs, times in found]
        return [pair for some in pairs for pair in some], float(found[0][1].overlap_exponent[0])

    def comm_share(self, rank: int) -> float:
        """What of a rank's compute tasks is communication inside them, by their prices."""
        own = [costs for ranks, costs, _ in self.priced_layers() if rank in ranks]
        both = [part for c in own for x in c.layers[1:-1] for part in (x.forward, x.backward)]
        kernels, host = (sum(float(getattr(p, n)[0]) for p in both) for n in ("kernels", "host"))
        comm = sum(float((p.comm + p.straggler_wait)[0]) for p in both)
        return comm / max(comm + max(kernels, host), 1e-30)


class _Draft:
    """Columns of tasks, waits and tables on their way to a graph."""

    def __init__(self) -> None:
        self.size = 0
        self.order = np.zeros(0, np.int64)
        self.texts: dict[str, int] = {"": 0}
        self.columns: dict[str, list[tuple[int, Any]]] = {}
        self.waits: list[tuple[Ids, Ids]] = []
        self.held: list[tuple[Ids, Ids]] = []
        self.used: list[tuple[Ids, Ids]] = []
        self.buffers: list[dict[str, Any]] = []

    def text(self, text: str) -> int:
        return self.texts.setdefault(text, len(self.texts))

    def tasks(self, count: int, order: Any = None, **columns: Any) -> Ids:
        """New tasks, behind all others where no order is given; a column is one value or many."""
        first = self.size
        self.size += count
        for name, value in columns.items():
            number = coded(name, value, self.text) if isinstance(value, str) else value
            values = np.broadcast_to(np.asarray(number), (count,))
            self.columns.setdefault(name, []).append((first, values))
        if order is None:
            order = 1 + self.order.max(initial=-1) + np.arange(count)
        self.order = np.concatenate([self.order, np.broadcast_to(order, (count,))])
        return np.arange(first, first + count)

    def pair(self, table: list[tuple[Ids, Ids]], tasks: Any, others: Any) -> None:
        """Rows of a table, task by task; there is no task below 0."""
        pair = np.broadcast_arrays(np.asarray(tasks, np.int64), np.asarray(others, np.int64))
        here, there = (side.reshape(-1) for side in pair)
        known = (here >= 0) & (there >= 0)
        table.append((here, there) if known.all() else (here[known], there[known]))

    def wait(self, tasks: Any, after: Any) -> None:
        self.pair(self.waits, tasks, after)

    def buffer(self, count: int, kind: str, name: str, **columns: Any) -> None:
        given = {"kind": code_of(BufferKind, kind), "name": self.text(name), **columns}
        self.buffers.append({k: np.broadcast_to(v, (count,)) for k, v in given.items()})

    def tables(self, program: Program) -> dict[str, Any]:
        """Columns and tables of the graph; tasks are numbered in their order."""
        turn = np.argsort(self.order, kind="stable")
        number = np.append(np.empty_like(turn), NONE)
        number[turn] = np.arange(self.size)
        columns = {name: self._filled(name, parts)[turn] for name, parts in self.columns.items()}
        columns["seconds"] = columns["seconds"] * program.slowdown
        waits, held, used = (
            [np.concatenate([p[k] for p in table] or [turn[:0]]) for k in (0, 1)]
            for table in (self.waits, self.held, self.used)
        )
        names = ("bytes", "rank", "born", "dies", "name", "kind")
        rows = {n: np.concatenate([b[n] for b in self.buffers] or [[]]) for n in names}
        rows |= {n: number[rows[n].astype(np.int64)] for n in ("born", "dies")}
        ranks, texts, kinds = zip(*program.lanes, strict=True)
        codes = [code_of(LaneKind, kind) for kind in kinds]
        lanes = Lanes(
            np.array(ranks), np.array([self.text(t) for t in texts]), np.array(codes),
            np.full(len(codes), program.is_ordered),
        )  # fmt: skip
        links = Links(
            np.array([self.text(t) for t in program.links], np.int64), np.ones(len(program.links))
        )
        return {
            "columns": columns,
            "edges": edges(self.size, number[waits[0]], number[waits[1]]),
            "lanes": lanes,
            "links": links,
            "held": Held(number[held[0]], held[1]),
            "used": Used(number[used[0]], used[1], np.ones(len(used[0]))),
            "buffers": Buffers(**rows),
            "names": Names(self.texts),
        }

    def _filled(self, name: str, parts: list[tuple[int, Any]]) -> Any:
        out = np.full(self.size, COLUMNS[name].default, COLUMNS[name].dtype)
        for first, values in parts:
            out[first : first + len(values)] = values
        return out


class _Spans(NamedTuple):
    """First and last task of each action: way × stage × chunk × micro-batch; -1: none."""

    first: Ids
    last: Ids
    made: list[Ids]  # of each stage: kernels of its last action, whose gradients can go
    done: Ids  # of each stage: the last task of that action, which may reduce sharded gradients


def lowered(step: ResolvedStep, program: Program) -> Graph:
    """The graph of a step whose program is known, with the plan's what-ifs applied."""
    plan = step.plan
    program.slowdown = step.slowdown
    graph = written(program, {"workload": step.workload.name, "plan": str(plan)})
    if not plan.whatifs:
        return graph
    return applied([parse(text) for text in plan.whatifs], graph, Setting(step.cluster))


def written(program: Program, facts: Mapping[str, Any]) -> Graph:
    """The graph of a program."""
    draft = _Draft()
    spans = _write_stages(draft, program)
    _write_messages(draft, program, spans)
    _write_end(draft, program, spans)
    _write_buffers(draft, program, spans)
    return assemble(draft.size, facts=facts, **draft.tables(program))


def _write_stages(draft: _Draft, program: Program) -> _Spans:
    """Every action of every stage, stage by stage."""
    stages, lengths = program.stages, np.array([len(chain) for chain in program.chains])
    pieces = [piece for chain in program.chains for piece in chain]
    counts = [len(one.chain) for one in stages]
    chain, way, micro = (
        np.concatenate([getattr(one, name) for one in stages]) for name in ("chain", "way", "micro")
    )
    sizes = lengths[chain]
    begin = np.cumsum(sizes) - sizes
    inside = np.arange(sizes.sum()) - np.repeat(begin, sizes)
    at = np.repeat((np.cumsum(lengths) - lengths)[chain], sizes) + inside
    owner, back = np.repeat(np.repeat(np.arange(len(stages)), counts), sizes), way != FORWARD
    order = None
    if stages[0].order is not None:
        order = np.repeat(np.concatenate([one.order for one in stages]), sizes) + 2 * inside
    columns = {name: values[at] for name, values in _piece_columns(draft, pieces).items()}
    # Exchanges of a split layer stand in the way of the next kernel, of another micro-batch too.
    blocks = np.array([p.kind == "kernel" or p.axis == "tp" for p in pieces])[at]
    compute, comm = np.array([(one.lanes[0], one.collective) for one in stages])[owner].T
    _add_groups(draft, stages, columns["group"], owner, np.array([p.axis for p in pieces])[at])
    phase = np.repeat(np.where(back, int(Phase.BACKWARD), int(Phase.FORWARD)), sizes)
    columns["phase"] = np.where(columns["phase"] == NONE, phase, columns["phase"])
    ids = draft.tasks(
        len(at), order=order, rank=np.array([one.rank for one in stages])[owner],
        lane=np.where(blocks, compute, comm), micro_batch=np.repeat(micro, sizes),
        priority=0 if program.is_ordered else np.repeat(1 + back, sizes),
        source=int(Source.FORMULA), **columns,
    )  # fmt: skip
    task, which = _rows(at, np.array([len(p.after) for p in pieces]))
    steps = np.array([back for p in pieces for back in p.after], np.int64)[which]
    has = inside[task] >= steps
    draft.wait(ids[task[has]], ids[task[has]] - steps[has])
    for k, one in enumerate(stages):
        for lane in one.lanes[1:]:
            draft.pair(draft.held, ids[owner == k], lane)
    return _spans(program, begin, sizes, columns["kind"] == int(Kind.KERNEL))


def _add_groups(
    draft: _Draft, stages: Sequence[StageTasks], column: Ids, owner: Ids, axis: Any
) -> None:
    """The ranks of exchanges, which differ from stage to stage."""
    for k, one in enumerate(stages) if axis.any() else ():
        for name, text in one.groups.items():
            column[(owner == k) & (axis == name)] = draft.text(text)


def _piece_columns(draft: _Draft, pieces: Sequence[Piece]) -> dict[str, Any]:
    """What pieces say of their tasks."""
    numbers = {n: [getattr(p, n) for p in pieces] for n in ("seconds", "flops", "comm_bytes")}
    texts = {
        n: [draft.text(getattr(p, n)) for p in pieces] for n in ("op", "layer", "name", "group")
    }
    kind = [code_of(Kind, p.kind) for p in pieces]
    phase = [code_of(Phase, p.phase) if p.phase else NONE for p in pieces]
    found = numbers | texts | {"kind": kind, "phase": phase}
    return {name: np.array(values) for name, values in found.items()}


def _spans(program: Program, begin: Ids, sizes: Ids, kernel: Any) -> _Spans:
    """Where the actions of stages begin and end, and the kernels of the last one of each."""
    stages = program.stages
    counts = np.array([len(one.chain) for one in stages])
    chain, way, chunk, micro = (
        np.concatenate([getattr(one, name) for one in stages])
        for name in ("chain", "way", "chunk", "micro")
    )
    lead = np.array([[p.kind for p in pieces].index("kernel") for pieces in program.chains])
    where = way, np.repeat(np.arange(len(stages)), counts), chunk, micro
    shape = (WEIGHT + 1, len(stages), int(chunk.max()) + 1, int(micro.max()) + 1)
    first, last = np.full((2, *shape), NONE)
    first[where], last[where] = begin + lead[chain], begin + sizes - 1
    final = [np.arange(begin[k], begin[k] + sizes[k]) for k in np.cumsum(counts) - 1]
    done = np.array([ids[-1] for ids in final])
    return _Spans(first, last, [ids[kernel[ids]] for ids in final], done)


def _rows(at: Ids, many: Ids) -> tuple[Ids, Ids]:
    """For every entry the rows of what it points at, so many each: entries, and their rows."""
    starts, sizes = (np.cumsum(many) - many)[at], many[at]
    entry = np.repeat(np.arange(len(at)), sizes)
    return entry, starts[entry] + np.arange(len(entry)) - (np.cumsum(sizes) - sizes)[entry]


def _write_messages(draft: _Draft, program: Program, spans: _Spans) -> None:
    """Sends between stages, and waits where nothing is sent."""
    first, last = spans.first, spans.last
    draft.wait(first[WEIGHT], last[BACKWARD])
    for place in program.turns:
        draft.wait(first[BACKWARD, *place], last[FORWARD, *place])
    for one in program.messages:
        if one.rank == NONE:
            draft.wait(first[one.way, *one.there], last[one.way, *one.here])
    sent = [one for one in program.messages if one.rank != NONE]
    if not sent:
        return
    made, wanted = (
        np.array([ids[one.way, *place] for one, place in zip(sent, places, strict=True)])
        for ids, places in ((last, [m.here for m in sent]), (first, [m.there for m in sent]))
    )
    which, micro = np.nonzero(made >= 0)
    made, wanted = made[which, micro], wanted[which, micro]
    # Messages leave as they are made; where lanes have no order, right before what reads them.
    order = draft.order[made] if program.is_ordered else draft.order[wanted] - 1
    columns = {
        name: np.array([getattr(one, name) for one in sent])[which]
        for name in ("rank", "lane", "seconds", "comm_bytes")
    }
    groups = np.array([draft.text(one.group) for one in sent])[which]
    ids = draft.tasks(
        len(made), order=order, kind="send", op="send", phase="communicate", micro_batch=micro,
        group=groups, source="formula", **columns,
    )  # fmt: skip
    draft.wait(ids, made)
    draft.wait(wanted, ids)
    for k in range(max(len(one.links) for one in sent)):
        links = np.array([(*one.links, NONE, NONE)[k] for one in sent])[which]
        draft.pair(draft.used, ids, links)


def _write_end(draft: _Draft, program: Program, spans: _Spans) -> None:
    """Gradient reductions, the optimizer and what follows it."""
    done: list[int] = []
    for one in program.epilogue:
        ids = draft.tasks(
            max(len(one.parts), 1), order=one.order, kind=one.kind, op=one.op, name=one.name,
            rank=one.rank, lane=one.lanes[0], seconds=one.seconds, comm_bytes=one.comm_bytes,
            group=one.group, phase=one.phase, source="formula",
        )  # fmt: skip
        for stage in one.stages:
            made = spans.made[stage][list(one.parts)] if one.parts else spans.last[BACKWARD, stage]
            draft.wait(ids if one.parts else ids[0], made)
            if one.kind == "kernel":  # the optimizer reads gradients that are reduced by then
                draft.wait(ids[0], spans.done[stage])
        if one.behind:
            draft.wait(ids[0], [done[k] for k in one.behind])
        for table, others in ((draft.held, one.lanes[1:]), (draft.used, one.links)):
            for other in others:
                draft.pair(table, ids, other)
        done.append(int(ids[-1]))


def _write_buffers(draft: _Draft, program: Program, spans: _Spans) -> None:
    """What each rank holds for good, and what each micro-batch keeps from forward to backward."""
    for one in program.buffers:
        born = dies = np.array([NONE])
        if one.stage != NONE:
            born = spans.first[FORWARD, one.stage].reshape(-1)
            final = WEIGHT if (spans.last[WEIGHT, one.stage] >= 0).any() else BACKWARD
            dies = spans.last[final, one.stage].reshape(-1)
        draft.buffer(
            len(born), one.kind, one.name, bytes=one.bytes, rank=one.rank, born=born, dies=dies
        )
