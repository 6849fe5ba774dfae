"""Another GPU: kernels by the ratio of two prices, the host as it is."""

from pathlib import Path

import pytest

from foretell.cluster import load
from foretell.cluster.read import devices
from foretell.errors import InputError
from foretell.graph import Builder
from foretell.trace import read
from foretell.whatif import DoesNotApply, Setting, parse
from foretell.whatif.kernel_request import requested_kernels
from foretell.whatif.machine import device_of
from tests.whatif.traced import Step, attention, convnet


def test_the_same_device_changes_nothing():
    step = convnet()
    after = parse("device:to=a100-80").apply(step, Setting())
    assert after.seconds == pytest.approx(step.seconds)


def test_products_go_by_flops_and_passes_by_bandwidth():
    step = attention()
    after = parse("device:to=h100").apply(step, Setting())
    here, there = devices()["a100-80"], devices()["h100"]
    ratio = after.seconds / step.seconds
    products, passes = step.select(kind="kernel", op="addmm"), step.select(kind="kernel", op="div")
    flops = here.peak("fp32") / there.peak("fp32")
    assert ratio[products] == pytest.approx([flops] * len(products), rel=0.35)
    bandwidth = here.memory_bandwidth / there.memory_bandwidth
    assert ratio[passes] == pytest.approx([bandwidth] * len(passes), rel=0.1)


def test_the_host_stays_and_copies_go_by_the_bus():
    step = convnet()
    after = parse("device:to=h100").apply(step, Setting())
    host = step.select(kind=("host", "load", "sync"))
    assert (after.seconds[host] == step.seconds[host]).all()
    copy = step.select(kind="copy")
    assert after.seconds[copy] < step.seconds[copy]  # PCIe 5 behind PCIe 4


def test_the_next_change_knows_the_new_device():
    after = parse("device:to=h100").apply(convnet(), Setting())
    assert device_of(after, Setting()).name == "h100"


def test_kernels_of_unknown_shape_go_by_memory():
    s = Step()
    (kernel,) = s.op("mystery")
    after = parse("device:to=h100").apply(s.graph(), Setting())
    here, there = devices()["a100-80"], devices()["h100"]
    bandwidth = here.memory_bandwidth / there.memory_bandwidth
    assert after.seconds[kernel] == pytest.approx(1e-3 * bandwidth, rel=0.01)


@pytest.mark.parametrize(
    ("title", "name"),
    [
        ("NVIDIA H200", "h200"),
        ("Tesla V100-DGXS-32GB", "v100-32"),
        ("NVIDIA A100-PCIE-40GB", "a100-40-pcie"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA GeForce RTX 3090", "3090"),
        ("AMD Instinct MI250X", "mi250x"),
    ],
)
def test_devices_by_the_names_traces_give_them(title, name):
    make = Builder()
    make.task(kind="kernel", op="gemm", seconds=1.0)
    assert device_of(make.graph(device=title), Setting()).name == name


def test_who_says_which_device():
    make = Builder()
    make.task(kind="kernel", op="gemm", seconds=1.0, shape="b=1,m=64,n=64,k=64")
    step = make.graph()
    with pytest.raises(DoesNotApply, match="nothing says"):
        parse("device:to=h100").apply(step, Setting())
    parse("device:to=h100,here=v100-16").apply(step, Setting())
    parse("device:to=h100").apply(step, Setting(load("v100-16:gpus=1")))
    with pytest.raises(InputError, match="did you mean"):
        parse("device:to=h1000").apply(step, Setting())


def test_convolutions_of_traces_that_tell_sizes_alone():
    dy, x, w = "8x64x28x28", "8x32x56x56", "64x32x3x3"
    both = requested_kernels("convolution_backward", f"in={dy}+{x}+{w}")
    assert [k.op for k in both] == ["conv_wgrad", "conv_dgrad"]
    assert "stride=2" in both[0].shape
    (weights,) = requested_kernels("cudnn_convolution_backward_weight", f"in=-+{dy}+{x}")
    assert weights.op == "conv_wgrad"
    assert "k=64" in weights.shape
    (image,) = requested_kernels("cudnn_convolution_backward_input", f"in=-+{dy}+{w}")
    assert (image.op, "c=32" in image.shape) == ("conv_dgrad", True)
    assert requested_kernels("add", "") == ()


TRUTH = Path(__file__).resolve().parents[2].parent / "shared" / "truth"


@pytest.mark.truth
def test_a_model_traced_on_two_devices():
    """ResNet-50 in fp32: 32 samples on a V100, 64 on an H200; either foretells the other."""
    if not TRUTH.exists():
        pytest.skip("needs the measured data in ../shared/truth")
    (old,) = (TRUTH / "traces" / "kineto").glob("*num_workers_0*")
    small, large = read(old).graph, read(TRUTH / "h200" / "resnet50.base.json.gz").graph

    def on_device(graph):
        return graph.seconds[graph.select(kind="kernel")].sum()

    newer = parse("device:to=h200").apply(small, Setting())
    assert 2 * on_device(newer) == pytest.approx(on_device(large), rel=0.1)
    older = parse("device:to=v100-32").apply(large, Setting())
    assert on_device(older) == pytest.approx(2 * on_device(small), rel=0.15)
