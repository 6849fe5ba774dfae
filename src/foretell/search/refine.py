"""Descent from good plans: what a small change of a plan would do, predicted and taken if it pays.

Moves change one thing: the schedule, the micro-batch, how much is run again and where, how blocks
are split among stages, how state is sharded, how gradients are sent, or two degrees against each
other. A plan is only as good as the step that `predict` gives it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from foretell.cluster import Cluster
from foretell.errors import ForetellError, InputError
from foretell.io import read_json, write_text
from foretell.plan import Plan
from foretell.plan.check import check, settled
from foretell.plan.framework import framework_of
from foretell.plan.order import FAMILIES, ONE_CHUNK
from foretell.plan.plan import Segment, blocks_of, segments, written
from foretell.predict import Prediction, predict, predict_many
from foretell.workload import Workload

BATCHED = 12  # plans predicted before the best of them is taken


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


@dataclass
class Evaluator:
    """Predictions by plan, and how many of them may still be made."""

    workload: Workload
    cluster: Cluster
    budget: int
    accepts: Callable[[Plan], bool] = lambda plan: True  # what a plan of the answer has to be
    filled: Callable[[Plan], Plan] = lambda plan: plan  # what every plan is asked to be besides
    cost: Callable[[Prediction], float] = lambda found: found.step  # what is made least
    known: dict[str, Prediction | None] = field(default_factory=dict)
    forms: dict[str, str] = field(default_factory=dict)  # a plan as it is settled, and as asked
    twice: int = 0  # plans that were asked in two ways, and predicted once

    @property
    def evaluations(self) -> int:
        """Plans predicted so far."""
        return len(self.known) - self.twice

    @property
    def is_spent(self) -> bool:
        """Whether the budget is used up."""
        return self.evaluations >= self.budget

    def ranked(self) -> list[Found]:
        """Every plan predicted so far that fits, the shortest step first."""
        every = ((Plan.parse(text), one) for text, one in self.known.items() if one)
        return sorted(
            (Found(p, one, self.cost(one)) for p, one in every if one.fits), key=Found.key
        )

    def best(self) -> Found | None:
        """The best of them."""
        return next(iter(self.ranked()), None)

    def of(self, plans: Sequence[Plan]) -> list[Found]:
        """Those plans that can be and fit, predicted as far as the budget goes."""
        plans = [self.filled(plan) for plan in plans]
        new = [p for p in dict.fromkeys(plans) if str(p) not in self.known and self.accepts(p)]
        able, same = self._taken(new)
        try:
            found: Sequence[Prediction | None] = predict_many(
                able, self.workload, self.cluster, advises=False
            )
        except ForetellError:
            found = [self._one(plan) for plan in able]
        self.known |= {str(plan): one for plan, one in zip(able, found, strict=True)}
        self.known |= {text: self.known[first] for text, first in same.items()}
        self.twice += len(same)
        mine = ((plan, self.known.get(str(plan))) for plan in plans)
        return [
            Found(plan, one, self.cost(one)) for plan, one in mine if one is not None and one.fits
        ]

    def _taken(self, new: Sequence[Plan]) -> tuple[list[Plan], dict[str, str]]:
        """New plans that can be, as far as the budget goes; those another says by another text."""
        able, same, left = list[Plan](), dict[str, str](), self.budget - self.evaluations
        for plan in new:
            text, form = str(plan), self._form(plan)
            if form in self.forms:
                same[text] = self.forms[form]
            elif left > 0:
                left -= 1
                self.known[text] = None
                if form:
                    self.forms[form] = text
                    able.append(plan)
        return able, same

    def save(self, path: Path) -> None:
        """Keep what was predicted in a file, so that the same search can go on from there."""
        rows = {text: one and one.as_json() for text, one in self.known.items()}
        write_text(path, json.dumps({"for": self._question(), "plans": rows}))

    def load(self, path: Path) -> None:
        """Take over what an earlier search of the same question predicted."""
        if not path.is_file():
            return
        told = read_json(path)
        if not isinstance(told, dict) or told.get("for") != self._question():
            raise InputError(
                f"{path} is of another search: its model, cluster or version differ",
                hint="name another file, or remove it",
            )
        self.known = {text: row and _read(row) for text, row in told["plans"].items()}

    def _question(self) -> dict[str, str]:
        return {
            "model": self.workload.fingerprint(), "cluster": self.cluster.fingerprint(),
            "foretell": version("foretell"),
        }  # fmt: skip

    def can_be(self, plan: Plan) -> bool:
        """Whether a plan is one for this model and these machines."""
        return bool(self._form(plan))

    def _form(self, plan: Plan) -> str:
        """A plan with all it leaves open settled; empty where it cannot be."""
        try:
            if plan.segments:
                plan = check(plan, self.workload, self.cluster)
            inner, _ = settled(plan, self.workload, self.cluster)
            own = (
                [one.plan for one in segments(inner, self.workload)] if inner.segments else [inner]
            )
        except ForetellError:
            return ""
        unlike = len({one.zero == 3 for one in own}) > 1
        if unlike or not all(_is_wrapped(one, inner.framework) for one in own):
            return ""
        return f"{inner} on {plan.placement}"

    def _one(self, plan: Plan) -> Prediction | None:
        try:
            return predict(plan, self.workload, self.cluster, advises=False)
        except ForetellError:
            return None


def _read(row: dict[str, Any]) -> Prediction:
    """A prediction as a file has it."""
    names = {"step": "step_s", "low": "low_s", "high": "high_s", "peak": "peak_bytes"}
    names |= {"missing": "missing_bytes"}
    values = {f.name: row[names.get(f.name, f.name)] for f in fields(Prediction)}
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
    return plan.but(framework="", precision="", dtype="", optimizer="")


def descend(start: Found, on: Evaluator, tell: Callable[[float], None]) -> Found:
    """The best plan that single moves lead to."""
    best = start
    while not on.is_spent:
        moves = list(neighbours(best.plan, on.workload, on.cluster))
        better = _first_better(best, moves, on)
        if better is None:
            return best
        best = better
        tell(best.step)
    return best


def _first_better(best: Found, moves: list[Plan], on: Evaluator) -> Found | None:
    """The best of the first few moves among which one pays."""
    for at in range(0, len(moves), BATCHED):
        found = on.of(moves[at : at + BATCHED])
        lower = [one for one in found if one.cost < best.cost * (1 - 1e-9)]
        if lower:
            return min(lower, key=Found.key)
        if on.is_spent:
            break
    return None


def neighbours(plan: Plan, workload: Workload, cluster: Cluster) -> Iterator[Plan]:
    """Plans one move away; some cannot be."""
    if plan.groups or plan.shares or plan.sync:
        moves = _kernel_moves(plan)
    elif plan.segments:
        moves = _segment_moves(plan, workload)
    else:
        moves = _degree_moves(plan, workload, cluster)
    seen = {str(plan)}
    for other in moves:
        if str(other) not in seen:
            seen.add(str(other))
            yield other


def _degree_moves(plan: Plan, workload: Workload, cluster: Cluster) -> Iterator[Plan]:
    yield from _schedule_moves(plan)
    yield from _micro_moves(plan)
    yield from _recompute_moves(plan, blocks_of(plan, workload)[0])
    yield from _layer_moves(plan, workload)
    yield from _state_moves(plan, cluster)
    yield from _kernel_moves(plan)
    yield from _expert_moves(plan, workload)
    yield from _turned(plan, workload, cluster)
    yield from _traded(plan, workload)


def _turned(plan: Plan, workload: Workload, cluster: Cluster) -> Iterator[Plan]:
    """Stages on unlike devices the other way round, as segments."""
    whole = plan.chunks == 1 and plan.schedule in ONE_CHUNK and not plan.actions
    if plan.pp == 1 or not whole or len(cluster.devices_by_kind()) == 1:
        return
    each, now = plan.ranks // plan.pp, plan.placement or tuple(range(plan.ranks))
    stages = [now[s * each : (s + 1) * each] for s in range(plan.pp)]
    blocks = blocks_of(plan, workload)
    own = plan.but(pp=1, layers=(), placement=())
    rows = [Segment(n, ranks, own) for n, ranks in zip(blocks, stages, strict=True)]
    yield from _halved(written(own, rows[::-1]))


def _halved(plan: Plan) -> Iterator[Plan]:
    """Stages in another order, with micro-batches as they are and of half as many samples."""
    yield plan
    if plan.micro_batch % 2 == 0:
        yield plan.but(micro_batch=plan.micro_batch // 2)


def _schedule_moves(plan: Plan) -> Iterator[Plan]:
    if plan.pp == 1 or plan.actions:
        return
    for name in FAMILIES:
        for chunks in (2, 4, 8) if name == "interleaved" else (1,):
            yield plan.but(schedule=name, chunks=chunks, layers=() if chunks > 1 else plan.layers)


def _kernel_moves(plan: Plan) -> Iterator[Plan]:
    """Pointwise chains compiled to single kernels, where the framework does not fuse them."""
    name = plan.framework or ("fsdp" if plan.zero == 3 else "")
    if plan.compile or (name and framework_of(name).kernels == "eager"):
        yield plan.but(compile=not plan.compile)
    yield plan.but(optimizer_kernels="" if plan.optimizer_kernels else "fused")
    alone = plan.ranks > plan.dp == 1 and not (plan.segments or plan.groups)
    if alone and name != "fsdp":
        own = unsharded(plan, compiled=True)
        yield own.but(optimizer_kernels="fused")  # it issues an update tensor by tensor else
        yield own


def unsharded(plan: Plan, *, compiled: bool) -> Plan:
    """A plan of one replica under FSDP, which then shards nothing: its precision and kernels."""
    own = {"framework": "fsdp", "compile": compiled, "zero": 3}
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
    share = plan.global_batch // max(plan.dp, 1)
    for micro in (plan.micro_batch * 2, plan.micro_batch // 2, share):
        if micro and share % micro == 0:
            yield plan.but(micro_batch=micro)


def _recompute_moves(plan: Plan, blocks: int) -> Iterator[Plan]:
    """Fewer blocks of a stage run again, by halves and by one: a plan that fits gains by no more.

    All of them less dearly is another way to run fewer.
    """
    if plan.recompute == "none":
        return
    yield plan.but(recompute="none", recompute_layers=0)
    if plan.recompute == "full":
        yield plan.but(recompute="selective", recompute_layers=0)
    now = plan.recompute_layers or blocks
    for many in (now // 2, now - 1):
        if 0 < many < blocks:
            yield plan.but(recompute_layers=many)


def _layer_moves(plan: Plan, workload: Workload) -> Iterator[Plan]:
    """One block moved from the first or last stage to the others, or to its neighbour."""
    if plan.pp == 1 or plan.chunks > 1:
        return
    now = list(blocks_of(plan, workload))
    ends = {0, plan.pp - 1}
    for source in range(plan.pp):
        for target in (*ends, source - 1, source + 1):
            is_end = source in ends or target in ends
            if is_end and 0 <= target < plan.pp and target != source and now[source] > 1:
                dealt = list(now)
                dealt[source] -= 1
                dealt[target] += 1
                yield plan.but(layers=tuple(dealt))


def _state_moves(plan: Plan, cluster: Cluster) -> Iterator[Plan]:
    """How state is sharded, and how gradients are sent."""
    if plan.dp > 1:
        for zero in (0, 1, 2, 3):
            if zero < 2 or plan.pp == 1:
                yield _wrapped(plan.but(zero=zero, shard=0))
        node = int((cluster.nodes == cluster.nodes[0]).sum()) // max(plan.tp * plan.cp, 1)
        if plan.zero and 1 < node < plan.dp and plan.dp % node == 0:
            yield plan.but(shard=node)
        for times in (2.0, 0.5, 4.0):
            yield plan.but(bucket_mb=plan.bucket_mb * times)
        yield plan.but(overlap=True)
    if plan.offload:
        yield plan.but(offload=False)
    if plan.tp > 1:
        yield plan.but(sp=not plan.sp)


def _traded(plan: Plan, workload: Workload) -> Iterator[Plan]:
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
            other = plan.but(**changed, layers=(), shard=0)
            yield other.but(sp=plan.sp or other.tp > 1)
            if take == "dp":
                yield other.but(micro_batch=max(plan.micro_batch // 2, 1))


def _segment_moves(plan: Plan, workload: Workload) -> Iterator[Plan]:
    found = segments(plan, workload)
    yield from _kernel_moves(plan)
    own = plan.but(compile=True, precision="", dtype="", optimizer="")
    if plan.framework != "ddp":  # PyTorch's own stages, compiled, in the precision it runs in
        yield own.but(framework="ddp")
    if plan.framework != "fsdp" and all(one.plan.dp == 1 for one in found):
        rows = [replace(one, plan=one.plan.but(zero=3)) for one in found]
        yield written(own.but(framework="fsdp"), rows)
    yield from _own(plan, found, workload)
    for name in ONE_CHUNK:
        yield plan.but(schedule=name)
    for micro in (plan.micro_batch * 2, plan.micro_batch // 2):
        if micro and plan.global_batch % micro == 0:
            yield plan.but(micro_batch=micro)
    yield from _halved(written(plan, found[::-1]))
    yield from _merged(plan, found)
    yield from _block_moved(plan, found)
    for a in range(len(found) - 1 if len(found) > 2 else 0):  # neighbours change places
        yield written(plan, [*found[:a], found[a + 1], found[a], *found[a + 2 :]])


def _block_moved(plan: Plan, found: Sequence[Segment]) -> Iterator[Plan]:
    """One block from a segment to another."""
    for a, source in enumerate(found):
        for b, target in enumerate(found):
            if a != b and source.blocks > 1:
                dealt = list(found)
                dealt[a] = replace(source, blocks=source.blocks - 1)
                dealt[b] = replace(target, blocks=target.blocks + 1)
                yield written(plan, dealt)


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


def _own(plan: Plan, found: Sequence[Segment], workload: Workload) -> Iterator[Plan]:
    """Recompute, sharding and the ways to split layers of one segment."""
    for a, one in enumerate(found):
        p = one.plan
        changed = list(_recompute_moves(p, one.blocks))
        changed += [p.but(zero=z) for z in (0, 1, 2) if p.dp > 1]
        changed += [p.but(offload=False)] if p.offload else []
        for other in _splits(p, workload):
            dp, rest = divmod(len(one.ranks), max(other.ranks // (other.dp * other.pp), 1))
            if dp and not rest and plan.micro_batch % dp == 0:
                changed.append(other.but(dp=dp, micro_batch=plan.micro_batch // dp))
        for other in changed:
            yield written(plan, [*found[:a], replace(one, plan=other), *found[a + 1 :]])


def _merged(plan: Plan, found: Sequence[Segment]) -> Iterator[Plan]:
    """Two segments that are split alike as one with twice the replicas."""
    for a in range(len(found) - 1):
        first, then = found[a], found[a + 1]
        dp = first.plan.dp + then.plan.dp
        alike = first.plan.tp == then.plan.tp and first.plan.cp == then.plan.cp
        if len(found) > 2 and alike and plan.micro_batch % dp == 0:
            own = first.plan.but(dp=dp, micro_batch=plan.micro_batch // dp)
            one = Segment(first.blocks + then.blocks, first.ranks + then.ranks, own)
            yield written(plan, [*found[:a], one, *found[a + 2 :]])
