"""The best order in which to visit a few points, as a closed ring or an open chain.

Best is: the narrowest step is as wide as can be; then the steps together are as quick as can be;
then the lowest numbers come first. Exact up to `EXACT` points by dynamic programming over subsets
(Held and Karp 1962), with the width as a threshold lowered until a tour exists; beyond that a
greedy tour, or the points as they are counted, improved by reversing stretches of it (2-opt).
"""

from collections.abc import Sequence
from itertools import combinations, pairwise

Matrix = Sequence[Sequence[float]]
Order = tuple[int, ...]

EXACT = 8  # 2^7 subsets of 7 points: a few milliseconds


def ring(width: Matrix, delay: Matrix) -> Order:
    """The best closed tour of points 0 … n-1, starting at 0."""
    return _tour(width, delay, closed=True)


def chain(width: Matrix, delay: Matrix) -> Order:
    """The best open tour of points 0 … n-1."""
    return _tour(width, delay, closed=False)


def _tour(width: Matrix, delay: Matrix, *, closed: bool) -> Order:
    size = len(width)
    if size <= 3 and (closed or size < 3):
        return tuple(range(size))
    steps = [[round(d * 1e12) for d in row] for row in delay]  # whole picoseconds: ties are exact
    if _all_equal(width) and _all_equal(steps):
        return tuple(range(size))
    if size > EXACT:
        starts = (_greedy(width, steps), tuple(range(size)))
        start = min(starts, key=lambda order: _cost(width, steps, order, closed))
        return _improved(width, steps, start, closed)
    for limit in sorted({w for i, row in enumerate(width) for w in row[:i]}, reverse=True):
        if found := _exact(width, steps, limit, closed):
            return found
    return tuple(range(size))


def _all_equal(matrix: Matrix) -> bool:
    return len({x for i, row in enumerate(matrix) for j, x in enumerate(row) if i != j}) <= 1


def _exact(width: Matrix, steps: Matrix, limit: float, closed: bool) -> Order:
    """The quickest tour over steps at least `limit` wide; empty when there is none."""
    size = len(width)
    # best[(visited, last)] = (delay, order)
    best: dict[tuple[int, int], tuple[float, Order]] = {
        (1 << v, v): (0, (v,)) for v in ((0,) if closed else range(size))
    }
    for _ in range(size - 1):
        best = _longer(best, width, steps, limit)
    ends = [
        (cost + (steps[last][0] if closed else 0), order)
        for (_, last), (cost, order) in best.items()
        if not closed or width[last][0] >= limit
    ]
    return min(ends)[1] if ends else ()


def _longer(
    best: dict[tuple[int, int], tuple[float, Order]], width: Matrix, steps: Matrix, limit: float
) -> dict[tuple[int, int], tuple[float, Order]]:
    """Every partial tour with one more point."""
    out: dict[tuple[int, int], tuple[float, Order]] = {}
    for (seen, last), (cost, order) in best.items():
        for v in range(len(width)):
            if seen >> v & 1 or width[last][v] < limit:
                continue
            key, new = (seen | 1 << v, v), (cost + steps[last][v], (*order, v))
            if key not in out or new < out[key]:
                out[key] = new
    return out


def _greedy(width: Matrix, steps: Matrix) -> Order:
    order = [0]
    left = set(range(1, len(width)))
    while left:
        here = order[-1]
        nearest = min(left, key=lambda v: (-width[here][v], steps[here][v], v))
        order.append(nearest)
        left.remove(nearest)
    return tuple(order)


def _improved(width: Matrix, steps: Matrix, order: Order, closed: bool) -> Order:
    cost = _cost(width, steps, order, closed)
    better = True
    while better:
        better = False
        for i, j in combinations(range(1, len(order) + 1), 2):
            other = order[:i] + order[i:j][::-1] + order[j:]
            if (new := _cost(width, steps, other, closed)) < cost:
                order, cost, better = other, new, True
    return order


def _cost(width: Matrix, steps: Matrix, order: Order, closed: bool) -> tuple[float, float]:
    pairs = list(pairwise(order))
    if closed:
        pairs.append((order[-1], order[0]))
    return -min(width[a][b] for a, b in pairs), sum(steps[a][b] for a, b in pairs)
