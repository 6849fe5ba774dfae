"""The search: known optima, any placement legal, bounds that hold, the same answer every time."""

import itertools
import os
import subprocess
import sys
from fractions import Fraction

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from foretell.errors import InfeasibleError, InputError
from foretell.search.schedule import Block, Problem, Wait, integer_problem, schedule, shape, wrong
from foretell.search.schedule.integer_problem import in_integers
from foretell.search.schedule.replay import end_time, replay


@pytest.mark.parametrize(
    ("spec", "memory", "each", "unroll"),
    [
        ("v", 4, 4, 1),
        ("v", 3, Fraction(16, 3), 3),  # the memory bound: 16 from first forward to last backward
        ("v", 2, 8, 1),
        ("v", 1, 16, 1),
        ("m", 5, 6, 1),
        pytest.param("m", 2, 10, 1, marks=pytest.mark.slow),
        ("k", 2, 8, 1),
        ("nn", 6, 8, 1),
    ],
)
def test_the_least_time_a_micro_batch(spec, memory, each, unroll):
    found = schedule(shape(spec), 8, memory)
    assert found.per_micro_batch == pytest.approx(float(each))
    assert found.unroll == unroll
    assert found.proven
    assert max(found.peak_memory) <= memory


@pytest.mark.parametrize(
    ("spec", "num", "memory", "makespan"),
    [
        ("v", 8, 4, 44),
        ("v", 8, 3, 52),
        ("m", 8, 6, 60),
        ("nn", 8, 6, 76),
        ("k", 8, 6, 52),
        ("x", 4, 16, 36),
        ("v:split=yes,backward=2", 8, 4, 27),
        ("m:split=yes,backward=2", 6, 6, 33),
        ("v:devices=32", 64, 32, 380),
        ("m:devices=16", 128, 40, 828),
    ],
)
def test_the_least_makespan(spec, num, memory, makespan):
    found = schedule(shape(spec), num, memory)
    assert found.makespan == makespan
    assert found.makespan_gap == 0


def test_tight_memory_is_better_used_by_several_micro_batches_a_pattern():
    several = schedule(shape("m"), 4, 3, unroll=2, work=2)
    assert several.per_micro_batch == 8
    assert several.proven_unroll == 2
    assert not several.proven  # no shorter pattern of two is no bound
    assert several.gap == pytest.approx(1 - (16 / 3 + 2) / 8)  # the bound: 16/3 as for v, 2 sharded
    one = schedule(shape("m"), 4, 3, unroll=1, work=2)
    assert one.per_micro_batch == 10
    assert not one.proven


@pytest.mark.parametrize(
    ("problem", "num", "makespan"),
    [
        (shape("v"), 1, 16),
        (shape("v:devices=1"), 5, 20),
        (shape("v:devices=1,infer=yes"), 1, 1),
        (Problem((Block(0, "F", (6,), 2.0),)), 3, 6),
        (Problem((Block(0, "F", (0,), 0.0), Block(1, "F", (0,), 0.0)), (Wait(1, 0),)), 2, 0),
    ],
    ids=["one micro-batch", "one device", "one block", "idle devices", "no time at all"],
)
def test_odd_sizes(problem, num, makespan):
    found = schedule(problem, num)
    assert found.makespan == makespan
    assert wrong(problem, found.starts, found.order) is None
    assert found.answer()["micro_batches"] == num


def test_blocks_without_time_keep_their_order():
    blocks = [
        Block(0, "F", (0,), 0.0, 1.0),
        Block(1, "F", (1,), 2.0),
        Block(2, "B", (0,), 1.0, -1.0),
    ]
    found = schedule(Problem(tuple(blocks), (Wait(1, 0), Wait(2, 1))), 4, 2)
    assert found.per_micro_batch == 2
    assert found.makespan == 9
    assert found.proven


def test_lags_are_waited_for_and_hidden():
    found = schedule(shape("v:devices=2,lag=1"), 8)
    assert found.per_micro_batch == 4
    assert found.makespan == 8 * 4 + (1 + 1) + (3 + 1)


