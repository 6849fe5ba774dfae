"""A plan that fuses ops: written, read back, lowered to a graph, and predicted as every
command does.

What `foretell predict` prints for such a plan is what the planner that found it printed.

A way to fuse as a graph: what the simulator simulates, and what a report shows.

The lanes of `foretell.search.fusion.lanes` are this graph's lanes; a test holds both to the same
seconds.

A way to fuse as a plan, and back: regions and buckets by name, with the model's fingerprint.

A region lists the ops of one kernel; an op written with `*` behind it is recomputed there for
its reader, and stays where it is too. Buckets list parameters in the order they are sent.

Seconds of a fused step as every command reports them.

The lanes of the search know kernels and messages. What a framework's host, a board's power limit
and a precision add is in the price by layers (→ `foretell.predict`), and a fused step keeps the
share of it that the lanes say:

    step = predicted step of eager DDP · lanes of the fused step / lanes of eager DDP

So a plan that fuses nothing takes what `predict` says of plain data parallelism.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from foretell.cluster import Cluster
from foretell.errors import InputError, unknown
from foretell.graph import Graph
from foretell.plan import Plan
from foretell.plan.costs import room
from foretell.plan.file import COPY, named_ops
from foretell.plan.framework import Running, resolved, running
from foretell.plan.program import Piece, Program, ResolvedStep, StageTasks, written
from foretell.predict import predict
from foretell.search.fusion.lanes import seconds
from foretell.search.fusion.problem import (
    Memory,
    Problem,
    Reference,
    from_workload,
    problem_of_graph,
)
from foretell.search.fusion.score import Buckets, Evaluator, Scored, buckets_of
from foretell.search.fusion.search import ddp
from foretell.search.fusion.state import Fusion, edge_fits, fused, require, unfused
from foretell.workload import Workload
from foretell.workload.captured import from_graph

_ALONE = ("tp", "pp", "cp", "filter", "channel", "height", "width", "depth")


def lower(judge: Evaluator, scored: Scored, stretch: float = 1.0) -> Graph:
    """One step: groups on a stream, messages on the wire, updates behind them."""
    problem = judge.problem
    facts = {"workload": problem.model, "ranks": problem.wire.ranks}
    return written(_program(judge, scored, stretch), facts)


def _program(judge: Evaluator, scored: Scored, stretch: float) -> Program:
    """The step, every task so many times what the lanes of the search give it."""
    out, first = Program(), np.zeros(1, np.int64)
    compute, wire = out.lane(0, "compute", "compute"), out.lane(0, "wire", "comm")
    pieces = [*_gathers(judge, scored), *_groups(judge, scored)]
    out.chains.append([p._replace(seconds=stretch * p.seconds) for p in pieces])
    out.stages.append(StageTasks(0, (compute,), wire, first, first, first, first))
    problem, fusion = judge.problem, scored.fusion
    place = {g: k + bool(scored.before) for k, g in enumerate(fusion.order.tolist())}
    op = "reduce_scatter" if scored.gathers else "all_reduce"
    share, sent = judge.update / max(float(problem.sizes.sum()), 1.0), list[tuple[int, float]]()
    for bucket, parts in zip(scored.buckets.lists(), scored.buckets.parts.tolist(), strict=True):
        size = float(problem.sizes[bucket].sum()) / int(parts)
        made = max(place[int(fusion.group[problem.producer[k]])] for k in bucket)
        for _ in range(int(parts)):
            message = out.end(
                "collective", op, 0, (wire,), stretch * float(seconds(size, judge.laws)),
                "communicate", stages=(0,), parts=(made,), comm_bytes=size,
                name=_named(scored, bucket), group=f"0-{problem.wire.ranks - 1}",
            )  # fmt: skip
            sent.append((message, share * size))
    for message, each in sent if judge.by_message else [(sent[-1][0], judge.update)]:
        last = out.end(
            "kernel", "optimizer", 0, (compute,), stretch * each, "update", name="update",
            behind=(message,),
        )  # fmt: skip
    if scored.launches:
        out.end(
            "host", "launch", 0, (compute,), stretch * scored.launches, "update", behind=(last,),
            name="waiting for the host to launch kernels",
        )  # fmt: skip
    return out


def _gathers(judge: Evaluator, scored: Scored) -> list[Piece]:
    """Parameters that come while the forward runs."""
    problem, out = judge.problem, list[Piece]()
    for bucket in scored.gathers.lists() if scored.gathers else []:
        size = float(problem.sizes[bucket].sum())
        took, group = float(seconds(size, problem.wire.halves[1])), f"0-{problem.wire.ranks - 1}"
        out.append(
            Piece("collective", "all_gather", took, after=(), comm_bytes=size, phase="communicate",
                  name=_named(scored, bucket), group=group)
        )  # fmt: skip
    return out


def _groups(judge: Evaluator, scored: Scored) -> list[Piece]:
    """Kernels in their order, each after those it reads and the last gather of its parameters."""
    fusion, problem = scored.fusion, scored.fusion.problem
    there, ahead = dict[int, int](), scored.gathers.lists() if scored.gathers else []
    out: list[Piece] = []
    if scored.before:  # parameters were there for the first of them
        name = "micro-batches before the last"
        out.append(Piece("kernel", "fused", scored.before, after=(), name=name, phase="forward"))
    else:
        for at, bucket in enumerate(ahead):
            there |= dict.fromkeys(fusion.group[problem.used[bucket]].tolist(), at)
    place: dict[int, int] = {}
    for g in fusion.order.tolist():
        ops, here = [problem.ops[i] for i in fusion.of(g)], len(ahead) + len(out)
        waits = {place[a] for a in _waits(fusion, g)} | ({there[g]} if g in there else set())
        out.append(
            Piece("kernel", "fused" if len(ops) > 1 else ops[0].word, float(scored.cost[g]),
                  after=tuple(here - a for a in sorted(waits)),
                  name=" + ".join(op.name for op in ops),
                  phase="backward" if ops[0].side else "forward")
        )  # fmt: skip
        place[g] = here
    return out


def _waits(fusion: Fusion, g: int) -> set[int]:
    """Groups that a group reads from; through a copy, those the copy reads from."""
    problem = fusion.problem
    rows = (row for i in (*fusion.of(g), *fusion.copies(g)) for row in problem.reads[i])
    return {int(fusion.group[j]) for j, edge in rows if not fusion.copied[edge]} - {g}


def _named(scored: Scored, bucket: list[int]) -> str:
    names = [scored.fusion.problem.gradients[k].name for k in bucket]
    return names[0] if len(names) == 1 else f"{names[0]} … {names[-1]} ({len(names)})"


def plan_of(scored: Scored) -> Plan:
    """The plan that runs a step so, on every rank of the wire."""
    problem, fusion = scored.fusion.problem, scored.fusion
    edges = fusion.copied.nonzero()[0].tolist()
    copying = {int(fusion.group[problem.target[e]]) for e in edges if fusion.is_copied(e)}
    regions = tuple(
        tuple(problem.ops[i].name for i in fusion.of(g))
        + tuple(f"{problem.ops[i].name}{COPY}" for i in sorted(fusion.copies(g)))
        for g in sorted({*fusion.members, *copying})
    )
    buckets = tuple(
        tuple(problem.gradients[k].name for k in bucket) for bucket in scored.buckets.lists()
    )
    late = tuple(problem.ops[i].name for i in fusion.late.nonzero()[0].tolist())
    parts = scored.buckets.parts
    return Plan(
        dp=problem.wire.ranks,
        zero=2 if scored.gathers else 0,
        recompute="full" if problem.recompute else "none",
        regions=regions,
        late=late,
        buckets=buckets,
        parts=tuple(parts.tolist()) if parts.max(initial=1) > 1 else (),
        model=problem.made_for(named_ops(regions, late)),
    )


def fusion_of(plan: Plan, problem: Problem) -> Fusion:
    """The state a plan stands for, or an error that says what is wrong with it."""
    _require_model(plan, problem)
    places = {op.name: i for i, op in enumerate(problem.ops)}
    own = [[n for n in region if not n.endswith(COPY)] for region in plan.regions]
    for name, times in Counter(n for region in own for n in region).items():
        if name not in places:
            raise unknown("op in a region of the plan", name, places)
        if times > 1:
            raise InputError(
                f"`{name}` is in {times} regions of the plan",
                hint=f"name it once; write `{name}{COPY}` where it is to be recomputed",
            )
    groups = [tuple(places[n] for n in region) for region in own]
    copies = [e for r in plan.regions for e in _copied_edges(r, places, problem)]
    state = fused(problem, groups, copies)
    return require(state.put_off(_late(plan, places)) if plan.late else state)


def _late(plan: Plan, places: Mapping[str, int]) -> list[int]:
    for name in plan.late:
        if name not in places:
            raise unknown("op that the plan puts off", name, places)
    return [places[name] for name in plan.late]


def _copied_edges(
    region: tuple[str, ...], places: Mapping[str, int], problem: Problem
) -> list[int]:
    """The edges from a region's copies to those of its ops and copies that read them."""
    inside = {places[n.removesuffix(COPY)] for n in region if n.removesuffix(COPY) in places}
    found: list[int] = []
    for name in (n.removesuffix(COPY) for n in region if n.endswith(COPY)):
        if name not in places:
            raise unknown("op in a region of the plan", name, places)
        edges = [edge for reader, edge in problem.readers[places[name]] if reader in inside]
        if not edges:
            raise InputError(f"nothing in the region {'+'.join(region)} reads `{name}`")
        # A reader whose loop a copy does not fit reads what was written to memory.
        found += [e for e in edges if edge_fits(problem, e)] or edges
    return found


