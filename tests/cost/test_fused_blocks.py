"""How kernels are cut into blocks."""

import numpy as np

from foretell.cost.fused import blocks


def one(rows, inner, *, down, loads=2):
    sizes = (np.array([float(v)]) for v in (rows, inner))
    found = blocks(*sizes, np.array([down]), np.array([loads]))
    return [float(column[0]) for column in found]


def test_a_short_row_lies_in_one_block():
    programs, turns, padded, held = one(8192, 768, down=False)
    assert (turns, held) == (1.0, 1.0)
    assert programs == 8192
    assert padded == 1024 / 768


def test_a_long_row_is_a_loop():
    programs, turns, padded, held = one(4096, 10240, down=False)
    assert (programs, turns, padded, held) == (4096, 5, 1.0, 0.0)


def test_many_loads_take_shorter_turns():
    assert one(4096, 10240, down=False, loads=12)[1] == 2 * one(4096, 10240, down=False)[1]


def test_columns_share_a_block():
    programs, turns, _, held = one(65536, 128, down=True)
    assert (programs, turns, held) == (1024, 16, 0.0)
    assert one(65536, 64, down=True)[3] == 1.0


def test_places_without_a_reduction():
    programs, turns, padded, _ = one(10_000, 1, down=False)
    assert (programs, turns) == (10, 1)
    assert padded == 1.024
