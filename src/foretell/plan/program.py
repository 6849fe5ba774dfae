"""What each stage does in which order, and the program of a step as a task graph.

Pipeline schedules by name: what every stage runs, first to last.

    gpipe         all forwards, then all backwards
    1f1b          as many forwards as stages lie ahead, then forward and backward in turn
    interleaved   Megatron's: several chunks a stage, p micro-batches through each in turn
                  (Narayanan et al. 2021, arXiv 2104.04473, section 2.2)
    zb-h1, zb-h2  backward in two; weight gradients fill the bubble, with the memory of 1f1b and
                  with twice that (Qi et al. 2024, arXiv 2401.10241)
    zb-v, v-half, v-min   two chunks a stage, there and back, backward in two, at 1, 1/2 and 1/3 of
                  the memory of 1f1b (Qi et al. 2024, arXiv 2405.15362)
    dualpipev     there and back in DeepSeek's eight phases (Liu et al. 2024, arXiv 2412.19437)
    actions       as the plan writes it: F3, B3 or I3 and W3, with `.chunk` or the number of the
                  stage of the model in front

A stage of the model is a chunk of a stage of the plan; `Order.places` has them as forward goes.

The step of a plan as a program, whatever syntax the plan is in, and the program as a task graph.

stages      chains of tasks, action by action, on the compute lanes that a stage holds
messages    what stages send each other, micro-batch by micro-batch
epilogue    gradient reductions when parts of the last backward are done, optimizer, all-gathers
buffers     what ranks hold for good, and from a forward to its backward
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from foretell.cluster import Cluster
from foretell.errors import InputError
from foretell.graph import COLUMNS, BufferKind, Buffers, Graph, Lanes, assemble, edges
from foretell.graph import Names as GraphNames
from foretell.graph.graph import (
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
from foretell.plan.plan import Names, Plan
from foretell.whatif import Setting, applied, parse
from foretell.workload import Workload

if TYPE_CHECKING:
    from foretell.plan.costs import Costs
    from foretell.plan.layer_cost import LayerCost


Ints = npt.NDArray[np.int64]
FORWARD, BACKWARD, WEIGHT = 0, 1, 2  # BACKWARD: of inputs alone where weights are apart
Cell = tuple[int, int, int]  # way, chunk, micro-batch
_ACTION = re.compile(r"(\d*)([FBIW])(\d+)(?:\.(\d+))?")
_WAYS = {"F": FORWARD, "B": BACKWARD, "I": BACKWARD, "W": WEIGHT}
_RING = 6  # steps of a building block: forward, input and weight gradient of two chunks


class StageOrder(NamedTuple):
    """What one stage runs, first to last."""

    way: Ints
    chunk: Ints
    micro: Ints


class Order(NamedTuple):
    """What all stages run."""

    places: tuple[tuple[int, int], ...]  # (stage, chunk) of each part of the model
    turns: tuple[StageOrder, ...]
    is_split: bool  # weight gradients apart

    @property
    def chunks(self) -> int:
        """Parts of the model that a stage has."""
        return len(self.places) // len(self.turns)

    def rows(self) -> list[list[str]]:
        """The actions of each stage as text: part of the model, kind, micro-batch."""
        number = {place: part for part, place in enumerate(self.places)}
        kinds = "FIW" if self.is_split else "FB"
        return [
            [
                f"{number[stage, c]}{kinds[w]}{m}"
                for w, c, m in zip(*(column.tolist() for column in turns), strict=True)
            ]
            for stage, turns in enumerate(self.turns)
        ]


class Family(NamedTuple):
    """How a named schedule is made."""

    make: Callable[
        [int, int, int, int], Sequence[Cell] | StageOrder
    ]  # stage, stages, chunks, number
    chunks: int = 1  # of a stage; 0: as many as the plan says, more than one
    is_split: bool = False
    least: tuple[int, int] = (0, 1)  # micro-batches it needs: (a, b) for a·stages + b


def last_stage(plan: Plan) -> int:
    """The stage with the last part of the model: the first one where chunks go there and back."""
    if plan.actions:
        return _last_written(plan.actions, plan.pp)
    return 0 if plan.schedule in FAMILIES and FAMILIES[plan.schedule].chunks == 2 else plan.pp - 1


def chunks_of(plan: Plan) -> int:
    """Parts of the model that each stage has."""
    if plan.actions or plan.schedule not in FAMILIES:
        return plan.chunks
    return FAMILIES[plan.schedule].chunks or plan.chunks


def is_split(plan: Plan) -> bool:
    """Whether weight gradients are apart from those of inputs."""
    if plan.actions:
        return any("W" in cell for row in plan.actions for cell in row)
    return plan.schedule in FAMILIES and FAMILIES[plan.schedule].is_split


def require_micro_batches(schedule: str, stages: int, num: int) -> None:
    """Raise where a named schedule needs more micro-batches on so many stages."""
    each, more = FAMILIES[schedule].least
    if num < each * stages + more:
        raise InputError(
            f"{num} micro-batches; schedule={schedule} on pp={stages} needs "
            f"{each * stages + more} or more",
            hint="a smaller micro_batch, or schedule=zb-h1",
        )


def order(plan: Plan, micro_batches: int) -> Order:
    """The order of all stages of a plan."""
    return _order(plan.schedule, plan.pp, chunks_of(plan), plan.actions, micro_batches)


def places_of(plan: Plan) -> tuple[tuple[int, int], ...]:
    """(stage, chunk) of each part of the model, where the order is not written out."""
    line = ((s, c) for c in range(chunks_of(plan)) for s in range(plan.pp))
    is_wave = last_stage(plan) < plan.pp - 1
    return tuple((plan.pp - 1 - s if is_wave and c % 2 else s, c) for s, c in line)


def turns(plan: Plan, stage: int, micro_batches: int) -> StageOrder:
    """The order of one stage."""
    return order(plan, micro_batches).turns[stage]


@lru_cache(maxsize=256)
def in_flight(plan_key: tuple[str, int, int, Names], micro_batches: int) -> Ints:
    """The most chunks of micro-batches that each stage holds for their backward."""
    found = _order(*plan_key, micro_batches)
    last = WEIGHT if found.is_split else BACKWARD
    rows = [np.cumsum((t.way == FORWARD).astype(int) - (t.way == last)) for t in found.turns]
    return np.array([row.max() for row in rows])


def key_of(plan: Plan) -> tuple[str, int, int, Names]:
    """All of a plan that its order depends on, beside the number of micro-batches."""
    return plan.schedule, plan.pp, chunks_of(plan), plan.actions


@lru_cache(maxsize=256)
def _order(schedule: str, pp: int, chunks: int, actions: Names, num: int) -> Order:
    if actions:
        return _written(actions, pp, chunks, num)
    family = FAMILIES[schedule]
    require_micro_batches(schedule, pp, num)
    made = (family.make(stage, pp, chunks, num) for stage in range(pp))
    rows = tuple(m if isinstance(m, StageOrder) else _columns(m) for m in made)
    places = places_of(Plan(schedule=schedule, pp=pp, chunks=chunks))
    return Order(places, rows, family.is_split)


def _columns(cells: Sequence[Cell]) -> StageOrder:
    return StageOrder(*np.array(cells, np.int64).reshape(-1, 3).T)


# Orders with the whole backward at once.


def _gpipe(stage: int, pp: int, chunks: int, num: int) -> StageOrder:
    return _alternating(pp, chunks, num, num * chunks)


def _1f1b(stage: int, pp: int, chunks: int, num: int) -> StageOrder:
    return _alternating(pp, chunks, num, min(pp - stage - 1, num))


def _interleaved(stage: int, pp: int, chunks: int, num: int) -> StageOrder:
    """2(p−s−1) + (v−1)p forwards before the first backward."""
    if chunks == 1:
        return _1f1b(stage, pp, chunks, num)
    warm = 2 * (pp - stage - 1) + (chunks - 1) * pp
    return _alternating(pp, chunks, num, min(warm, num * chunks))


def _alternating(pp: int, chunks: int, num: int, warm: int) -> StageOrder:
    """`warm` forwards, then one forward and one backward in turns, then the backwards left."""
    steady = num * chunks - warm
    middle = np.tile([0, 1], steady)
    way = np.concatenate([np.zeros(warm, int), middle, np.ones(warm, int)])
    place = np.where(way == 1, np.cumsum(way), np.cumsum(1 - way)) - 1
    chunk, micro = _groups(pp, chunks, num)
    flipped = np.where(way == 1, chunks - 1 - chunk[place], chunk[place])
    return StageOrder(way, flipped, micro[place])


def _groups(pp: int, chunks: int, num: int) -> tuple[Ints, Ints]:
    """Chunk and micro-batch of each forward: groups of `pp` micro-batches, chunk by chunk."""
    group = pp if chunks > 1 else num
    pairs = [
        (chunk, micro)
        for first in range(0, num, group)
        for chunk in range(chunks)
        for micro in range(first, min(first + group, num))
    ]
    found = np.array(pairs, int).reshape(-1, 2)
    return found[:, 0], found[:, 1]


# Orders with weight gradients apart.


def _zb_h1(stage: int, pp: int, chunks: int, num: int) -> list[Cell]:
    """1F1B where stage s puts off its weight gradients by s micro-batches: p in flight."""
    ahead, cells = min(num, pp - stage), list[Cell]()
    cells += [(FORWARD, 0, m) for m in range(ahead)]
    for m in range(num + stage):
        if m < num:
            cells.append((BACKWARD, 0, m))
        if m >= stage:
            cells.append((WEIGHT, 0, m - stage))
        if m + ahead < num:
            cells.append((FORWARD, 0, m + ahead))
    return cells


def _zb_h2(stage: int, pp: int, chunks: int, num: int) -> Sequence[Cell]:
    """Forwards until the first gradient comes back: up to 2p − 1 in flight."""
    return _dispatched(pp, num, 2 * pp - 1)[stage]


@lru_cache(maxsize=64)
def _dispatched(pp: int, num: int, limit: int) -> list[list[Cell]]:
    """In unit times: a backward first, then a forward while fewer are in flight, then a weight."""
    rows: list[list[Cell]] = [[] for _ in range(pp)]
    done = np.zeros(
        (3, pp + 2), int
    )  # by way and stage; a stage beyond each end is never waited on
    done[FORWARD, 0] = done[BACKWARD, -1] = num
    while done[WEIGHT, 1:-1].min() < num:
        now = done.copy()
        for s in range(1, pp + 1):
            if now[BACKWARD, s] < min(now[BACKWARD, s + 1], now[FORWARD, s]):
                way = BACKWARD
            elif now[FORWARD, s] < min(now[FORWARD, s - 1], now[WEIGHT, s] + limit):
                way = FORWARD
            elif now[WEIGHT, s] < now[BACKWARD, s]:
                way = WEIGHT
            else:
                continue
            rows[s - 1].append((way, 0, int(now[way, s])))
            done[way, s] += 1
    return rows


class _Row:
    """The order of one stage of two chunks as it is written down."""

    def __init__(self) -> None:
        self.cells: list[Cell] = []
        self.next = {(way, chunk): 0 for way in (0, 1, 2) for chunk in (0, 1)}

    def run(self, *some: tuple[int, int], times: int = 1) -> None:
        """The next micro-batch of each (way, chunk), so many times over."""
        for _ in range(times):
            for way, chunk in some:
                self.cells.append((way, chunk, self.next[way, chunk]))
                self.next[way, chunk] += 1

    def weights(self, chunk: int) -> None:
        """All weight gradients of a chunk that are left."""
        self.run((WEIGHT, chunk), times=self.next[BACKWARD, chunk] - self.next[WEIGHT, chunk])


def _zb_v(stage: int, pp: int, chunks: int, num: int) -> list[Cell]:
    """Forwards until the first gradient comes back, then all six kinds in turn."""
    row, far = _Row(), pp - stage
    near, back = [(way, 0) for way in (0, 1, 2)], [(way, 1) for way in (0, 1, 2)]
    row.run(near[0], times=2 * far - 1)
    row.run(back[0], near[0], times=stage)
    row.run(*back, times=far)
    while row.next[back[0]] < num:
        if row.next[near[0]] < num:
            row.run(near[0])
        row.run(near[1], near[2], *back)
    row.run(near[1], back[1], times=stage)
    row.run(near[1], near[2], times=far)
    row.weights(1)
    row.weights(0)
    return row.cells


def _dualpipev(stage: int, pp: int, chunks: int, num: int) -> list[Cell]:
    return dual_phases(stage, pp, num)


def dual_phases(rank: int, half: int, num: int) -> list[Cell]:
    """DualPipe's eight phases `rank` from the near end, with `half` ranks to the turning point.

    Chunk 0 enters at the near end, chunk 1 comes from the far one, `num` micro-batches each. Where
    the original runs a forward and a backward at the same time, here one follows the other.
    """
    rest, row, late = half - rank - 1, _Row(), list[tuple[int, int]]()

    def backward(chunk: int, put_off: bool = False) -> None:
        row.run((BACKWARD, chunk))
        if put_off:
            late.append((WEIGHT, chunk))
        else:
            row.run((WEIGHT, chunk))

    def weight() -> None:
        if late:
            row.run(late.pop(0))

    row.run((0, 0), times=2 * rest)
    row.run((0, 0), (0, 1), times=rank + 1)
    for _ in range(rest):
        backward(1, put_off=True)
        weight()
        row.run((0, 1))
    for _ in range(num - 2 * half + rank + 1):
        row.run((0, 0))
        backward(1)
        row.run((0, 1))
        backward(0)
    for _ in range(rest):
        backward(1)
        row.run((0, 1))
        backward(0)
    pairs = rank + 1
    for k in range(pairs):  # in the second half of them weight gradients are put off
        backward(1, k >= pairs // 2 + (pairs % 2 == 0))
        backward(0, k >= pairs // 2)
    for _ in range(rest):
        weight()
        backward(0, put_off=True)
    while late:
        weight()
    return row.cells


def _v_half(stage: int, pp: int, chunks: int, num: int) -> Sequence[Cell]:
    return _built(pp, num, 6)[stage]


def _v_min(stage: int, pp: int, chunks: int, num: int) -> Sequence[Cell]:
    return _built(pp, num, 4)[stage]


@lru_cache(maxsize=64)
def _built(pp: int, num: int, total: int) -> list[list[Cell]]:
    """Of building blocks with this sum of delays between neighbours the one that holds least.

    It holds about `p · total / 6` chunks, where 1F1B holds 2p (Qi et al., arXiv 2405.15362).
    """
    rated = []
    for starts in _building_blocks(pp, total):
        rows = [_repeated(mine, num) for mine in starts]
        held = max(_most_held(row) for row in rows)
        rated.append((held, max(t for mine in starts for _, t in mine), rows))
    if not rated:
        raise InputError(f"no building block fits {pp} stages", hint="schedule=zb-v")
    return min(rated, key=lambda one: one[:2])[2]


def _repeated(mine: Sequence[tuple[tuple[int, int], int]], num: int) -> list[Cell]:
    placed = sorted((t + _RING * m, (*kind, m)) for kind, t in mine for m in range(num))
    return [cell for _, cell in placed]


def _most_held(row: Sequence[Cell]) -> int:
    now = most = 0
    for way, _, _ in row:
        now += (way == FORWARD) - (way == WEIGHT)
        most = max(most, now)
    return most


Starts = list[list[tuple[tuple[int, int], int]]]  # by stage: (way, chunk) and when it starts


def _building_blocks(pp: int, total: int) -> Iterator[Starts]:
    """Starts of one micro-batch, for delays whose repetitions never meet."""
    steps = range(1, total - 2)
    for down, up, back_down in product(steps, steps, steps):
        back_up = total - down - up - back_down
        if back_up < 1 or abs(down + back_up - up - back_down) > 1:
            continue  # else one end of the pipeline holds more than the other
        for turning in product(range(_RING), repeat=3):
            found = _building_block(pp, (down, up, back_down, back_up), turning)
            if found is not None:
                yield found
                break


def _building_block(pp: int, delays: Sequence[int], turning: Sequence[int]) -> Starts | None:
    ends = [0]
    for delay, more in zip(delays, turning, strict=False):
        ends.append(ends[-1] + (pp - 1) * delay + 1 + more)
    starts: Starts = []
    for s in range(pp):
        far = pp - 1 - s
        steps = [d * n for d, n in zip(delays, (s, far, s, far), strict=True)]
        at = [end + step for end, step in zip(ends, steps, strict=True)]
        taken = {t % _RING for t in at}
        if len(taken) < len(at):
            return None
        free = [r for r in range(_RING) if r not in taken]
        mine = list(zip(((0, 0), (0, 1), (1, 1), (1, 0)), at, strict=True))
        for chunk, after in ((1, at[2]), (0, at[3])):  # the first free step behind its gradient
            place = min(free, key=lambda r: (r - after - 1) % _RING)
            free.remove(place)
            mine.append(((WEIGHT, chunk), after + 1 + (place - after - 1) % _RING))
        starts.append(mine)
    return starts


FAMILIES = {
    "gpipe": Family(_gpipe),
    "1f1b": Family(_1f1b),
    "interleaved": Family(_interleaved, 0),
    "zb-h1": Family(_zb_h1, 1, True),
    "zb-h2": Family(_zb_h2, 1, True),
    "zb-v": Family(_zb_v, 2, True, (2, -1)),
    "v-half": Family(_v_half, 2, True),
    "v-min": Family(_v_min, 2, True),
    "dualpipev": Family(_dualpipev, 2, True, (2, 0)),
}
SCHEDULES = (*FAMILIES, "actions")
ONE_CHUNK = tuple(name for name, one in FAMILIES.items() if one.chunks == 1)


# Orders that a plan writes down.


def _written(actions: Names, pp: int, chunks: int, num: int) -> Order:
    if len(actions) != pp:
        raise InputError(
            f"actions for {len(actions)} stages in a plan with pp={pp}",
            hint="give one list a stage, such as F0 F1 B0 B1",
        )
    found = [[_action(text, stage, pp) for text in row] for stage, row in enumerate(actions)]
    split = any(kind == "W" for row in found for _, kind, _ in row)
    parts = [sorted({part for part, _, _ in row}) for row in found]
    places = {part: (s, c) for s, mine in enumerate(parts) for c, part in enumerate(mine)}
    if sorted(places) != list(range(pp * chunks)) or any(len(p) != chunks for p in parts):
        raise InputError(
            f"actions of {len(places)} parts of the model; pp={pp} × chunks={chunks}",
            hint="give `chunks` as many parts as each stage has, each part on one stage",
        )
    rows = tuple(_checked(row, s, places, num, split) for s, row in enumerate(found))
    return Order(tuple(places[part] for part in range(pp * chunks)), rows, split)


def _last_written(actions: Names, pp: int) -> int:
    """The stage whose row names the last part of the model by its number; else the last one."""
    if not actions[0][:1] or not actions[0][0][:1].isdecimal():
        return pp - 1
    parts = [max(_action(cell, s, pp)[0] for cell in row) for s, row in enumerate(actions)]
    return int(np.argmax(parts))


def _checked(
    row: Sequence[tuple[int, str, int]], stage: int, places: dict[int, tuple[int, int]], num: int,
    split: bool,
) -> StageOrder:  # fmt: skip
    """The columns of one stage, every kind of every micro-batch once."""
    kinds = "FIW" if split else "FB"
    mine = {part for part, _, _ in row}
    wanted = {(part, kind, m) for part in mine for kind in kinds for m in range(num)}
    if set(row) != wanted or len(row) != len(wanted):
        raise InputError(
            f"the actions of stage {stage} are not every {', '.join(kinds[:-1])} and {kinds[-1]} "
            f"of {num} micro-batches",
            hint="each once: F0 … and B0 … (or I0 and W0), with `.chunk` behind where a stage has "
            "several",
        )
    return _columns([(_WAYS[kind], places[part][1], m) for part, kind, m in row])


def _action(text: str, stage: int, pp: int) -> tuple[int, str, int]:
    found = _ACTION.fullmatch(text)
    if not found or (found[1] and found[4]):
        raise InputError(f"`{text}` is no action of a plan", hint="write F3, B3 or F3.1")
    part = int(found[1]) if found[1] else int(found[4] or 0) * pp + stage
    return part, found[2], int(found[3])


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
    """Bytes of a rank: for good, or of every micro-batch of a stage while some tasks run."""

    rank: int
    kind: str
    name: str
    bytes: float
    stage: int = NONE
    first: int = FORWARD  # from the start of these tasks of a micro-batch
    last: int = NONE  # to the end of these; of its last backward where NONE


# Kinds of buffers by the names that predictions have for what is held.
HELD_AS = {"parameters": "parameter", "gradients": "gradient", "activations": "activation"}
HELD_AS |= {"optimizers": "optimizer", "optimizer": "optimizer", "workspace": "workspace"}
HELD_AS |= {"buffers": "bucket", "program": "other", "rounding": "other"}


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


class _GraphColumns:
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
            "names": GraphNames(self.texts),
        }

    def _filled(self, name: str, parts: list[tuple[int, Any]]) -> Any:
        out = np.full(self.size, COLUMNS[name].default, COLUMNS[name].dtype)
        for first, values in parts:
            out[first : first + len(values)] = values
        return out


class _TaskRanges(NamedTuple):
    """First and last task of each action: way × stage × chunk × micro-batch; -1: none."""

    first: Ids
    last: Ids
    made: list[Ids]  # of each stage: kernels of its last action, whose gradients can go
    done: Ids  # of each stage: the last task of that action, which may reduce sharded gradients


def lowered(step: ResolvedStep, program: Program) -> Graph:
    """The graph of a step whose program is known, with the plan's what-ifs applied."""
    plan = step.plan
    program.slowdown = step.slowdown
    graph = graph_of_program(program, {"workload": step.workload.name, "plan": str(plan)})
    if not plan.whatifs:
        return graph
    return applied([parse(text) for text in plan.whatifs], graph, Setting(step.cluster))


