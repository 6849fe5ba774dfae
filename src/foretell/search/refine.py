"""Descent from good plans: what a small change of a plan would do, predicted and taken if it pays.

Moves change one thing: the schedule, the micro-batch, how much is run again and where, how blocks
are split among stages, how state is sharded, how gradients are sent, or two degrees against each
other. A plan is only as good as the step that `predict` gives it.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from importlib.metadata import version
from itertools import pairwise, permutations
from pathlib import Path
from typing import Any, NamedTuple

from foretell.cluster import Cluster
from foretell.errors import ForetellError, InputError
from foretell.io import read_json, write_text
from foretell.plan import Plan
from foretell.plan.check import check, micro_batches, settled
from foretell.plan.framework import framework_of
from foretell.plan.plan import (
    Segment,
    as_degrees,
    blocks_of,
    micro_samples,
    plan_of_segments,
    segments,
)
from foretell.plan.prices import estimate
from foretell.plan.program import FAMILIES, ONE_CHUNK
from foretell.pool import Pool
from foretell.predict import Prediction, predict_many
from foretell.search.oracle.space import at_least
from foretell.search.partition import Mesh, Partitioner, divisors, rows_of
from foretell.workload import Workload

BATCHED = 8  # plans predicted before the best of them is taken
FEW = 4  # blocks that are moved at once, beside one alone
SAME = 1e-9  # of a step: plans that differ by less are as good as each other
BEYOND = 1.3  # of the best step so far: moves whose closed form is above, and descents, come last
LAST = 0.15  # of the evaluations, for a descent from the best plan alone when others have ended
AGAIN = 3  # next-best plans that begin a descent together, when every strategy had one


class Found(NamedTuple):
    """A plan as it was asked, what it leaves open still open, and its prediction."""

    plan: Plan
    prediction: Prediction

    cost: float  # what is made least: seconds or joules of a step

    @property
    def step(self) -> float:
        """Seconds predicted."""
        return self.prediction.step

    def key(self) -> tuple[float, str]:
        """What sorts plans: the least cost first, then by text."""
        return self.cost, str(self.plan)


class Guess(NamedTuple):
    """What is made least by the closed form, and what it cannot be below."""

    cost: float
    least: float
    fits: bool = True  # as far as the closed form knows


@dataclass
class Evaluator:
    """Predictions by plan, and how many of them may still be made."""

    workload: Workload
    cluster: Cluster
    budget: int
    accepts: Callable[[Plan], bool] = lambda plan: True  # what a plan of the answer has to be
    filled: Callable[[Plan], Plan] = lambda plan: plan  # what every plan is asked to be besides
    cost: Callable[[Plan, float], float] = lambda plan, step: step  # what is made least
    known: dict[str, Prediction | None] = field(default_factory=dict)
    forms: dict[str, str] = field(default_factory=dict)  # a plan as it is settled, and as asked
    ends: float = math.inf  # when the clock ends it, once there is an answer
    evaluations: int = 0  # plans predicted so far; one that is asked in two ways counts once
    pool: Pool | None = None  # workers that share the predictions; None: this process
    left: set[str] = field(default_factory=set)  # plans, settled, from which moves were tried
    _settled: dict[Plan, str] = field(default_factory=dict)
    _plans: dict[str, Plan] = field(default_factory=dict)

    @property
    def is_spent(self) -> bool:
        """Whether the budget, or the time, is used up."""
        return self.evaluations >= self.budget or self.is_late

    @property
    def is_late(self) -> bool:
        """Whether time is up and some plan fits."""
        return time.monotonic() > self.ends and any(one and one.fits for one in self.known.values())

    def ranked(self) -> list[Found]:
        """Every plan predicted so far that fits, the shortest step first."""
        every = ((self._plan(text), one) for text, one in self.known.items() if one)
        return sorted(
            (Found(p, one, self.worth(one)) for p, one in every if one.fits), key=Found.key
        )

    def _plan(self, text: str) -> Plan:
        """The plan of a text."""
        if text not in self._plans:
            self._plans[text] = Plan.parse(text)
        return self._plans[text]

    def worth(self, found: Prediction) -> float:
        """What is made least, of a plan that was predicted."""
        return self.cost(found.plan, found.step)

    def best(self) -> Found | None:
        """The best of them."""
        return next(iter(self.ranked()), None)

    def of(self, plans: Sequence[Plan]) -> list[Found]:
        """Those plans that can be and fit, predicted as far as budget and time go."""
        if self.ends < math.inf and len(plans) > BATCHED:
            some = (plans[k : k + BATCHED] for k in range(0, len(plans), BATCHED))
            return [found for part in some for found in self.of(part)]
        plans = [self.filled(plan) for plan in plans]
        able, same = list[Plan](), dict[str, str]()  # same: another text of a plan that is known
        for plan in dict.fromkeys(plans):
            text, form = str(plan), self._resolved_text(plan)
            self._plans[text] = plan
            if text in self.known:
                continue
            if not form:
                self.known[text] = None
            elif not self.accepts(plan):
                continue
            elif form in self.forms:
                same[text] = self.forms[form]
            elif not self.is_spent:
                self.evaluations += 1
                self.forms[form] = text
                able.append(plan)
        try:
            found: Sequence[Prediction | None] = (
                predict_many(able, self.workload, self.cluster, advises=False)
                if self.pool is None or len(able) < 2
                else self._by_workers(able, self.pool)
            )
        except ForetellError:  # of one of them: each by itself
            found = [one for p in able for one in _predictions([p], self.workload, self.cluster)]
        self.known |= {str(plan): one for plan, one in zip(able, found, strict=True)}
        self.known |= {text: self.known[first] for text, first in same.items()}
        mine = ((plan, self.known.get(str(plan))) for plan in plans)
        return [
            Found(plan, one, self.worth(one)) for plan, one in mine if one is not None and one.fits
        ]

    def _by_workers(self, plans: list[Plan], pool: Pool) -> list[Prediction | None]:
        """Predictions, a part of them by each worker."""
        work = partial(_predictions, workload=self.workload, cluster=self.cluster)
        many = min(pool.size, len(plans))
        cuts = [len(plans) * k // many for k in range(many + 1)]
        parts = pool.map(work, [plans[a:b] for a, b in pairwise(cuts)])
        return [one for part in parts for one in part]

    def new(self, plans: Iterable[Plan]) -> list[Plan]:
        """Plans that can be and are accepted, of which nothing is known yet."""
        candidates = dict.fromkeys(self.filled(plan) for plan in plans)
        return [
            p
            for p in candidates
            if str(p) not in self.known and self.is_valid(p) and self.accepts(p)
        ]

    def estimated(self, plans: Sequence[Plan]) -> dict[Plan, Guess]:
        """What is made least, by the closed form, all plans at once; it has none of some.

        Stages on unlike devices have a rough guess and no bound.
        """
        found = {
            p: Guess(self.rough_cost(p), 0.0, self.chains.fits(p))
            for p in plans
            if not self.is_seen(p)
        }
        for ranks in dict.fromkeys(p.placement for p in plans):
            machines = self.cluster.subset(ranks) if ranks else self.cluster
            bare = {
                (p.but(placement=(), cluster="") if ranks else p): p
                for p in plans
                if p.placement == ranks and p not in found
            }
            todo = [list(bare)] if bare else []
            while todo:
                some = todo.pop()
                try:
                    took = estimate(some, self.workload, machines)
                except ForetellError:  # one of them cannot be priced: the others still can
                    half = len(some) // 2
                    todo += [some[half:], some[:half]] if half else []
                    continue
                columns = took.step.tolist(), at_least(took).tolist(), took.missing.tolist()
                for p, step, least, missing in zip(some, *columns, strict=True):
                    found[bare[p]] = Guess(self.cost(p, step), self.cost(p, least), not missing)
        return found

    def rough_cost(self, plan: Plan) -> float:
        """What is made least, by a rough guess of a chain of stages; 0 where there is none."""
        if plan.groups or plan.sync or plan.stages or not plan.micro_batch:
            return 0.0
        try:
            return self.cost(plan, self.chains.guess(plan))
        except ForetellError:
            return 0.0

    @cached_property
    def chains(self) -> Partitioner:
        return Partitioner(self.workload, self.cluster)

    def unexpanded(self, limit: float) -> list[Found]:
        """Plans from which no move was tried, none above a limit, the best first.

        Of plans that take equally long the first one goes first, all others come last.
        """
        found = sorted(
            (self.worth(one), text) for text, one in self.known.items() if one and one.fits
        )
        first, again, last = list[Found](), list[Found](), -1.0
        for cost, text in found:
            plan, one = self._plan(text), self.known[text]
            same, last = cost <= last * (1 + SAME), cost
            if one is not None and cost <= limit and not self.is_expanded(plan):
                (again if same else first).append(Found(plan, one, cost))
        return first + again

    def is_expanded(self, plan: Plan) -> bool:
        """Whether moves from a plan were tried."""
        return self._resolved_text(plan) in self.left

    def mark_expanded(self, plan: Plan) -> Plan:
        """Note that moves from a plan are tried; the plan in degrees where it is one of those."""
        self.left.add(self._resolved_text(plan))
        if plan.segments:
            alike = as_degrees(plan, segments(plan, self.workload), self.cluster)
            return plan if alike is None else alike
        return plan

    def neighbours(self, plan: Plan) -> Iterator[Plan]:
        """Plans one move away; some cannot be."""
        return neighbours(plan, self.workload, self.cluster, self.chains)

    def is_seen(self, plan: Plan) -> bool:
        """Whether the closed form prices every stage on the devices that it has."""
        apart = plan.segments or plan.groups or plan.shares or plan.sync or plan.stages
        mine = plan.placement or range(self.cluster.size)
        return not apart and (
            plan.pp == 1 or len({self.cluster.devices[rank].name for rank in mine}) == 1
        )

    def save(self, path: Path) -> None:
        """Keep what was predicted in a file, so that the same search can go on from there."""
        rows = {text: one and one.as_json() for text, one in self.known.items()}
        write_text(path, json.dumps({"for": self._question(), "plans": rows}))

    def load(self, path: Path) -> None:
        """Take over what an earlier search of the same question predicted."""
        if not path.is_file():
            return
        stored = read_json(path)
        if not isinstance(stored, dict) or stored.get("for") != self._question():
            raise InputError(
                f"{path} is of another search: its model, cluster or version differ",
                hint="name another file, or remove it",
            )
        self.known = {text: row and _read(row) for text, row in stored["plans"].items()}
        self.evaluations = sum(row is not None for row in self.known.values())

    def _question(self) -> dict[str, str]:
        return {
            "model": self.workload.fingerprint(), "cluster": self.cluster.fingerprint(),
            "foretell": version("foretell"),
        }  # fmt: skip

    def is_valid(self, plan: Plan) -> bool:
        """Whether a plan is one for this model and these machines."""
        return bool(self._resolved_text(plan))

    def _resolved_text(self, given: Plan) -> str:
        """A plan with all it leaves open settled; empty where it cannot be."""
        if given in self._settled:
            return self._settled[given]
        self._settled[given] = ""
        try:
            plan = check(given, self.workload, self.cluster) if given.segments else given
            inner, _ = settled(plan, self.workload, self.cluster)
            rows = segments(inner, self.workload) if inner.segments else ()
        except ForetellError:
            return ""
        own = [one.plan for one in rows] or [inner]
        alike = len({one.zero == 3 for one in own}) == 1
        if alike and all(_is_wrapped(one, inner.framework) for one in own):
            self._settled[given] = f"{inner} on {plan.placement}"
        return self._settled[given]


def _predictions(
    plans: Sequence[Plan], workload: Workload, cluster: Cluster
) -> list[Prediction | None]:
    """The prediction of each plan, None of those that cannot be; priced together where all can."""
    try:
        return list(predict_many(plans, workload, cluster, advises=False))
    except ForetellError:
        if len(plans) == 1:
            return [None]
        return [one for plan in plans for one in _predictions([plan], workload, cluster)]


def is_uneven(plan: Plan) -> bool:
    """Whether replicas have unlike numbers of samples, of the whole plan or of a segment."""
    return bool(plan.shares) or any("shares" in text for row in plan.segments for text in row[2:])


def _changed(plan: Plan, other: Plan) -> object:
    """What kind of move leads from one plan to another: the fields it changes, every schedule."""
    names = [f.name for f in fields(Plan) if getattr(other, f.name) != getattr(plan, f.name)]
    return tuple(names), other.schedule


def _read(row: dict[str, Any]) -> Prediction:
    """A prediction as a file has it."""
    names = {"step": "step_s", "low": "low_s", "high": "high_s", "peak": "peak_bytes"}
    names |= {"missing": "missing_bytes", "away": "distances"}
    keys = ((f.name, names.get(f.name, f.name)) for f in fields(Prediction))
    values = {name: row[key] for name, key in keys if key in row}
    return Prediction(**values | {"plan": Plan.parse(row["plan"])})


def _is_wrapped(plan: Plan, framework: str) -> bool:
    """Whether a framework shards as a plan says: DDP no parameters, FSDP nothing less."""
    if framework == "ddp":
        return plan.zero < 3
    return framework != "fsdp" or plan.zero == 3 or plan.dp == 1


def _wrapped(plan: Plan) -> Plan:
    """A plan that leaves its framework and precision open where that one does not shard so."""
    if _is_wrapped(plan, plan.framework):
        return plan
    return plan.but(framework="", precision="", dtype="", optimizer="", compile=False)


@dataclass
class Descent:
    """The best plan that single moves led to from a start, and moves from it not tried yet."""

    best: Found
    moves: list[Plan] | None = None  # worked out when they are first needed
    further: list[Plan] = field(default_factory=list)  # the last move once more, tried first
    turns: int = 0

    def keep(self, found: Sequence[Found]) -> None:
        """Go on from the best of some moves if it pays."""
        lower = min(found, key=Found.key, default=self.best)
        if lower.cost < self.best.cost * (1 - SAME):
            self.further = list(_repeated_cut(self.best.plan, lower.plan))
            self.best, self.moves = lower, None


def _repeated_cut(before: Plan, after: Plan) -> Iterator[Plan]:
    """A change of the blocks of stages once and twice more, where it was the only change."""
    if before.layers and after.layers and before.but(layers=after.layers) == after:
        moved = [b - a for a, b in zip(before.layers, after.layers, strict=True)]
        for times in (1, 2):
            cut = tuple(n + times * d for n, d in zip(after.layers, moved, strict=True))
            if min(cut) > 0:
                yield after.but(layers=cut)


def descend(
    starts: Sequence[Found], on: Evaluator, tell: Callable[[float], None] = lambda step: None,
    *, kind: Callable[[Plan], str] | None = None, late: Mapping[Plan, Guess] | None = None,
) -> Found:  # fmt: skip
    """The best plan that single moves lead to, as far as the budget goes.

    Without `kind` from the starts alone; with it, which tells strategies apart, from the best start
    of each, then from what was met on the way. Moves that take longer than the plan they are from
    by a tested lower bound are left out, all others are tried in turn: those that the closed form
    puts far beyond the best, and `late` ones, when nothing else is left. The last part of the
    budget is for a descent from the best plan alone.
    """
    race, whole = Race(list(starts), on, kind, dict(late or {})), on.budget
    on.budget = int(whole * (1 - LAST)) if kind else whole
    while True:
        if on.is_spent and on.budget < whole:
            on.budget, race.live = whole, [Descent(race.best)]
        one = None if on.is_spent else race.next()
        if one is None and on.budget == whole:
            return race.best
        if one is None:
            on.budget, race.live = whole, [Descent(race.best)]
            continue
        if one.moves is None:  # propose, and estimate in batch
            plan = on.mark_expanded(one.best.plan)
            offered = on.estimated(on.new(on.neighbours(plan)))
            one.moves = one.further + race.ordered(plan, one.best.cost, offered)
        found = on.of(one.moves[:BATCHED])  # lower and simulate
        del one.moves[:BATCHED]
        if race.keep(one, found):
            tell(race.best.step)


@dataclass
class Race:
    """Descents side by side: whose turn it is, and what is left when all have ended."""

    starts: list[Found]
    on: Evaluator
    kind: Callable[[Plan], str] | None
    late: dict[Plan, Guess]  # plans far beyond the best
    live: list[Descent] = field(default_factory=list)
    turn: int = 0

    def __post_init__(self) -> None:
        self.best = min(self.starts, key=Found.key)
        self.lead = self.best.cost  # of the descents of this round
        self.firsts = self.starts
        self.seen: set[str] = set()
        if self.kind:
            self.firsts = self._of_new_kinds(sorted(self.starts, key=Found.key))
        self.live = [Descent(one) for one in self.firsts]

    def next(self) -> Descent | None:
        """Every other turn the descent that is ahead, else the one that had fewest."""
        self.live = [one for one in self.live if one.moves is None or one.moves]
        near = [one for one in self.live if one.best.cost <= BEYOND * self.lead]
        if not near and self.kind:
            near = self.live = self._new_descents()
            self.lead = min((one.best.cost for one in near), default=self.lead)
        if not near:
            return None
        ahead = min(near, key=lambda one: one.best.key())
        one = min(near, key=lambda one: one.turns) if self.turn % 2 else ahead
        self.turn += 1
        one.turns += 1
        return one

    def keep(self, one: Descent, found: Sequence[Found]) -> bool:
        """Take what a turn found; whether that is the best of all."""
        one.keep(found)
        self.lead = min(self.lead, one.best.cost)
        if one.best.cost >= self.best.cost:
            return False
        self.best = one.best
        return True

    def _new_descents(self) -> list[Descent]:
        """New descents: from strategies met on the way, the next best plans, what is far beyond."""
        near = self.on.unexpanded(BEYOND * self.best.cost)
        starts = self._of_new_kinds(near) or near[:AGAIN]
        starts = starts or [one for one in self.firsts if not self.on.is_expanded(one.plan)]
        if not starts and (few := self._few_postponed()):
            return [Descent(self.best, few)]
        return [Descent(one) for one in starts]

    def _few_postponed(self) -> list[Plan]:
        """The best guesses of those far beyond that could still be ahead."""
        able = [p for p, guess in self.late.items() if guess.least < self.best.cost]
        few = sorted(self.on.new(able), key=self._rank)[:BATCHED]
        self.late = {p: self.late[p] for p in able if p not in few}
        return few

    def _rank(self, plan: Plan) -> tuple[bool, float, str]:
        guess = self.late[plan]
        return not guess.fits, guess.cost, str(plan)

    def _of_new_kinds(self, plans: Sequence[Found]) -> list[Found]:
        """The first plan of every strategy that had no descent."""
        found: dict[str, Found] = {}
        for one in plans:
            name = self.kind(one.plan) if self.kind else ""
            if name not in self.seen:
                found.setdefault(name, one)
        self.seen |= set(found)
        return list(found.values())

    def ordered(self, plan: Plan, cost: float, offered: Mapping[Plan, Guess]) -> list[Plan]:
        """Moves from a plan: the best that changes some fields, then the second best.

        Those that cannot be below its cost are left out.
        """
        able = {p: guess for p, guess in offered.items() if guess.least < cost}
        far = {p: guess for p, guess in able.items() if self._is_far(p, guess)}
        near = sorted(able.keys() - far.keys(), key=lambda p: (able[p].cost, str(p)))
        self.late |= far
        rows = plan if plan.segments else in_segments(plan, self.on.workload)
        turns: dict[Plan, int] = {}
        many: dict[object, int] = {}
        for other in near:
            kind = _changed(rows if rows and other.segments else plan, other)
            turns[other] = many[kind] = many.get(kind, -1) + 1
        return sorted(near, key=lambda other: turns[other])

    def _is_far(self, plan: Plan, guess: Guess) -> bool:
        """Whether a move comes last; a rough guess decides that of uneven shares alone.

        So does one that does not seem to fit.
        """
        if not guess.fits:
            return True
        if self.on.is_seen(plan):
            return guess.cost > BEYOND * self.lead
        return is_uneven(plan) and guess.cost > self.lead


def neighbours(
    plan: Plan, workload: Workload, cluster: Cluster, chains: Partitioner | None = None
) -> Iterator[Plan]:
    """Plans one move away; some cannot be. `chains` keeps what was priced."""
    chains = chains or Partitioner(workload, cluster)
    if plan.groups or plan.sync or plan.stages:
        moves = _kernel_moves(plan)
    elif plan.segments:
        moves = _segment_moves(plan, chains)
    else:
        moves = _degree_moves(plan, chains)
    seen = {str(plan)}
    for other in moves:
        if str(other) not in seen:
            seen.add(str(other))
            yield other


def _degree_moves(plan: Plan, chains: Partitioner) -> Iterator[Plan]:
    workload = chains.workload
    yield from _schedule_moves(plan)
    yield from _micro_moves(plan)
    yield from _recompute_moves(plan, blocks_of(plan, workload)[0])
    yield from _layer_moves(plan, workload)
    yield from _state_moves(plan)
    yield from _kernel_moves(plan)
    yield from _framework_moves(plan)
    yield from _expert_moves(plan, workload)
    yield from _as_segments(plan, chains)
    yield from share_moves(plan, chains)
    yield from _degree_trades(plan, workload)


def _as_segments(plan: Plan, chains: Partitioner) -> Iterator[Plan]:
    """Stages on unlike devices changed one by one, or in another order, as segments."""
    rows = in_segments(plan, chains.workload)
    if rows is not None and len(chains.cluster.devices_by_kind()) > 1:
        yield from _segment_moves(rows, chains)


def share_moves(plan: Plan, chains: Partitioner) -> Iterator[Plan]:
    """Samples of replicas by the speed of their devices, some of them moved on, or even again."""
    alike = len(chains.cluster.devices_by_kind()) == 1
    if plan.dp == 1 or not plan.micro_batch or alike:
        return
    one = rows_of(plan, chains.workload)[0]
    for other in _share_moves(one, micro_samples(plan), micro_batches(plan), chains):
        yield plan.but(shares=other.plan.shares, micro_batch=other.plan.micro_batch)


def _share_moves(one: Segment, samples: int, turns: int, chains: Partitioner) -> Iterator[Segment]:
    """A stage whose replicas have other shares of its micro-batches of so many samples."""
    plan = one.plan
    if not plan.shares:
        mesh = chains.uneven(Mesh(one.ranks, plan), samples, turns)
        if mesh is not None:
            yield replace(one, plan=mesh.plan)
        return
    if samples % plan.dp == 0:
        yield replace(one, plan=plan.but(shares=(), micro_batch=samples // plan.dp))
    inner = len(one.ranks) // plan.dp
    kinds: dict[str, list[int]] = {}
    for k in range(plan.dp):
        kinds.setdefault(chains.cluster.devices[one.ranks[k * inner]].name, []).append(k)
    for give, take in permutations(kinds, 2):  # a sample of every replica of one kind
        shares = list(plan.shares)
        for at, k in enumerate(kinds[give]):
            shares[k] -= turns
            shares[kinds[take][at % len(kinds[take])]] += turns
        if min(shares) > 0:
            yield replace(
                one, plan=plan.but(shares=tuple(shares), micro_batch=max(shares) // turns)
            )


def in_segments(plan: Plan, workload: Workload) -> Plan | None:
    """The stages of a pipeline in degrees as segments, where they can be."""
    whole = plan.chunks == 1 and plan.schedule in ONE_CHUNK and not plan.actions
    if plan.pp == 1 or not whole:
        return None
    return plan_of_segments(plan.but(pp=1, layers=(), placement=()), rows_of(plan, workload))


def _with_half(plan: Plan) -> Iterator[Plan]:
    """Stages in another order, with micro-batches as they are and of half as many samples."""
    yield plan
    if plan.micro_batch % 2 == 0:
        yield plan.but(micro_batch=plan.micro_batch // 2)


def _schedule_moves(plan: Plan) -> Iterator[Plan]:
    if plan.pp == 1 or plan.actions:
        return
    share = plan.global_batch // max(plan.dp, 1)
    for name, family in FAMILIES.items():
        least = family.least[0] * plan.pp + family.least[1]
        enough = [m for m in _smaller(share, plan.micro_batch) if share // m >= least]
        for chunks in (2, 4, 8) if name == "interleaved" else (1,):
            cut = () if chunks > 1 else plan.layers
            for micro in enough[:2]:  # smaller where the schedule needs more of them, or gains
                yield plan.but(schedule=name, chunks=chunks, layers=cut, micro_batch=micro)


def _smaller(share: int, micro: int) -> list[int]:
    """A micro-batch, and those that are smaller and divide a share of the batch, largest first."""
    return [m for m in range(micro, 0, -1) if share % m == 0]


def _kernel_moves(plan: Plan) -> Iterator[Plan]:
    """Kernels compiled or not, the optimizer's fused or not, one of them or both changed."""
    name = plan.framework or ("fsdp" if plan.zero == 3 else "")
    other = plan.but(compile=not plan.compile)
    ways = [plan]
    if plan.compile or (name and framework_of(name).kernels == "eager"):
        ways.append(other)
    for way in ways:
        yield way
        yield way.but(optimizer_kernels="" if way.optimizer_kernels else "fused")


