"""Written-out attention becomes one kernel each way; masks and neighbours stay."""

import pytest

from foretell.cluster.read import devices
from foretell.cost import kernel
from foretell.whatif import DoesNotApply, Setting, parse
from tests.whatif.traced import HEADS, LENGTH, WIDTH, Step, attention


def test_one_kernel_each_way():
    after = parse("flash-attention").apply(attention(), Setting())
    fused = after.select(kind="kernel", op="attention")
    assert [after[int(t)].phase for t in fused] == ["forward", "backward"]
    gone = ("bmm", "div", "_softmax", "_softmax_backward_data", "native_dropout*")
    assert not len(after.select(kind="kernel", op=gone))
    assert len(after.select(kind="kernel", op="fill_")) == 1  # makes a mask
    assert len(after.select(kind="kernel", op=("addmm", "mm"))) == 4 + 6


def test_its_price_is_that_of_fused_attention():
    after = parse("flash-attention").apply(attention(), Setting())
    for task, way in zip(after.select(kind="kernel", op="attention"), ("fwd", "bwd"), strict=True):
        sizes = f"b=1,heads={HEADS},sq={LENGTH},sk={LENGTH},d={WIDTH}"
        shape = f"{sizes},dropout=1,direction={way}"
        price = kernel.seconds(devices()["a100-80"], "attention", "fp32", [shape])
        assert after.seconds[task] == pytest.approx(price.seconds[0])
    assert after.facts["scores_bytes"] == HEADS * LENGTH * LENGTH * 4 * 2


def test_the_host_part_of_the_others_goes():
    step = attention()
    after = parse("flash-attention").apply(step, Setting())
    assert len(after.select(kind="host", op="bmm")) == 2 * 2  # of the first product, both ways
    assert not len(after.select(kind="host", op=("div", "_softmax", "native_dropout")))
    assert len(after.select(kind="host", op="fill_")) == 2
    # The view inside the attention goes; those of the projections stay.
    assert len(after.select(kind="host", op="view")) == len(step.select(kind="host", op="view")) - 1


def test_without_written_out_attention():
    s = Step()
    s.op("bmm", "in=8x4x4+8x4x4")
    s.op("_softmax", "in=8x4x4")
    with pytest.raises(DoesNotApply, match="no attention"):
        parse("flash-attention").apply(s.graph(), Setting())
    s = Step()
    s.op("bmm")  # tells no sizes
    s.op("_softmax")
    s.op("bmm")
    with pytest.raises(DoesNotApply, match="no attention"):
        parse("flash-attention").apply(s.graph(), Setting())
