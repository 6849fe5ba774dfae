"""Cases are text through and through, and the list of them covers what it should."""

import math

import pytest

from foretell.errors import InputError
from foretell_lab.bench.case import (
    case,
    fill,
    floor,
    parse_case,
    published,
    read_shape,
    snap,
    text,
    wholes,
    work,
)


def test_a_case_prints_and_reads_back() -> None:
    query = case("conv2d", "wgrad", "bf16", "nhwc", n=64, c=3, mode="bilinear")
    assert str(query) == "conv2d wgrad bf16 nhwc n=64;c=3;mode=bilinear"
    assert parse_case(str(query)) == query
    assert read_shape(text(query.shape)) == query.shape
    assert (query["n"], query.word("mode"), query.size("groups", 1)) == (64, "bilinear", 1)


@pytest.mark.parametrize("written", ["m", "m=", "=3", "m=3;n", "m=3;;=1"])
def test_a_broken_shape_is_named(written: str) -> None:
    with pytest.raises(InputError, match="is no shape"):
        read_shape(written)


def test_a_broken_case_says_what_is_missing() -> None:
    with pytest.raises(InputError, match="3 words where 5"):
        parse_case("linear forward bf16")
    with pytest.raises(InputError, match="no size `k`"):
        case("linear", m=1)["k"]


def test_points_fill_the_box_evenly_from_the_first() -> None:
    points = list(fill(64, (1, 1000), (10, 10000)))
    for prefix in (16, 32, 64):
        quarters = [0, 0, 0, 0]
        for x, y in points[:prefix]:
            assert 1 <= x <= 1000
            assert 10 <= y <= 10000
            quarters[2 * (x > math.sqrt(1000)) + (y > math.sqrt(1e5))] += 1
        assert min(quarters) >= prefix / 4 - 3, quarters


def test_sizes_are_snapped_as_models_snap_them() -> None:
    drawn = [n for point in wholes(200, (64, 16384), (64, 16384)) for n in point]
    share = sum(n % 64 == 0 for n in drawn) / len(drawn)
    assert 0.4 < share < 0.8
    assert sum(n % 8 != 0 for n in drawn) / len(drawn) > 0.1
    assert (snap(1000, 64), snap(20, 64), snap(0.2, 8)) == (1024, 16, 1)


def test_published_layers_are_whole_numbers() -> None:
    layers = published("conv")
    assert len(layers) > 250
    for layer in layers:
        sizes = {key: int(value) for key, value in layer.items() if key != "network"}
        assert min(sizes.values()) >= 1
        assert sizes["c"] % sizes["groups"] == sizes["k"] % sizes["groups"] == 0


def test_work_is_what_a_person_counts() -> None:
    linear = work(case("linear", "forward", "fp32", "nk", m=8, n=4, k=2))
    assert (linear.flops, linear.bytes) == (128, 4 * (16 + 8 + 32))
    sizes = {"n": 2, "c": 8, "k": 16, "r": 3, "s": 3, "stride": 2, "groups": 1, "h": 8, "w": 8}
    conv = work(case("conv2d", "forward", "bf16", "nchw", **sizes))
    assert conv.flops == 2 * 2 * 16 * 16 * 8 * 9
    assert conv.bytes == 2 * (2 * 8 * 64 + 2 * 16 * 16 + 16 * 8 * 9)
    causal = case("attention", "forward", "bf16", "flash", b=1, h=2, s=16, d=8, causal=1)
    assert work(causal).flops == 4 * 2 * 16 * 16 * 8 / 2
    assert work(case("copy", "forward", "fp32>bf16", "-", n=1000)).bytes == 1000 * (4 + 2)


def test_the_floor_is_the_slower_of_flops_and_bytes() -> None:
    rates = {"fp32": 1e12, "bf16": 8e12, "bytes": 1e11}
    square = case("linear", "forward", "bf16", "nk", m=4096, n=4096, k=4096)
    assert floor(square, rates) == pytest.approx(2 * 4096**3 / 8e12)
    thin = case("linear", "forward", "bf16", "nk", m=1, n=4096, k=4096)
    assert floor(thin, rates) == pytest.approx(work(thin).bytes / 1e11)
