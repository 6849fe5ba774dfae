"""The compiled lanes against the simulator, and the messages that are found exactly."""

import itertools
import random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from foretell.search.fusion.fused_step import (
    Evaluator,
    best_buckets,
    buckets_of,
    lower,
    own_buckets,
)
from foretell.search.fusion.lanes import best_messages, communication, ends
from foretell.search.fusion.planner import random_move
from foretell.search.fusion.state import deferrable_gradients, fitting_edges, random_change, unfused
from foretell.simulate import simulate
from tests.search.fusion.cases import chain, problems, wire

QUICK = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))


def wandered(problem, seed, steps=12):
    """A random legal state."""
    dice, state = random.Random(seed), unfused(problem)
    for _ in range(steps):
        moved = random_move(state, dice.choice(("copy", "merge")), dice)
        state = moved.fusion if moved else state
    return state


@QUICK
@given(problems(), st.integers(0, 999), st.booleans(), st.booleans(), st.data())
def test_lanes_give_what_the_simulator_gives(problem, seed, by_message, sharded, data):
    judge = Evaluator(problem, by_message, sharded)
    state = wandered(problem, seed)
    late = [i for i in deferrable_gradients(problem)[0] if data.draw(st.booleans())]
    order = data.draw(st.permutations(range(len(problem.gradients))))
    cut = data.draw(st.integers(1, len(order)))
    lists = [list(b) for b in (order[:cut], order[cut:]) if b]
    parts = [data.draw(st.integers(1, 3)) for _ in lists]
    scored = judge.score(state.put_off(late), buckets_of(lists, parts))
    graph = lower(judge, scored)
    for engine in ("readable", "compiled"):
        assert simulate(graph, engine=engine).seconds == pytest.approx(scored.step, rel=1e-12)


@settings(QUICK, max_examples=120)
@given(problems(), st.integers(0, 999))
def test_a_move_simulated_from_the_last_state_gives_what_a_fresh_simulation_gives(problem, seed):
    judge, dice = Evaluator(problem), random.Random(seed)
    scored = judge.score(unfused(problem))
    for _ in range(20):
        sort = dice.choice(("copy", "merge", "any"))
        edges = fitting_edges(problem)
        moved = (
            random_move(scored.fusion, sort, dice)
            if sort != "any"
            else random_change(scored.fusion, edges, dice)
            if edges
            else None
        )
        if moved is None:
            continue
        live = [g for g in moved.touched if moved.fusion.group[g] == g]
        scored = judge.after(scored, moved.fusion, live)
        anew = Evaluator(problem).score(moved.fusion)
        assert scored.step == anew.step
        assert scored.compute == anew.compute


@QUICK
@given(problems(), st.integers(0, 999), st.integers(0, 999))
def test_prices_do_not_depend_on_what_was_asked_before(problem, seed, other):
    state, judge = wandered(problem, seed), Evaluator(problem)
    judge.score(wandered(problem, other))
    assert judge.score(state).step == Evaluator(problem).score(state).step


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1e-2), st.floats(1e3, 1e8)), min_size=1, max_size=7))
def test_messages_of_neighbours_are_the_best_of_all_cuts(rows):
    ready = np.sort(np.array([r for r, _ in rows]))
    sizes, laws = np.array([s for _, s in rows]), wire().laws
    n = len(rows)
    firsts, through = best_messages(ready, sizes, laws)
    tried = []
    for cuts in itertools.product((0, 1), repeat=n - 1):
        edges = [0, *(k + 1 for k, c in enumerate(cuts) if c), n]
        tried.append(_through(ready, sizes, edges, laws))
    assert through == pytest.approx(min(tried), rel=1e-12)
    assert _through(ready, sizes, [*firsts.tolist(), n], laws) == pytest.approx(through, rel=1e-12)


def _through(ready, sizes, edges, laws):
    many = len(edges) - 1
    first, ones = np.array(edges, np.int64), np.ones(many, np.int64)
    end, done = np.zeros(many), np.zeros(many)
    member = np.arange(len(ready))
    return communication(ready, sizes, first, member, ones, laws, 0.0, 0.0, False, end, done, 0)


def test_lanes_taken_up_in_the_middle_end_the_same():
    problem = chain(["add"] * 6, gradients=[(i, 1e6 * (i + 1)) for i in range(6)])
    scored = Evaluator(problem).score(unfused(problem))
    end = scored.end.copy()
    assert ends(scored.fusion.order, scored.cost, end, 3) == scored.compute
    buckets = own_buckets(problem, scored.ready)
    whole, done = np.zeros(6), np.zeros(6)
    given_ = (
        buckets.first,
        buckets.member,
        buckets.parts,
        problem.wire.laws,
        scored.compute,
        1e-4,
        True,
    )
    step = communication(scored.ready, problem.sizes, *given_, whole, done, 0)
    assert communication(scored.ready, problem.sizes, *given_, whole, done, 4) == step


def test_a_late_gradient_leaves_last_and_others_earlier():
    problem = chain(["add", "mul", "add"], gradients=[(0, 1e6), (2, 1e6)])
    state = unfused(problem)
    assert deferrable_gradients(problem) == [
        [2],
        [2],
    ]  # op0 is read by others, so it stays where it is
    assert state.put_off([2]).order.tolist() == [0, 1, 2]


def test_more_messages_than_needed_are_not_sent():
    problem = chain(["add"] * 4, gradients=[(3, 1e3)] * 5)
    scored = Evaluator(problem).score(unfused(problem))
    assert len(best_buckets(problem, scored.ready)) == 1