def buckets_from(plan: Plan, problem: Problem) -> Buckets:
    """The buckets of a plan; every gradient is in one of them."""
    _require_model(plan, problem)
    places = {g.name: k for k, g in enumerate(problem.gradients)}
    held = Counter(name for bucket in plan.buckets for name in bucket)
    for name, times in held.items():
        if name not in places:
            raise unknown("parameter in a bucket of the plan", name, places)
        if times > 1:
            raise InputError(f"`{name}` is in {times} buckets of the plan", hint="send it once")
    left = [name for name in places if name not in held]
    if left:
        raise InputError(
            f"`{left[0]}` is in no bucket of the plan"
            + f", nor {len(left) - 1} more" * (len(left) > 1),
            hint="list every trained parameter in one bucket",
        )
    if plan.parts and (len(plan.parts) != len(plan.buckets) or min(plan.parts) < 1):
        raise InputError(
            f"the parts of {len(plan.buckets)} buckets are {list(plan.parts)}",
            hint="give each bucket one part or more",
        )
    return buckets_of([[places[n] for n in bucket] for bucket in plan.buckets], plan.parts)


def _require_model(plan: Plan, problem: Problem) -> None:
    own = problem.made_for(named_ops(plan.regions, plan.late))
    if plan.model and plan.model != own:
        raise InputError(
            f"the plan was made for model {plan.model}; `{problem.model}` is {own}",
            hint="plan again for this model, batch and number format",
        )


