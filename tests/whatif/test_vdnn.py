"""Inputs of convolutions offloaded and fetched back: who waits for which copy."""

from pathlib import Path

import pytest

from foretell.cluster import load
from foretell.simulate import simulate
from foretell.trace import read
from foretell.whatif import DoesNotApply, Setting, parse
from tests.whatif.traced import Step, convnet

FIRST, SECOND = 16 * 3 * 224 * 224 * 4, 16 * 64 * 112 * 112 * 4


def test_every_input_leaves_and_comes_back():
    after = parse("vdnn").apply(convnet(), Setting())
    out, back = after.select(kind="copy", op="d2h"), after.select(kind="copy", op="h2d")
    assert after.bytes[out].tolist() == [FIRST, SECOND]
    assert after.bytes[back].tolist() == [FIRST, SECOND]
    assert len({*after.lane[out].tolist(), *after.lane[back].tolist()}) == 2
    for copy in (*out, *back):
        (call,) = (a for a in after[int(copy)].after if after[a].kind == "host")
        assert after[call].op == "cudaMemcpyAsync"


def test_who_waits_for_the_copies():
    after = parse("vdnn").apply(convnet(), Setting())
    out, back = after.select(kind="copy", op="d2h"), after.select(kind="copy", op="h2d")
    _, second = after.select(kind="kernel", op="convolution")
    assert out[0] in after[int(second)].after
    played = simulate(after)
    gradients = after.select(kind="kernel", op="convolution_backward")
    of_first = next(t for t in gradients if after[int(t)].layer == "conv2d.0")
    assert back[0] in after[int(of_first)].after
    assert out[0] in after[int(back[0])].after
    # The first layer's input comes back beside the second layer's gradients.
    beside = [t for t in gradients if after[int(t)].layer == "conv2d.1"]
    assert played.start[back[0]] <= played.start[beside[0]] + 1e-9


def test_copies_take_what_the_bus_takes():
    cluster = load("a100-80:gpus=1")
    after = parse("vdnn").apply(convnet(), Setting(cluster))
    out = after.select(kind="copy", op="d2h")
    rate = cluster.host_bandwidth(0)
    assert after.seconds[out] == pytest.approx([FIRST / rate, SECOND / rate], rel=0.1)


def test_without_convolutions():
    s = Step()
    s.op("mm", "in=4x4+4x4", "linear.0")
    with pytest.raises(DoesNotApply, match="no convolutions"):
        parse("vdnn").apply(s.graph(), Setting())


def test_a_forward_pass_that_runs_again_is_refused():
    again = parse("checkpoint").apply(convnet(), Setting())
    with pytest.raises(DoesNotApply, match="runs again"):
        parse("vdnn").apply(again, Setting())


def test_several_passes_in_one_step_are_refused():
    step = Path(__file__).parents[2] / "benchmarks" / "measured" / "h200" / "resnet18.base.json.gz"
    twice = parse("accumulate:steps=2").apply(read(step).graph, Setting())
    with pytest.raises(DoesNotApply, match="behind a backward pass"):
        parse("vdnn").apply(twice, Setting())
