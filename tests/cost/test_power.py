"""The clock of a board at its power limit."""

from dataclasses import replace

import numpy as np
import pytest

from foretell.cluster import load
from foretell.cost import kernel

ONE, NONE = np.ones(1), np.zeros(1)


def device(name="h100"):
    return load(name).devices[0]


def clock(board, flops=800e12, kind=""):
    energy = ONE * flops * kernel.joules(board, "bf16", kind)
    return float(kernel.clock(board, ONE, energy, NONE, NONE)[0])


def test_long_products_run_below_the_nominal_clock():
    assert 0.7 < clock(device()) < 0.9  # 8192^3 settles at 1485 of 1980 MHz on 700 W


def test_a_capped_board_has_less_left_for_its_matrix_units():
    board = device()
    capped = replace(board, watts=500.0)
    assert clock(capped) < clock(board)
    smaller = replace(capped, units=round(board.units * 500 / 700))
    assert clock(capped) < clock(smaller)  # its static power is the whole chip's


def test_a_gh200_of_a_node_of_four_has_less_power_than_one_alone():
    assert clock(device("gh200-680w")) < clock(device("gh200"))
    assert {one.name for one in load("alps-node:gpus=4").devices} == {"gh200-680w"}


def test_flash_attention_2_takes_more_energy_a_flop_than_cudnn():
    board = device("h200")
    assert kernel.joules(board, "bf16", "flash2") > kernel.joules(board, "bf16", "attention")
    assert kernel.joules(board, "bf16", "attention") > kernel.joules(board, "bf16")


def test_a_board_without_a_row_keeps_its_clock():
    assert clock(device("p100")) == pytest.approx(1.0)


def test_memory_bound_kernels_leave_power_for_the_others():
    board = device()
    energy = ONE * 800e12 * kernel.joules(board, "bf16")
    mixed = float(kernel.clock(board, ONE, energy, ONE, NONE)[0])
    assert mixed > clock(board)


def test_the_slowest_of_more_boards_is_slower_where_power_limits_it():
    assert kernel.slowest_of(1) == pytest.approx(0.0, abs=1e-12)
    assert kernel.slowest_of(8) == pytest.approx(1.42, abs=0.02)  # of a normal distribution
    board, energy = device(), ONE * 800e12 * kernel.joules(device(), "bf16")
    paces = [
        float(kernel.clock(board, ONE, energy, NONE, NONE, kernel.slowest_of(n))[0])
        for n in (1, 8, 512)
    ]
    assert paces[0] == clock(board)
    assert paces[0] / paces[1] == pytest.approx(1 + 0.015 * 1.42, abs=0.006)
    assert paces[2] < paces[1]
    idle = kernel.clock(board, ONE, energy / 4, NONE, NONE, kernel.slowest_of(512))
    assert float(idle[0]) == pytest.approx(1.0)  # below its limit every board keeps its clock