def graph_of_program(program: Program, facts: Mapping[str, Any]) -> Graph:
    """The graph of a program."""
    draft = _GraphColumns()
    spans = _write_stages(draft, program)
    _write_messages(draft, program, spans)
    _write_end(draft, program, spans)
    _write_buffers(draft, program, spans)
    return assemble(draft.size, facts=facts, **draft.tables(program))


def _write_stages(draft: _GraphColumns, program: Program) -> _TaskRanges:
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
    draft: _GraphColumns, stages: Sequence[StageTasks], column: Ids, owner: Ids, axis: Any
) -> None:
    """The ranks of exchanges, which differ from stage to stage."""
    for k, one in enumerate(stages) if axis.any() else ():
        for name, text in one.groups.items():
            column[(owner == k) & (axis == name)] = draft.text(text)


def _piece_columns(draft: _GraphColumns, pieces: Sequence[Piece]) -> dict[str, Any]:
    """What pieces say of their tasks."""
    numbers = {n: [getattr(p, n) for p in pieces] for n in ("seconds", "flops", "comm_bytes")}
    texts = {
        n: [draft.text(getattr(p, n)) for p in pieces] for n in ("op", "layer", "name", "group")
    }
    kind = [code_of(Kind, p.kind) for p in pieces]
    phase = [code_of(Phase, p.phase) if p.phase else NONE for p in pieces]
    found = numbers | texts | {"kind": kind, "phase": phase}
    return {name: np.array(values) for name, values in found.items()}


