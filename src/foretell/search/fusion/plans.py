"""A way to fuse as a plan, and back: regions and buckets by name, with the model's fingerprint.

A region lists the ops of one kernel; an op written with `*` behind it is recomputed there for
its reader, and stays where it is too. Buckets list parameters in the order they are sent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from foretell.errors import InputError, unknown
from foretell.plan import Plan
from foretell.plan.op_names import COPY, named_ops
from foretell.search.fusion.legal import edge_fits, require
from foretell.search.fusion.problem import Problem
from foretell.search.fusion.score import Buckets, Scored, buckets_of
from foretell.search.fusion.state import Fusion, fused


def plan_of(scored: Scored) -> Plan:
    """The plan that runs a step so, on every rank of the wire."""
    problem, fusion = scored.fusion.problem, scored.fusion
    copies = _copies(fusion)
    groups = sorted({*fusion.members, *copies})
    regions = tuple(
        tuple(problem.ops[i].name for i in fusion.of(g))
        + tuple(f"{problem.ops[i].name}{COPY}" for i in sorted(copies.get(g, set())))
        for g in groups
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


def _copies(fusion: Fusion) -> dict[int, set[int]]:
    """For each group the ops it recomputes."""
    found: dict[int, set[int]] = {}
    problem = fusion.problem
    for edge in fusion.copied.nonzero()[0].tolist():
        if fusion.is_copied(edge):
            reader = int(fusion.group[problem.target[edge]])
            found.setdefault(reader, set()).add(int(problem.source[edge]))
    return found


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
    """The edges from a region's copies to those of its ops that read them."""
    inside = {places[n] for n in region if not n.endswith(COPY)}
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
