"""A faster CPU shrinks the host's time and gaps, and nothing on the device."""

import pytest

from foretell.errors import InputError
from foretell.graph import Builder
from foretell.simulate import simulate
from foretell.whatif import DoesNotApply, Setting, parse
from tests.whatif.traced import convnet


def test_time_and_gaps_of_the_host_shrink():
    step = convnet()
    after = parse("faster-host:times=4").apply(step, Setting())
    host, device = step.select(kind=("host", "load", "sync")), step.select(kind=("kernel", "copy"))
    for column in ("seconds", "gap"):
        assert after.column(column)[host] == pytest.approx(step.column(column)[host] / 4)
        assert (after.column(column)[device] == step.column(column)[device]).all()
    # The loading holds everything up: 50 ms less three quarters of it.
    assert simulate(step).seconds - simulate(after).seconds > 0.75 * 0.05


def test_mistakes():
    with pytest.raises(InputError, match="more than 0"):
        parse("faster-host:times=0").apply(convnet(), Setting())
    make = Builder()
    make.task(kind="kernel", op="gemm", seconds=1.0)
    with pytest.raises(DoesNotApply, match="no tasks on a host"):
        parse("faster-host").apply(make.graph(), Setting())
