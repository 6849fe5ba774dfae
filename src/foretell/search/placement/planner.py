"""The planners of placements, and the baselines they are compared with.

What others would do, each in its own space, on the same evaluator; and all placements of a
few.

even-allreduce, even-ps                   data parallel, as many samples for every rank; servers
                                          are split, or one serves all: the quicker of both
proportional-allreduce, proportional-ps   samples by the speed of devices
horovod                                   even, gradients fused to 64 MiB
hap                                       one program on all ranks, samples by an LP, each tensor
                                          replicated or split, with the best way to agree
single                                    the fastest device alone
heft                                      each op group on the device that ends it first
metis                                     groups split over all devices by METIS
flexflow                                  Markov chain over sets and splits, even samples
heterog                                   per group one device, or all with even or
                                          proportional samples by ps (any server) or
                                          all-reduce; descent
tag                                       its tree without its network: sets of devices,
                                          all-reduce, ps (any server) or split, even samples
random                                    the best of so many at random

The planner behind `--with placement` and `--with tag`, and its answer as a plan.

Where all groups run on one set of ranks the plan has `dp`, `shares`, `placement` and `sync`, which
deploy. Equal stages become `pp`. Other placements are written group by group in `groups`: first
and last layer, the way its replicas agree, and rank:samples of each.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from itertools import islice, permutations, product
from math import inf, prod
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from foretell import portable
from foretell.cluster import Cluster
from foretell.errors import ForetellError, InfeasibleError, InputError, UnmodelledError, unknown
from foretell.plan import Plan
from foretell.predict import Prediction
from foretell.search.kit import Planned, Planner, Progress, priced, silent
from foretell.search.placement import search as evaluate
from foretell.search.placement.policy import shipped
from foretell.search.placement.problem import (
    ALL_REDUCE,
    BALANCED,
    EVEN,
    FACTORS,
    MICROS,
    MODES,
    MOST_CELLS,
    PROPORTIONAL,
    PS,
    SHARDED,
    SPLIT,
    WAYS,
    Action,
    Placement,
    Problem,
    actions,
    canonical,
    law,
    problem,
    refined,
    text,
    uniform,
    with_servers,
)
from foretell.search.placement.search import (
    FUSES,
    Allowed,
    Evaluator,
    Prior,
    Tree,
    anneal,
    bound,
    even_chances,
    look_ahead,
    memory,
    polish,
    settled,
    shares,
    simplified,
    with_shares,
)
from foretell.workload import Workload

MOST = 60_000  # placements that are all tried: some seconds
_AT_ONCE = 4096


FUSED = 64 * 2**20  # bytes: Horovod's fusion buffer
CHAIN = 2000  # proposals of the Markov chain
DRAWS = 2000  # random placements
PLAYOUTS = 800  # of the tree without a network: the middle one of TAG's budgets
Found = tuple[Placement, float]


def count(problem: Problem) -> int:
    """How many placements there are."""
    return prod(len(with_servers(problem, g)) for g in problem.leaders) * len(_steps(problem))


def every(problem: Problem) -> Iterator[Placement]:
    """Each of them."""
    choices = [with_servers(problem, g) for g in problem.leaders]
    for row in product(*choices):
        chosen = dict(zip(problem.leaders, row, strict=True))
        picked = tuple(chosen[group.leader] for group in problem.groups)
        for micros, fuse, mode in _steps(problem):
            yield Placement(picked, micros, fuse, mode)


def _steps(problem: Problem) -> list[tuple[int, float, int]]:
    micros = [m for m in MICROS if m <= problem.batch]
    fuses = FUSES if len(problem.groups) > 1 else FUSES[:1]
    return list(product(micros, fuses, range(len(MODES))))


def best_baseline(on: Evaluator) -> tuple[Placement, float]:
    """The quickest of all."""
    rest = every(on.problem)
    found: list[tuple[float, int, Placement]] = []
    while some := list(islice(rest, _AT_ONCE)):
        took = on.many(some)
        i = int(np.argmin(took))
        found.append((took[i], len(found), some[i]))
    seconds, _, placement = min(found)
    return placement, seconds


def even_allreduce(on: Evaluator) -> Found:
    """Plain DDP."""
    return _one(on, uniform(on.problem, Action(0, ALL_REDUCE), mode=EVEN))


def even_ps(on: Evaluator) -> Found:
    """Parameter servers."""
    return _best(on, [uniform(on.problem, a, mode=EVEN) for a in _served(on.problem)])


def proportional_allreduce(on: Evaluator) -> Found:
    """DDP with samples by speed."""
    return _one(on, uniform(on.problem, Action(0, ALL_REDUCE), mode=PROPORTIONAL))


def proportional_ps(on: Evaluator) -> Found:
    """Parameter servers with samples by speed."""
    return _best(on, [uniform(on.problem, a, mode=PROPORTIONAL) for a in _served(on.problem)])


def _served(problem: Problem) -> list[Action]:
    """All ranks by parameter server: split, and one of each cell for everything."""
    firsts = np.unique(problem.tables.cell_of, return_index=True)[1]
    return [Action(0, PS), *(Action(0, PS, place) for place in firsts.tolist())]


def horovod(on: Evaluator) -> Found:
    """Even samples, gradients fused."""
    return _one(on, uniform(on.problem, Action(0, ALL_REDUCE), mode=EVEN, fuse=FUSED))


def hap(on: Evaluator) -> Found:
    """All ranks run one program; each tensor agrees the way that is best for the step."""
    problem = on.problem
    if problem.batch < problem.cluster.size:
        return uniform(problem, Action(0, ALL_REDUCE)), math.inf
    share = evaluate.rank_shares(problem, 0)
    best = uniform(problem, Action(0, ALL_REDUCE))
    seconds = with_shares(problem, best, share)
    for g in problem.leaders:
        for way in (SHARDED, FACTORS):
            if way == FACTORS and not problem.tables.factors[0, g] > 0:
                continue
            other = best.but((g,), Action(0, way))
            took = with_shares(problem, other, share)
            if took < seconds:
                best, seconds = other, took
            on.evaluations += 1
    split = _one(on, best)
    for g in problem.leaders:
        if Action(0, SPLIT) in actions(problem, g, ways=(SPLIT,)):
            split = _better(split, _one(on, split[0].but((g,), Action(0, SPLIT))))
    return _better((best, seconds), split)


def single(on: Evaluator) -> Found:
    """The fastest device that holds it all."""
    alone = [s for s, n in enumerate(on.problem.tables.size) if n == 1]
    return _best(on, [uniform(on.problem, Action(s, ALL_REDUCE)) for s in alone])


def heft(on: Evaluator) -> Found:
    """In order of upward rank, each group to the device that ends it first and has room."""
    problem, t = on.problem, on.problem.tables
    alone = [s for s, n in enumerate(t.size) if n == 1]
    if not alone:
        return uniform(problem, Action(0, ALL_REDUCE)), math.inf
    cell = {s: problem.fleet.sets[s][0] for s in alone}
    room = {s: float(t.room[cell[s]]) for s in alone}
    each = np.diff(t.forward[:, :, -1], axis=1) + np.diff(t.backward[:, :, -1], axis=1)
    reads = [t.reads[t.reads[:, 1] == g] for g in range(len(problem.groups))]
    size = [t.read_bytes[t.reads[:, 1] == g] * t.batch for g in range(len(problem.groups))]
    chosen: list[int] = []
    done, free = list[float](), dict.fromkeys(alone, 0.0)  # when groups end, and devices
    for g in range(len(problem.groups)):
        need = float(t.held[g] + t.state[g] + t.kept[g] * t.batch)
        able = [s for s in alone if room[s] >= need] or alone

        def ends(s: int, g: int = g) -> tuple[float, int]:
            ready = free[s]
            for (source, _, _), bytes_ in zip(reads[g].tolist(), size[g].tolist(), strict=True):
                sent = _message(problem, cell[chosen[source]], cell[s], bytes_)
                ready = max(ready, done[source] + 2 * sent * (chosen[source] != s))
            return ready + float(each[t.kind[cell[s]], g]), s

        end, best = min(map(ends, able))
        chosen.append(best)
        done.append(end)
        free[best] = end
        room[best] -= need
    return _one(on, Placement(tuple(Action(s, ALL_REDUCE) for s in chosen)))


def _message(problem: Problem, a: int, b: int, size: float) -> float:
    return float(law(problem.tables.sends[a, b], np.array([size]))[0])


def metis(on: Evaluator) -> Found:
    """Groups in as many parts as there are lone devices, cut where little is passed over."""
    problem, t = on.problem, on.problem.tables
    alone = [s for s, n in enumerate(t.size) if n == 1]
    if not alone:
        return uniform(problem, Action(0, ALL_REDUCE)), math.inf
    parts = _parted(problem, min(len(alone), len(problem.groups)))
    return _one(on, Placement(tuple(Action(alone[p], ALL_REDUCE) for p in parts)))


def _parted(problem: Problem, count: int) -> list[int]:
    from foretell.search.placement.problem import metis_parts

    t = problem.tables
    if count < 2:
        return [0] * len(problem.groups)
    each = np.diff(t.forward[0, :, -1]) + np.diff(t.backward[0, :, -1])
    try:
        reads = [(a, b) for a, b, _ in t.reads.tolist()]
        parts = metis_parts(each, reads, t.read_bytes, count)
    except UnmodelledError:
        parts = (np.cumsum(each) / each.sum() * (count - 1e-9)).astype(int).tolist()
    order = list(dict.fromkeys(parts))  # numbered as the chain meets them
    return [order.index(p) for p in parts]


def pipelines(problem: Problem, most: int = 400) -> list[Placement]:
    """Pipelines of two to four stages, with several numbers of micro-batches."""
    fleet = problem.fleet
    groups = [fleet.group_set((g,)) for g in range(fleet.num_groups)]
    boxes = [
        fleet.sets.index(tuple(i for i, c in enumerate(fleet.cells) if c.box == box))
        for box in sorted({c.box for c in fleet.cells})
    ]
    rows = [p for n in (2, 3, 4) for p in permutations(groups, n) if n <= len(groups)]
    rows += [tuple(boxes[:n]) for n in (2, 3, 4, 6, 8) if 1 < n <= len(boxes)]
    halves = fleet.num_groups == 1 and len(boxes) > 1
    rows += [tuple(boxes)] if halves else []
    found = []
    for row in dict.fromkeys(rows):
        for micros in MICROS:
            if micros <= problem.batch:
                found.append(_staged(problem, row, micros))
    return found[:most]


def _staged(problem: Problem, row: tuple[int, ...], micros: int) -> Placement:
    """Groups cut into stages by the speed of their sets."""
    t = problem.tables
    speed = [sum(t.ranks[c] * t.speed[t.kind[c]] for c in problem.fleet.sets[s]) for s in row]
    each = np.diff(t.forward[-1, :, -1]) + np.diff(t.backward[-1, :, -1])
    due = np.cumsum(speed) / sum(speed)
    passed = (np.cumsum(each) - each / 2) / each.sum()
    stage = np.minimum(np.searchsorted(due, passed), len(row) - 1)
    return Placement(tuple(Action(row[i], ALL_REDUCE) for i in stage), micros)


def flexflow(on: Evaluator, seed: int = 0, proposals: int = CHAIN) -> Found:
    """A Markov chain from data parallelism: one group at a time, even samples, no servers."""
    problem, draw = on.problem, random.Random(seed)
    now = uniform(problem, Action(0, ALL_REDUCE), mode=EVEN)
    took = on.seconds(now)
    best = (now, took)
    choices = {g: actions(problem, g, ways=(ALL_REDUCE, SPLIT)) for g in problem.leaders}
    for _ in range(proposals):
        g = draw.choice(problem.leaders)
        other = now.but((g,), draw.choice(choices[g]))
        seconds = on.seconds(other)
        # acceptance exp(β·(old - new)) with β so that 1 % slower passes in one of e cases
        worse = (seconds - took) / best[1] if best[1] < math.inf else 0.0
        if seconds < math.inf and (took == math.inf or draw.random() < portable.exp(-100 * worse)):
            now, took = other, seconds
        best = _better(best, (now, took))
    return best


def heterog(on: Evaluator) -> Found:
    """Group by group, twice round: one device, or all of them by ps or all-reduce."""
    alone = [s for s, n in enumerate(on.problem.tables.size) if n == 1]
    served, found = _served(on.problem), []
    for mode in (EVEN, PROPORTIONAL):
        starts = (Action(0, ALL_REDUCE), *served)
        now = _best(on, [uniform(on.problem, a, mode=mode) for a in starts])
        for g in on.problem.leaders * 2:
            choices = [Action(0, ALL_REDUCE), *served, *(Action(s, 0) for s in alone)]
            now = _better(now, _best(on, [now[0].but((g,), a) for a in choices]))
        found.append(now)
    return min(found, key=lambda pair: pair[1])


def tag(on: Evaluator) -> Found:
    """A tree from data parallelism that nothing guides."""
    start = uniform(on.problem, Action(0, ALL_REDUCE), mode=EVEN)
    base = on.seconds(start)
    ways = (ALL_REDUCE, PS, SPLIT)
    tree = Tree(on, [start], even_chances, base, ways=ways, steps=False)
    tree.play(PLAYOUTS)
    return tree.best


def at_random(on: Evaluator, seed: int = 0) -> Found:
    """Runs of groups with any choice each."""
    return _best(on, drawn(on.problem, DRAWS, seed))


def drawn(problem: Problem, count: int, seed: int) -> list[Placement]:
    """Placements at random: up to four runs of groups, each with one choice."""
    draw, n = random.Random(seed), len(problem.groups)
    choices = {g: actions(problem, g) for g in range(n)}
    found = []
    for _ in range(count):
        cuts = sorted(draw.sample(range(1, n), min(draw.randrange(4), n - 1)))
        rows: list[Action] = []
        for first, last in zip([0, *cuts], [*cuts, n], strict=True):
            rows += [draw.choice(choices[first])] * (last - first)
        found.append(Placement(tuple(rows), draw.choice((1, 1, 1, 2, 4)), mode=BALANCED))
    return found


def _one(on: Evaluator, placement: Placement) -> Found:
    return placement, on.seconds(placement)


def _best(on: Evaluator, placements: list[Placement]) -> Found:
    if not placements:
        return uniform(on.problem, Action(0, ALL_REDUCE)), math.inf
    took = on.many(placements)
    i = int(np.argmin(took))
    return placements[i], took[i]


def _better(one: Found, other: Found) -> Found:
    return other if other[1] < one[1] else one


BASELINES: dict[str, Callable[..., Found]] = {
    "even-allreduce": even_allreduce,
    "even-ps": even_ps,
    "proportional-allreduce": proportional_allreduce,
    "proportional-ps": proportional_ps,
    "horovod": horovod,
    "hap": hap,
    "single": single,
    "heft": heft,
    "metis": metis,
    "flexflow": flexflow,
    "heterog": heterog,
    "tag": tag,
    "random": at_random,
}


Ints = npt.NDArray[np.int64]


def plan_of(on: Problem, placement: Placement, share: Ints | None = None) -> Plan:
    """The plan that does what a placement says."""
    placement = canonical(on, placement)
    share = shares(on, placement) if share is None else share
    base = Plan(
        global_batch=on.batch,
        bucket_mb=round(min(placement.fuse, 2.0**40) / 2**20, 3) or 0.001,
        framework=on.run.profile.name,
        model=on.workload.fingerprint(),
        cluster=on.cluster.fingerprint(),
    )
    used = {a.devices for a in placement.actions}
    if len(used) == 1 and all(a.way != SPLIT for a in placement.actions):
        return _replicas(on, placement, share, base)
    if len(used) == 1 and all(a.way == SPLIT for a in placement.actions):
        return _whole_split(on, placement, base)
    # rows say how their layers agree: what they cannot say is who serves, and what goes as factors
    sent = tuple(row for row in _sync(on, placement, tuple) if row[1] != "sharded")
    rows = tuple(_rows(on, placement, share))
    return base.but(**_batches(on, placement, on.batch), groups=rows, sync=sent)


def samples(on: Problem, chosen: int, share: Ints) -> dict[int, int]:
    """Samples of each rank of a set: as many as its cell's at most, a batch in all."""
    found = {
        r: int(share[chosen, c]) for c in on.fleet.sets[chosen] for r in on.fleet.cells[c].ranks
    }
    over = sum(found.values()) - on.batch
    for rank in sorted(found, key=lambda r: (-found[r], -r)):
        if over > 0 and found[rank] > 1:
            found[rank] -= 1
            over -= 1
    while over > 0:  # every rank gave one and there is still too much
        rank = max(found, key=lambda r: (found[r], -r))
        found[rank] -= 1
        over -= 1
    return found


