"""The usual orders of a pipeline as lists of actions: plain data, no torch.

    gpipe         all forwards, then all backwards
    1f1b          as many forwards as stages lie ahead, then backward and forward in turn
    interleaved   Megatron's order: several chunks a rank, groups of micro-batches through each
    zb-h1         1f1b with each backward in two; weight gradients fill the bubble (Qi et al. 2023)

Stage s is on rank s mod p. Searched orders come in a plan's `actions`.
"""

from __future__ import annotations

from collections.abc import Sequence

from foretell.errors import InputError, unknown
from foretell.plan import Plan
from foretell.pytorch.deploy.actions import Action, Pipeline, parse

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "actions")


def pipeline(plan: Plan, micro_batches: int) -> Pipeline:
    """The pipeline of a plan for so many micro-batches."""
    if plan.actions:
        return Pipeline(parse(_numbered(plan.actions)))
    if plan.schedule not in SCHEDULES or plan.schedule == "actions":
        raise unknown("schedule without actions", plan.schedule, SCHEDULES[:-1])
    rows = _ROWS[plan.schedule]
    each = [rows(plan.pp, plan.chunks, rank, micro_batches) for rank in range(plan.pp)]
    return Pipeline(tuple(map(tuple, each)))


def name_of(found: Pipeline) -> str:
    """Which of the usual orders a pipeline of one stage a rank has; nothing where it has none."""
    ranks, num = len(found.orders), found.micro_batches
    for name, row in (("1f1b", _1f1b), ("gpipe", _gpipe)):
        usual = tuple(tuple(row(ranks, 1, rank, num)) for rank in range(ranks))
        if usual == found.orders:
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


def _gpipe(ranks: int, chunks: int, rank: int, num: int) -> list[Action]:
    stages = range(rank, ranks * chunks, ranks)
    forward = [Action(s, "F", m) for s in stages for m in range(num)]
    return forward + [Action(s, "B", m) for s in reversed(stages) for m in range(num)]


def _1f1b(ranks: int, chunks: int, rank: int, num: int) -> list[Action]:
    if chunks > 1:
        return _interleaved(ranks, chunks, rank, num)
    ahead = min(num, ranks - rank)
    order = [Action(rank, "F", m) for m in range(ahead)]
    for m in range(num):
        order.append(Action(rank, "B", m))
        if m + ahead < num:
            order.append(Action(rank, "F", m + ahead))
    return order


def _interleaved(ranks: int, chunks: int, rank: int, num: int) -> list[Action]:
    if num % ranks:
        raise InputError(
            f"{num} micro-batches are not a multiple of {ranks} stages, as interleaving needs",
            hint="choose micro_batch so that they are, or the schedule 1f1b",
        )

    def place(k: int, kind: str) -> Action:
        turn, m = k % (ranks * chunks) // ranks, k // (ranks * chunks) * ranks + k % ranks
        chunk = chunks - 1 - turn if kind == "B" else turn
        return Action(chunk * ranks + rank, kind, m)

    total = num * chunks
    ahead = min(total, (ranks - rank - 1) * 2 + (chunks - 1) * ranks + 1)
    order = [place(k, "F") for k in range(ahead)]
    for k in range(total):
        order.append(place(k, "B"))
        if k + ahead < total:
            order.append(place(k + ahead, "F"))
    return order


def _zb_h1(ranks: int, chunks: int, rank: int, num: int) -> list[Action]:
    """ZB-H1: a rank keeps as many activations as in 1F1B; the weights of micro-batch m are due
    when those of the last `rank` ones wait."""
    if chunks > 1:
        raise InputError(f"schedule=zb-h1 with chunks={chunks}", hint="it has one stage a rank")
    order, waiting = [], list[Action]()
    for action in _1f1b(ranks, 1, rank, num):
        if action.kind == "F":
            order.append(action)
            continue
        order.append(action._replace(kind="I"))
        waiting.append(action._replace(kind="W"))
        if len(waiting) > rank:
            order.append(waiting.pop(0))
    return order + waiting


_ROWS = {"gpipe": _gpipe, "1f1b": _1f1b, "interleaved": _interleaved, "zb-h1": _zb_h1}
