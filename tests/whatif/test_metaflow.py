"""Substitutions: products of one input joined, activations in epilogues."""

import pytest

from foretell.whatif import DoesNotApply, Setting, parse
from tests.whatif.traced import KERNEL, Step, attention


def test_three_projections_become_one():
    step = attention()
    after = parse("metaflow:epilogue=no").apply(step, Setting())
    joined, _ = after.select(kind="kernel", op="addmm")
    assert after[int(joined)].layer == "linear.0"
    assert 0.5 * 3 * KERNEL < after.seconds[joined] <= 3 * KERNEL
    # Of two projections: a piece, a call, a kernel and a last piece.
    gone = 2 * 4
    backward = after.select(kind="kernel", op="mm", phase="backward")
    assert len(backward) == 2  # one of the input, one of the weights
    assert len(after) == len(step) - gone - 2 * gone


def test_an_activation_goes_into_the_product_before():
    after = parse("metaflow:join=no").apply(attention(), Setting())
    assert not len(after.select(op="relu"))
    assert len(after.select(kind="kernel", op="addmm")) == 4


def test_the_bias_of_a_convolution_goes_too():
    s = Step()
    s.op("convolution", layer="conv2d.0")
    s.op("add_", layer="conv2d.0")
    s.op("relu_", layer="relu_.0")
    s.op("add_", layer="add_.0")
    after = parse("metaflow").apply(s.graph(), Setting())
    kernels = [after[int(t)] for t in after.select(kind="kernel")]
    assert [(k.op, k.layer) for k in kernels] == [
        ("convolution", "conv2d.0"),
        ("add_", "add_.0"),
    ]


def test_products_in_a_chain_are_not_joined():
    s = Step()
    for k in range(3):
        s.op("addmm", "in=64+32x64+64x64", f"linear.{k}")
        s.op("tanh", "in=32x64", f"tanh.{k}")
    with pytest.raises(DoesNotApply, match="nothing that a substitution knows"):
        parse("metaflow").apply(s.graph(), Setting())
