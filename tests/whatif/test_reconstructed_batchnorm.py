"""Batch normalisation joined with its neighbours: half its time, no ReLU beside it."""

import pytest

from foretell.errors import InputError
from foretell.whatif import DoesNotApply, Setting, parse
from tests.whatif.traced import KERNEL, Step, convnet


def test_relus_beside_go_with_their_host_part():
    step = convnet()
    after = parse("reconstructed-batchnorm").apply(step, Setting())
    assert not len(after.select(op=("clamp_min_", "threshold_backward")))
    # A piece, a call, a kernel and a last piece of two ReLUs, both ways.
    assert len(after) == len(step) - 4 * 4


def test_normalisation_keeps_its_share():
    after = parse("reconstructed-batchnorm:keep=0.25").apply(convnet(), Setting())
    norms = after.select(kind="kernel", op="native_batch_norm*")
    assert len(norms) == 4
    assert after.seconds[norms] == pytest.approx(KERNEL / 4)
    others = after.select(kind="kernel", op="convolution*")
    assert after.seconds[others] == pytest.approx(KERNEL)


def test_a_relu_elsewhere_stays():
    s = Step()
    s.op("native_batch_norm", layer="a")
    s.op("add", layer="b")
    s.op("relu", layer="c")
    after = parse("reconstructed-batchnorm").apply(s.graph(), Setting())
    assert len(after.select(op="relu", kind="kernel")) == 1


def test_mistakes():
    with pytest.raises(InputError, match="0 to 1"):
        parse("reconstructed-batchnorm:keep=2").apply(convnet(), Setting())
    s = Step()
    s.op("mm")
    with pytest.raises(DoesNotApply, match="no batch normalisation"):
        parse("reconstructed-batchnorm").apply(s.graph(), Setting())
