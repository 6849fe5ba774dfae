"""What half precision makes of single kernels: how they walk memory, attention, casts."""

import numpy as np
import pytest

from foretell.cost.kernel import passes
from foretell.graph.graph import Kind, Phase
from foretell.whatif import Setting, parse
from foretell.whatif.amp import amp_attention
from foretell.whatif.autocast import autocast_ops
from foretell.whatif.table_lookup import kernel_group, powers
from tests.whatif.traced import Step

H200 = "NVIDIA H200"
NOTHING = Setting()
VECTORISED = "void at::native::vectorized_elementwise_kernel<4, at::native::AddFunctor>"
INDEXED = "void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl_nocast>"
REDUCED = "void at::native::reduce_kernel<128, 4, at::native::ReduceOp<float>>"
WIDE = "8x512x768"


def linear(s: Step, m: int, n: int, k: int) -> None:
    s.op("mm", f"in={m}x{k}+{k}x{n},types=float+float")


def seconds(graph, op: str, phase: str = "forward") -> float:
    return float(graph.seconds[graph.select(kind="kernel", op=op, phase=phase)].sum())


def test_kernels_that_index_or_reduce_gain_little():
    s = Step()
    linear(s, 4096, 768, 768)
    for name in (VECTORISED, INDEXED, REDUCED):
        s.op("relu", f"in={WIDE},types=float", name=name)
    graph = s.graph()
    assert powers(graph, graph.select(kind="kernel", op="relu")).tolist() == [1.0, 0.2, 0.2]


def test_a_sum_of_both_formats_takes_longer_than_in_fp32():
    s = Step()
    s.op("native_layer_norm", f"in={WIDE}+-+768+768+-,types=float+ScalarList+float+float+Scalar")
    linear(s, 4096, 768, 768)
    s.op("add", f"in={WIDE}+{WIDE}+-,types=float+float+Scalar")
    after = parse("amp").apply(s.graph(), NOTHING)
    assert np.isclose(seconds(after, "add"), passes()["mixed"]["times"] * seconds(s.graph(), "add"))


def logits(widened: bool) -> Step:
    """A head, its logits cast to fp32 by the program or not, and a cross entropy."""
    s = Step()
    size = "8x512x32000"
    linear(s, 4096, 32000, 768)
    if widened:
        s.host("to", shape=f"in={size}+-,types=float+Scalar,args=-+6")
    s.phase = "loss"
    s.op("_log_softmax", "in=4096x32000+-+-,types=float+Scalar+Scalar,args=-+1+False")
    s.op("nll_loss_forward", "in=4096x32000+4096,types=float+long int")
    return s


def test_a_cross_entropy_keeps_the_format_of_its_logits_and_casts_for_the_loss():
    softmax, loss = (r for r in autocast_ops(logits(False).graph()) if r.op != "mm")
    assert softmax.is_half
    assert softmax.widened == ()
    assert loss.inputs == (4096 * 32000,)


def test_logits_that_the_program_widens_are_cast_once_before_the_softmax():
    softmax, loss = (r for r in autocast_ops(logits(True).graph()) if r.op != "mm")
    assert not softmax.is_half
    assert softmax.widened == (4096 * 32000,)
    assert loss.inputs == ()


def written_out(biased: bool, drops: bool = False) -> Step:
    """Attention as `scaled_dot_product_attention` writes it out in fp32, forward and backward."""
    s = Step()
    scores, queries = "8x12x512x512", "96x512x64+96x64x512"
    linear(s, 4096, 768, 768)
    s.op("bmm", f"in={queries},types=float+float")
    s.op("add_", f"in={scores}+1x12x512x512+-,types=float+float+Scalar")
    s.op("_softmax", f"in={scores}+-+-,types=float+Scalar+Scalar")
    s.op("isneginf", f"in={scores},types=float")
    s.op("all", f"in={scores},types=bool")
    if drops:
        s.op("fill_", "in=-+-,types=float+Scalar")
    s.op("where", f"in=8x12x512x1+{scores}+{scores},types=bool+float+float")
    if drops:
        s.op("native_dropout", f"in={scores}+-+-,types=float+Scalar+Scalar")
        s.op("copy_", "in=8x12x512x64+8x12x512x64,types=float+float")
    s.op("bmm", "in=96x512x512+96x512x64,types=float+float")
    linear(s, 4096, 768, 768)
    s.phase = "backward"
    s.op("bmm", "in=96x512x512+96x512x64,types=float+float")
    s.op("bmm", f"in={queries},types=float+float")
    s.op("_softmax_backward_data", f"in={scores}+{scores},types=float+float")
    if biased:
        s.op("sum", f"in={scores}+-,types=float+ScalarList")
    s.op("bmm", "in=96x64x512+96x512x512,types=float+float")
    s.op("bmm", "in=96x512x512+96x512x64,types=float+float")
    return s


def test_attention_written_out_for_lack_of_a_kernel_becomes_one_each_way():
    after = parse("amp").apply(written_out(False).graph(), NOTHING)
    assert len(after.select(kind="kernel", op="attention")) == 2
    assert not len(after.select(kind="kernel", op=("bmm", "_softmax", "isneginf", "where")))