def test_real_times_are_kept_exactly_or_to_a_fine_grid():
    tenth = schedule(shape("v:forward=0.1,backward=0.3"), 8, 4)
    assert tenth.makespan == pytest.approx(4.4)
    assert tenth.makespan_gap == pytest.approx(0, abs=1e-12)
    odd = schedule(shape("v:forward=0.1000123456789,backward=0.3141592653589"), 8, 4)
    assert odd.proven_unroll is None
    assert odd.per_micro_batch == pytest.approx(0.4141716110378)
    assert odd.makespan == pytest.approx(11 * 0.4141716110378)
    assert odd.makespan_gap < 1e-3


def test_slow_devices_and_small_memories():
    problem = shape("v:devices=2")
    slow = Problem(problem.blocks, problem.waits, speed=(1.0, 0.5))
    assert schedule(slow, 8).per_micro_batch == 8
    assert schedule(problem, 8, [2, 1]).per_micro_batch == 4
    assert schedule(problem, 8, [1, 2]).per_micro_batch == 8


def test_memory_too_small_says_where_and_how_much():
    with pytest.raises(
        InfeasibleError, match=r"device 1 needs memory 1 for one micro-batch, it has 0\.5"
    ):
        schedule(shape("v:devices=2"), 4, [1, 0.5])
    blocks = (
        Block(0, "F", (0,), 1.0, 2.0),
        Block(1, "F", (0,), 1.0, 3.0),
        Block(2, "B", (0,), 1.0, -5.0),
    )
    with pytest.raises(InfeasibleError, match="device 0 needs memory 5"):
        schedule(Problem(blocks, (Wait(2, 0), Wait(2, 1))), 4, 4)


def test_what_stays_in_memory_counts_for_every_micro_batch():
    keeps = Problem((Block(0, "F", (0,), 1.0, 1.0),))
    assert schedule(keeps, 4, 4).makespan == 4
    with pytest.raises(InfeasibleError, match="needs memory 5 for what all micro-batches leave"):
        schedule(keeps, 5, 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"micro_batches": 0}, "0 micro-batches"),
        ({"method": "2f2b"}, "unknown schedule method"),
        ({"unroll": 9}, "unroll is 9"),
        ({"time_limit": 0}, "time limit is 0"),
        ({"work": 0}, "work is 0"),
        ({"memory": [1, 2, 3]}, "3 values of capacity"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(InputError, match=message):
        schedule(shape("v"), **options)


def test_progress_is_reported():
    seen = []
    schedule(
        shape("v"), 8, 3, progress=lambda what, value, bound: seen.append((what, value, bound))
    )
    assert {what for what, _, _ in seen} == {"period", "makespan"}
    assert all(value >= bound - 1e-9 for _, value, bound in seen)
    periods = [value for what, value, _ in seen if what == "period"]
    assert periods == sorted(periods, reverse=True)


def test_hash_seeds_change_nothing():
    code = (
        "from foretell.search.schedule import schedule, shape;"
        "print([schedule(shape(s), 4, m, work=0.1).starts for s, m in (('m', 3), ('x', 4))])"
    )
    said = set()
    for seed in ("0", "1"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
        )
        said.add(done.stdout)
    assert len(said) == 1


@st.composite
def problems(draw):
    """A few forward blocks on a few devices, mostly mirrored in backward, with odd times."""
    devices = draw(st.integers(1, 3))
    num = draw(st.integers(1, 4))
    times = st.sampled_from([0.0, 1.0, 1.0, 2.0, 0.37])
    places = st.sets(st.integers(0, devices - 1), min_size=1, max_size=devices)
    blocks, waits = [], []
    for i in range(num):
        at = tuple(sorted(draw(places)))
        blocks.append(Block(i, "F", at, draw(times), draw(st.sampled_from([0.0, 1.0, 2.0]))))
        waits += [
            Wait(i, j, draw(st.sampled_from([0.0, 0.0, 0.5])))
            for j in range(i)
            if draw(st.booleans())
        ]
    if draw(st.booleans()):
        for i in range(num):
            b = blocks[i]
            blocks.append(Block(num + i, "B", b.devices, draw(times), -b.memory))
            waits.append(Wait(num + i, i))
        waits += [Wait(num + w.on, num + w.block, w.lag) for w in list(waits) if w.block < num]
    return Problem(tuple(blocks), tuple(waits), devices)


def shortest_by_trying(problem, num):
    """The least makespan over all orders of all blocks."""
    after = [[(w.on, w.lag) for w in waits] for waits in problem.after]
    devices = [b.devices for b in problem.blocks]
    items = [(b, m) for m in range(num) for b in range(len(problem.blocks))]
    best = None
    for order in itertools.permutations(items):
        place = {item: k for k, item in enumerate(order)}
        if all(place[w.on, m] < place[w.block, m] for w in problem.waits for m in range(num)):
            starts = replay(order, problem.seconds, devices, after)
            if wrong(problem, starts, order) is None:
                length = end_time(starts, problem.seconds)
                best = length if best is None else min(best, length)
    return best


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(problems(), st.integers(1, 5), st.sampled_from([None, 2.0, 3.0, 5.0]))
def test_any_placement_gets_a_legal_schedule_within_its_bounds(problem, num, memory):
    try:
        found = schedule(problem, num, memory, work=0.5)
    except InfeasibleError:
        return
    limited = problem.limited(memory)
    assert wrong(limited, found.starts, found.order) is None
    assert found.makespan >= found.makespan_bound * (1 - 1e-9)
    assert found.per_micro_batch >= max(limited.work) * (1 - 1e-9)
    assert found.per_micro_batch >= found.lower_bound * (1 - 1e-9)
    assert found.proven == (found.per_micro_batch <= found.lower_bound * (1 + 1e-9))
    if found.stopped == "bound":
        assert found.proven
        assert found.makespan == pytest.approx(found.makespan_bound)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    problems().filter(lambda p: len(p.blocks) <= 3), st.integers(1, 2), st.sampled_from([None, 2.0])
)
def test_small_cases_are_solved_to_the_optimum(problem, num, memory):
    limited = problem.limited(memory)
    best = shortest_by_trying(limited, num)
    if best is None:
        with pytest.raises(InfeasibleError):
            schedule(problem, num, memory)
        return
    found = schedule(problem, num, memory, work=2.0)
    assert found.makespan == pytest.approx(best)
    whole = in_integers(limited, num)
    assert float(integer_problem.makespan_bound(whole, num)) * whole.unit <= best * (1 + 1e-9)


