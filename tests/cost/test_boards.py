"""What boards and memory layouts change in the price of matrix kernels."""

import pytest

from foretell.cluster import load
from foretell.cost import kernel
from foretell.cost.constants import shipped
from foretell.cost.limits import limits

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