def workload_of(model: Workload | Graph) -> Workload:
    """The layers of a model; those a captured step is cut into."""
    return from_graph(model) if isinstance(model, Graph) else model


def eager_plan(workload: Workload, plan: Plan | None = None) -> Plan:
    """Plain DDP in the precision a plan asks for: what a fused plan is made from."""
    plan = plan or Plan()
    asked = Plan(
        framework=plan.framework or "ddp", precision=plan.precision, dtype=plan.dtype,
        optimizer=plan.optimizer, optimizer_kernels=plan.optimizer_kernels,
        grad_dtype=plan.grad_dtype,
    )  # fmt: skip
    return resolved(asked, workload.most("tp") > 1, workload.dtype)


def run_of(workload: Workload, plan: Plan | None = None) -> Running:
    """The framework profile that a fused plan of a workload runs under."""
    return running(eager_plan(workload, plan))


def referred(
    problem: Problem, model: Workload | Graph, cluster: Cluster, plan: Plan | None = None
) -> Problem:
    """The problem with what `predict` says of its step while nothing is fused: time and memory."""
    workload = workload_of(model)
    base = eager_plan(workload, plan)
    samples = problem.samples or workload.batch
    asked = base.but(
        dp=problem.wire.ranks,
        zero=problem.zero,
        recompute="full" if problem.recompute else "none",
        micro_batch=samples,
        global_batch=samples * problem.repeats * problem.wire.ranks,
    )
    found = predict(asked.but(zero=0), workload, cluster, advises=False)
    sharded = problem.zero and predict(asked, workload, cluster, advises=False)
    memory = sharded.peak if sharded else found.peak
    run = running(base)
    host = run.issued("elementwise", False) * cluster.calibration.host
    reference = Reference(found.step, host, run.profile.exponent, found.away)
    kept = unfused(problem).held - problem.held
    return replace(problem, reference=reference, held=memory - kept, room=room(cluster))


def scale_of(problem: Problem) -> float:
    """Reported seconds of a step over those of its lanes; 1 where nothing else is known."""
    if problem.reference is None:
        return 1.0
    return problem.reference.seconds / ddp(Evaluator(problem)).step


def fuses(plan: Plan) -> bool:
    """Whether a plan says what becomes of single ops or messages: more than layers and sizes."""
    made = bool(plan.model) and bool(plan.buckets) and not plan.sync and not plan.groups
    said = plan.regions or plan.late or plan.parts or plan.update == "by-message"
    return bool(said) or (made and _is_plain(plan))


def _is_plain(plan: Plan) -> bool:
    """Whether only data is split."""
    degrees = plan.degrees()
    return all(degrees.get(axis, 1) == 1 for axis in _ALONE) and not plan.stages


