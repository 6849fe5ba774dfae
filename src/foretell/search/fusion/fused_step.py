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
from dataclasses import replace

from foretell.cluster import Cluster
from foretell.errors import InputError, unknown
from foretell.graph import Builder, Graph
from foretell.plan import Plan
from foretell.plan.file import COPY, named_ops
from foretell.plan.framework import Running, resolved, running
from foretell.plan.memory import room
from foretell.predict.interval import interval
from foretell.predict.predict import Prediction, predict, utilisation
from foretell.search.fusion.baselines import ddp
from foretell.search.fusion.lanes import seconds
from foretell.search.fusion.ops import Memory, from_workload, problem_of_graph
from foretell.search.fusion.problem import Problem, Reference
from foretell.search.fusion.score import Buckets, Evaluator, Scored, buckets_of
from foretell.search.fusion.state import Fusion, edge_fits, fused, require, unfused
from foretell.simulate import simulate
from foretell.workload import Workload
from foretell.workload.captured import from_graph

_ALONE = ("tp", "pp", "cp", "filter", "channel", "height", "width", "depth")


def lower(judge: Evaluator, scored: Scored, stretch: float = 1.0) -> Graph:
    """One step: groups on a stream, messages on the wire, updates behind them.

    With `stretch` every task takes so many times what the lanes of the search give it.
    """
    make = Builder()
    lanes = make.lane("compute", kind="compute"), make.lane("wire", kind="comm")
    there = _gathers(make, lanes[1], judge, scored)
    if scored.before:
        make.task(
            kind="kernel", op="fused", name="micro-batches before the last", lane=lanes[0],
            seconds=scored.before, phase="forward",
        )  # fmt: skip
        there = {}  # parameters were there for the first of them
    task = _groups(make, lanes[0], scored, there)
    _messages(make, lanes, judge, scored, task)
    problem = judge.problem
    graph = make.graph(workload=problem.model, ranks=problem.wire.ranks)
    if stretch == 1.0:
        return graph
    with graph.edit() as edit:
        edit.scale(edit.select(), stretch)
    return edit.graph


def _gathers(make: Builder, wire: int, judge: Evaluator, scored: Scored) -> dict[int, int]:
    """Parameters that come while the forward runs; for each group the last message it waits for."""
    problem, there = judge.problem, dict[int, int]()
    for bucket in scored.gathers.lists() if scored.gathers else []:
        size = float(problem.sizes[bucket].sum())
        message = make.task(
            kind="collective", op="all_gather", name=_named(scored, bucket), lane=wire,
            seconds=float(seconds(size, problem.wire.halves[1])), comm_bytes=size,
            group=f"0-{problem.wire.ranks - 1}", phase="communicate",
        )  # fmt: skip
        there |= dict.fromkeys(scored.fusion.group[problem.used[bucket]].tolist(), message)
    return there


def _groups(make: Builder, stream: int, scored: Scored, there: dict[int, int]) -> dict[int, int]:
    fusion, problem = scored.fusion, scored.fusion.problem
    task: dict[int, int] = {}
    for g in fusion.order.tolist():
        ops = [problem.ops[i] for i in fusion.of(g)]
        task[g] = make.task(
            kind="kernel",
            op="fused" if len(ops) > 1 else ops[0].word,
            name=" + ".join(op.name for op in ops),
            lane=stream,
            seconds=float(scored.cost[g]),
            phase="backward" if ops[0].side else "forward",
            after=sorted(
                {task[a] for a in _waits(fusion, g)} | ({there[g]} if g in there else set())
            ),
        )
    return task


def _waits(fusion: Fusion, g: int) -> set[int]:
    """Groups that a group reads from; through a copy, those the copy reads from."""
    problem = fusion.problem
    rows = (row for i in (*fusion.of(g), *fusion.copies(g)) for row in problem.reads[i])
    return {int(fusion.group[j]) for j, edge in rows if not fusion.copied[edge]} - {g}


def _messages(
    make: Builder, lanes: tuple[int, int], judge: Evaluator, scored: Scored, task: dict[int, int]
) -> None:
    problem, fusion = scored.fusion.problem, scored.fusion
    op = "reduce_scatter" if scored.gathers else "all_reduce"
    share = judge.update / max(float(problem.sizes.sum()), 1.0)
    sent: list[tuple[int, float]] = []
    for b, bucket in enumerate(scored.buckets.lists()):
        parts = int(scored.buckets.parts[b])
        size = float(problem.sizes[bucket].sum()) / parts
        after = sorted({task[int(fusion.group[problem.producer[k]])] for k in bucket})
        for _ in range(parts):
            message = make.task(
                kind="collective", op=op, name=_named(scored, bucket), lane=lanes[1],
                seconds=float(seconds(size, judge.laws)), comm_bytes=size,
                group=f"0-{problem.wire.ranks - 1}", phase="communicate", after=after,
            )  # fmt: skip
            sent.append((message, share * size))
    updates = sent if judge.by_message else [(sent[-1][0], judge.update)]
    for message, each in updates:
        last = make.task(
            kind="kernel", op="optimizer", name="update", lane=lanes[0], seconds=each,
            phase="update", after=[message],
        )  # fmt: skip
    if scored.launches:
        make.task(
            kind="kernel", op="launch", name="waiting for the host to launch kernels",
            lane=lanes[0], seconds=scored.launches, phase="update", after=[last],
        )  # fmt: skip


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


def predict_fused(plan: Plan, model: Workload | Graph, cluster: Cluster) -> Prediction:
    """The step of a plan with fused ops or messages of its own, as its planner reports it."""
    _require_plain(plan, cluster)
    problem = problem_of(plan, model, cluster)
    judge, scored = evaluated(plan, problem)
    return _predicted(plan, _sized(plan, model), cluster, judge, scored)


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


def _predicted(
    plan: Plan, model: Workload | Graph, cluster: Cluster, judge: Evaluator, scored: Scored
) -> Prediction:
    problem = judge.problem
    stretch = scale_of(problem)
    seconds = float(simulate(lower(judge, scored, stretch)).seconds)
    workload = workload_of(model)
    plan = _explicit(plan, workload)
    held, room = scored.fusion.held, problem.room
    assert problem.reference is not None
    low, high = interval(seconds, problem.reference.away)
    compute = stretch * problem.repeats * float(scored.cost[scored.fusion.order].sum())
    update, idle = stretch * judge.update, stretch * scored.launches
    return Prediction(
        plan=plan,
        step=seconds,
        low=low,
        high=high,
        away=problem.reference.away,
        peak=held,
        missing=max(held - room, 0.0),
        breakdown={
            "compute_s": compute,
            "exchange_s": 0.0,
            "reduce_s": max(seconds - compute - update - idle, 0.0),
            "update_s": max(min(update, seconds - compute - idle), 0.0),
            "idle_s": idle,
        },
        memory={"state": problem.held, "activations": held - problem.held},
        advice="accumulate more micro-batches, recompute, or zero=2" if held > room else "",
        utilisation=utilisation(plan, workload, cluster, seconds),
    )


def _explicit(plan: Plan, workload: Workload) -> Plan:
    """The plan with the batch, framework and precision that it runs in."""
    named = eager_plan(workload, plan)
    return plan.but(
        global_batch=plan.global_batch or workload.batch * plan.dp,
        framework=named.framework, precision=named.precision, dtype=named.dtype,
        optimizer=named.optimizer,
    )  # fmt: skip
