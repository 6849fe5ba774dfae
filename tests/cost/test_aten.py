"""PyTorch operators as kernels that have a price, and the host's part of them."""

import numpy as np
import pytest

from foretell.cluster import load
from foretell.cost import price
from foretell.cost.aten import kernels, read
from foretell.cost.price import constants, host_seconds, issued, updated
from foretell.graph import Builder, Source

LINEAR = "in=3072+4096x768+768x3072+-+-,types=float+float+float+Scalar+Scalar,args=-+-+-+1+1"
CONV = (
    "in=64x3x224x224+64x3x7x7+64+-+-+-+-+-+-,types=float+float+float,"
    "args=-+-+-+2x2+3x3+1x1+False+0x0+1"
)
BACK = (
    "in=8x16x4x4+8x16x4x4+16x1x3x3+-+-+-+-+-+-+-+-,types=float+float+float,"
    "args=-+-+-+0+1x1+1x1+1x1+False+0x0+16+TruexTruexTrue"
)


def shape(op, text, **more):
    (kernel,) = kernels(op, text, **more)
    return kernel.op, dict(part.split("=") for part in kernel.shape.split(",") if part)


def test_matmuls_are_recognised_by_their_inputs():
    op, found = shape("addmm", LINEAR)
    assert op == "gemm"
    assert (found["m"], found["n"], found["k"]) == ("4096", "3072", "768")
    assert shape("addmm", LINEAR + ",strides=-+-+1x768+-+-")[1]["tb"] == "1"
    assert shape("bmm", "in=12x64x32+12x32x64,types=float+float")[1]["b"] == "12"


def test_a_convolution_is_a_kernel_and_one_for_its_bias():
    conv, bias = kernels("convolution", CONV)
    assert conv.op == "conv"
    assert "n=64,c=3,h=224,w=224,k=64,r=7,s=7,stride=2,pad=3,groups=1" in conv.shape
    assert bias.bytes == 2 * 64 * 64 * 112 * 112 * 4
    assert kernels("convolution", CONV + ",part=conv") == (conv,)


def test_the_parts_of_a_backward_convolution_make_the_whole():
    whole = kernels("convolution_backward", BACK)
    parts = [
        kernels("convolution_backward", f"{BACK},part={p}")[0] for p in ("dgrad", "wgrad", "bias")
    ]
    assert list(whole) == parts
    assert [k.op for k in whole] == ["conv_dgrad", "conv_wgrad", "reduce"]


def test_a_row_of_numbers_is_an_image_of_one_row():
    text = "in=2x8x10+4x8x3+-+-+-+-+-+-+-,types=float+float,args=-+-+-+1+1+1+False+0+1"
    op, found = shape("convolution", text)
    assert op == "conv"
    assert (found["h"], found["w"], found["p"], found["q"]) == ("1", "10", "1", "10")


def test_a_transposed_convolution_is_a_gradient():
    text = "in=2x8x5x5+8x4x3x3+-+-+-+-+-+-+-,types=float+float,args=-+-+-+2x2+0x0+1x1+True+0x0+1"
    op, found = shape("convolution", text)
    assert op == "conv_dgrad"
    assert (found["c"], found["h"], found["k"]) == ("4", "11", "8")


def test_a_row_that_cudnn_is_given_as_an_image_stays_one_row():
    """Padding and stride of the row say nothing of its one row; transposed ones grow its width."""
    args = "-+-+{}+1x8+1x1+1+False+False+True"
    types = "types=float+float+ScalarList+ScalarList+ScalarList+Scalar"
    text = f"in=2x8x1x64+8x8x1x16+-+-+-+-+-+-+-,{types},args={args.format('0x4')}"
    op, found = shape("convolution", text)
    assert (op, found["p"], found["q"]) == ("conv", "1", "8")
    text = "in=2x8x1x64+8x4x1x16+-+-+-+-+-+-+-,types=float+float,args=-+-+-+1x8+0x4+1x1+True+0x0+1"
    op, found = shape("convolution", text)
    assert (op, found["h"], found["w"], found["p"], found["q"]) == (
        "conv_dgrad",
        "1",
        "512",
        "1",
        "64",
    )