def _framework_moves(plan: Plan) -> Iterator[Plan]:
    """The same layout compiled under DDP, or FSDP that shards nothing; or under the usual one."""
    whole = plan.zero == 0 or (plan.zero == 3 and (plan.dp == 1 or plan.shard == 1))
    if plan.groups or not (whole or plan.zero == 1):
        return
    plain = plan.but(zero=0, shard=0) if whole else plan
    plain = plain.but(precision="", dtype="", optimizer="", compile=False, framework="")
    yield plain
    ways = [plain.but(framework="ddp", compile=True)]
    if whole and plan.ranks > 1:
        ways.append(unsharded(plain, compiled=True))
    for way in ways:
        yield way.but(optimizer_kernels="fused")  # updates go tensor by tensor else
        yield way.but(optimizer_kernels="")


def unsharded(plan: Plan, *, compiled: bool) -> Plan:
    """A plan under FSDP that shards nothing: its precision and kernels."""
    own = {"framework": "fsdp", "compile": compiled, "zero": 3, "shard": int(plan.dp > 1)}
    return plan.but(**own, precision="", dtype="", optimizer="")


def _expert_moves(plan: Plan, workload: Workload) -> Iterator[Plan]:
    """Experts over more or fewer ranks, and over those of `tp` too."""
    if workload.most("ep") <= 1:
        return
    for ep in (plan.ep * 2, plan.ep // 2):
        if 1 <= ep <= workload.most("ep"):
            yield plan.but(ep=ep)
    if plan.tp > 1 and plan.sp:
        yield plan.but(etp=0 if plan.etp else 1)


def _micro_moves(plan: Plan) -> Iterator[Plan]:
    share, now = max(plan.shares, default=plan.global_batch // max(plan.dp, 1)), plan.micro_batch
    up = next((m for m in divisors(share) if m > now), 0)
    down = next((m for m in reversed(divisors(share)) if m < now), 0)
    for micro in (now * 2, now // 2, up, down, share):
        if micro and share % micro == 0:
            yield plan.but(micro_batch=micro)


def _recompute_moves(plan: Plan, blocks: int) -> Iterator[Plan]:
    """Fewer blocks of a stage run again, by halves and by one: a plan that fits gains by no more.

    All of them less dearly is another way to run fewer.
    """
    if plan.recompute == "none":
        return
    yield plan.but(recompute="none", recompute_layers=0)
    if not plan.offload:  # the optimizer's state leaves its room to activations
        yield plan.but(recompute="none", recompute_layers=0, offload=True)
    if plan.recompute == "full":
        yield plan.but(recompute="selective", recompute_layers=0)
    now = plan.recompute_layers or blocks
    for many in (now // 2, now - 1):
        if 0 < many < blocks:
            yield plan.but(recompute_layers=many)


def _layer_moves(plan: Plan, workload: Workload) -> Iterator[Plan]:
    """A block, or a few, from the first or last stage to the others, or to its neighbour."""
    if plan.pp == 1 or plan.chunks > 1:
        return
    now = list(blocks_of(plan, workload))
    ends = {0, plan.pp - 1}
    for source in range(plan.pp):
        for target in (*ends, source - 1, source + 1):
            is_end = source in ends or target in ends
            for many in (1, FEW) if is_end and 0 <= target < plan.pp and target != source else ():
                if now[source] > many:
                    assigned = list(now)
                    assigned[source] -= many
                    assigned[target] += many
                    yield plan.but(layers=tuple(assigned))


def _state_moves(plan: Plan) -> Iterator[Plan]:
    """How state is sharded, and how gradients are sent."""
    if plan.dp > 1:
        for zero in (0, 1, 2, 3):
            if zero < 2 or plan.pp == 1:
                yield _wrapped(plan.but(zero=zero, shard=0))
        for many in divisors(plan.dp)[1:-1] if plan.zero else ():
            yield plan.but(shard=many)
        if plan.zero == 3 and plan.shard:
            yield plan.but(shard=0)
        for times in (2.0, 0.5, 4.0):
            yield plan.but(bucket_mb=plan.bucket_mb * times)
        yield plan.but(overlap=True)
    if plan.offload:
        yield plan.but(offload=False)
    if plan.tp > 1:
        yield plan.but(sp=not plan.sp)


def _degree_trades(plan: Plan, workload: Workload) -> Iterator[Plan]:
    """Two degrees against each other, the micro-batches as they are."""
    axes = [a for a in ("dp", "tp", "pp", "cp") if a == "dp" or workload.most(a) > 1 or a == "pp"]
    for give in axes:
        for take in axes:
            if give == take or getattr(plan, give) % 2:
                continue
            changed: dict[str, Any] = {
                give: getattr(plan, give) // 2,
                take: 2 * getattr(plan, take),
            }
            other = plan.but(**changed, layers=(), shard=0, shares=())
            if other.pp == 1:
                other = other.but(schedule="1f1b", chunks=1, actions=())
            yield other.but(sp=plan.sp or other.tp > 1)
            if take == "dp":
                yield other.but(micro_batch=max(plan.micro_batch // 2, 1))


def _segment_moves(plan: Plan, chains: Partitioner) -> Iterator[Plan]:
    workload = chains.workload
    found = segments(plan, workload)
    yield from _kernel_moves(plan)
    yield from _segment_frameworks(plan, found)
    yield from _stage_moves(plan, found, workload)
    for name in ONE_CHUNK:
        yield from _with_half(plan.but(schedule=name))
    for micro in (plan.micro_batch * 2, plan.micro_batch // 2):
        if micro and plan.global_batch % micro == 0:
            yield plan.but(micro_batch=micro)
    yield from _with_half(plan_of_segments(plan, found[::-1]))
    yield from _merges(plan, found, chains)
    yield from _block_moved(plan, found)
    turns = plan.global_batch // max(plan.micro_batch, 1)
    for a, one in enumerate(found):
        for other in _share_moves(one, plan.micro_batch, turns, chains) if one.plan.dp > 1 else ():
            yield plan_of_segments(plan, [*found[:a], other, *found[a + 1 :]])
    for a in range(len(found) - 1 if len(found) > 2 else 0):  # neighbours change places
        yield plan_of_segments(plan, [*found[:a], found[a + 1], found[a], *found[a + 2 :]])


def _segment_frameworks(plan: Plan, found: Sequence[Segment]) -> Iterator[Plan]:
    """PyTorch's own stages, compiled, in the precision it runs in; under FSDP nothing sharded."""
    own = plan.but(compile=True, precision="", dtype="", optimizer="")
    whole = [one.plan.but(zero=0, shard=0) if one.plan.zero == 3 else one.plan for one in found]
    alone = [p.but(zero=3, shard=int(p.dp > 1)) for p in whole]
    for name, rows in (("ddp", whole), ("fsdp", alone)):
        for kernels in ("fused", "") if plan.framework != name else ():
            assigned = [replace(one, plan=row) for one, row in zip(found, rows, strict=True)]
            yield plan_of_segments(own.but(framework=name, optimizer_kernels=kernels), assigned)


def _block_moved(plan: Plan, found: Sequence[Segment]) -> Iterator[Plan]:
    """One block from a segment to another."""
    for a, source in enumerate(found):
        for b, target in enumerate(found):
            if a != b and source.blocks > 1:
                assigned = list(found)
                assigned[a] = replace(source, blocks=source.blocks - 1)
                assigned[b] = replace(target, blocks=target.blocks + 1)
                yield plan_of_segments(plan, assigned)


def _splits(plan: Plan, workload: Workload) -> Iterator[Plan]:
    """A segment's replica over twice or half as many ranks, along each way to split its layers."""
    for axis in ("tp", "filter", "channel"):
        now = getattr(plan, axis)
        for many in (now * 2, now // 2):
            if 1 <= many <= workload.most(axis):
                yield plan.but(**{axis: many, "sp": many > 1 if axis == "tp" else plan.sp})
    sides = [side for side in ("height", "width", "depth") if workload.most(side) > 1]
    now = (*plan.spatial, *(1,) * len(sides))[: len(sides)]
    for at, side in enumerate(sides):
        for many in (now[at] * 2, now[at] // 2):
            if 1 <= many <= workload.most(side):
                cut = (*now[:at], many, *now[at + 1 :])
                yield plan.but(spatial=cut if max(cut) > 1 else ())


def _stage_moves(plan: Plan, found: Sequence[Segment], workload: Workload) -> Iterator[Plan]:
    """Recompute, sharding and the ways to split layers of one segment."""
    for a, one in enumerate(found):
        p = one.plan
        alone = list(_recompute_moves(p, one.blocks))
        alone += [p.but(zero=z) for z in (0, 1, 2) if p.dp > 1]
        alone += [p.but(offload=False)] if p.offload else []
        changed = [(plan.micro_batch, other) for other in alone]
        for other in _splits(p, workload):
            dp, rest = divmod(len(one.ranks), max(other.ranks // (other.dp * other.pp), 1))
            samples = math.lcm(plan.micro_batch, dp)  # more replicas may want larger micro-batches
            if dp and not rest and plan.global_batch % samples == 0:
                shard = int(dp > 1) if p.dp == 1 or p.shard == 1 else 0
                own: dict[str, Any] = {"shard": shard if other.zero == 3 else 0}
                own |= {"dp": dp, "micro_batch": samples // dp, "shares": ()}
                changed.append((samples, other.but(**own)))
        for samples, other in changed:
            times = samples // plan.micro_batch
            if times > 1 and any(row.plan.shares for row in found):
                continue
            rows = [
                replace(row, plan=row.plan.but(micro_batch=row.plan.micro_batch * times))
                for row in found
            ]
            rows[a] = replace(one, plan=other)
            yield plan_of_segments(plan.but(micro_batch=samples), rows)


def _merges(plan: Plan, found: Sequence[Segment], chains: Partitioner) -> Iterator[Plan]:
    """Two segments that are split alike as one with the replicas of both, shared evenly or not."""
    turns = plan.global_batch // max(plan.micro_batch, 1)
    for a in range(len(found) - 1):
        first, then = found[a], found[a + 1]
        dp, samples = first.plan.dp + then.plan.dp, plan.micro_batch
        if first.plan.tp != then.plan.tp or first.plan.cp != then.plan.cp:
            continue
        own = first.plan.but(dp=dp, micro_batch=max(samples // dp, 1), shares=())
        one = Segment(first.blocks + then.blocks, first.ranks + then.ranks, own)
        some = [one] if len(found) > 2 and samples % dp == 0 else []
        for other in (*some, *_share_moves(one, samples, turns, chains)):
            yield plan_of_segments(plan, [*found[:a], other, *found[a + 2 :]])
