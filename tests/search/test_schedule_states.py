"""Patterns of any length by their states: bounds hold, patterns are legal, the solver agrees."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell.search.schedule import Block, Problem, Wait, exact_search, schedule, shape, wrong
from foretell.search.schedule.exact_search import solve_pattern
from foretell.search.schedule.integer_problem import Budget, in_integers, period_bound
from foretell.search.schedule.replay import replay, unrolled_order


@pytest.mark.parametrize(
    ("spec", "memory", "each"),
    [("v", 3, 16 / 3), ("nn", 3, 21 / 2), ("nn", 4, 9), ("nn", 5, 17 / 2), ("k", 2, 8)],
)
def test_tight_memory_is_solved_for_patterns_of_any_length(spec, memory, each):
    found = schedule(shape(spec), 4, memory, work=3)
    assert found.per_micro_batch == each
    assert found.lower_bound == each
    assert found.proven_unroll is None


@pytest.mark.slow
def test_long_patterns_come_near_the_bound():
    found = schedule(shape("m"), 4, 3, work=3)
    assert found.unroll > 4
    assert found.per_micro_batch < 23 / 3  # the best of up to three micro-batches a pattern
    assert found.gap < 0.05


def test_what_states_do_not_cover_is_left_to_the_solver():
    apart = in_integers(shape("x").limited(3), 4)  # two pipelines that nothing ties together
    lagged = in_integers(shape("v:lag=1").limited(3), 4)
    roomy = in_integers(shape("v"), 4)
    for whole in (apart, lagged, roomy):
        assert exact_search.rate_bound_by_states(whole, Fraction(20), Budget(5)) is None
        assert exact_search.pattern_by_states(whole, Fraction(20), Fraction(1), Budget(5)) is None


@st.composite
def pipelines(draw):
    """There and back over a few devices, at times with a block on all of them inside."""
    num = draw(st.integers(2, 3))
    stages = [(d,) for d in range(num)]
    if draw(st.booleans()):
        stages.insert(draw(st.integers(1, num)), tuple(range(num)))
    times = st.integers(1, 3)
    blocks = [Block(i, "F", s, draw(times), float(len(s) == 1)) for i, s in enumerate(stages)]
    size = len(blocks)
    for i, s in enumerate(reversed(stages)):
        blocks.append(Block(size + i, "B", s, draw(times), -float(len(s) == 1)))
    waits = tuple(Wait(i, i - 1) for i in range(1, len(blocks)))
    return Problem(tuple(blocks), waits).limited(draw(st.integers(1, 2)))


@settings(max_examples=25, deadline=None)
@given(pipelines())
def test_no_pattern_of_the_solver_beats_the_states(problem):
    whole = in_integers(problem, 4)
    alone = Fraction(sum(whole.time))
    bound = exact_search.rate_bound_by_states(whole, alone, Budget(5))
    assert bound is not None
    assert bound >= period_bound(whole)
    for size in (1, 2):
        under = -(-bound * size // 1) - 1  # the largest whole period that would beat the bound
        status, _ = solve_pattern(whole, size, int(under), "any", Budget(5), 5)
        assert status == "none"
    found = exact_search.pattern_by_states(whole, alone, bound, Budget(5))
    if bound < alone:
        assert found is not None
        assert Fraction(found.period, found.unroll) == bound
        items = unrolled_order(found, len(whole.time), 3 * found.unroll)
        starts = replay(items, problem.seconds, whole.devices, whole.after)
        assert wrong(problem, starts, items) is None
