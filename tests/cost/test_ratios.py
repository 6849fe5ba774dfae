"""What another format or layout makes of an operator, from rows measured both ways."""

import numpy as np
import pytest

from foretell.cost.ratios import NEIGHBOURS, Way, places, ratios, times
from foretell.cost.ratios import _rows as rows_of

FP32, TF32, BF16 = Way("fp32"), Way("tf32"), Way("bf16")


def one(**sizes):
    return {key: np.array([float(value)]) for key, value in sizes.items()}


def test_large_products_gain_most():
    small = ratios("linear", "forward", one(m=32, n=64, k=64), FP32, BF16)
    large = ratios("linear", "forward", one(m=4096, n=3072, k=768), FP32, BF16)
    assert 0.03 < large.factor[0] < 0.15
    assert large.factor[0] < small.factor[0] < 1.5


def test_an_odd_width_spoils_tensor_cores():
    even = ratios("linear", "forward", one(m=4096, n=50304, k=768), FP32, BF16)
    odd = ratios("linear", "forward", one(m=4096, n=50257, k=768), FP32, BF16)
    assert odd.factor[0] > 1.5 * even.factor[0]


def test_a_batch_norm_is_slower_in_half_precision_but_not_with_channels_last():
    sizes = one(n=64, c=256, h=14, w=14)
    first, last = (Way("bf16", layout) for layout in ("nchw", "nhwc"))
    assert ratios("batch_norm", "forward", sizes, Way("fp32", "nchw"), first).factor[0] > 1.5
    assert ratios("batch_norm", "forward", sizes, first, last).factor[0] < 1


def test_depthwise_convolutions_keep_their_time():
    thin = one(n=128, c=672, k=672, r=3, s=3, stride=1, groups=672, h=14, w=14)
    full = one(n=128, c=672, k=672, r=3, s=3, stride=1, groups=1, h=14, w=14)
    before, after = Way("fp32", "nchw"), Way("bf16", "nchw")
    assert ratios("conv2d", "forward", thin, before, after).factor[0] > 0.6
    assert ratios("conv2d", "forward", full, before, after).factor[0] < 0.2


ATTENTION = (Way("fp32", "efficient"), Way("bf16", "cudnn"))


def attended(direction, **sizes):
    """Seconds of one attention in half precision."""
    shape = one(**{"b": 8, "h": 12, "d": 64, **sizes})
    return float(times("attention", direction, shape, ATTENTION[1]).seconds[0])


@pytest.mark.parametrize(("direction", "bar"), [("forward", 0.27), ("backward", 0.12)])
def test_an_attention_left_out_is_predicted_by_those_alike(direction, bar):
    rows = rows_of("attention", direction, *ATTENTION)
    away = np.sqrt(((rows.places[:, None] - rows.places[None]) ** 2).sum(-1))
    np.fill_diagonal(away, np.inf)
    order = np.argsort(away, axis=1)[:, :NEIGHBOURS]
    weight = 1 / (0.12**2 + np.take_along_axis(away, order, 1) ** 2) ** 2
    answer = (weight * rows.ratio[order]).sum(1) / weight.sum(1)
    assert np.median(np.abs(answer - rows.ratio)) < bar


def test_attention_both_ways_takes_up_to_twice_a_causal_one():
    whole, causal = (attended("forward", s=2048, causal=flag) for flag in (0, 1))
    assert 1.3 * causal < whole < 2.5 * causal


def test_few_words_on_the_side_of_blocks_leave_processors_idle():
    few, many = (attended("backward", b=1, s=s, sk=4096 * 64 // s) for s in (64, 4096))
    assert few > 2 * many


def test_a_recurrent_step_costs_its_kernels_however_small():
    sizes = [one(s=200, b=8, n=n, layers=1) for n in (64, 320)]
    small, larger = (times("gru", "forward", z, BF16).seconds[0] for z in sizes)
    assert 0.8 < small / larger < 1.1


def test_what_was_measured_one_way_only_is_not_predicted():
    assert ratios("topk", "forward", one(m=8, n=8), FP32, BF16) is None
    assert ratios("no such op", "forward", one(n=8), FP32, BF16) is None


@pytest.mark.parametrize("op", ["linear", "conv2d", "batch_norm", "layer_norm"])
def test_a_measured_shape_is_predicted_nearly_as_measured(op):
    layout = "" if op in ("linear", "layer_norm") else "nchw"
    rows = rows_of(op, "forward", Way("fp32", layout), Way("bf16", layout))
    mean, spread, _ = rows.near(_sizes_back(op, layout))
    error = np.abs(mean - rows.ratio)
    assert np.median(error) < 0.1
    assert np.mean(error < 2 * spread) > 0.8  # what it says of itself


@pytest.mark.parametrize(
    ("op", "direction", "bar"), [("linear", "forward", 0.2), ("bmm", "forward", 0.12),
                                 ("layer_norm", "forward", 0.08), ("softmax", "forward", 0.1)]
)  # fmt: skip
def test_a_shape_left_out_is_predicted_by_its_neighbours(op, direction, bar):
    rows = rows_of(op, direction, FP32, BF16)
    away = np.sqrt(((rows.places[:, None] - rows.places[None]) ** 2).sum(-1))
    np.fill_diagonal(away, np.inf)
    order = np.argsort(away, axis=1)[:, :NEIGHBOURS]
    weight = 1 / (0.12**2 + np.take_along_axis(away, order, 1) ** 2)
    answer = (weight * rows.ratio[order]).sum(1) / weight.sum(1)
    assert np.median(np.abs(answer - rows.ratio)) < bar


def test_places_do_not_depend_on_the_order_of_keys():
    sizes = one(m=10, n=20, k=40)
    assert np.array_equal(
        places("linear", ("m", "n", "k"), sizes), places("linear", ("k", "n", "m"), sizes)
    )


def _sizes_back(op, layout):
    """The sizes of every row measured both ways, as columns."""
    from foretell.cost.ratios import _measured, _pairs

    first, second = (_measured(op, "forward", Way(d, layout)) for d in ("fp32", "bf16"))
    shapes = [dict(_pairs(shape)) for shape, _ in first if (shape, _) in second]
    keys = sorted({k for shape in shapes for k in shape})
    return {k: np.array([shape.get(k, 1.0) for shape in shapes]) for k in keys}


def test_the_time_of_a_measured_shape_is_predicted_by_its_neighbours():
    from foretell.cost.ratios import _measured, _pairs

    found = _measured("linear", "forward", Way("bf16"))
    big = [(shape, s) for (shape, _), s in found.items() if s > 2e-5][:20]
    for shape, seconds in big:
        sizes = {k: np.array([v]) for k, v in _pairs(shape)}
        answer = times("linear", "forward", sizes, Way("bf16"))
        assert answer is not None
        assert abs(np.log(answer.seconds[0] / seconds)) < 0.15  # it is its own nearest neighbour


def test_no_time_is_predicted_of_what_has_no_measure_of_work():
    assert times("gelu", "forward", {"n": np.array([1e6])}, Way("bf16")) is None


def test_a_single_tap_minds_how_its_pixels_are_aligned():
    answer = {"n": 64, "c": 128, "k": 512, "stride": 1, "groups": 1}
    sizes = {k: np.full(2, v) for k, v in answer.items()}
    sizes |= {"h": np.array([28, 27]), "w": np.array([28, 27])}
    one, three = (
        places("conv2d", (), {**sizes, "r": np.full(2, taps), "s": np.full(2, taps)})
        for taps in (1, 3)
    )
    assert abs(one[0, -1] - one[1, -1]) > 1
    assert three[0, -1] == three[1, -1] == 0
