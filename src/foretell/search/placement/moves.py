"""What goes over links: samples that are wanted elsewhere, and collectives. Compiled.

`moved` says which share of the batch goes from cell to cell when one set hands over to another:
what `reslice` says of single ranks.
"""

from __future__ import annotations

from typing import Any

from foretell.compiled import compiled
from foretell.search.placement.problem import Tables
from foretell.search.placement.tasks import (
    SEND,
    Page,
    holds,
    law,
    task,
    uses,
    waits,
)


@compiled
def moved(t: Tables, one: int, of: Any, is_split: Any, other: int, to: Any, out: Any) -> None:
    """[c, c] share of the batch that goes from the cells of one set to those of another.

    `of` and `to` are samples of a rank [c]; `is_split` says whose ranks hold, or want, all samples.
    """
    out[:] = 0.0
    if is_split[0]:
        fetched(t, one, other, to, is_split[1], out)
    elif is_split[1]:
        gathered(t, one, of, other, out)
    else:
        resliced(t, one, of, other, to, out)


@compiled
def total(t: Tables, s: int, share: Any) -> float:
    """Samples of all ranks of a set: a batch, and what rounding up adds."""
    out = 0.0
    for c in range(len(share)):
        if t.member[s, c]:
            out += t.ranks[c] * share[c]
    return out


@compiled
def fetched(t: Tables, one: int, other: int, to: Any, wants_all: bool, out: Any) -> None:
    """From ranks that hold everything: each cell that is none of them gets its part from all."""
    holders = t.member[one].sum()
    whole = 1.0 if wants_all else total(t, other, to)
    for b in range(len(t.kind)):
        if t.member[other, b] and not t.member[one, b]:
            part = 1.0 if wants_all else t.ranks[b] * to[b] / whole
            for a in range(len(t.kind)):
                if t.member[one, a]:
                    out[a, b] += part / holders


@compiled
def gathered(t: Tables, one: int, of: Any, other: int, out: Any) -> None:
    """To ranks that want everything: what a cell's own ranks hold passes over its bus."""
    whole = total(t, one, of)
    for b in range(len(t.kind)):
        if t.member[other, b]:
            for a in range(len(t.kind)):
                if t.member[one, a]:
                    part = t.ranks[a] * of[a] / whole
                    out[a, b] += part * (t.ranks[b] - 1) if a == b else part


@compiled
def resliced(t: Tables, one: int, of: Any, other: int, to: Any, out: Any) -> None:
    """Where stretches of samples overlap; ranks lie in the order of cells for every set."""
    cells = len(t.kind)
    held, whole = total(t, one, of), total(t, other, to)
    a, i, b, j = 0, 0, 0, 0
    begin_a, begin_b = 0.0, 0.0
    while a < cells and b < cells:
        if not t.member[one, a]:
            a += 1
            continue
        if not t.member[other, b]:
            b += 1
            continue
        end_a, end_b = begin_a + of[a] / held, begin_b + to[b] / whole
        overlap = min(end_a, end_b) - max(begin_a, begin_b)
        if overlap > 1e-12 and not (a == b and i == j):
            out[a, b] += overlap
        if end_a <= end_b:
            begin_a = end_a
            i += 1
            if i == t.ranks[a]:
                a, i = a + 1, 0
        else:
            begin_b = end_b
            j += 1
            if j == t.ranks[b]:
                b, j = b + 1, 0


@compiled
def collective(p: Page, t: Tables, s: int, seconds: float, what: int, group: int) -> Any:
    """A collective of all ranks of a set: one at a time on each, sharing links with messages."""
    i = task(p, seconds, 0, what, 0, group)
    for c in range(len(t.kind)):
        if t.member[s, c]:
            holds(p, len(t.kind) + c)
    last = -1
    for c in range(len(t.kind)):
        if t.member[s, c] and t.box[c] != last:
            last = t.box[c]
            if t.boxes[s] > 1:
                uses(p, 3 * last, 1.0)
                uses(p, 3 * last + 1, 1.0)
            else:
                uses(p, 3 * last + 2, 1.0)
    return i


@compiled
def transfers(
    p: Page, t: Tables, part: Any, size: float, done: Any, arrived: Any, flip: bool, group: int
) -> None:
    """Messages of one hand-over; `arrived` [c, c] becomes their tasks.

    Messages between cells use what goes out of one box and into another; those inside one its bus.
    """
    arrived[:] = -1
    box, nodes, streams, sends = t.box, t.nodes, t.streams, t.sends
    for a in range(len(done)):
        for b in range(len(done)):
            share = part[b, a] if flip else part[a, b]
            if share > 0:
                side = streams[a, b]
                arrived[a, b] = task(p, law(sends[a, b], share * size / side), 0, SEND, b, group)
                if box[a] != box[b] or (a == b and nodes[a] > 1):
                    uses(p, 3 * box[a], side / nodes[a])
                    uses(p, 3 * box[b] + 1, side / nodes[b])
                else:
                    uses(p, 3 * box[a] + 2, 1.0)
                waits(p, done[a])
