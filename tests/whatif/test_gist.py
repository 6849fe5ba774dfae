"""Activations in fewer bits: one pass to encode, one to decode, at the right places."""

import pytest

from foretell.errors import InputError
from foretell.whatif import DoesNotApply, Setting, parse
from tests.whatif.traced import Step, convnet

NUMBERS = 16 * 64 * 112 * 112


def test_passes_are_put_in_both_ways():
    step = convnet()
    after = parse("gist").apply(step, Setting())
    encode, decode = (
        after.select(op="encode", kind="kernel"),
        after.select(op="decode", kind="kernel"),
    )
    assert [after[int(t)].layer for t in encode] == ["conv2d.1", "max_pool2d.0"]
    assert {after[int(t)].phase for t in decode} == {"backward"}
    assert len(after) == len(step) + 8  # each with a call of the host
    user = after.select(kind="kernel", op="max_pool2d_with_indices")
    assert after.order[encode[1]] > after.order[user[0]]
    first = after.select(kind="kernel", op="convolution_backward", layer="conv2d.1")[0]
    before = [t for t in decode if after[int(t)].layer == "conv2d.1"]
    assert after.order[before[0]] < after.order[first]


def test_one_bit_before_a_pool_and_as_many_as_said_elsewhere():
    after = parse("gist:bits=16").apply(convnet(), Setting())
    encode = after.select(op="encode", kind="kernel")
    assert after.bytes[encode].tolist() == [NUMBERS * (4 + 2), NUMBERS * (4 + 1 / 8)]
    assert after.facts["encoded_bytes"] == NUMBERS * (4 - 2) + NUMBERS * (4 - 1 / 8)


def test_passes_take_what_memory_takes():
    after = parse("gist").apply(convnet(), Setting())
    encode = after.select(op="encode", kind="kernel")
    assert after.seconds[encode] == pytest.approx(after.bytes[encode] / 2.0e12, rel=0.4)


def test_mistakes():
    with pytest.raises(InputError, match="1 to 32"):
        parse("gist:bits=0").apply(convnet(), Setting())
    s = Step()
    s.op("mm")
    with pytest.raises(DoesNotApply, match="no ReLU"):
        parse("gist").apply(s.graph(), Setting())
