"""Steps that have a change already, hardware that lacks a feature, and operators seldom seen."""

import numpy as np
import pytest

from foretell.cluster import load
from foretell.cost.ratios import Way
from foretell.graph.graph import Phase
from foretell.trace.words import collective, is_collective
from foretell.whatif import DoesNotApply, Setting, applied, parse
from foretell.whatif.table_lookup import changed, kernel_group
from tests.whatif.traced import Step, convnet


def renamed(**columns):
    graph = convnet()
    with graph.edit() as edit:
        edit.set(graph.select(kind="kernel")[:1], **columns)
    return edit.graph


@pytest.mark.parametrize("name", ["triton_poi_fused_add_0", "triton_red_fused_native_batch_norm_1"])
def test_a_compiled_step_is_not_compiled_again(name):
    with pytest.raises(DoesNotApply, match="already"):
        parse("compile").apply(renamed(name=name), Setting())


def test_kernels_of_ones_own_in_triton_are_no_compiler():
    parse("compile").apply(renamed(name="my_triton_attention"), Setting())


def test_a_graphed_step_is_not_graphed_again():
    graph = applied([parse("cuda-graph")], convnet())
    with pytest.raises(DoesNotApply, match="CUDA graph already"):
        parse("cuda-graph").apply(graph, Setting())


def test_a_fused_optimizer_is_named():
    from tests.whatif.ddp import hosted

    graph = applied([parse("fused-optimizer")], hosted())
    with pytest.raises(DoesNotApply, match="a fused one"):
        parse("foreach-optimizer").apply(graph, Setting())


@pytest.mark.parametrize(
    ("spec", "device"), [("tf32", "v100-16"), ("amp:dtype=bf16", "t4"), ("tf32", "mi250")]
)
def test_what_the_hardware_lacks_is_refused(spec, device):
    with pytest.raises(DoesNotApply, match="has no"):
        parse(spec).apply(convnet(), Setting(load(device)))


def test_fp16_is_what_a_v100_has():
    parse("amp:dtype=fp16").apply(convnet(), Setting(load("v100-16")))


CONVOLUTIONS = {
    "conv2d": "in=8x64x1600+64x64x5,types=float+float",  # one dimension: speech
    "conv3d": "in=2x16x32x64x64+32x16x3x3x3,types=float+float",
}


@pytest.mark.parametrize("row", sorted(CONVOLUTIONS))
@pytest.mark.parametrize("dtype", ["tf32", "bf16"])
def test_convolutions_of_one_and_three_dimensions(row, dtype):
    sort = kernel_group("convolution", CONVOLUTIONS[row], Phase.FORWARD, np.zeros(1, np.int64))
    assert sort.rows[0][0] == row
    before, after = (Way(d, "nchw") for d in ("fp32", dtype))
    factor, sigma = changed(sort, before, after, 1e-3)
    assert 0 < factor < 1.5
    assert 0 < sigma < 3


@pytest.mark.parametrize("spec", ["amp", "tf32", "batch", "compile", "checkpoint", "cuda-graph"])
def test_a_step_of_one_dimension_is_answered(spec):
    s = Step()
    shape = "in=8x64x1600+64x64x5,types=float+float"
    s.op("convolution", shape, "conv1d.0")
    s.phase = "backward"
    back = "in=8x64x1600+8x64x1600+64x64x5,types=float+float+float"
    s.op("convolution_backward", back, "conv1d.0", 2)
    assert applied([parse(spec)], s.graph()).size


COMMUNICATION = {
    "void deep_ep::intranode::dispatch<8, 768>(int4*)": "all_to_all",
    "void deep_ep::internode_ll::combine<true, 7168>": "all_to_all",
    "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>": "all_reduce",
    "rcclAllReduceKernel": "all_reduce",
    "nvshmemi_transfer_put": "all_to_all",
}


@pytest.mark.parametrize("kernel", sorted(COMMUNICATION))
def test_kernels_of_other_libraries_communicate(kernel):
    assert is_collective(kernel)
    assert collective(kernel, "")[1] == COMMUNICATION[kernel]


@pytest.mark.parametrize("kernel", ["dispatch_kernel", "gemm_combine", "void at::native::reduce"])
def test_kernels_of_like_names_do_not(kernel):
    assert not is_collective(kernel)
