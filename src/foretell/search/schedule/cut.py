"""A model cut into stages by dynamic programming: uneven layers, mixed devices, any widths.

Layers stand in a line, ranks in a row. A stage is a run of layers on the next 1, 2, 4 … ranks, over
which it is split. With `W(i, j, k, t)` the seconds of layers i to j on the t ranks from k on:

    best(s, d, i) = min over t, j of max( W(i, j, n − d, t), best(s − 1, d − t, j) )      → `_table`

is the least longest stage when layers from i on make s stages on the last d of n ranks, over those
that fit: weights, and what as many micro-batches keep as 1F1B would have in flight there. Of all s
the one is taken that ends N micro-batches first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from foretell.errors import InfeasibleError
from foretell.plan.layouts import Array
from foretell.plan.memory import ROUNDING
from foretell.plan.place_costs import Prices, room


@dataclass(frozen=True)
class Cutting:
    """What is to be cut, and under which conditions."""

    prices: Prices
    line: tuple[int, ...]  # the layer of each piece, in order
    ranks: tuple[int, ...]  # to be used in this order
    micro_batches: int
    trains: bool = True
    recompute: bool = False
    taken: float = 0.0  # bytes that every rank holds besides
    share: float = 1.0  # of the memory left, what one stage may use
    widths: tuple[int, ...] = ()  # ranks that a stage may have; powers of two where empty
    frozen: frozenset[int] = frozenset()  # layers that are not trained
    stages: int = 0  # how many there have to be; any number where 0


class Stage(NamedTuple):
    """A run of pieces and the ranks it is on."""

    ranks: tuple[int, ...]
    first: int
    last: int  # the piece behind it


class _Costs(NamedTuple):
    """Of every run i to j: seconds, bytes for good, bytes a micro-batch, seconds one way."""

    work: Array
    constant: Array
    kept: Array
    spare: float  # bytes that are there for a moment


_DEEP = 1 << 30  # more micro-batches than any device holds


def cut(asked: Cutting) -> list[Stage]:
    """The stages; an error where no way to cut fits into memory."""
    for flight in (_DEEP, 2, 1):  # fewer in flight than 1F1B where that does not fit
        found = _best(asked, flight)
        if found:
            return found
    raise InfeasibleError(
        f"no cut of {len(asked.line)} layers over {len(asked.ranks)} ranks fits into "
        f"{room(asked.prices, asked.ranks[0]) / 2**30:.0f} GiB each",
        hint="take more ranks, a smaller micro-batch, recompute, or shards on all ranks",
    )


def _best(asked: Cutting, flight: int) -> list[Stage]:
    table = _table(asked, flight)
    ends: list[tuple[float, int, int]] = []
    for (s, d), (worst, _) in table.items():
        if s and np.isfinite(worst[0]) and asked.stages in (0, s):
            ends.append(((asked.micro_batches + s - 1) * float(worst[0]), s, d))
    return _walked(asked, table, *min(ends)[1:]) if ends else []


Table = dict[tuple[int, int], tuple[Array, list[tuple[int, int]]]]


def _table(asked: Cutting, flight: int) -> Table:
    """By stages and ranks left: the least longest stage from each piece on, and how it begins."""
    size, num = len(asked.line), len(asked.ranks)
    nothing = np.full(size + 1, np.inf)
    nothing[size] = 0.0
    table: Table = {(0, 0): (nothing, [(0, 0)] * (size + 1))}
    known: dict[tuple[int, int], _Costs] = {}
    for s in range(1, min(size, num) + 1):
        for d in range(1, num + 1):
            ways = [t for t in _widths(asked, num - d, d) if (s - 1, d - t) in table]
            options = [(t, _options(asked, table, known, s, d, t, flight)) for t in ways]
            if not options:
                continue
            every = np.stack([o for _, o in options])  # width × first × last
            flat = every.transpose(1, 0, 2).reshape(size + 1, -1)
            at = np.argmin(flat, axis=1)
            least = flat[np.arange(size + 1), at]
            if np.isfinite(least).any():
                moves = [(options[a // (size + 1)][0], int(a % (size + 1))) for a in at]
                table[s, d] = (least, moves)
    return table


def _widths(asked: Cutting, start: int, left: int) -> list[int]:
    """Ranks the next stage may have, in line with those of equal width beside it."""
    widths = asked.widths or tuple(1 << k for k in range(left.bit_length()))
    return [t for t in widths if t <= left and start % t == 0]


def _options(
    asked: Cutting, table: Table, known: dict[tuple[int, int], _Costs], s: int, d: int, t: int,
    flight: int,
) -> Array:  # fmt: skip
    """The longest stage for every run that begins with i and ends before j."""
    k = len(asked.ranks) - d
    if (k, t) not in known:
        known[k, t] = _costs(asked, asked.ranks[k : k + t])
    c = known[k, t]
    least = min(room(asked.prices, r) for r in asked.ranks[k : k + t])
    space = (least - asked.taken) * asked.share - c.spare
    held = c.constant + c.kept * min(s, flight, asked.micro_batches)
    fits = (held <= space) & (c.work > 0)
    longest = np.maximum(c.work, table[s - 1, d - t][0][None, :])
    found: Array = np.where(fits, longest, np.inf)
    return found


def _costs(asked: Cutting, ranks: tuple[int, ...]) -> _Costs:
    r, line = asked.prices.rates(ranks), list(asked.line)
    blocks = r.is_block * asked.recompute
    learns = np.array([float(i not in asked.frozen) for i in range(len(r.forward))])
    back = (r.inputs + r.weights * learns + blocks * r.forward)[line] * _returns(asked)
    kept = np.where(blocks > 0, r.handed, r.kept)[line] * _returns(asked)
    constant = r.parameters + r.trained * learns * asked.trains
    moment = max(float((r.kept + r.brief)[i] * blocks[i] + r.brief[i]) for i in line)
    runs = [_runs(column) for column in (r.forward[line] + back, constant[line], kept)]
    return _Costs(runs[0], ROUNDING * runs[1], ROUNDING * runs[2], ROUNDING * moment)


def _returns(asked: Cutting) -> Array:
    """1 for pieces that have a backward: trained ones and all behind the first of them."""
    learns = [float(asked.trains and i not in asked.frozen) for i in asked.line]
    return np.maximum.accumulate(np.array(learns))


def _runs(values: Array) -> Array:
    """Sums over all runs: from i, before j; 0 where there is no such run."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    found: Array = np.maximum(sums[None, :] - sums[:, None], 0.0)
    return found


def _walked(asked: Cutting, table: Table, s: int, d: int) -> list[Stage]:
    out, i = [], 0
    while s:
        k = len(asked.ranks) - d
        t, j = table[s, d][1][i]
        out.append(Stage(asked.ranks[k : k + t], i, j))
        i, s, d = j, s - 1, d - t
    return out