def test_a_dilated_convolution_makes_what_its_taps_reach():
    args = "args=-+-+-+1x1+12x12+12x12+False+0x0+1"
    text = f"in=2x8x28x28+8x8x3x3+-+-+-+-+-+-+-,types=float+float,{args}"
    found = shape("convolution", text)[1]
    assert (found["p"], found["q"]) == ("28", "28")


@pytest.mark.parametrize(
    ("op", "text", "found"),
    [
        ("add", "in=4x8+4x8+-,types=float+float+Scalar", ("elementwise", "0", 3 * 32 * 4)),
        ("add", "in=4x8+8+-,types=float+float+Scalar", ("elementwise", "1", (64 + 8) * 4)),
        ("mul_", "in=4x8+-,types=c10::BFloat16+Scalar", ("elementwise", "0", 2 * 32 * 2)),
        ("gelu", "in=4x8+-,types=float+-", ("activation", "0", 2 * 32 * 4)),
    ],
)
def test_pointwise_work_moves_bytes(op, text, found):
    (kernel,) = kernels(op, text)
    uneven = dict(part.split("=") for part in kernel.shape.split(","))["uneven"]
    assert (kernel.op, uneven, kernel.bytes) == found


def test_rows_and_channels():
    assert shape("_softmax", "in=32x12x128+-+-,types=float+Scalar+Scalar")[1]["cols"] == "128"
    assert shape("native_batch_norm", "in=8x16x4x4+16,types=float+float")[1]["rows"] == "16"
    assert shape("sum", "in=64x10+-+-+-,types=float,args=-+0+True+-")[1]["rows"] == "10"


def test_attention_knows_its_layout():
    text = "in=8x512x12x64+8x512x12x64+8x512x12x64,types=float,args=-+-+-+-+-+-+-+-+0.1+True"
    op, found = shape("_efficient_attention_forward", text)
    assert (op, found["heads"], found["sq"], found["causal"]) == ("attention", "12", "512", "1")
    turned = text.replace("8x512x12x64", "8x12x512x64").replace("0.1+True", "-+0.1+True")
    assert shape("_cudnn_attention_forward", turned)[1] == found


def test_a_recurrent_layer_takes_its_steps_one_by_one():
    weights = "256x32|256x64|256|256"
    text = f"in=10x8x32+{weights}+-+256x32+1x8x64,types=float+TensorList"
    fed, turned, gates = kernels("_cudnn_rnn", text)
    assert fed.shape == "m=80,n=256,k=32,tb=1"
    assert (turned.shape, turned.times) == ("m=8,n=256,k=64,tb=1", 10)
    assert (gates.op, gates.times) == ("elementwise", 10)
    assert len(kernels("_cudnn_rnn_backward", text)) == 5
    tasks = [{"kind": "kernel", "op": "_cudnn_rnn", "shape": text, "dtype": "fp32"}]
    longer = text.replace("10x8x32", "100x8x32")
    tasks.append({**tasks[0], "shape": longer})
    short, long = price(graph_of(*tasks), load("h200")).seconds
    assert 7 * short < long < 11 * short


def test_what_no_rule_knows_is_priced_by_what_it_moves_and_computes():
    (light,) = kernels("digamma", "in=1000,types=float", 8000.0, 1000.0)
    assert (light.op, light.bytes) == ("elementwise", 8000.0)
    (heavy,) = kernels("linalg_qr", "in=64x64,types=float", 32768.0, 1e9)
    assert (heavy.op, heavy.flops) == ("bare", 1e9)


def test_inputs_of_another_version_do_not_stop_a_price():
    assert kernels("convolution", "in=2x3x4x4,types=float", 384.0)[0].op == "elementwise"
    assert read("cat", "in=4x8|4x8+-,types=TensorList+Scalar").dims == ((), ())


