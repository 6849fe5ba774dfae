"""What becomes of tensors when a batch is split over ranks, compared with numbers."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretell.plan.layer_ranges import Move, gather, redistribute


def test_moves_of_equal_dealings_stay_at_home():
    assert all(m.source == m.target for m in redistribute({0: 3, 1: 5}, {0: 3, 1: 5}))


shares = st.lists(st.integers(1, 5), min_size=1, max_size=5)


@st.composite
def dealings(draw):
    """Two ways to deal one batch out, on ranks that partly differ."""
    one = draw(shares)
    total, cuts = sum(one), draw(st.sets(st.integers(1, 20), max_size=4))
    edges = [0, *sorted(c for c in cuts if c < total), total]
    other = [b - a for a, b in pairwise(edges)]
    offset = draw(st.integers(0, 3))
    return dict(enumerate(one)), {i + offset: n for i, n in enumerate(other)}


def moved(parts, moves, held):
    """Carry moves out on arrays: what each target then has, in order."""
    begin = dict(zip(held, np.cumsum([0, *held.values()]), strict=False))
    out: dict[int, list] = {}
    for m in sorted(moves, key=lambda m: (m.target, m.first)):
        rows = parts[m.source][m.first - begin[m.source] : m.last - begin[m.source]]
        out.setdefault(m.target, []).append(rows)
    return {rank: np.concatenate(rows) for rank, rows in out.items()}


def rank_parts(x, held):
    edges = np.cumsum([0, *held.values()])
    return {r: x[edges[i] : edges[i + 1]] for i, r in enumerate(held)}


@given(dealings(), st.integers(0, 2**16))
def test_a_step_on_two_sets_of_ranks_gives_the_gradients_of_one(both, seed):
    """Two layers on sets of their own, samples redistributed between: forward, backward, sums."""
    one, other = both
    draw = np.random.default_rng(seed)
    batch = sum(one.values())
    x = draw.normal(size=(batch, 3))
    w1, w2 = draw.normal(size=(3, 4)), draw.normal(size=(4, 2))
    hidden = {r: np.maximum(part @ w1, 0) for r, part in rank_parts(x, one).items()}
    there = moved(hidden, redistribute(one, other), one)
    errors = {r: (part @ w2) / batch for r, part in there.items()}
    dw2 = sum(there[r].T @ errors[r] for r in other)  # partial sums are added up
    back = moved({r: e @ w2.T for r, e in errors.items()}, redistribute(other, one), other)
    inputs = rank_parts(x, one)
    dw1 = sum(inputs[r].T @ (back[r] * (hidden[r] > 0)) for r in one)
    whole = np.maximum(x @ w1, 0)
    error = whole @ w2 / batch
    np.testing.assert_allclose(dw2, whole.T @ error, atol=1e-12)
    np.testing.assert_allclose(dw1, x.T @ ((error @ w2.T) * (whole > 0)), atol=1e-12)


@given(dealings(), st.integers(0, 2**16))
def test_factors_gathered_give_the_gradient_everywhere(both, seed):
    held, other = both
    draw = np.random.default_rng(seed)
    batch = sum(held.values())
    a, e = draw.normal(size=(batch, 3)), draw.normal(size=(batch, 2))
    targets = list(other)
    rows = [moved(rank_parts(t, held), gather(held, targets), held) for t in (a, e)]
    for rank in targets:
        np.testing.assert_allclose(rows[0][rank].T @ rows[1][rank], a.T @ e, atol=1e-12)


def test_dealings_have_to_agree():
    with pytest.raises(ValueError, match="3 samples are held, 4"):
        redistribute({0: 3}, {1: 4})
    assert gather({0: 1, 1: 0}, [2]) == [Move(0, 2, 0, 1)]
