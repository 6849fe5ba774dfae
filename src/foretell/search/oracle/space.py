"""All layouts of a model on so many devices, priced at once; the best simulated, with a bound.

A degree is in the space where the model can be split that way: heads for `tp`, experts for `ep`,
blocks for `pp`, pixels for `spatial`, channels for `filter` and `channel`. With each go
micro-batches, how much is kept of the activations, and how much is shared among data-parallel
ranks.

All layouts of a space priced at once: columns of time, memory and money, and their front.

The closed form prices thousands of layouts a second (→ `foretell.plan.prices`); what cannot fit
is kept with the bytes it lacks, never ranked.

The best layout of a space, simulated, with a bound on how much better any other could be.

Layouts are taken in the order of the closed form and simulated. A layout cannot take less than the
busiest stage works (kernels, host, exchanges inside layers) plus its update; once the best step
simulated is below that bound of every layout not yet simulated, nothing in the space can beat it.
Otherwise the remaining gap is given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from foretell.cluster import Cluster
from foretell.errors import InfeasibleError, InputError
from foretell.graph.graph import Array
from foretell.plan import Plan
from foretell.plan.plan import Recompute
from foretell.plan.prices import Estimate, estimate
from foretell.plan.program import FAMILIES
from foretell.pool import Pool
from foretell.predict import Prediction, predict, predict_many
from foretell.workload import Workload

# What a rank's degrees are called when they are more than one, in the order they are named.
WORDS = {
    "dp": "data", "tp": "tensor", "pp": "pipeline", "cp": "context", "ep": "expert",
    "filter": "filter", "channel": "channel", "height": "spatial", "width": "spatial",
    "depth": "spatial",
}  # fmt: skip
PLAIN: tuple[Recompute, ...] = ("none",)


CHUNK = 4096  # layouts priced at a time: bounds memory, and progress is reported between
LEAST = 512  # layouts worth sending to a worker: fewer take less time than the way there
HOUR = 3600.0
SLACK = 0.97  # of the closed form's parts: they and the simulation round differently
SHORT = 3  # layouts of a strategy simulated at once: until one of them fits
TRIED = 12  # at most, of a strategy
LARGE = 1e12  # seconds: layouts that do not fit come last
GROUP = 8  # layouts simulated before the bound is looked at again


@dataclass(frozen=True)
class Space:
    """What is tried; an empty choice means all that make sense."""

    micro_batch: tuple[int, ...] = (1, 2, 4, 8)
    recompute: tuple[Recompute, ...] = ("none", "selective", "full")
    zero: tuple[int, ...] = (0, 1, 3)
    chunks: tuple[int, ...] = (1, 2, 4)
    schedules: tuple[str, ...] = ("1f1b",)  # of stages that have one piece of the model each
    whole_share: bool = False  # a rank's share in one micro-batch too, and in halves of it
    tp_inside: bool = True  # tensor-parallel ranks share a node
    dtype: str = ""
    framework: str = ""
    offload: tuple[bool, ...] = (False,)


def layouts(workload: Workload, gpus: int, batch: int, per_node: int, space: Space) -> list[Plan]:
    """Every plan of a space that could run so many samples on so many devices."""
    if batch < 1:
        raise InputError(f"a step of {batch} samples", hint="a batch is 1 or more")
    found: list[Plan] = []
    for degrees in _degrees(workload, gpus, per_node, space):
        if batch >= degrees["dp"] and batch % degrees["dp"] == 0:
            found += _with_options(workload, degrees, batch, space)
    return list(dict.fromkeys(found))


def per_node(cluster: Cluster) -> int:
    """Devices of the first node."""
    return max(1, len(cluster.node(0).devices))


def strategy(plan: Plan) -> str:
    """What a plan is called: `data`, `data+tensor+pipeline`; `zero` where state is shared."""
    degrees = plan.degrees() | {"ep": plan.ep}
    words = [word for axis, word in WORDS.items() if degrees.get(axis, 1) > 1]
    names = list(dict.fromkeys(words)) or ["serial"]
    if plan.zero and plan.dp > 1:
        names[names.index("data")] = "fsdp" if plan.zero == 3 else "zero"
    return "+".join(names)


def _degrees(
    workload: Workload, gpus: int, per_node: int, space: Space
) -> Iterator[dict[str, Any]]:
    """Degrees whose product is the number of devices."""
    if workload.most("tp") > 1 or workload.most("cp") > 1:
        yield from _transformer(workload, gpus, per_node, space)
    else:
        yield from _images(workload, gpus)


def _transformer(
    workload: Workload, gpus: int, per_node: int, space: Space
) -> Iterator[dict[str, Any]]:
    inside = per_node if space.tp_inside else gpus
    tps = [d for d in _divisors(gpus) if d <= min(workload.most("tp"), inside)]
    for tp in tps:
        for pp in (d for d in _divisors(gpus // tp) if d <= workload.num_blocks):
            rest = gpus // tp // pp
            for cp in _contexts(workload, rest):
                for ep in _experts(workload, rest):
                    yield {"dp": rest // cp, "tp": tp, "pp": pp, "cp": cp, "ep": ep}


def _contexts(workload: Workload, rest: int) -> list[int]:
    """Ranks among which the tokens of a sample are split: where a sample is long."""
    longest = max(1, int(workload.tokens // 4096))
    return [d for d in _divisors(rest) if d <= min(longest, 16)]


def _experts(workload: Workload, rest: int) -> list[int]:
    return [d for d in _divisors(rest) if d <= workload.most("ep")]


def _images(workload: Workload, gpus: int) -> Iterator[dict[str, Any]]:
    """ParaDL's strategies: one axis and data beside it, or a pipeline."""
    yield {"dp": gpus}
    for axis in ("filter", "channel", "pp"):
        most = workload.num_blocks if axis == "pp" else workload.most(axis)
        for d in _divisors(gpus)[1:]:
            if d <= most:
                yield {"dp": gpus // d, axis: d}
    for sides in _sides(workload, gpus):
        yield {"dp": gpus // math.prod(sides), "spatial": sides}


def _sides(workload: Workload, gpus: int) -> Iterator[tuple[int, ...]]:
    """How height, width and depth may be cut: evenly, so that halos are short."""
    most = [workload.most(axis) for axis in ("height", "width", "depth")]
    for cut in product(*([d for d in _divisors(gpus) if d <= m] for m in most)):
        used = sorted((c for c, m in zip(cut, most, strict=True) if m > 1), reverse=True)
        if math.prod(cut) > 1 and gpus % math.prod(cut) == 0 and used[0] <= 4 * used[-1]:
            yield cut if most[2] > 1 else cut[:2]


def _with_options(
    workload: Workload, degrees: dict[str, Any], batch: int, space: Space
) -> Iterator[Plan]:
    share = batch // degrees["dp"]
    is_piped, is_long = degrees.get("pp", 1) > 1, workload.most("tp") > 1
    for micro, recompute, zero, (schedule, chunks), offload in product(
        _micro(share, space, workload.batch if is_piped or is_long else 0),
        space.recompute if is_long else PLAIN,
        space.zero if _shares(degrees) else (0,),
        _schedules(workload, degrees.get("pp", 1), space),
        space.offload,
    ):
        turns = share // micro
        if chunks > 1 and turns % degrees["pp"]:
            continue
        if zero > 1 and is_piped:  # parameters gathered anew for every micro-batch: never ahead
            continue
        sp = degrees.get("tp", 1) > 1
        yield Plan(
            **degrees, sp=sp, zero=zero, micro_batch=micro, global_batch=batch, chunks=chunks,
            schedule=schedule, recompute=recompute,
            offload=offload, dtype=space.dtype, framework=space.framework,
        )  # fmt: skip


def _shares(degrees: dict[str, Any]) -> bool:
    """Whether data-parallel ranks may share state: not beside split convolutions."""
    return degrees["dp"] > 1 and not {"filter", "channel", "spatial"} & set(degrees)


def _micro(share: int, space: Space, own: int) -> Sequence[int]:
    """Micro-batches that divide a rank's share, the model's `own` among them; all and 1 if 0."""
    some = sorted({m for m in (*space.micro_batch, own) if share % m == 0}) if own else []
    if space.whole_share:
        halves = [share >> k for k in range(share.bit_length()) if share % (1 << k) == 0]
        return sorted({*some, *halves})
    return some or sorted({1, share if not own else 1})


def _schedules(workload: Workload, pp: int, space: Space) -> list[tuple[str, int]]:
    """Schedules, each with the pieces of the model that a stage has."""
    if pp == 1:
        return [("1f1b", 1)]
    more = [c for c in space.chunks if c > 1 and workload.num_blocks % (pp * c) == 0]
    most = {1: workload.num_blocks, 2: workload.num_blocks + 2}  # embedding and head may be alone
    pieces = {name: FAMILIES[name].chunks for name in space.schedules}
    names = [name for name, many in pieces.items() if many * pp <= most[many]]
    return [(name, 1) for name in names] + [("interleaved", c) for c in more]


def _divisors(n: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


@dataclass(frozen=True, eq=False)
class Swept:
    """Layouts and what each would do, in the order they were asked."""

    plans: tuple[Plan, ...]
    found: Estimate
    price: float  # money per hour for the cluster; 0 where it is unknown

    @property
    def fits(self) -> Array:
        """Which layouts fit in memory."""
        mask: Array = self.found.missing == 0
        return mask

    @property
    def money(self) -> Array:
        """Money of one step."""
        cost: Array = self.found.step * self.price / HOUR
        return cost

    def best(self) -> int:
        """The fastest layout that fits, or an error with the bytes that are missing."""
        if not self.plans:
            raise InfeasibleError(
                "no layout has that many devices", hint="another number of devices, or a batch "
                "that more of them divide",
            )  # fmt: skip
        if not self.fits.any():
            least = int(np.argmin(self.found.missing))
            raise InfeasibleError(
                f"none of {len(self.plans)} layouts fits: `{self.plans[least]}` lacks "
                f"{self.found.missing[least] / 2**30:.1f} GiB a device, the others more",
                hint="more devices, a smaller batch, or offload=yes",
            )
        return int(np.argmin(np.where(self.fits, self.found.step, np.inf)))

    def front(self) -> list[int]:
        """Layouts that no other beats in time, memory and money at once, fastest first."""
        mine = np.flatnonzero(self.fits)
        mine = mine[np.lexsort((self.found.peak[mine], self.found.step[mine]))]
        peaks = self.found.peak[mine]
        least = np.minimum.accumulate(np.concatenate([[np.inf], peaks[:-1]]))
        return [int(i) for i in mine[peaks < least]]


def sweep(
    plans: Sequence[Plan],
    workload: Workload,
    cluster: Cluster,
    progress: Callable[[int, int], None] = lambda done, all_: None,
    pool: Pool | None = None,
) -> Swept:
    """Price layouts on a cluster."""
    many, parts = len(plans), list[Estimate]()
    pool = None if pool is not None and pool.size == 1 else pool
    size = CHUNK if pool is None else min(CHUNK, max(LEAST, many // (4 * pool.size)))
    chunks = [plans[start : start + size] for start in range(0, many, size)]
    if pool is None:
        for some in chunks:
            parts.append(estimate(some, workload, cluster))
            progress(min(len(parts) * size, many), many)
    else:
        work = partial(estimate, workload=workload, cluster=cluster)
        parts = pool.map(work, chunks, lambda done, _: progress(min(done * size, many), many))
    names = [f.name for f in fields(Estimate)]
    joined = {n: np.concatenate([getattr(p, n) for p in parts] or [np.zeros(0)]) for n in names}
    return Swept(tuple(plans), Estimate(**joined), cluster.price)


class Fastest(NamedTuple):
    """The fastest layout of one strategy."""

    at: int  # its place in the sweep
    prediction: Prediction
    layouts: int  # of the strategy

    @property
    def fits(self) -> bool:
        """Whether it fits in memory; where none does it is the one that lacks least."""
        return self.prediction.fits


def by_strategy(
    swept: Swept, workload: Workload, cluster: Cluster, skipped: Collection[str] = ()
) -> dict[str, Fastest]:
    """The fastest layout of every strategy: the best in closed form are simulated."""
    names = np.array([strategy(p) for p in swept.plans])
    waiting: dict[str, list[int]] = {}
    for name in dict.fromkeys(names.tolist()):
        if name not in skipped:
            mine = np.flatnonzero(names == name)
            rank = np.where(swept.fits, swept.found.step, LARGE + swept.found.missing)[mine]
            waiting[name] = mine[np.argsort(rank, kind="stable")][:TRIED].tolist()
    found: dict[str, Fastest] = {}
    while waiting:
        short = {name: [waiting[name].pop(0) for _ in waiting[name][:SHORT]] for name in waiting}
        every = [at for some in short.values() for at in some]
        plans = [swept.plans[at] for at in every]
        predictions = predict_many(plans, workload, cluster, advises=False)
        for at, one in zip(every, predictions, strict=True):
            name, before = str(names[at]), found.get(str(names[at]))
            if before is None or _ahead(one) < _ahead(before.prediction):
                found[name] = Fastest(at, one, int((names == name).sum()))
        waiting = {n: rest for n, rest in waiting.items() if rest and not found[n].fits}
    return found


def _ahead(one: Prediction) -> tuple[float, float]:
    return one.missing, one.step


@dataclass(frozen=True)
class Choice:
    """The layout chosen, how it does, and what is known of all the others."""

    best: Prediction
    others: tuple[Prediction, ...]  # simulated too, fastest first
    layouts: int
    fitting: int
    bound: float  # seconds below which no layout of the space can be

    @property
    def gap(self) -> float:
        """By how much of its time the best might be beaten inside the space; 0 where it cannot."""
        return max(0.0, 1 - self.bound / self.best.step)


def choose(
    plans: Sequence[Plan],
    workload: Workload,
    cluster: Cluster,
    *,
    most: int = 48,
    progress: Callable[[int, int], None] = lambda done, all_: None,
    pool: Pool | None = None,
) -> Choice:
    """The layout with the shortest step of those that fit; at most so many are simulated."""
    swept = sweep(plans, workload, cluster, progress, pool)
    swept.best()  # raises where nothing fits
    order = _order(swept)
    bounds = at_least(swept.found)[order]
    found: list[Prediction] = []
    at = 0
    while at < len(order) and (at < most or not found):
        many = min(GROUP, max(most - at, 1))
        group = [swept.plans[i] for i in order[at : at + many].tolist()]
        found += [p for p in _simulated(group, workload, cluster, pool) if p.fits]
        at += len(group)
        if found and at < len(order) and min(p.step for p in found) <= bounds[at:].min():
            break
    found.sort(key=lambda p: (p.step, str(p.plan)))
    rest = float(bounds[at:].min()) if at < len(order) else np.inf
    return Choice(
        found[0], tuple(found[1:]), len(plans), int(swept.fits.sum()), min(found[0].step, rest)
    )


def _simulated(
    plans: list[Plan], workload: Workload, cluster: Cluster, pool: Pool | None
) -> list[Prediction]:
    """Layouts simulated: together here, one by one where there are workers."""
    if pool is None or pool.size == 1:
        return predict_many(plans, workload, cluster, advises=False)
    return pool.map(partial(predict, workload=workload, cluster=cluster), plans)


def _order(swept: Swept) -> Array:
    """Layouts that fit, fastest first by the closed form; ties by their text."""
    mine = np.flatnonzero(swept.fits)
    texts = np.array([str(swept.plans[i]) for i in mine.tolist()])
    found: Array = mine[np.lexsort((texts, swept.found.step[mine]))]
    return found


def at_least(found: Estimate) -> Array:
    """Seconds that each layout takes at least: its busiest stage and its update."""
    least: Array = SLACK * (found.compute + found.host + found.comm + found.update)
    return least