def _batches(on: Problem, placement: Placement, most: int) -> dict[str, int]:
    return {"micro_batch": -(-most // placement.micros)} if placement.micros > 1 else {}


def _replicas(on: Problem, placement: Placement, share: Ints, base: Plan) -> Plan:
    """Data parallelism on some ranks, with a way for each parameter."""
    chosen = placement.actions[0].devices
    assigned = dict(sorted(samples(on, chosen, share).items()))
    uneven = len(set(assigned.values())) > 1
    everywhere = tuple(assigned) == tuple(range(on.cluster.size))
    sharded = all(a.way == SHARDED for a in placement.actions) and len(assigned) > 1
    return base.but(
        dp=len(assigned),
        shares=tuple(assigned.values()) if uneven else (),
        placement=() if everywhere else tuple(assigned),
        zero=1 if sharded else 0,
        sync=() if sharded else tuple(_sync(on, placement, sorted)),
        **_batches(on, placement, max(assigned.values())),
    )


def _sync(
    on: Problem, placement: Placement, in_order: Callable[[tuple[int, ...]], Sequence[int]]
) -> Iterator[tuple[str, str]]:
    """How each parameter agrees, where that is not an all-reduce; servers count ranks in order."""
    served, places = settled(on, placement)[2].tolist(), on.fleet.ranks(0)
    for g, action in enumerate(placement.actions):
        ranks = in_order(on.fleet.ranks(action.devices))
        if action.way in (ALL_REDUCE, SPLIT) or len(ranks) == 1:
            continue
        sent = on.factored.get((action.devices, g), {})
        word = f"ps:{ranks.index(places[served[g]])}" if action.way == PS else "sharded"
        for op, name in _parameters(on, g):
            if action.way != FACTORS:
                yield name, word
            elif op in sent:
                yield name, sent[op]


def _parameters(on: Problem, group: int) -> Iterator[tuple[str, str]]:
    """(op, parameter) of a group, both behind the name of their layer; tied ones once."""
    again = {other for _, other in on.workload.tied}
    for unit in on.groups[group].units:
        layer = on.workload.layers[unit.layer]
        for op in layer.works():
            for weight in op.weights:
                if f"{layer.name}/{weight.name}" not in again:
                    yield f"{unit.name}/{op.name}", f"{unit.name}/{weight.name}"


def _whole_split(on: Problem, placement: Placement, base: Plan) -> Plan:
    ranks = on.fleet.ranks(placement.actions[0].devices)
    axis = "tp" if on.workload.most("tp") > 1 else "filter"
    return base.but(**{axis: len(ranks)}, placement=ranks, **_batches(on, placement, on.batch))


def _rows(on: Problem, placement: Placement, share: Ints) -> Iterator[tuple[str, ...]]:
    """Runs of groups that choose the same."""
    first, chosen = 0, placement.actions
    for g in range(1, len(chosen) + 1):
        if g < len(chosen) and chosen[g][:2] == chosen[first][:2]:
            continue
        action = chosen[first]
        split = action.way == SPLIT
        assigned = (
            dict.fromkeys(on.fleet.ranks(action.devices), on.batch)
            if split
            else samples(on, action.devices, share)
        )
        ends = on.groups[first].units[0].name, on.groups[g - 1].units[-1].name
        yield (*ends, WAYS[action.way], *(f"{r}:{n}" for r, n in assigned.items()))
        first = g


# What mixing devices gains: against the best part of the fleet that has one kind of device.
#
# Both are searched alike. Mixing that gains less than `WORTH` is refused. Money is the price of the
# nodes a placement touches for the time of a step; where a price is unknown, device-seconds stand
# beside it and money is left out.


WORTH = 1.005  # times as fast that a mix has to be: less is within what prices can tell apart
HOUR = 3600.0


@dataclass(frozen=True)
class Part:
    """The best placement on devices of one kind."""

    problem: Problem
    kind: str
    ranks: int
    placement: Placement
    seconds: float


def unmixed_parts(on: Evaluator, most: int) -> list[Part]:
    """The best placement on each kind of device alone; none where there is one kind."""
    problem = on.problem
    if len(problem.fleet.kinds) == 1:
        return []
    return [_part(on, k, most) for k in range(len(problem.fleet.kinds))]


def parts_of(problem: Problem, found: Mapping[int, tuple[Placement, float]]) -> list[Part]:
    """The same where the best placement on each set is known."""
    out = []
    for kind, device in enumerate(problem.fleet.kinds) if len(problem.fleet.kinds) > 1 else ():
        mine = _alike(problem, kind) & set(found)
        if mine:
            best = min(sorted(mine), key=lambda s: found[s][1])
            largest = max(int(problem.tables.size[s]) for s in mine)
            out.append(Part(problem, device.name, largest, *found[best]))
    return out


def _alike(problem: Problem, kind: int) -> set[int]:
    """Sets that have devices of one kind alone."""
    cells = problem.fleet.cells
    return {
        s for s, some in enumerate(problem.fleet.sets) if all(cells[c].kind == kind for c in some)
    }


def _part(on: Evaluator, kind: int, most: int) -> Part:
    problem = on.problem
    mine = _alike(problem, kind)
    starts = [
        uniform(problem, a, micros=micros)
        for a in actions(problem, problem.leaders[0])
        if a.devices in mine
        for micros in (1, 4)
    ]
    took = on.many(starts)
    ranked = sorted(range(len(starts)), key=lambda i: took[i])
    best, seconds = uniform(problem, Action(min(mine), ALL_REDUCE)), inf
    for i in ranked[:2]:
        found = polish(on, starts[i], most, lambda action: action.devices in mine)
        if found[1] < seconds:
            best, seconds = found
    largest = max(int(problem.tables.size[s]) for s in mine)
    return Part(problem, problem.fleet.kinds[kind].name, largest, best, seconds)


def ranks_of(problem: Problem, placement: Placement) -> tuple[int, ...]:
    """Ranks that have something to do."""
    used = {r for a in placement.actions for r in problem.fleet.ranks(a.devices)}
    return tuple(sorted(used))


def money(problem: Problem, placement: Placement, seconds: float) -> dict[str, Any]:
    """What a step costs: device-seconds, and money where the prices of all nodes are known."""
    ranks = ranks_of(problem, placement)
    price = problem.cluster.subset(ranks).price
    found: dict[str, Any] = {"ranks": len(ranks), "device_s": len(ranks) * seconds}
    found["money"] = price / HOUR * seconds if price else None
    return found


@dataclass(frozen=True)
class Verdict:
    """The mix against the best part of one kind."""

    part: Part
    gain: float  # times as fast
    mixes: bool  # whether the answer uses several kinds of device
    cost: dict[str, Any]
    part_cost: dict[str, Any]


def verdict(problem: Problem, mixed: tuple[Placement, float], found: list[Part]) -> Verdict | None:
    """What the answer gains and costs; None where there is nothing to compare with."""
    fit = [part for part in found if part.seconds < inf]
    if not fit:
        return None
    best = min(fit, key=lambda part: part.seconds)
    kinds = {problem.cluster.devices[r].name for r in ranks_of(problem, mixed[0])}
    return Verdict(
        best,
        best.seconds / mixed[1],
        len(kinds) > 1,
        money(problem, *mixed),
        money(best.problem, best.placement, best.seconds),
    )


def verdict_lines(problem: Problem, mixed: tuple[Placement, float], found: list[Part]) -> list[str]:
    """The verdict in words."""
    if len(problem.fleet.kinds) > 1 and found and all(part.seconds == inf for part in found):
        return ["no kind of device holds the model alone: only a mix does"]
    said = verdict(problem, mixed, found)
    if said is None:
        return []
    part = f"the best of one kind ({said.part_cost['ranks']} {said.part.kind})"
    if not said.mixes:
        return [f"mixing devices gains nothing here: {part} is the answer"]
    price = f"{_price(said.cost)} a step against {_price(said.part_cost)}"
    return [f"the mix is {said.gain:.2f} × as fast as {part}, and costs {price}"]


def _price(cost: dict[str, Any]) -> str:
    busy = f"{cost['device_s']:.3g} device-seconds"
    return busy if cost["money"] is None else f"{cost['money'] * 100:.3g} cents ({busy})"


# Where each part of a model runs on a mix of machines: the planner behind `--with placement`.
#
# Baselines, pipelines and one choice for all are where annealing starts, and a descent behind it
# gives the answer, so that no baseline is ever quicker. Instances small enough are tried in full. A
# tree search before it, with or without TAG's network, changed no answer at equal CPU time
# (`benchmarks/placement.py --only ablation`): it is what `--with tag` runs, and an option here.


METHODS = ("search", "mcts", *BASELINES)
PRIORS = ("learned", "look-ahead", "even")
FINE = ("single", "heft", "metis", "heterog")  # baselines that place groups on single devices
DRAWN = ("flexflow", "random")  # baselines that draw
MOST_FINE = 32  # ranks up to which every device is told apart for them
STARTS = 24  # placements the tree search may start from


@dataclass(frozen=True)
class PlacementPlanner(Planner):
    """Place, replicate and synchronise every part of a model on the machines there are."""

    name: ClassVar[str] = "placement"
    source: ClassVar[str] = "Zhang et al., TAG, TPDS 2023; uneven shares as HAP, EuroSys 2024"
    method: str = "search"  # or one of the baselines: hap, horovod, flexflow …
    playouts: int = 0  # of a tree search before annealing
    prior: str = "even"  # what guides it: learned, look-ahead, even
    strokes: int = 60_000  # simulations of annealing: an eighth a start, the rest from the best
    polish: int = 6_000  # simulations of the descent behind it, at most
    proposals: int = 2_000  # of FlexFlow's chain, which it is compared with
    global_batch: int = 0  # samples of a step; the workload's on every rank where 0
    groups: int = 40  # op groups, at most
    factors: bool = True  # gradients may be sent as their factors
    recompute: bool = True  # ranks may make a factor themselves: priced, not run
    split: bool = True  # groups may be split over the ranks of a node
    runs: bool = False  # only what any model can do: one set of ranks, a way for each parameter
    idle: bool = False  # a batch may be smaller than the number of ranks
    blocks: int = MOST_CELLS  # parts of the cluster that are told apart, at most
    framework: str = "ddp"  # whose kernels, host and optimizer are priced
    seed: int = 0

    def plan(
        self, workload: Workload, cluster: Cluster, progress: Progress = silent,
        *, kept: list[Best] | None = None,
    ) -> Planned:  # fmt: skip
        """The quickest placement that fits; itself it is left in `kept`."""
        began = time.process_time()
        self._check()
        progress("pricing", inf)
        on = fine = Evaluator(self._problem(workload, cluster))
        if cluster.size <= MOST_FINE:
            fine = Evaluator(self._problem(workload, cluster, single=True))
        rivals = self._rivals(on, fine, progress)
        best = self._best(on, rivals, progress)
        placed = canonical(best.found.problem, best.found.placement)  # tied groups as they are
        found = replace(best.found, placement=placed)
        best = replace(best, found=found)
        steps = _predicted({"": found, **rivals}, workload, cluster)
        if self.method == "search" and not self.runs:  # the evaluator here only proposes
            first = min(steps, key=lambda name: steps[name].step, default="")
            best = replace(best, found=rivals[first]) if first else best
            steps |= {"": steps[first]} if first else {}
        if kept is not None:
            kept.append(best)
        mine = steps.pop("", None) or priced(plan_of(found.problem, placed), workload, cluster)
        fitting = {name: one.step for name, one in steps.items()}
        least = best.found.seconds if best.is_proven else bound(on.problem)
        return Planned(
            mine.plan,
            mine.step,
            fitting.get("even-allreduce", max(fitting.values(), default=mine.step)),
            fitting,
            min(least, mine.step),
            on.evaluations,
            time.process_time() - began,
            notes(best, sorted(set(rivals) - set(fitting))),
            stopped=best.stopped,
        )

    def _check(self) -> None:
        """Raise where an option cannot be."""
        if self.method not in METHODS:
            raise unknown("placement method", self.method, METHODS)
        if self.prior not in PRIORS:
            raise unknown("prior", self.prior, PRIORS)
        least = {"playouts": 0, "strokes": 0, "polish": 0, "global_batch": 0, "groups": 1}
        least["proposals"] = 0
        for name, few in least.items():
            if getattr(self, name) < few:
                raise InputError(
                    f"`{name}={getattr(self, name)}` of placement", hint=f"it is {few} or more"
                )

    def _problem(self, workload: Workload, cluster: Cluster, single: bool = False) -> Problem:
        found = problem(
            workload,
            cluster,
            self.global_batch,
            framework=self.framework,
            most=self.groups,
            single=single,
            idle=self.idle,
            blocks=self.blocks,
        )
        tables = found.tables
        if not self.factors:
            tables = tables._replace(factors=tables.factors * 0)
            found = replace(found, factored={})
        if not self.split:
            never = np.full_like(tables.split_forward, inf)
            tables = tables._replace(split_forward=never, split_backward=never.copy())
        return replace(found, tables=tables)

    def _rivals(self, on: Evaluator, fine: Evaluator, progress: Progress) -> dict[str, Rival]:
        """Every baseline, on single devices where it places things there."""
        found = {}
        for name, method in BASELINES.items():
            progress(name, on.least)
            use = fine if name in FINE else on
            drawn = {"seed": self.seed} if name in DRAWN else {}
            if name == "flexflow":
                drawn["proposals"] = self.proposals
            found[name] = Rival(use.problem, *method(use, **drawn))
        if fine is not on:
            on.evaluations += fine.evaluations
        return found

    def _best(self, on: Evaluator, rivals: dict[str, Rival], progress: Progress) -> Best:
        if self.method in rivals:
            rival = rivals[self.method]
            if rival.seconds == inf:
                raise _nothing_fits(on, rival.placement, self.method)
            return Best(rival, False, [])
        if self.runs:
            return self._deployable(on)
        if count(on.problem) <= MOST:
            progress("every placement", on.least)
            found = _quickest([Rival(on.problem, *best_baseline(on)), *rivals.values()], on)
            return Best(found, True, unmixed_parts(on, self.polish // 2))
        if self.method == "mcts":
            return self._as_published(on, progress)
        starts = self._starts(on, rivals)
        ends: list[Rival] = []
        try:
            if self.playouts:
                progress("tree search", on.least)
                starts = [self._tree(on, starts, rivals["even-allreduce"].seconds)[0], *starts]
            self._searched(on, starts, progress, ends)
        except KeyboardInterrupt:  # the best so far
            return Best(_quickest([*reversed(ends), *rivals.values()], on), False, [], stopped=True)
        best = _quickest([*reversed(ends), *rivals.values()], on)
        if self.factors and best.problem is on.problem:
            best = _with_factors(best, self.recompute)
        progress("parts of one kind", best.seconds)
        parts = unmixed_parts(on, self.polish // 2)
        return Best(_unmixed(on.problem, best, parts), False, parts)

    def _as_published(self, on: Evaluator, progress: Progress) -> Best:
        """TAG: a tree from data parallelism, or from all split where that does not fit; factors."""
        start = uniform(on.problem, Action(0, ALL_REDUCE), mode=EVEN)
        if on.seconds(start) == inf:
            start = uniform(on.problem, Action(0, SPLIT), mode=EVEN)
        progress("tree search", on.least)
        base = on.seconds(start)
        tree = Tree(
            on, [start], prior_of(self.prior), base, ways=(ALL_REDUCE, PS, SPLIT), steps=False
        )
        stopped = False
        try:
            tree.play(self.playouts)
        except KeyboardInterrupt:
            stopped = True
        best = _quickest([Rival(on.problem, *tree.best)], on)
        best = _with_factors(best, self.recompute) if self.factors else best
        return Best(best, False, [], stopped=stopped)

    def _tree(
        self, on: Evaluator, starts: list[Placement], plain: float
    ) -> tuple[Placement, float]:
        """What the tree search finds."""
        reference = plain if plain < inf else on.seconds(starts[0])
        tree = Tree(on, starts, prior_of(self.prior), reference)
        tree.play(self.playouts)
        return tree.best

    def _searched(
        self, on: Evaluator, starts: list[Placement], progress: Progress, found: list[Rival]
    ) -> None:
        """Annealing from some starts, from the best two again, from the best; descent behind it."""
        each = self.strokes // 8

        def annealed(start: Placement, strokes: int) -> None:
            progress(f"annealing {len(found) + 1}", on.least)
            found.append(Rival(on.problem, *anneal(on, start, strokes, self.seed + len(found))))

        for start in _apart(starts):
            annealed(start, each)
        for again in sorted(found, key=lambda rival: rival.seconds)[:2]:
            annealed(again.placement, each)
        first = min(found, key=lambda rival: rival.seconds)
        annealed(first.placement, self.strokes - each * len(found))
        first = _quickest([found[-1], first], on)
        progress("descent", first.seconds)
        lowest, _ = polish(on, first.placement, self.polish)
        found.append(Rival(on.problem, *simplified(on, lowest)))

    def _starts(self, on: Evaluator, rivals: dict[str, Rival]) -> list[Placement]:
        """Where to start: what others do, one choice for all, pipelines; the quickest first."""
        tried = [r.placement for r in rivals.values() if r.problem is on.problem]
        tried += [uniform(on.problem, a) for a in actions(on.problem, on.problem.leaders[0])]
        tried += pipelines(on.problem)
        tried = list(dict.fromkeys(tried))
        took = on.many(tried)
        ranked = sorted(range(len(tried)), key=lambda i: (took[i], i))
        return [tried[i] for i in ranked[:STARTS]]

    def _deployable(self, on: Evaluator) -> Best:
        """The best of each set of ranks with a way for each parameter."""
        found: dict[int, tuple[Placement, float]] = {}
        for s in range(len(on.problem.fleet.sets)):
            if on.problem.tables.size[s] <= on.problem.batch:
                start = uniform(on.problem, Action(s, 0))
                found[s] = polish(on, start, self.polish, _runs_on(s))
        best = _quickest([Rival(on.problem, *one) for one in found.values()], on)
        parts = parts_of(on.problem, found)
        return Best(_unmixed(on.problem, best, parts), False, parts)


def prior_of(name: str) -> Prior:
    """What may guide the tree search, by its name."""
    if name == "learned":
        return shipped()
    return look_ahead if name == "look-ahead" else even_chances


@dataclass(frozen=True)
class Tag(PlacementPlanner):
    """TAG's own search: its network guides a tree, an exact program places factors behind it."""

    name: ClassVar[str] = "tag"
    source: ClassVar[str] = "Zhang et al., TAG, TPDS 2023"
    method: str = "mcts"
    playouts: int = 800  # of the tree search
    prior: str = "learned"
    blocks: int = 128

    def own(self) -> Planner:
        """Annealing and descent, as many placements together as the tree has playouts."""
        mine = {f.name: getattr(self, f.name) for f in fields(PlacementPlanner)}
        few = self.playouts // 8
        search = {"method": "search", "playouts": 0, "prior": "even"}
        return PlacementPlanner(**mine | search | {"strokes": self.playouts - few, "polish": few})


@dataclass(frozen=True)
class Rival:
    """A placement, the problem whose sets it names, and its seconds."""

    problem: Problem
    placement: Placement
    seconds: float


@dataclass(frozen=True)
class Best:
    """The answer, whether nothing in the space is quicker, and the parts of one kind."""

    found: Rival
    is_proven: bool
    parts: list[Part]
    stopped: bool = False  # by Ctrl-C


def _predicted(
    found: Mapping[str, Rival], workload: Workload, cluster: Cluster
) -> dict[str, Prediction]:
    """What `predict` says of placements, by name: of those that fit, equal plans priced once."""
    plans = {
        name: plan_of(one.problem, one.placement)
        for name, one in found.items()
        if one.seconds < inf
    }
    known = dict[Plan, Prediction]()
    for plan in dict.fromkeys(plans.values()):
        with suppress(ForetellError):
            known[plan] = priced(plan, workload, cluster)
    fit = {plan for plan, one in known.items() if one.fits}
    return {name: known[plan] for name, plan in plans.items() if plan in fit}


def _runs_on(chosen: int) -> Allowed:
    """What deploys: replicas on one set of ranks."""
    return lambda action: action.devices == chosen and action.way != SPLIT


def _apart(ranked: list[Placement]) -> list[Placement]:
    """Four that differ: the best, the best without and the best with micro-batches."""
    plain = [p for p in ranked if p.micros == 1]
    staged = [p for p in ranked if p.micros > 1]
    return list(dict.fromkeys([ranked[0], *plain[:1], *staged[:3]]))[:4]


def _quickest(found: list[Rival], on: Evaluator) -> Rival:
    best = min(found, key=lambda rival: rival.seconds)
    if best.seconds == inf:
        raise _nothing_fits(on, best.placement, "any placement")
    return best


def _with_factors(rival: Rival, recompute: bool) -> Rival:
    """Place factors by the exact program; kept where the simulated step is shorter."""
    found = [rival]
    for again in dict.fromkeys((False, recompute)):
        one, placement = refined(rival.problem, rival.placement, recompute=again)
        found.append(Rival(one, placement, Evaluator(one).seconds(placement)))
    return min(found, key=lambda one: one.seconds)


def _unmixed(problem: Problem, found: Rival, parts: list[Part]) -> Rival:
    """The part of one kind where mixing gains nothing."""
    fit = [part for part in parts if part.seconds < inf]
    best = min(fit, key=lambda part: part.seconds, default=None)
    if best is None or found.seconds * WORTH < best.seconds:
        return found
    return Rival(problem, best.placement, best.seconds)


def _nothing_fits(on: Evaluator, nearest: Placement, what: str) -> InfeasibleError:
    why = on.fault(nearest) if nearest.actions else "memory"
    room = max(on.problem.tables.room) / 2**30
    need = max(memory(on.problem, nearest).values()) / 2**30 if why == "memory" else 0.0
    if why == "samples":
        return InfeasibleError(
            f"{what}: a batch of {on.problem.batch} for {on.problem.cluster.size} ranks",
            hint="raise global_batch, or leave the method out: fewer ranks may do",
        )
    return InfeasibleError(
        f"{what} fits no memory: the fullest rank would hold {need:.1f} GiB of {room:.1f} GiB",
        hint="lower global_batch, add machines, or use a model that is split: `foretell oracle`",
    )


def notes(best: Best, missing: list[str]) -> tuple[str, ...]:
    """What a reader should know: the placement, memory, what mixing gains, what did not fit."""
    found = best.found
    held = max(memory(found.problem, found.placement).values()) / 2**30
    served = settled(found.problem, found.placement)[2].tolist()
    lines = [*text(found.problem, found.placement, served).splitlines()]
    lines.append(f"fullest rank: {held:.1f} GiB" + (", proven best" if best.is_proven else ""))
    lines += verdict_lines(found.problem, (found.placement, found.seconds), best.parts)
    if missing:
        lines.append(f"do not fit: {', '.join(missing)}")
    return tuple(lines)
