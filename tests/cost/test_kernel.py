"""Kernel prices: bounds that physics sets, and that arrays and scalars agree."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell.cluster.node import Device
from foretell.cluster.read import devices
from foretell.cost import kernel
from foretell.cost.kernel import SIZES, nearest, pipe_of, shipped
from foretell.errors import InputError

DEVICES = sorted({d.name for d in devices().values()})
dims = st.integers(1, 20_000)
device_names = st.sampled_from(DEVICES)
formats = st.sampled_from(["fp32", "tf32", "fp16", "bf16", "fp8"])
MEMORY = sorted(c for c in shipped().memory if c != "all" and not c.endswith("_half"))


def one(device: str, op: str, dtype: str, shape: str, **more: float) -> float:
    return float(kernel.seconds(devices()[device], op, dtype, [shape], **more).seconds[0])


@given(device_names, formats, st.integers(1, 300), dims, dims, dims)
@settings(max_examples=150, deadline=None)
def test_a_product_is_never_quicker_than_the_hardware(name, dtype, b, m, n, k):
    device = devices()[name]
    price = kernel.seconds(device, "gemm", dtype, [f"b={b},m={m},n={n},k={k}"])
    seconds, sigma = float(price.seconds[0]), float(price.sigma[0])
    assert np.isfinite(seconds)
    assert 0 < sigma < 2
    assert seconds >= 2.0 * b * m * n * k / device.peak(dtype)
    moved = b * (m * k + k * n + m * n) * SIZES[dtype]
    if moved > device.l2:
        assert seconds >= moved / device.memory_bandwidth


@given(device_names, formats, st.integers(1, 500), st.integers(1, 500), dims, dims, dims)
@settings(max_examples=150, deadline=None)
def test_more_products_never_take_less(name, dtype, b, more, m, n, k):
    shape = f"m={m},n={n},k={k}"
    few, many = (one(name, "gemm", dtype, f"b={x},{shape}") for x in (b, b + more))
    assert many >= few * (1 - 1e-9)


@given(
    device_names,
    formats,
    st.lists(st.tuples(st.integers(1, 64), dims, dims, dims), min_size=1, max_size=20),
)
@settings(max_examples=50, deadline=None)
def test_arrays_price_as_scalars_do(name, dtype, shapes):
    texts = [f"b={b},m={m},n={n},k={k}" for b, m, n, k in shapes]
    together = kernel.seconds(devices()[name], "gemm", dtype, texts).seconds
    alone = [one(name, "gemm", dtype, text) for text in texts]
    columns = dict(zip("bmnk", np.array(shapes, float).T, strict=True))
    by_column = kernel.seconds(devices()[name], "gemm", dtype, columns).seconds
    np.testing.assert_allclose(together, alone, rtol=1e-12)
    np.testing.assert_allclose(by_column, alone, rtol=1e-12)


conv_shapes = st.fixed_dictionaries(
    {
        "n": st.integers(1, 256),
        "c": st.integers(1, 64).map(lambda x: 8 * x),
        "h": st.integers(7, 256),
        "w": st.integers(7, 256),
        "k": st.integers(1, 1024),
        "r": st.sampled_from([1, 3, 5, 7]),
        "stride": st.sampled_from([1, 2]),
    }
)


@given(device_names, formats, st.sampled_from(["conv", "conv_dgrad", "conv_wgrad"]), conv_shapes)
@settings(max_examples=150, deadline=None)
def test_convolutions_have_finite_prices_above_what_they_move(name, dtype, op, shape):
    s = {**shape, "s": shape["r"], "pad": shape["r"] // 2}
    device = devices()[name]
    price = float(kernel.seconds(device, op, dtype, s).seconds[0])
    assert np.isfinite(price)
    p, q = ((s[x] + 2 * s["pad"] - s["r"]) // s["stride"] + 1 for x in "hw")
    image, result = s["n"] * s["c"] * s["h"] * s["w"], s["n"] * s["k"] * p * q
    moved = SIZES[dtype] * (image / s["stride"] ** 2 + result)
    if moved > 2 * device.l2 and s["r"] > 1:
        assert price >= 0.5 * moved / device.memory_bandwidth
    # four multiplications are the most that Winograd's transforms save
    assert (
        price >= 2.0 * result * s["c"] * s["r"] ** 2 / s["stride"] ** 2 / device.peak(dtype) / 4.1
    )


@given(device_names, st.sampled_from(MEMORY), st.integers(0, 36), formats)
@settings(max_examples=150, deadline=None)
def test_memory_bound_kernels_grow_with_bytes_and_respect_the_bandwidth(name, op, power, dtype):
    device = devices()[name]
    sizes = np.array([2.0**power, 2.0 ** (power + 1)])
    seconds = kernel.seconds(device, op, dtype, bytes=sizes).seconds
    assert (np.diff(seconds) >= 0).all()
    large = sizes > 3 * device.l2
    # the cache may still hold a hundredth of what is three times its size
    assert (seconds[large] >= 0.99 * sizes[large] / device.memory_bandwidth).all()
    assert (seconds > 0).all()


@pytest.mark.parametrize("op", [*MEMORY, "gelu", "layer_norm", "cat", "something-new"])
def test_every_op_has_a_price_from_bytes_alone(op):
    price = kernel.seconds(devices()["a100"], op, "bf16", bytes=[1e3, 1e6, 1e9])
    assert np.isfinite(price.seconds).all()
    assert (np.diff(price.seconds) > 0).all()


def test_flop_and_bytes_alone_are_near_the_formula_with_the_shape():
    m = n = k = 4096.0
    device = devices()["a100"]
    known = one("a100", "gemm", "bf16", "m=4096,n=4096,k=4096")
    bare = kernel.seconds(device, "gemm", "bf16", flops=[2 * m * n * k], bytes=[6 * m * n])
    assert bare.seconds[0] == pytest.approx(known, rel=0.4)
    assert bare.sigma[0] > kernel.seconds(device, "gemm", "bf16", ["m=1,n=1,k=1"]).sigma[0]


def test_nothing_known_takes_the_smallest_kernel():
    price = kernel.seconds(devices()["h100"], "mystery", "fp32", [""])
    assert price.seconds[0] == pytest.approx(devices()["h100"].floor, rel=0.01)


def test_mixed_ops_and_formats_are_priced_each_by_its_own_formula():
    device = devices()["h100"]
    ops = ("gemm", "softmax", "gemm", "conv")
    dtypes = ("bf16", "fp32", "fp32", "bf16")
    shapes = (
        "m=512,n=512,k=512",
        "rows=64,cols=999",
        "m=512,n=512,k=512",
        "n=8,c=64,h=56,w=56,k=64,r=3,s=3,pad=1",
    )
    together = kernel.seconds(device, ops, dtypes, shapes).seconds
    alone = [one("h100", *each) for each in zip(ops, dtypes, shapes, strict=True)]
    np.testing.assert_allclose(together, alone, rtol=1e-12)
    assert together[2] > together[0]


@pytest.mark.parametrize(("device", "least"), [("h100", 6.0), ("a100", 6.0), ("v100", 4.0)])
def test_halves_run_large_products_on_matrix_units(device, least):
    shape = "m=8192,n=8192,k=8192"
    assert one(device, "gemm", "fp32", shape) > least * one(device, "gemm", "fp16", shape)


def test_odd_strides_spoil_matrix_units_but_not_vector_lanes():
    even, odd = "m=4096,n=50264,k=768,tb=1", "m=4096,n=50257,k=768,tb=1"
    assert one("h200", "gemm", "bf16", odd) > 3 * one("h200", "gemm", "bf16", even)
    assert one("h200", "gemm", "fp32", odd) < 1.1 * one("h200", "gemm", "fp32", even)


def test_fewer_bits_multiply_faster_where_the_units_have_them():
    bf16, fp8, fp4 = (
        one("b200", "gemm", f, "m=8192,n=8192,k=8192") for f in ("bf16", "fp8", "fp4")
    )
    assert 1.8 < bf16 / fp8 < 2.2
    assert 1.8 < fp8 / fp4 < 2.2


def test_one_block_more_than_a_wave_costs_a_wave():
    full, over = (one("a100", "gemm", "fp32", f"b={b},m=128,n=128,k=4096") for b in (216, 217))
    assert over > 1.2 * full


def test_depthwise_convolution_is_no_product():
    shape = "n=32,c=256,h=56,w=56,k=256,r=3,s=3,pad=1"
    dense, alone = (one("h100", "conv", "bf16", f"{shape},groups={g}") for g in (1, 256))
    flops = 2.0 * 32 * 256 * 56 * 56 * 9
    assert alone > 20 * flops / devices()["h100"].peak("bf16")
    assert dense > 0


def test_channels_last_saves_the_passes_that_turn_the_layout():
    shape = "n=64,c=64,h=224,w=224,k=64,r=3,s=3,pad=1"
    assert one("h200", "conv", "bf16", shape) > 1.3 * one("h200", "conv", "bf16", f"{shape},nhwc=1")


def test_a_third_dimension_multiplies_the_work():
    flat = one("v100", "conv", "fp32", "n=4,c=64,h=64,w=64,k=64,r=3,s=3,pad=1")
    deep = one("v100", "conv", "fp32", "n=4,c=64,h=64,w=64,d=64,k=64,r=3,s=3,t=3,pad=1")
    assert deep > 50 * flat


class TestAttention:
    def test_causal_and_backward(self):
        shape = "b=8,heads=16,sq=4096,sk=4096,d=128"
        full, half = (
            one("h100", "attention", "bf16", shape),
            one("h100", "attention", "bf16", f"{shape},causal=yes"),
        )
        back = one("h100", "attention", "bf16", f"{shape},direction=bwd")
        assert 0.45 * full < half < 0.7 * full
        assert 2 * full < back < 4.5 * full

    def test_long_sequences_run_near_what_flash_attention_reports(self):
        # FlashAttention-2 (Dao 2023, fig. 5): 190 to 225 Tflop/s forward on A100, d = 128, 4k
        seconds = one("a100", "attention", "bf16", "b=4,heads=16,sq=4096,sk=4096,d=128")
        rate = 4.0 * 4 * 16 * 4096 * 4096 * 128 / seconds
        assert 150e12 < rate < 240e12

    def test_fused_beats_unfused(self):
        shape = "b=8,heads=12,sq=2048,sk=2048,d=64"
        assert one("a100", "attention", "bf16", f"{shape},math=1") > 1.5 * one(
            "a100", "attention", "bf16", shape
        )


def test_a_board_of_little_power_falls_short_of_its_peak():
    shape = "m=8192,n=8192,k=8192"
    for name, share in (("t4", 0.7), ("l4", 0.6)):
        seconds = one(name, "gemm", "fp32", shape)
        assert 2 * 8192.0**3 / seconds < share * devices()[name].peak("fp32")


def test_a_cold_board_may_exceed_its_power_for_a_while():
    shape = ["m=1024,n=1024,k=1024"]
    device = devices()["t4"]
    warm, cold = (
        kernel.seconds(device, "gemm", "fp32", shape, burst=b).seconds[0] for b in (0, 1e-3)
    )
    assert cold < warm


def test_an_unknown_architecture_borrows_and_is_less_sure():
    blackwell, hopper = devices()["b200"], devices()["h100"]
    shape = ["m=4096,n=4096,k=4096"]
    new, old = (kernel.seconds(d, "gemm", "bf16", shape) for d in (blackwell, hopper))
    assert new.seconds[0] < old.seconds[0]
    assert new.sigma[0] > old.sigma[0]
    assert nearest("rubin", shipped().arch) in shipped().arch


def test_formats_pick_their_pipe():
    named = devices()
    assert pipe_of(named["3090"], "bf16") == "tensor"
    assert pipe_of(named["3090"], "tf32") == "tensor"
    assert pipe_of(named["v100"], "tf32") == "simt"
    assert one("v100", "gemm", "tf32", "m=999,n=999,k=999") == one(
        "v100", "gemm", "fp32", "m=999,n=999,k=999"
    )
    assert pipe_of(named["v100"], "bf16") == "simt"
    assert pipe_of(named["p100"], "fp16") == "simt"
    assert pipe_of(named["h100"], "fp8") == "tensor"


def test_an_unknown_format_offers_the_nearest():
    with pytest.raises(InputError, match="did you mean `bf16`"):
        one("h100", "gemm", "bf17", "m=1,n=1,k=1")


def test_host_dispatch_follows_the_device_preset():
    slow = Device(**{**vars(devices()["h100"]), "launch": 1e-5})
    assert kernel.host_seconds(slow, "gemm") == pytest.approx(
        2 * kernel.host_seconds(devices()["h100"], "gemm")
    )
    assert kernel.host_seconds(slow, "conv") > kernel.host_seconds(slow, "elementwise")


def test_heads_of_odd_width_are_slow_on_a100() -> None:
    """pytorch/pytorch issue 83272: 384 matmuls of 1024 x 1024 x 140 at 12.2 and 53.9 Tflop/s."""
    rates = {}
    for name in ("a100-80", "h100"):
        for dtype in ("bf16", "fp16"):
            for n in (128, 140, 150):
                took = one(name, "gemm", dtype, f"b=384,m=1024,n={n},k=1024")
                rates[name, dtype, n] = 2 * 384 * 1024 * 1024 * n / took
    assert rates["a100-80", "bf16", 140] == pytest.approx(12.2e12, rel=0.4)
    assert rates["a100-80", "fp16", 140] == pytest.approx(53.9e12, rel=0.4)
    assert rates["a100-80", "fp16", 150] == rates["a100-80", "bf16", 150]  # rows at 4 bytes
    assert rates["a100-80", "bf16", 128] > 100e12
    assert rates["h100", "bf16", 140] > 100e12


def test_attention_is_written_out_where_no_kernel_fuses_it() -> None:
    shape = "b=8,heads=16,sq=1024,sk=1024,d=128,causal=1"
    assert one("mi100", "attention", "bf16", shape) > 5 * one("mi250", "attention", "bf16", shape)
