"""What boards and memory layouts change in the price of matrix kernels."""

import pytest

from foretell.cluster import load
from foretell.cost import kernel
from foretell.cost.kernel import limits_of as limits
from foretell.cost.kernel import shipped

GEMM = {"m": 4096.0, "n": 4096.0, "k": 4096.0}
DEPTHWISE = {"n": 256.0, "c": 384.0, "h": 28.0, "w": 28.0, "k": 384.0, "r": 3.0, "s": 3.0}
DEPTHWISE |= {"pad": 1.0, "groups": 384.0}


def board(name):
    return load(f"{name}:gpus=1").devices[0]


@pytest.mark.parametrize(
    ("name", "ease"),
    [("3090", 0.25), ("2080ti", 0.25), ("a100-80", 1.0), ("v100-16", 1.0), ("t4", 1.0)],
)
def test_half_rate_boards_feed_their_matrix_units_easily(name, ease):
    given = limits(board(name), "fp16", shipped().arch)
    assert given.ease == pytest.approx(ease, rel=0.05)


def test_only_matrix_units_are_eased():
    assert limits(board("3090"), "fp32", shipped().arch).ease == 1.0


def test_a_half_rate_board_comes_nearer_to_its_peak():
    work = 2 * 4096.0**3
    shares = [
        work / kernel.seconds(d, "gemm", "fp16", GEMM).seconds[0] / d.peak("fp16")
        for d in (board("3090"), board("a100-80"))
    ]
    assert 1 > shares[0] > shares[1] > 0.5


@pytest.mark.parametrize("op", ["conv", "conv_dgrad", "conv_wgrad"])
def test_depthwise_halves_are_quicker_with_channels_last(op):
    device = board("h200")
    first, last = (
        kernel.seconds(device, op, "bf16", DEPTHWISE | {"nhwc": nhwc}).seconds[0]
        for nhwc in (0.0, 1.0)
    )
    assert last < 0.6 * first


GROUPED = {"n": 64.0, "h": 28.0, "w": 28.0, "r": 3.0, "s": 3.0, "pad": 1.0, "nhwc": 1.0}


def grouped(op, width, groups):
    sizes = {"c": width * groups, "k": width * groups, "groups": groups}
    return kernel.seconds(board("h200"), op, "bf16", GROUPED | sizes).seconds[0]


@pytest.mark.parametrize("op", ["conv", "conv_dgrad", "conv_wgrad"])
def test_groups_of_odd_widths_go_one_by_one(op):
    """Rows of h200.csv.gz: 36 groups of 56 take 108 kernels, 32 of 8 take one to five."""
    assert grouped(op, 56.0, 36.0) > 2 * grouped(op, 32.0, 63.0)  # the same channels
    assert grouped(op, 56.0, 36.0) > 1.5 * grouped(op, 56.0, 18.0)
    assert grouped(op, 56.0, 4.0) > 4 * grouped(op, 56.0, 1.0)


def test_what_feeds_slow_matrix_units_shows_less():
    """A quarter of the rate has four times as long for the loads before the first product."""
    work, shape = 2 * 65536 * 512 * 128.0, {"m": 65536.0, "n": 512.0, "k": 128.0}
    fast, slow = (
        work / kernel.seconds(d, "gemm", "fp16", shape).seconds[0] / d.peak("fp16")
        for d in (board("a100-80"), board("3090"))
    )
    assert slow > 1.4 * fast
