"""Number formats, layouts and the compiler: what they make of a small step."""

import numpy as np
import pytest

from foretell.cost.kernel import passes
from foretell.graph.graph import Dtype, Kind, Phase
from foretell.whatif import DoesNotApply, Setting, parse
from foretell.whatif.autocast import autocast_ops
from foretell.whatif.table_lookup import kernel_group
from tests.whatif.traced import Step, attention, convnet

NOTHING = Setting()


def apply(spec, graph):
    return parse(spec).apply(graph, NOTHING)


def linear(s: Step, m: int, n: int, k: int, bias: bool = True) -> list[int]:
    if bias:
        types = "float+float+float+Scalar+Scalar"
        return s.op("addmm", f"in={n}+{m}x{k}+{k}x{n}+-+-,types={types},args=-+-+-+1+1")
    return s.op("mm", f"in={m}x{k}+{k}x{n},types=float+float")


def mlp():
    """Norm, two products with an activation between, a sum with what came in; and backward."""
    s = Step()
    wide = "4096x768"
    s.op("native_layer_norm", f"in={wide}+-+768+768+-,types=float+ScalarList+float+float+Scalar")
    linear(s, 4096, 3072, 768)
    s.op("gelu", "in=4096x3072+-,types=float+-")
    linear(s, 4096, 768, 3072)
    s.op("add", f"in={wide}+{wide}+-,types=float+float+Scalar")
    s.phase = "backward"
    for m, n, k in ((4096, 3072, 768), (768, 3072, 4096), (4096, 768, 3072), (3072, 768, 4096)):
        linear(s, m, n, k, bias=False)
        s.op("gelu_backward", "in=4096x3072+4096x3072+-,types=float+float+-")
    return s.graph()


def test_autocast_casts_parameters_and_what_comes_in_fp32():
    found = {r.op: r for r in autocast_ops(mlp())}
    first, last = [r for r in autocast_ops(mlp()) if r.op == "addmm"]
    assert first.weights == (768 * 3072, 3072)
    assert first.inputs == (4096 * 768,)  # the norm left fp32
    assert last.inputs == ()  # the activation kept half precision
    assert found["gelu"].is_half
    assert not found["native_layer_norm"].is_half
    assert not found["add"].is_half  # half plus fp32 is fp32


def test_queries_keys_and_values_cast_the_same_input_each():
    s = Step()
    s.op("native_layer_norm", "in=64x96+-+96+96+-,types=float+ScalarList+float+float+Scalar")
    for _ in range(3):
        linear(s, 64, 96, 96)
    assert [r.inputs for r in autocast_ops(s.graph()) if r.op == "addmm"] == [(64 * 96,)] * 3


def test_amp_shortens_products_and_adds_casts_on_both_sides():
    before = mlp()
    after = apply("amp:dtype=bf16", before)
    products = before.select(kind="kernel", op=("mm", "addmm"))
    assert (after.seconds[products] < 0.2 * before.seconds[products]).all()
    assert (after.dtype[products] == Dtype.BF16).all()
    norm = before.select(kind="kernel", op="native_layer_norm")
    assert after.seconds[norm] == pytest.approx(before.seconds[norm])
    casts = after.select(kind="kernel", op=("copy_", "cast_weight"))
    assert len(casts) == 2 * 5  # two weights, two biases, one input; and their gradients
    assert len(after.select(kind="host", op="_to_copy")) == len(casts)


def test_a_gradient_scaler_makes_the_host_wait():
    s = Step()
    linear(s, 4096, 3072, 768)
    s.phase = "backward"
    linear(s, 3072, 768, 4096, bias=False)
    s.phase = "update"
    s.op("add_", "in=3072x768+3072x768+-,types=float+float+Scalar", bytes=28e6)
    after = apply("amp:dtype=fp16", s.graph())
    (check,) = after.select(kind="kernel", op="_amp_foreach_unscale").tolist()
    waiting = after.edges.waiting[after.edges.after == check]
    assert (after.kind[waiting] == Kind.HOST).any()


def test_amp_twice_does_not_apply():
    once = apply("amp:dtype=bf16", mlp())
    with pytest.raises(DoesNotApply, match="already"):
        apply("amp:dtype=bf16", once)


def test_formats_that_are_none():
    with pytest.raises(Exception, match="bf16 or dtype=fp16"):
        apply("amp:dtype=fp8", mlp())