def _spans(program: Program, begin: Ids, sizes: Ids, kernel: Any) -> _TaskRanges:
    """Where the actions of stages begin and end, and the kernels of the last one of each."""
    stages = program.stages
    counts = np.array([len(one.chain) for one in stages])
    chain, way, chunk, micro = (
        np.concatenate([getattr(one, name) for one in stages])
        for name in ("chain", "way", "chunk", "micro")
    )
    kinds = [[p.kind for p in pieces] for pieces in program.chains]
    lead = np.array([one.index("kernel") if "kernel" in one else 0 for one in kinds])
    where = way, np.repeat(np.arange(len(stages)), counts), chunk, micro
    shape = (WEIGHT + 1, len(stages), int(chunk.max()) + 1, int(micro.max()) + 1)
    first, last = np.full((2, *shape), NONE)
    first[where], last[where] = begin + lead[chain], begin + sizes - 1
    final = [np.arange(begin[k], begin[k] + sizes[k]) for k in np.cumsum(counts) - 1]
    done = np.array([ids[-1] for ids in final])
    return _TaskRanges(first, last, [ids[kernel[ids]] for ids in final], done)


def _rows(at: Ids, many: Ids) -> tuple[Ids, Ids]:
    """For every entry the rows of what it points at, so many each: entries, and their rows."""
    starts, sizes = (np.cumsum(many) - many)[at], many[at]
    entry = np.repeat(np.arange(len(at)), sizes)
    return entry, starts[entry] + np.arange(len(entry)) - (np.cumsum(sizes) - sizes)[entry]


def _write_messages(draft: _GraphColumns, program: Program, spans: _TaskRanges) -> None:
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


def _write_end(draft: _GraphColumns, program: Program, spans: _TaskRanges) -> None:
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


def _write_buffers(draft: _GraphColumns, program: Program, spans: _TaskRanges) -> None:
    """What each rank holds for good, and what each micro-batch keeps from forward to backward."""
    for one in program.buffers:
        born = dies = np.array([NONE])
        if one.stage != NONE:
            born = spans.first[one.first, one.stage].reshape(-1)
            final = WEIGHT if (spans.last[WEIGHT, one.stage] >= 0).any() else BACKWARD
            dies = spans.last[final if one.last == NONE else one.last, one.stage].reshape(-1)
        draft.buffer(
            len(born), one.kind, one.name, bytes=one.bytes, rank=one.rank, born=born, dies=dies
        )