@pytest.mark.parametrize("drops", [False, True])
def test_attention_with_a_learned_bias_stays_written_out_in_fp32(drops):
    before = written_out(True, drops).graph()
    after = parse("amp").apply(before, NOTHING)
    assert not len(after.select(kind="kernel", op="attention"))
    for phase in ("forward", "backward"):
        assert seconds(after, "bmm", phase) == seconds(before, "bmm", phase)
    wide = amp_attention(before, NOTHING, "bf16").wide
    assert set(before.select(kind="kernel", op="bmm").tolist()) <= set(wide.tolist())


@pytest.mark.parametrize(("args", "flags"), [("", (0, 0)), ("-+-+-+-+-+-+-+-+0.1+True", (1, 1))])
def test_an_attention_is_looked_up_by_its_own_sizes(args, flags):
    said = "in=8x512x12x64+8x77x12x64+8x77x12x64,types=float+float+float"
    op = "_efficient_attention_forward"
    args = f",args={args}" if args else ""
    sort = kernel_group(op, f"{said}{args}", Phase.FORWARD, np.zeros(0, np.int64))
    answer = {"b": 8, "h": 12, "s": 512, "sk": 77, "d": 64, "mask": 0}
    assert sort.sizes == answer | dict(zip(("causal", "dropout"), flags, strict=True))


def test_cudnn_attention_needs_nothing_turned_round():
    s = Step()
    q = "8x512x12x64"
    linear(s, 4096, 768, 768)
    s.op("_efficient_attention_forward", f"in={q}+{q}+{q},types=float+float+float")
    s.op("copy_", f"in={q}+{q},types=float+float")
    s.op("copy_", "in=8x512+8x512,types=float+float", name="kept")
    s.phase = "backward"
    s.op("mul", f"in={q}+{q},types=float+float")
    s.op("sum", f"in={q}+-,types=float+ScalarList")
    s.op("_efficient_attention_backward", f"in={q}+{q}+{q}+{q},types=float+float+float+float")
    graph = amp_attention(s.graph(), NOTHING, "bf16").graph
    kernels = graph.kind == Kind.KERNEL
    left = [graph.names[int(k)] for k in graph.op[kernels & (graph.phase == Phase.BACKWARD)]]
    assert left == ["_efficient_attention_backward"]


def test_adam_in_a_graph_divides_by_tensors_and_counts_its_steps_on_the_device():
    s = Step()
    linear(s, 64, 64, 64)
    s.phase = "update"
    for op in ("sqrt", "div", "add_", "addcdiv_"):
        s.op(op, "in=64x64,types=float")
    before = s.graph()
    after = parse("cuda-graph").apply(before, NOTHING)
    assert len(after.select(op="capturable")) == passes()["capturable"]["kernels"]
    ratio = seconds(after, "div", "update") / seconds(before, "div", "update")
    assert np.isclose(ratio, passes()["capturable"]["by_tensor"]["div"])
    assert seconds(after, "sqrt", "update") == seconds(before, "sqrt", "update")


def test_every_weight_of_a_recurrent_layer_is_cast():
    s = Step()
    weights = "2600x650|2600x650|2600|2600"
    s.op("_cudnn_rnn", f"in=35x64x650+{weights}+-,types=float+TensorList+Scalar")
    (run,) = autocast_ops(s.graph())
    assert run.is_half
    assert run.weights == (2600 * 650, 2600 * 650, 2600, 2600)


def test_what_a_graph_lists_as_held_is_halved_and_casts_of_weights_are_held():
    s = Step()
    linear(s, 4096, 768, 768)
    s.phase = "backward"
    linear(s, 4096, 768, 768)
    graph = s.graph()
    first, last = graph.select(kind="kernel").tolist()
    with graph.edit("memory") as edit:
        edit.buffer(4.0 * 4096 * 768, born=first, dies=last, kind="activation")
    after = parse("amp").apply(edit.graph, NOTHING)
    assert sorted(after.buffers.bytes.tolist()) == [2.0 * 768 * 768, 2.0 * 4096 * 768]


def test_products_inside_an_operator_that_autocast_does_not_list_stay_as_they_are():
    s = Step()
    linear(s, 4096, 768, 768)
    s.op("mm", "in=512x768+768x3072,types=float+float", layer="_grouped_mm.0")
    before = s.graph()
    after = parse("amp").apply(before, NOTHING)
    mine = [g.select(kind="kernel", op="mm", layer="_grouped_mm.0") for g in (before, after)]
    assert after.seconds[mine[1]].tolist() == before.seconds[mine[0]].tolist()
    assert seconds(after, "mm") < seconds(before, "mm")
    casts = after.select(kind="kernel", op=("copy_", "cast_weight"))
    assert not any(after.text_of("layer", int(k)).startswith("_grouped") for k in casts)


def test_a_volume_of_one_filter_a_channel_takes_as_long_where_pytorch_has_its_own_kernel():
    shape = "in=16x216x13x10x10+216x1x3x3x3+-+-+-+-+-,types=float+float+float+ScalarList"
    shape += ",args=-+-+-+1x1x1+1x1x1+1x1x1+216"
    took = {}
    for name in ("conv_depthwise3d_cuda_kernel<float, float>", "sm80_xmma_fprop_implicit_gemm"):
        s = Step()
        linear(s, 4096, 768, 768)
        s.op("convolution", shape, name=name)
        after = parse("amp").apply(s.graph(), NOTHING)
        took[name] = seconds(after, "convolution") / seconds(s.graph(), "convolution")
    own, other = took.values()
    assert own == 1.0 != other
