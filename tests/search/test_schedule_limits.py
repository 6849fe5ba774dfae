"""Time limits by a clock of the test's own; and annealing: what a move is said to lead to."""

import numpy as np
import pytest

from foretell.search.schedule import (
    anneal,
    families,
    find,
    integer_problem,
    replay,
    shape,
    wrong,
)
from foretell.search.schedule.integer_problem import Budget, in_integers


class Clock:
    """A clock that goes on by so many seconds whenever it is read."""

    def __init__(self, step):
        self.now, self.step = 0.0, step

    def __call__(self):
        self.now += self.step
        return self.now


@pytest.mark.parametrize("limit", [2.0, 5.0, 20.0])
@pytest.mark.parametrize(
    ("spec", "num", "memory"),
    [("nn:devices=8", 24, 8), ("m:devices=32", 64, 40), ("x:devices=8,infer=yes", 16, None)],
)
def test_the_search_ends_in_time_however_slow_the_machine_is(monkeypatch, limit, spec, num, memory):
    clock = Clock(0.01)
    allowed = []

    def slow(engine, model):  # a solver that always takes what it may
        seconds = engine.parameters.max_time_in_seconds
        allowed.append(clock.now + seconds)
        clock.now += seconds
        engine.solve(integer_problem.solver().CpModel())  # an empty one
        return integer_problem.solver().UNKNOWN

    monkeypatch.setattr(integer_problem, "_solve_interruptibly", slow)
    problem = shape(spec).limited(memory)
    budget = Budget(1e9, limit, clock=clock)
    found = find._search(problem, num, "makespan", 4, budget, lambda *_: None)
    assert wrong(problem, found.starts, found.order) is None
    assert clock.now <= 1.2 * limit
    assert all(moment <= limit for moment in allowed)
    assert found.stopped == "time" or found.proven


def test_a_part_of_a_budget_is_charged_to_the_whole():
    whole = Budget(10.0, 100.0, clock=lambda: 0.0)
    part = whole.part(0.5, 0.25)
    assert (part.left, part.deadline) == (5.0, 25.0)
    part.part(0.5).spend(2.0)
    assert (part.left, whole.left) == (3.0, 8.0)


@pytest.mark.parametrize("spec", ["v:devices=4", "k:devices=4", "nn:devices=4", "loop:devices=3"])
def test_annealing_knows_what_its_moves_lead_to(spec):
    num = 6
    whole = in_integers(shape(spec).limited(4), num)
    rows = replay.arrays(whole)
    walk = anneal._order_state(whole, rows, num)
    price = int(np.max(rows.time))
    order = np.array([b * num + m for b, m in next(replay.list_schedules(whole, num))], np.int64)
    for seed in range(5):
        order, cost, best, least, _ = anneal.anneal(
            rows, walk, num, order, seed, 20_000, 2.0, 0, price
        )
        starts, held = replay.starts_and_peaks(rows, num, order)
        ends = starts.reshape(-1, num) + rows.time[:, None]
        assert walk.start.tolist() == starts.tolist()
        over = walk.counters[anneal._OVER]
        assert cost == ends.max() + price * over
        assert (over == 0) == all(h <= r for h, r in zip(held, rows.room, strict=True))
        assert replay.order_makespan(rows, num, best) == least


@pytest.mark.parametrize("at", [2, 6])
def test_an_interrupt_of_the_two_phases_answers_the_best_so_far(monkeypatch, at):
    solve, calls = families.solve, []

    def interrupted(*given):
        calls.append(given)
        if len(calls) == at:
            raise KeyboardInterrupt
        return solve(*given)

    monkeypatch.setattr(families, "solve", interrupted)
    found = find.schedule(shape("v:devices=4"), 8, 3, method="tessel", work=5)
    assert found.stopped == "interrupted"
    assert wrong(found.problem, found.starts, found.order) is None


def test_an_interrupt_ends_a_comparison_with_what_is_there(monkeypatch):
    def interrupted(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr(find, "shortest_period", interrupted)
    rows = find.compare(shape("v:devices=4"), 8, 3, work=5)
    assert [row.method for row in rows] == ["search", "gpipe", "1f1b"]
