"""The end of a step as tasks: gradients reduced, weights updated, what was shared passed back."""

from __future__ import annotations

from typing import Any

import numpy as np

from foretell.cost import collective
from foretell.graph.groups import group_text
from foretell.plan.chains import Spans, sent_in
from foretell.plan.costs import grad_width
from foretell.plan.ends import overlaps, reducing, regathering, tied_bytes, updating
from foretell.plan.order import last_stage
from foretell.plan.sheet import PricedStage, Sheet


def write_end(sheet: Sheet, spans: Spans) -> None:
    """Reduce, update and hand back, on every stage."""
    done = [_reduce(sheet, one, spans.made[one.index]) for one in sheet.stages]
    if len(sheet.stages) > 1:
        done += _tie(sheet, done)
    for one in sheet.stages:
        _update(sheet, one, done)


def _reduce(sheet: Sheet, one: PricedStage, made: list[int]) -> int:
    """Reduce the gradients of a stage; the task after which they are all there."""
    seconds = float(reducing(one.costs, one.cost, one.cluster)[0])
    if not seconds:
        return made[-1]
    pieces = made if overlaps(one.plan) else made[-1:]
    parts = sent_in(one)
    if len(parts) != len(pieces):  # layer by layer, or all at the end
        parts = np.full(len(pieces), 1 / len(pieces))
    size = float((one.cost.weights * grad_width(one.costs))[0])
    ids = sheet.draft.tasks(
        len(pieces),
        op="reduce_scatter" if one.plan.zero else "all_reduce",
        name="gradients",
        seconds=seconds * parts,
        comm_bytes=size * parts,
        group=one.group,
        **(_talk(sheet, one) | {"lane": sheet.lanes[one.index].between}),
    )
    sheet.draft.wait(ids, pieces)
    return int(ids[-1])


def _talk(sheet: Sheet, one: PricedStage) -> dict[str, Any]:
    """What all collectives of a stage have in common."""
    where = {"lane": sheet.lanes[one.index].collective, "rank": one.rank}
    return where | {"kind": "collective", "phase": "communicate", "source": "formula"}


def _tie(sheet: Sheet, done: list[int]) -> list[int]:
    """Add up the gradients of weights that the stages of the first and the last layer share."""
    first, last = sheet.stages[0], sheet.stages[last_stage(sheet.stages[0].plan)]
    size = tied_bytes(first.costs, sheet.workload)
    if not size[0] or first is last:
        return []
    between = sheet.apart(first.index, last.index)
    seconds = float(collective.price("all_reduce", size, between).seconds[0])
    group = group_text((first.rank, last.rank))
    task = sheet.draft.tasks(
        1, op="all_reduce", name="tied weights", seconds=seconds, group=group,
        **_talk(sheet, first),
    )  # fmt: skip
    sheet.draft.wait(task, (done[first.index], done[last.index]))
    return [int(task[0])]


def _update(sheet: Sheet, one: PricedStage, done: list[int]) -> None:
    """The optimizer, after all gradients are there, and the parameters it hands back."""
    update = sheet.draft.tasks(
        1,
        kind="kernel",
        op="optimizer",
        lane=sheet.lanes[one.index].compute,
        rank=one.rank,
        seconds=float(updating(one.costs, one.cost, one.cluster)[0]),
        phase="update",
        source="formula",
    )
    sheet.draft.wait(update, done)
    again = float(regathering(one.costs, one.cost, one.cluster)[0])
    if again:
        back = sheet.draft.tasks(
            1,
            op="all_gather",
            name="parameters",
            seconds=again,
            group=one.group,
            **_talk(sheet, one),
        )
        sheet.draft.wait(back, update)


def write_buffers(sheet: Sheet, spans: Spans) -> None:
    """What each rank holds for good, and what each micro-batch keeps from forward to backward."""
    for one in sheet.stages:
        parts = one.memory.parts()
        for kind in ("parameter", "gradient", "optimizer", "workspace"):
            size = parts.get(f"{kind}s", parts.get(kind, 0.0))
            sheet.draft.buffers(1, kind, kind, bytes=size, rank=one.rank)
        first, last = (ids[one.index].reshape(-1) for ids in (spans.first[0], spans.last[-1]))
        chunks = spans.first.shape[2]
        sheet.draft.buffers(
            len(first),
            "activation",
            "kept for the backward",
            bytes=float(one.memory.each[0]) / chunks,
            rank=one.rank,
            born=first,
            dies=last,
        )