def graph_of(*tasks):
    make = Builder()
    lanes = make.lane("thread", kind="host"), make.lane("stream", kind="compute")
    for task in tasks:
        make.task(lane=lanes[task["kind"] != "host"], **task)
    return make.graph()


def test_an_operator_is_priced_like_its_kernel():
    graph = graph_of(
        {"kind": "kernel", "op": "addmm", "shape": LINEAR, "dtype": "fp32"},
        {"kind": "kernel", "op": "gemm", "shape": "m=4096,n=3072,k=768", "dtype": "fp32"},
    )
    priced = price(graph, load("h200"))
    assert priced.seconds[0] == priced.seconds[1] > 0
    assert (priced.source == Source.MEASURED).all()


def test_parts_cost_what_the_whole_does():
    parts = ("", ",part=dgrad", ",part=wgrad", ",part=bias")
    graph = graph_of(
        *(
            {"kind": "kernel", "op": "convolution_backward", "shape": BACK + p, "dtype": "fp32"}
            for p in parts
        )
    )
    seconds = price(graph, load("a100-80")).seconds
    assert seconds[0] == pytest.approx(seconds[1:].sum())


def test_host_tasks_that_say_what_they_issue_have_a_price():
    graph = graph_of(
        {"kind": "host", "op": "addmm", "shape": "direction=fwd,kernels=1"},
        {"kind": "host", "op": "python"},
        {"kind": "host", "op": "addmm", "shape": "direction=fwd,kernels=1", "seconds": 1.0},
    )
    seconds = price(graph, load("h200")).seconds
    assert 1e-5 < seconds[0] < 1e-4
    assert seconds[1:].tolist() == [0.0, 1.0]  # nothing said, and said by somebody else


def test_the_terms_of_the_hosts_time():
    chain = constants()["chain"]
    plain = host_seconds("gelu", {"kernels": 1.0})
    assert host_seconds("gelu", {"kernels": 1.0, "nodes": 2.0}) - plain == pytest.approx(
        2 * chain["step"] * chain["node"]
    )
    assert host_seconds("mul_", {"kernels": 1.0, "update": 1.0}) == chain["update"]
    assert host_seconds("view", {}) < plain
    many = [host_seconds("_foreach_add_", {"kernels": 1.0, "tensors": n}) for n in (10.0, 100.0)]
    assert np.diff(many)[0] > 0


def test_the_hosts_time_of_a_described_kernel_and_of_an_update():
    assert issued("conv_wgrad", True) == issued("conv", True) > issued("relu", True)
    assert issued("batch_norm_backward", True) == issued("batch_norm", True)
    few, many = updated("adam", "foreach", np.array([10.0, 100.0]), False)
    assert many > few > updated("adam", "fused", np.array([10.0]), False)[0]
    assert updated("adam", "foreach", np.array([10.0]), True)[0] > few  # a scaler besides


def test_batch_norm_streams_where_channels_are_last():
    text = "in=8x16x4x4+16,types={0}+float"
    last = text + ",strides=256x1x64x16+-"
    assert shape("native_batch_norm", text.format("c10::Half"))[0] == "batch_norm"
    (kernel,) = kernels("native_batch_norm", last.format("c10::Half"))
    assert (kernel.op, kernel.bytes) == ("elementwise", 3 * 8 * 16 * 16 * 2)
    assert shape("native_batch_norm", last.format("c10::BFloat16"))[0] == "batch_norm"


def test_group_norm_has_a_row_for_each_group_of_a_sample():
    text = "in=8x64x7x7+64+64+-+-+-+-+-,types=float+float+float,args=-+-+-+8+64+49+4+1e-05"
    op, found = shape("native_group_norm", text)
    assert (op, found["rows"], found["cols"]) == ("norm", "32", "784")
    text = (
        "in=8x64x7x7+8x64x7x7+8x4+8x4+64+-+-+-+-+-,types=float+float+float+float+float,"
        "args=-+-+-+-+-+8+64+49+4+TruexTruexTrue"
    )
    assert shape("native_group_norm_backward", text)[1]["rows"] == "32"
