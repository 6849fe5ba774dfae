"""What a trace is said to hold that answers depend on: libraries, streams, AMD's kernels."""

import pytest

from foretell.graph import Dtype, Kind
from foretell.trace.read import remarks
from foretell.trace.words import library
from foretell.whatif import DoesNotApply, Setting, parse
from tests.whatif.traced import convnet


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        ("void deep_ep::intranode::dispatch<8, 768>(int4*)", "DeepEP"),
        ("nvshmemi_alltoall_kernel", "NVSHMEM"),
        ("mscclKernel_Sum_half_LL", "MSCCL"),
        ("rcclGenericKernel<1, false>", "RCCL"),
        ("void vllm::cross_device_reduce_1stage<half, 8>", "a custom all-reduce"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", ""),
    ],
)
def test_communication_libraries_are_known_by_their_kernels(kernel, name):
    assert library(kernel) == name
    graph = convnet()
    with graph.edit() as edit:
        edit.set(graph.select(kind="kernel")[:1], name=kernel, kind=Kind.COLLECTIVE)
    said = [note for note in remarks(edit.graph) if "communication kernels of" in note]
    assert bool(said) == bool(name)
    assert all(name in note for note in said)


def test_kernels_of_amd_are_said():
    graph = convnet()
    assert not remarks(graph)
    with graph.edit() as edit:
        edit.set(graph.select(kind="kernel")[:1], name="Cijk_Ailk_Bjlk_SB_MT64x64x16")
    assert any("AMD" in note for note in remarks(edit.graph))


def test_a_trace_without_a_gpu_is_said():
    graph = convnet()
    with graph.edit() as edit:
        edit.remove(graph.select(kind=("kernel", "copy")))
    assert any("no GPU in this trace" in note for note in remarks(edit.graph))
    with pytest.raises(DoesNotApply, match="no GPU kernels"):
        parse("amp").apply(edit.graph, Setting())


def test_streams_that_share_the_device_are_said():
    graph = convnet()
    with graph.edit() as edit:
        lane = edit.lane("stream 9", kind="compute")
        edit.set(graph.select(kind="kernel")[::2], lane=lane)
    assert any("2 streams" in note for note in remarks(edit.graph))


def test_how_the_step_ran_is_said():
    """In half precision, compiled, as a CUDA graph."""
    graph = convnet()
    with graph.edit() as edit:
        edit.set(graph.select(kind="kernel"), dtype=Dtype.BF16)
        edit.set(graph.select(kind="kernel")[:1], name="triton_poi_fused_relu_0")
        edit.set(graph.select(kind="host")[:1], op="cudaGraphLaunch")
    said = remarks(edit.graph)
    for words in ("half precision (bf16)", "compiled (Inductor)", "as a CUDA graph"):
        assert sum(words in note for note in said) == 1
    for spec in ("compile", "cuda-graph"):
        with pytest.raises(DoesNotApply, match="already"):
            parse(spec).apply(edit.graph, Setting())
