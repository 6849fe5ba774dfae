"""Segments of a plan: layers in a row on a mesh of ranks, with degrees and memory of their own.

    segments=12+0-7+tp:4/20+8-23+tp:2+zero:1+recompute:full,micro_batch=8

A row has the number of blocks, the ranks in mesh order (tp innermost, dp outermost), then what the
segment does its own way; what it does not say is as in the plan. dp is what the other degrees leave
of its ranks. `micro_batch` counts the samples of all replicas of a segment together: every segment
works on the same micro-batches. Degrees (`dp=4,tp=2,pp=2`) are segments that are all alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from foretell import spec
from foretell.cluster import Cluster
from foretell.errors import InputError, unknown
from foretell.graph.groups import group_text, ranks_of
from foretell.plan.plan import Plan, field_types
from foretell.workload import Workload

# What a segment may do its own way.
OWN = ("tp", "cp", "ep", "etp", "sp", "zero", "shard", "recompute", "recompute_layers", "offload")
_PLAIN = Plan()


@dataclass(frozen=True)
class Segment:
    """One stage: the blocks it has, its ranks, and the plan that it alone follows.

    The plan's degrees are the segment's; stages, micro-batches and schedule are the whole plan's.
    """

    blocks: int
    ranks: tuple[int, ...]
    plan: Plan

    def text(self, whole: Plan) -> tuple[str, ...]:
        """The segment as a row of a plan."""
        own = [
            f"{name}:{spec.write(getattr(self.plan, name))}"
            for name in OWN
            if getattr(self.plan, name) != getattr(whole, name)
        ]
        return (str(self.blocks), group_text(self.ranks), *own)


def segments(plan: Plan, workload: Workload) -> tuple[Segment, ...]:
    """The segments that the rows of a plan stand for; an error where a row cannot be."""
    rows = [_row(row, plan) for row in plan.segments]
    blocks = tuple(count for count, _, _ in rows)
    if min(blocks) < 1 or sum(blocks) != workload.num_blocks:
        raise InputError(
            f"segments of {'+'.join(map(str, blocks))} blocks; `{workload.name}` has "
            f"{workload.num_blocks}",
            hint="every segment has one or more, and together they are the model",
        )
    _check_ranks([ranks for _, ranks, _ in rows])
    whole = plan.global_batch or workload.batch * _replicas(rows[0][1], rows[0][2])
    each = plan.micro_batch or whole
    if whole % each:
        raise InputError(
            f"global_batch={whole} is no multiple of micro_batch={each}",
            hint="with segments, micro_batch counts the samples of all replicas together",
        )
    common = plan.but(
        segments=(), pp=len(rows), layers=blocks, global_batch=whole, cluster="", placement=()
    )
    return tuple(
        Segment(count, ranks, _own(common, ranks, own, each)) for count, ranks, own in rows
    )


def blocks_of(plan: Plan, workload: Workload) -> tuple[int, ...]:
    """Blocks of each stage."""
    if plan.layers:
        return plan.layers
    each, rest = divmod(workload.num_blocks, plan.pp)
    return tuple(each + (stage < rest) for stage in range(plan.pp))


def _row(row: Sequence[str], plan: Plan) -> tuple[int, tuple[int, ...], dict[str, Any]]:
    """Blocks, ranks and own fields of one row."""
    where = f"the row `{'+'.join(row)}` of segments"
    if not row[0].isdecimal():
        raise InputError(f"{where} begins with no number", hint="write BLOCKS+RANKS: 12+0-7+tp:4")
    own: dict[str, Any] = {name: getattr(plan, name) for name in OWN}
    for text in row[2:]:
        name, _, value = text.partition(":")
        if name not in OWN:
            raise unknown(f"field in {where}", name, OWN)
        own[name] = spec.read(value, field_types()[name], where)
    return int(row[0]), ranks_of(row[1]), own


def _check_ranks(found: Sequence[tuple[int, ...]]) -> None:
    every = [rank for ranks in found for rank in ranks]
    if not all(found) or len(set(every)) < len(every):
        raise InputError(
            "a segment without ranks, or a rank in two segments", hint="each rank has one segment"
        )


def _replicas(ranks: Sequence[int], own: dict[str, Any]) -> int:
    inner: int = own["tp"] * own["cp"]
    return max(len(ranks) // max(inner, 1), 1)


def _own(common: Plan, ranks: tuple[int, ...], own: dict[str, Any], each: int) -> Plan:
    """The plan of one segment."""
    inner = own["tp"] * own["cp"]
    dp = len(ranks) // inner if inner else 0
    if dp < 1 or dp * inner != len(ranks):
        raise InputError(
            f"tp={own['tp']} × cp={own['cp']} on the {len(ranks)} ranks of a segment",
            hint="their product divides the number of ranks",
        )
    if each % dp:
        raise InputError(
            f"micro-batches of {each} samples for {dp} replicas of a segment",
            hint=f"a multiple of {dp}; each replica has as many samples as the others",
        )
    return common.but(dp=dp, micro_batch=each // dp, **own)


def as_degrees(plan: Plan, found: Sequence[Segment], cluster: Cluster) -> Plan | None:
    """The same plan in degrees where all segments are alike; None where they are not.

    There is one way to write a plan down, and so one price for it.
    """
    first = found[0].plan
    if any(one.plan != first or len(one.ranks) != len(found[0].ranks) for one in found):
        return None
    ranks = tuple(rank for one in found for rank in one.ranks)
    in_order = ranks == tuple(range(cluster.size))
    return first.but(placement=() if in_order else ranks, cluster=plan.cluster)


def written(plan: Plan, found: Sequence[Segment]) -> Plan:
    """A plan whose stages are these segments; `plan` says what they have in common."""
    each = {one.plan.micro_batch * one.plan.dp for one in found}
    if len(each) > 1:
        raise InputError(
            f"segments with micro-batches of {sorted(each)} samples",
            hint="all segments work on the same micro-batches",
        )
    shared = {name: getattr(_PLAIN, name) for name in (*OWN, "dp", "pp", "layers", "placement")}
    common = plan.but(**shared, micro_batch=each.pop(), segments=())
    return common.but(segments=tuple(one.text(common) for one in found))