def test_tf32_touches_products_alone_and_once():
    before = mlp()
    after = apply("tf32", before)
    products = before.select(kind="kernel", op=("mm", "addmm"))
    others = np.setdiff1d(np.arange(before.size), products)
    assert (after.seconds[products] < 0.4 * before.seconds[products]).all()
    assert np.array_equal(after.seconds[others], before.seconds[others])
    with pytest.raises(DoesNotApply):
        apply("tf32", after)


def test_kernels_that_use_tf32_already_are_left_alone():
    s = Step()
    s.op("mm", "in=512x512+512x512,types=float+float", name="ampere_s1688gemm_128x128")
    with pytest.raises(DoesNotApply):
        apply("tf32", s.graph())


def test_channels_last_needs_convolutions():
    with pytest.raises(DoesNotApply, match="no convolution"):
        apply("channels-last", attention())


def test_channels_last_helps_half_precision_more():
    graph = convnet()
    convolutions = graph.select(kind="kernel", op="convolution")

    def gain(step):
        after = apply("channels-last", step)
        return after.seconds[convolutions].sum() / step.seconds[convolutions].sum()

    assert gain(apply("amp:dtype=bf16", graph)) < gain(graph)


def test_channels_last_twice_does_not_apply():
    with pytest.raises(DoesNotApply, match="already"):
        apply("channels-last", apply("channels-last", convnet()))


def test_compiled_runs_of_kernels_are_one():
    s = Step()
    linear(s, 64, 64, 64)
    for _ in range(3):
        s.op("gelu", "in=64x64+-,types=float+-")
    linear(s, 64, 64, 64)
    graph = s.graph()
    after = apply("compile", graph)
    kernels = after.select(kind="kernel")
    assert len(kernels) == 3
    fused = after.select(kind="kernel", op="gelu")
    assert after.seconds[fused] == pytest.approx(1e-3 * (1 + 0.2 * 2))
    assert len(after.select(kind="host")) < len(graph.select(kind="host")) / 2


def test_the_optimizer_is_not_compiled():
    s = Step()
    linear(s, 64, 64, 64)
    s.phase = "update"
    for _ in range(4):
        s.op("add_", "in=64x64+64x64+-,types=float+float+Scalar")
    after = apply("compile", s.graph())
    assert len(after.select(kind="kernel", phase="update")) == 4
    assert len(after.select(kind="host", phase="update", op="cudaLaunchKernel")) == 4


TURNED = (
    "in=256x512x4x4+512x256x4x4+-+-+-+-+-+-+-+-,types=float+float+ScalarList+ScalarList+ScalarList"
    "+ScalarList+Scalar+Scalar+Scalar+Scalar,args=-+-+1x1+0x0+2x2+1x1+1+False+False+False"
)


@pytest.mark.parametrize("spec", ["tf32", "amp", "batch:times=2", "compile"])
def test_a_transposed_convolution_in_cudnns_order(spec):
    """cuDNN's own order: padding, padding of the output, stride, dilation, groups."""
    s = Step()
    s.op("convolution", TURNED)
    s.op(
        "native_batch_norm", "in=256x256x8x8+256+256+256+256+-+-+-,types=" + "+".join(["float"] * 5)
    )
    s.phase = "backward"
    linear(s, 4096, 256, 256, bias=False)
    after = apply(spec, s.graph())
    assert np.isfinite(after.seconds).all()
    sort = kernel_group("convolution", TURNED, 2, np.zeros(1, np.int64))
    assert sort.rows == (("conv2d", "dgrad"),)  # of a convolution from what it makes
    assert (sort.sizes["h"], sort.sizes["c"], sort.sizes["k"]) == (8, 256, 512)
    assert sort.sizes["stride"] == 2
    assert sort.sizes["groups"] == 1


def test_a_depthwise_convolution_is_none_that_is_transposed():
    """Its window comes where cuDNN has the padding, then a bias, then stride, padding, dilation."""
    shape = (
        "in=128x64x112x112+64x1x3x3+-+-+-+-+-,types=float+float+ScalarList+-+ScalarList+ScalarList"
        "+ScalarList,args=-+-+3x3+-+2x2+1x1+1x1"
    )
    sort = kernel_group("convolution", shape, 2, np.zeros(1, np.int64))
    assert sort.rows == (("conv2d", "forward"),)
    assert (sort.sizes["groups"], sort.sizes["stride"]) == (64, 2)


