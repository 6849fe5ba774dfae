"""The checker finds every way in which a schedule can be illegal, and nothing in a legal one."""

import pytest

from foretell.search.schedule import Block, Problem, Wait, shape, wrong

# two stages, two micro-batches: forward 1, backward 2, one unit held in between
PROBLEM = shape("v:devices=2,backward=2").limited(2)
GOOD = [[0, 1], [1, 4], [2, 5], [4, 7]]


def moved(block, micro_batch, start):
    starts = [list(map(float, row)) for row in GOOD]
    starts[block][micro_batch] = float(start)
    return starts


def test_a_legal_schedule_passes():
    assert wrong(PROBLEM, GOOD) is None


@pytest.mark.parametrize(
    ("starts", "message"),
    [
        (GOOD[:3], "3 blocks are scheduled of 4"),
        ([*GOOD[:3], [4]], "runs for 1 micro-batches of 2"),
        (moved(0, 0, -1), "starts at -1"),
        (moved(0, 0, float("nan")), "starts at nan"),
        (moved(1, 0, 0.5), "block 1 of micro-batch 0 starts at 0.5, before"),
        (moved(3, 1, 6.5), "block 3 of micro-batch 1 starts at 6.5, before"),
        (moved(1, 1, 3), "device 1 runs block 2 of micro-batch 0 until 4 and"),
        (moved(0, 1, 0.5), "device 0 runs block 0 of micro-batch 0 until 1 and"),
    ],
)
def test_what_is_illegal_is_named(starts, message):
    assert message in (wrong(PROBLEM, starts) or "")


def test_memory_is_counted_by_start():
    assert wrong(PROBLEM.limited(1), GOOD) == (
        "device 0 holds 2 of 1 as block 0 of micro-batch 1 runs at 1"
    )
    one_by_one = [[0, 6], [1, 7], [2, 8], [4, 10]]
    assert wrong(PROBLEM.limited(1), one_by_one) is None


def test_memory_taken_while_a_block_runs_counts():
    scratch = Problem((Block(0, "F", (0,), 1.0, memory=3.0, memory_end=-3.0),))
    assert wrong(scratch.limited(3), [[0, 1]]) is None
    assert "holds 3 of 2" in (wrong(scratch.limited(2), [[0, 1]]) or "")
    late = Problem((Block(0, "F", (0,), 1.0, memory_end=1.0),))
    assert "holds 2 of 1" in (wrong(late.limited(1), [[0, 1]]) or "")


def test_lags_and_speeds_count():
    blocks = (Block(0, "F", (0,), 2.0), Block(1, "F", (1,), 1.0))
    fast = Problem(blocks, (Wait(1, 0, 0.5),), speed=(2.0, 1.0))
    assert wrong(fast, [[0], [1.5]]) is None
    assert "before what it needs" in (wrong(fast, [[0], [1.4]]) or "")


def test_the_order_decides_between_equal_starts():
    blocks = (Block(0, "F", (0,), 0.0, memory=1.0), Block(1, "B", (0,), 0.0, memory=-1.0))
    problem = Problem(blocks, (Wait(1, 0),)).limited(1)
    starts = [[0, 0], [0, 0]]
    assert wrong(problem, starts, [(0, 0), (1, 0), (0, 1), (1, 1)]) is None
    assert "holds 2 of 1" in (wrong(problem, starts, [(0, 0), (0, 1), (1, 0), (1, 1)]) or "")
    assert "is put before 0" in (wrong(problem, starts, [(1, 0), (0, 0), (0, 1), (1, 1)]) or "")
    assert "names 1 blocks of 4" in (wrong(problem, starts, [(0, 0)]) or "")
