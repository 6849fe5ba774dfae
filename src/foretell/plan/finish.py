"""The end of a step as tasks: gradients reduced, weights updated, what was shared handed back."""

from __future__ import annotations

from typing import Any

import numpy as np

from foretell.graph.groups import group_text
from foretell.plan.chains import Spans, sent_in
from foretell.plan.costs import Stage, grad_width
from foretell.plan.ends import overlaps, reducing, regathering, tying, updating
from foretell.plan.memory import rank_memory
from foretell.plan.sheet import Sheet


def write_end(sheet: Sheet, spans: Spans) -> None:
    """Reduce, update and hand back, on every stage."""
    stages = [sheet.stage(s) for s in range(sheet.plan.pp)]
    done = [_reduce(sheet, s, held, spans.made[s]) for s, held in enumerate(stages)]
    if sheet.plan.pp > 1:
        done += _tie(sheet, (done[0], done[-1]))
    for s, held in enumerate(stages):
        _update(sheet, s, held, done)


def _reduce(sheet: Sheet, s: int, held: Stage, made: list[int]) -> int:
    """Reduce the gradients of a stage; the task after which they are all there."""
    seconds = float(reducing(sheet.costs, held, sheet.cluster)[0])
    if not seconds:
        return made[-1]
    pieces = made if overlaps(sheet.plan) else made[-1:]
    parts = sent_in(sheet, s)
    if len(parts) != len(pieces):  # layer by layer, or all at the end
        parts = np.full(len(pieces), 1 / len(pieces))
    size = float((held.weights * grad_width(sheet.costs))[0])
    ids = sheet.draft.tasks(
        len(pieces),
        op="reduce_scatter" if sheet.plan.zero else "all_reduce",
        name="gradients",
        seconds=seconds * parts,
        comm_bytes=size * parts,
        group=sheet.group(s),
        **(_talk(sheet, s) | {"lane": sheet.lanes[s].between}),
    )
    sheet.draft.wait(ids, pieces)
    return int(ids[-1])


def _talk(sheet: Sheet, s: int) -> dict[str, Any]:
    """What all collectives of a stage have in common."""
    where = {"lane": sheet.lanes[s].collective, "rank": sheet.rank(s)}
    return where | {"kind": "collective", "phase": "communicate", "source": "formula"}


def _tie(sheet: Sheet, after: tuple[int, int]) -> list[int]:
    """Add up the gradients of weights that the first and the last stage share."""
    seconds = float(tying(sheet.costs, sheet.workload, sheet.cluster)[0])
    if not seconds:
        return []
    group = group_text((sheet.rank(0), sheet.rank(sheet.plan.pp - 1)))
    task = sheet.draft.tasks(
        1, op="all_reduce", name="tied weights", seconds=seconds, group=group, **_talk(sheet, 0)
    )
    sheet.draft.wait(task, after)
    return [int(task[0])]


def _update(sheet: Sheet, s: int, held: Stage, done: list[int]) -> None:
    """The optimizer, after all gradients are there, and the parameters it hands back."""
    update = sheet.draft.tasks(
        1,
        kind="kernel",
        op="optimizer",
        lane=sheet.lanes[s].compute,
        rank=sheet.rank(s),
        seconds=float(updating(sheet.costs, held, sheet.cluster)[0]),
        phase="update",
        source="formula",
    )
    sheet.draft.wait(update, done)
    again = float(regathering(sheet.costs, held, sheet.cluster)[0])
    if again:
        back = sheet.draft.tasks(
            1,
            op="all_gather",
            name="parameters",
            seconds=again,
            group=sheet.group(s),
            **_talk(sheet, s),
        )
        sheet.draft.wait(back, update)


def write_buffers(sheet: Sheet, spans: Spans) -> None:
    """What each rank holds for good, and what each micro-batch keeps from forward to backward."""
    for s in range(sheet.plan.pp):
        found = rank_memory(sheet.costs, sheet.workload, s)
        parts = found.parts()
        for kind in ("parameter", "gradient", "optimizer", "workspace"):
            size = parts.get(f"{kind}s", parts.get(kind, 0.0))
            sheet.draft.buffers(1, kind, kind, bytes=size, rank=sheet.rank(s))
        first, last = spans.first[0, s].reshape(-1), spans.last[1, s].reshape(-1)
        chunks = spans.first.shape[2]
        sheet.draft.buffers(
            len(first),
            "activation",
            "kept for the backward",
            bytes=float(found.each[0]) / chunks,
            rank=sheet.rank(s),
            born=first,
            dies=last,
        )
