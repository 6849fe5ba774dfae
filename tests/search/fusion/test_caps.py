"""Lists of caps: the cuts DDP makes of them, and what they are predicted to give."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell.search.fusion.lanes import (
    STRETCHES,
    Profile,
    as_caps,
    best_messages,
    candidates,
    even_cut,
    predicted_step,
    robust_cut,
)
from foretell.search.fusion.problem import measured_wire
from tests.search.fusion.cases import wire

MIB = 2**20


def profile(sizes, gap=1e-3):
    ready = 0.01 + gap * np.arange(len(sizes))
    return Profile(ready, np.array(sizes, float), float(ready[-1]), 1e-3)


def closed(sizes, caps):
    """Where DDP begins buckets: each is closed when it has reached its cap."""
    firsts, held, at = [0], 0, 0
    for k, size in enumerate(sizes):
        held += size
        if held >= int(caps[min(at, len(caps) - 1)] * MIB) and k + 1 < len(sizes):
            firsts.append(k + 1)
            held, at = 0, at + 1
    return firsts


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 4000), min_size=1, max_size=30), st.data())
def test_ddp_closes_buckets_where_the_caps_say(numbers, data):
    sizes = [4 * n for n in numbers]
    cuts = data.draw(st.sets(st.integers(1, len(sizes)), max_size=5)) - {len(sizes)}
    firsts = [0, *sorted(cuts)]
    assert closed(sizes, as_caps(profile(sizes), firsts)) == firsts


def test_the_default_comes_first_and_the_search_is_close_to_the_best():
    found = candidates(profile([4 * MIB] * 20), wire())
    assert found[0].name == "default"
    assert found[0].caps == ()
    best = next(c for c in found if c.name == "searched")
    assert best.step <= 1.03 * min(c.step for c in found)
    assert [c.step for c in found[1:]] == sorted(c.step for c in found[1:])


def test_the_search_does_well_whatever_ops_take_beside_messages():
    made, on = profile([MIB] * 24, gap=2e-3), wire(start=1e-4, slope=4e-9)
    cut = robust_cut(made, on)
    for stretch in STRETCHES:
        slow = replace(made, ready=made.ready * stretch, compute=made.compute * stretch)
        alone = best_messages(slow.ready, slow.sizes, on.laws)[0].tolist()
        assert predicted_step(slow, on, cut) <= 1.05 * predicted_step(slow, on, alone)


def test_caps_that_repeat_are_said_once():
    assert as_caps(profile([MIB] * 8), [0, 1, 3, 5, 7]) == (1.0, 2.0)
    assert as_caps(profile([MIB] * 8), [0, 4, 7]) == (4.0, 3.0)


def test_the_first_bucket_of_the_default_is_small():
    assert even_cut(profile([MIB // 2] * 60), 25.0, 1.0) == [0, 2, 52]


def test_a_dear_start_means_fewer_messages():
    dear, cheap = (
        next(c for c in candidates(profile([MIB] * 16), wire(start=s)) if c.name == "searched")
        for s in (1e-1, 1e-6)
    )
    assert dear.messages == 1
    assert cheap.messages > dear.messages
    assert dear.line.startswith("bucket_cap_mb_list=[")


def test_a_measured_wire_is_start_and_slope():
    sizes = np.array([1e4, 1e5, 1e6, 1e7])
    found = measured_wire(sizes, 2e-4 + 1e-9 * sizes, 2)
    assert found.laws[0] == pytest.approx([2e-4, 1e-9, 0.0], rel=1e-6, abs=1e-12)
    assert predicted_step(profile([MIB]), found, [0]) == pytest.approx(
        0.01 + 2e-4 + 1e-9 * MIB + 1e-3
    )
