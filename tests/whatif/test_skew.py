"""The slowest of n, and who waits for it."""

import numpy as np
import pytest

from foretell.errors import InputError
from foretell.simulate import simulate
from foretell.whatif import Setting, parse
from foretell.whatif.interference import TAKES
from foretell.whatif.skew import slowest, straggler_delay
from tests.transformer import transformer
from tests.whatif.ddp import bare


@pytest.mark.parametrize("ranks", [2, 4, 8, 64])
def test_the_expected_largest_of_so_many(ranks):
    drawn = np.random.default_rng(1).standard_normal((200_000 // ranks, ranks))
    assert slowest(ranks) == pytest.approx(drawn.max(axis=1).mean(), abs=0.05)


def test_one_rank_is_never_late():
    assert slowest(1) == 0.0
    assert straggler_delay(bare(), 1, 0.1) == 0.0


def test_a_step_waits_for_the_slowest():
    step = bare(1e5)  # five seconds on its stream, messages of next to nothing
    even = parse("data-parallel:ranks=8,skew=0").apply(step, Setting())
    uneven = parse("data-parallel:ranks=8,skew=0.1").apply(step, Setting())
    longer = simulate(uneven).seconds - simulate(even).seconds
    assert longer == pytest.approx(0.1 * slowest(8) * 5, rel=1e-3)


def test_where_the_network_is_the_limit_only_the_first_message_is_late():
    """It is ready a fifth of a step before the last, and the other queues behind it.

    While nobody sends yet the backward kernel runs alone, and slows the message less later on.
    """
    times = [
        simulate(parse(f"data-parallel:ranks=8,skew={s}").apply(bare(4e9), Setting())).seconds
        for s in ("0", "0.02")
    ]
    assert times[1] - times[0] == pytest.approx(0.08 * slowest(8) * (1 - TAKES), rel=1e-3)


def test_without_overlap_the_whole_step_is_late_at_once():
    spec = "data-parallel:ranks=8,overlap=no,skew={}"
    times = [
        simulate(parse(spec.format(s)).apply(bare(), Setting())).seconds for s in ("0", "0.02")
    ]
    assert times[1] - times[0] == pytest.approx(0.02 * slowest(8) * 5, rel=1e-3)


def test_ranks_that_are_there_show_their_own():
    with transformer(ranks=2, layers=2).edit() as edit:
        edit.set(edit.select(kind="kernel"), seconds=1e-3)
    two = edit.graph
    busiest = two.seconds[two.select(kind="kernel", rank=0)].sum()
    assert straggler_delay(two, 2, 0.02) == 0.0
    assert straggler_delay(two, 8, 0.02) == pytest.approx(
        0.02 * (slowest(8) - slowest(2)) * busiest
    )


@pytest.mark.parametrize("skew", ["-1", "2"])
def test_mistakes(skew):
    with pytest.raises(InputError):
        parse(f"data-parallel:ranks=2,skew={skew}").apply(bare(), Setting())
