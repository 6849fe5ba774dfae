"""What others would do, each in its own space, on the same evaluator; and all placements of a
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
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from itertools import islice, permutations, product
from math import prod

import numpy as np

from foretell import portable
from foretell.errors import UnmodelledError
from foretell.search.placement import evaluate
from foretell.search.placement.evaluate import Evaluator, with_shares
from foretell.search.placement.problem import (
    ALL_REDUCE,
    BALANCED,
    EVEN,
    FACTORS,
    MICROS,
    MODES,
    PROPORTIONAL,
    PS,
    SHARDED,
    SPLIT,
    Action,
    Placement,
    Problem,
    actions,
    law,
    uniform,
    with_servers,
)
from foretell.search.placement.search import FUSES, Tree, even_chances

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


def best(on: Evaluator) -> tuple[Placement, float]:
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