@dataclass(frozen=True, eq=False)
class FusedStep(ResolvedStep):
    """A plan of fused ops and messages of its own, evaluated."""

    judge: Evaluator
    scored: Scored

    @classmethod
    def of(cls, plan: Plan, model: Workload | Graph, cluster: Cluster) -> FusedStep:
        """The step of a plan; an error where it does more than split data."""
        _require_plain(plan, cluster)
        judge, scored = evaluated(plan, problem_of(plan, model, cluster))
        workload = workload_of(_sized(plan, model))
        return cls(_explicit(plan, workload), workload, cluster, judge, scored)

    @property
    def advice(self) -> str:
        """What to do where it does not fit."""
        return "accumulate more micro-batches, recompute, or zero=2"

    @property
    def away(self) -> dict[str, float]:
        """How far the step is from what was measured while nothing is fused."""
        assert self.judge.problem.reference is not None
        return self.judge.problem.reference.away

    def program(self, detail: str) -> Program:
        """The step with what a framework's host and a board's power limit add."""
        return _program(self.judge, self.scored, scale_of(self.judge.problem))

    def memory(self) -> tuple[float, float, dict[str, float]]:
        """Bytes of a rank, how many are missing there, and what they are."""
        held, problem = self.scored.fusion.held, self.judge.problem
        parts = {"state": problem.held, "activations": held - problem.held}
        return held, max(held - problem.room, 0.0), parts


def evaluated(plan: Plan, problem: Problem) -> tuple[Evaluator, Scored]:
    """The way to fuse that a plan says, simulated."""
    judge = Evaluator(problem, plan.update == "by-message", plan.zero == 2)
    buckets = buckets_from(plan, problem) if plan.buckets else None
    return judge, judge.score(fusion_of(plan, problem), buckets)


def _require_plain(plan: Plan, cluster: Cluster) -> None:
    beside = [f"{axis}={n}" for axis, n in plan.degrees().items() if n > 1 and axis != "dp"]
    beside += [f for f in ("sync", "stages", "groups", "shares", "whatifs") if getattr(plan, f)]
    beside += [f"zero={plan.zero}"] if plan.zero not in (0, 2) else []
    beside += [f"recompute={plan.recompute}"] if plan.recompute not in ("none", "full") else []
    if beside:
        raise InputError(
            f"fused ops or messages of a plan beside {', '.join(beside)}",
            hint="they are priced for a plain data-parallel step",
        )
    if plan.dp != cluster.size:
        raise InputError(
            f"dp={plan.dp} makes {plan.dp} ranks; `{cluster.name}` has {cluster.size}",
            hint="a plan of fused ops is made for all ranks of its cluster",
        )


def _sized(plan: Plan, model: Workload | Graph) -> Workload | Graph:
    """The workload with the samples a rank has in the plan."""
    if isinstance(model, Graph) or not plan.global_batch:
        return model
    return replace(model, batch=plan.global_batch // plan.dp)


def problem_of(plan: Plan, model: Workload | Graph, cluster: Cluster) -> Problem:
    """The step of a plan, with matmuls open to a compiler where it fuses any."""
    model = _sized(plan, model)

    def made(epilogue: bool) -> Problem:
        if isinstance(model, Graph):
            return problem_of_graph(model, cluster, epilogue=epilogue, learned=True, zero=plan.zero)
        return from_workload(
            model, cluster, epilogue=epilogue, learned=True, memory=_memory(plan, model),
            run=run_of(model, plan),
        )  # fmt: skip

    problem = made(False)
    kinds = dict(zip((op.name for op in problem.ops), problem.kinds, strict=True))
    inside = (name.removesuffix(COPY) for region in plan.regions for name in region)
    if any(kinds.get(name) == "template" for name in inside):
        problem = made(True)
    return referred(problem, model, cluster, plan)


def _memory(plan: Plan, model: Workload) -> Memory:
    """What the plan does to fit into memory."""
    repeats = model.batch // plan.micro_batch if plan.micro_batch else 1
    if plan.micro_batch and model.batch % plan.micro_batch:
        raise InputError(
            f"{model.batch} samples of a rank in micro-batches of {plan.micro_batch}",
            hint="give a micro-batch that divides them",
        )
    return Memory(repeats, plan.recompute == "full", plan.zero)


def _explicit(plan: Plan, workload: Workload) -> Plan:
    """The plan with the batch, framework and precision that it runs in."""
    named = eager_plan(workload, plan)
    return plan.but(
        global_batch=plan.global_batch or workload.batch * plan.dp,
        framework=named.framework, precision=named.precision, dtype=named.dtype,
        optimizer=named.optimizer,
    )  # fmt: skip