@st.composite
def small_rings(draw):
    """Two stages with whole times, there and back: few enough patterns to try them all."""
    devices = draw(st.integers(1, 3))
    places = st.sets(st.integers(0, devices - 1), min_size=1, max_size=2)
    time, lag = st.sampled_from([1.0, 2.0]), st.sampled_from([0.0, 0.0, 1.0, 3.0])
    blocks = [
        Block(i, "F", tuple(sorted(draw(places))), draw(time), draw(st.sampled_from([0.0, 1.0])))
        for i in range(2)
    ]
    blocks += [Block(2 + b.id, "B", b.devices, draw(time), -b.memory) for b in blocks]
    waits = [Wait(2, 0), Wait(3, 1), *([Wait(1, 0, draw(lag))] if draw(st.booleans()) else [])]
    waits += [Wait(2, 3, draw(lag))] if draw(st.booleans()) else []
    return Problem(tuple(blocks), tuple(waits), devices)


def least_period_by_trying(problem, most):
    """The least whole period over all starts within a few periods, checked on 12 micro-batches."""
    for period in range(int(max(problem.work)), most + 1):
        for others in itertools.product(range(-2 * period, 3 * period), repeat=3):
            starts = (0, *others)
            early = min(starts)
            rows = [[s - early + period * m for m in range(2)] for s in starts]
            if wrong(problem.limited(99), rows) is None:
                rows = [[s - early + period * m for m in range(12)] for s in starts]
                if wrong(problem, rows) is None:
                    return period
    return None


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(small_rings(), st.sampled_from([1.0, 2.0, 3.0]))
def test_the_period_is_the_least_of_all_patterns(problem, memory):
    try:
        found = schedule(problem, 3, memory, unroll=1)
    except InfeasibleError:
        return
    assert found.proven_unroll in (None, 1)
    fewer = problem.limited(memory)
    assert least_period_by_trying(fewer, int(found.period) - 1) is None


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(problems(), st.sampled_from([3.0, 5.0]))
def test_many_micro_batches_take_no_less_than_the_bound_each(problem, memory):
    try:
        found = schedule(problem, 12, memory, work=0.3)
    except InfeasibleError:
        return
    assert found.makespan / 12 >= found.lower_bound * (1 - 1e-9)
