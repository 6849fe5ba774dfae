"""Tours are the best there are: against every permutation."""

from itertools import pairwise, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell.cluster.node import tour


@st.composite
def matrices(draw: st.DrawFn, most: int = 6) -> tuple[list[list[float]], list[list[float]]]:
    size = draw(st.integers(2, most))
    width = [[0.0] * size for _ in range(size)]
    delay = [[0.0] * size for _ in range(size)]
    for i in range(size):
        for j in range(i):
            width[i][j] = width[j][i] = draw(st.sampled_from((6.0, 25.0, 50.0)))
            delay[i][j] = delay[j][i] = draw(st.sampled_from((0.6e-6, 1e-6, 2.1e-6)))
    return width, delay


def _worth(
    width: list[list[float]], delay: list[list[float]], order: tuple[int, ...], closed: bool
) -> tuple[float, int]:
    steps = list(pairwise(order))
    steps += [(order[-1], order[0])] if closed else []
    return -min(width[a][b] for a, b in steps), sum(round(delay[a][b] * 1e12) for a, b in steps)


@given(matrices())
@settings(max_examples=60, deadline=None)
def test_ring_is_the_best_of_all(case: tuple[list[list[float]], list[list[float]]]) -> None:
    width, delay = case
    orders = ((0, *rest) for rest in permutations(range(1, len(width))))
    best = min(_worth(width, delay, order, closed=True) for order in orders)
    assert _worth(width, delay, tour(width, delay, closed=True), closed=True) == best


@given(matrices())
@settings(max_examples=60, deadline=None)
def test_chain_is_the_best_of_all(case: tuple[list[list[float]], list[list[float]]]) -> None:
    width, delay = case
    best = min(
        _worth(width, delay, order, closed=False) for order in permutations(range(len(width)))
    )
    assert _worth(width, delay, tour(width, delay, closed=False), closed=False) == best


@given(matrices(most=14))
@settings(max_examples=20, deadline=None)
def test_beyond_exact_it_is_a_tour_no_worse_than_counting(
    case: tuple[list[list[float]], list[list[float]]],
) -> None:
    width, delay = case
    order = tour(width, delay, closed=True)
    assert sorted(order) == list(range(len(width)))
    counted = _worth(width, delay, tuple(range(len(width))), closed=True)
    assert _worth(width, delay, order, closed=True) <= counted


@pytest.mark.parametrize("size", [1, 2, 9, 40])
def test_equal_points_are_taken_in_order(size: int) -> None:
    flat = [[1.0] * size for _ in range(size)]
    found = [tour(flat, flat, closed=closed) for closed in (True, False)]
    assert found == [tuple(range(size))] * 2