@pytest.mark.parametrize(
    ("dims", "sides"), [("64x1024x2048", (1, 2048)), ("64x1024", (1, 1)), ("8x64x4x7x5", (28, 5))]
)
def test_a_batch_norm_has_the_sides_of_what_it_is_given(dims, sides):
    sort = kernel_group(
        "native_batch_norm", f"in={dims}+8,types=float+float", 2, np.zeros(1, np.int64)
    )
    assert (sort.sizes["h"], sort.sizes["w"]) == sides


def recurrent():
    """A GRU in fp32: at each step of time it clears, multiplies and works out its gates."""
    s = Step()
    for _ in range(5):
        for name in ("Memset (Device)", "sgemm_largek_lds64", "elemWiseRNNcell"):
            kind = "copy" if name.startswith("Memset") else "kernel"
            call = s.host("cudaLaunchKernel", name="_cudnn_rnn")
            shape = "in=32x200x1280,types=float"
            s.kernel("_cudnn_rnn", call, name=name, shape=shape, kind=kind)
    return s.graph()


@pytest.mark.parametrize("spec", ["tf32", "amp"])
def test_tensor_cores_need_no_helpers_in_a_recurrent_layer(spec):
    after = apply(spec, recurrent())
    names = [after.names[int(n)] for n in after.name[after.kind != Kind.HOST]]
    assert not any("Memset" in name for name in names)
    assert len(after.select(kind="host", op="cudaLaunchKernel")) == 10


def test_a_compiled_step_leaves_a_library_loop_to_its_host():
    """A recurrent layer is called as a whole: its kernels are launched as they are now."""
    s = Step()
    s.op("_cudnn_rnn", "in=32x200x1280,types=float", kernels=50)
    before = s.graph()
    after = apply("compile", before)
    found = [g.seconds[g.select(kind="host", op="cudaLaunchKernel")].sum() for g in (before, after)]
    assert found[1] == pytest.approx(found[0])


ARGS = ",types=float+TensorList,args=-+-+4+-+-+-+{mode}+768+0+3+True+0.+True+{both}"


@pytest.mark.parametrize(("mode", "row"), [(2, "lstm"), (3, "gru")])
@pytest.mark.parametrize("both", [False, True])
def test_a_recurrent_layer_is_found_by_its_sizes(mode, row, both):
    shape = "in=32x200x1312+2304x1312|2304x768+-+99+6x32x768" + ARGS.format(mode=mode, both=both)
    found = kernel_group("_cudnn_rnn", shape, int(Phase.FORWARD), np.zeros(0, np.int64))
    assert found.rows == ((row, "forward"),)
    assert found.sizes == {"s": 200, "b": 32, "n": 768, "layers": 6 if both else 3}


@pytest.mark.parametrize(
    ("image", "filters", "strides", "stride"),
    [("8x32x64x64", "32x32x3x3", "2x2", 2.0), ("8x32x80x200", "32x32x21x11", "2x1", 2**0.5),
     ("8x32x512", "32x32x10", "4", 2.0), ("8x3x8x64x64", "8x3x3x3x3", "2x2x2", 8**0.5)],
)  # fmt: skip
def test_a_stride_counts_what_it_leaves_out(image, filters, strides, stride):
    kinds = "float+float+-+ScalarList+ScalarList"
    shape = f"in={image}+{filters}+-+-+-,types={kinds},args=-+-+-+{strides}+1"
    found = kernel_group("convolution", shape, int(Phase.FORWARD), np.zeros(0, np.int64))
    assert found.sizes["stride"] == pytest.approx(stride)


def test_a_compiled_pass_along_an_index_takes_what_its_numbers_take():
    s = Step()
    linear(s, 4096, 768, 768)
    s.op("index_add", "in=4096x64+-+4096+4096x64,types=float+Scalar+long int+float")
    linear(s, 4096, 768, 768)
    s.op("add", "in=4096x64+4096x64,types=float+float")
    after = apply("compile", s.graph())
    indexed, plain = (
        after.seconds[after.select(kind="kernel", op=o)] for o in ("index_add", "add")
    )
    assert indexed[0] == pytest.approx(2 * 4 * 4096 * 64 / passes()["compiled"]["rate"])
    assert indexed[0] < plain[0]
