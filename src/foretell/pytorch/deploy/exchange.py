"""Rows that change hands: from the parts that ranks have to the parts they want, both ways.

Each rank has rows [a, b) of a dim and wants rows [c, d), which may overlap what others want (a
halo) and reach past the ends (zeros). Forward sends each row to all who want it; backward sends
gradients home and adds them up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

Tensor = Any
Span = tuple[int, int]


class _Exchange(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dim: int, have: Sequence[Span], want: Sequence[Span], group: Any
    ) -> Tensor:
        ctx.dim, ctx.have, ctx.want, ctx.group = dim, have, want, group
        return _moved(x, dim, have, want, group)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return _moved(g, ctx.dim, ctx.want, ctx.have, ctx.group), None, None, None, None


def exchange(
    x: Tensor, dim: int, have: Sequence[Span], want: Sequence[Span], group: Any = None
) -> Tensor:
    """The rows this rank wants, of a dim whose rows `have` says who holds."""
    if tuple(have) == tuple(want):
        return x
    return _Exchange.apply(x, dim, tuple(have), tuple(want), group)


def spans(sizes: Sequence[int]) -> list[Span]:
    """Where parts of these sizes begin and end."""
    ends = [sum(sizes[: r + 1]) for r in range(len(sizes))]
    return [(e - s, e) for s, e in zip(sizes, ends, strict=True)]


def _moved(x: Tensor, dim: int, have: Sequence[Span], want: Sequence[Span], group: Any) -> Tensor:
    """Rows from those who have them, added up where several do."""
    rank = dist.get_rank(group)
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    shape = list(x.shape)
    shape[dim] = want[rank][1] - want[rank][0]
    found = x.new_zeros(shape)
    sent, due = [], []
    for other in range(len(have)):
        if other == rank:
            continue
        if out := _overlap(have[rank], want[other]):
            piece = _rows(x, dim, have[rank], out).contiguous()
            sent.append((dist.isend(piece, dst=ranks[other], group=group), piece))
        if back := _overlap(want[rank], have[other]):
            into = torch.empty_like(_rows(found, dim, want[rank], back)).contiguous()
            due.append((dist.irecv(into, src=ranks[other], group=group), into, back))
    if own := _overlap(have[rank], want[rank]):
        _rows(found, dim, want[rank], own).add_(_rows(x, dim, have[rank], own))
    for work, into, back in due:
        work.wait()
        _rows(found, dim, want[rank], back).add_(into)
    for work, _ in sent:
        work.wait()
    return found


def _overlap(one: Span, other: Span) -> Span | None:
    first, last = max(one[0], other[0]), min(one[1], other[1])
    return (first, last) if first < last else None


def _rows(x: Tensor, dim: int, held: Span, wanted: Span) -> Tensor:
    return x.narrow(dim, wanted[0] - held[0], wanted[1] - wanted[0])
