"""The pipeline of a plan as lists of actions: by the name of its schedule, or as it writes them."""

from __future__ import annotations

from collections.abc import Sequence

from foretell.errors import InputError, unknown
from foretell.plan import Plan
from foretell.plan.order import FAMILIES, order
from foretell.pytorch.deploy.actions import Pipeline, parse


def pipeline(plan: Plan, micro_batches: int) -> Pipeline:
    """The pipeline of a plan for so many micro-batches."""
    if plan.actions:
        return Pipeline(parse(_numbered(plan.actions)))
    if plan.schedule not in FAMILIES:
        raise unknown("schedule without actions", plan.schedule, FAMILIES)
    if plan.schedule == "interleaved" and plan.chunks > 1 and micro_batches % plan.pp:
        raise InputError(
            f"{micro_batches} micro-batches are not a multiple of {plan.pp} stages, "
            "as interleaving needs",
            hint="choose micro_batch so that they are, or the schedule 1f1b",
        )
    return Pipeline(parse(order(plan, micro_batches).rows()))


def name_of(found: Pipeline) -> str:
    """Which of the usual orders a pipeline of one stage a rank has; nothing where it has none."""
    for name in ("1f1b", "gpipe"):
        usual = order(Plan(pp=len(found.orders), schedule=name), found.micro_batches)
        if parse(usual.rows()) == found.orders:
            return name
    return ""


def _numbered(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """Rows of `F0`, or `F0.1` of a chunk, are in the plan's own words; `3F0` says its stage."""
    return [[_cell(cell, rank, len(rows)) for cell in row] for rank, row in enumerate(rows)]


def _cell(cell: str, rank: int, ranks: int) -> str:
    if cell[:1].isdigit():
        return cell
    action, _, chunk = cell.partition(".")
    return f"{int(chunk or 0) * ranks + rank}{action}"
