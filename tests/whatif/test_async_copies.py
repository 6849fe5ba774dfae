"""Copies beside compute: a lane of their own, no staging, and the first user waits."""

import numpy as np
import pytest

from foretell.cluster import load
from foretell.simulate import simulate
from foretell.whatif import DoesNotApply, Setting, parse
from tests.whatif.traced import CALL, Step, convnet


def test_copies_go_to_a_lane_of_their_own_and_are_waited_for():
    step = convnet()
    after = parse("async-copies").apply(step, Setting())
    (copy,) = after.select(kind="copy")
    assert after.lane[copy] != after.lane[after.select(kind="kernel")[0]]
    first = after.select(op="convolution", kind="kernel")[0]
    assert copy in after[int(first)].after
    assert not len(after.select(kind="sync", name="copy_"))
    assert len(after.select(kind="sync", name="item")) == 1


def test_the_host_only_starts_them():
    after = parse("async-copies").apply(convnet(), Setting())
    (call,) = after.select(op="cudaMemcpyAsync")
    assert (after.seconds[call], after.gap[call]) == (CALL, 0.0)


def test_they_run_at_the_rate_of_the_bus():
    step, cluster = convnet(), load("a100-80:gpus=1")
    after = parse("async-copies").apply(step, Setting(cluster))
    (copy,) = after.select(kind="copy")
    size = after.bytes[copy]
    assert after.seconds[copy] == pytest.approx(size / cluster.host_bandwidth(0), rel=0.05)
    assert after.seconds[copy] < step.seconds[step.select(kind="copy")[0]]


def test_a_copy_overlaps_what_was_launched_before():
    s = Step()
    s.op("mm")
    copy = s.copy(1e6, 8e-4)
    s.op("mm")
    step = s.graph()
    played = simulate(parse("async-copies").apply(step, Setting()))
    first, second = played.graph.select(kind="kernel", op="mm")
    assert played.end[copy] < played.end[first]
    assert played.start[second] == pytest.approx(played.end[first], abs=1e-9)
    assert np.isclose(simulate(step).start[copy], simulate(step).end[first])


def test_nothing_to_copy():
    s = Step()
    s.op("mm")
    with pytest.raises(DoesNotApply, match="copies nothing"):
        parse("async-copies").apply(s.graph(), Setting())
