"""The correction before the formula: it passes where it was not trained, and helps where it was."""

import json
from importlib.resources import files

import numpy as np
import pytest

from foretell.cluster.read import devices
from foretell.cost import kernel
from foretell.cost.price import SIZES, Trees, learned_seconds, shipped_trees

NAMES = sorted(shipped_trees())


def stump(above: float, low: float, high: float) -> Trees:
    """One split on the second size of a product, m: −1 below, +1 above."""
    return Trees(
        feature=np.array([[1]], np.int16),
        above=np.array([[above]], np.float32),
        leaf=np.array([[-1.0, 1.0]], np.float32),
        low=np.full(4, low),
        high=np.full(4, high),
        sigma=0.1,
    )


def test_trees_walk_to_the_leaf_of_their_row():
    rows = np.array([[0.0, 3.0], [0.0, 5.0]])
    np.testing.assert_array_equal(stump(4.0, 0, 9).predict(rows), [-1.0, 1.0])


def test_inside_the_box_it_multiplies_the_formula_and_outside_it_passes():
    device = devices()["t4"]
    trees = {"t4 gemm fp32": stump(7.0, 1.0, 8.0)}
    shapes = ["m=64,n=64,k=64", "m=200,n=64,k=64", "m=4000,n=64,k=64"]
    price = learned_seconds(device, "gemm", "fp32", shapes, trees=trees)
    formula = kernel.seconds(device, "gemm", "fp32", shapes).seconds
    np.testing.assert_allclose(price.seconds[:2], formula[:2] * np.exp([-1.0, 1.0]), rtol=1e-6)
    assert np.isnan(price.seconds[2])
    assert price.sigma[0] == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("device", "op", "dtype"),
    [("b200", "gemm", "fp32"), ("t4", "softmax", "fp32"), ("t4", "gemm", "fp64")],
)
def test_it_passes_on_what_it_was_not_trained_on(device, op, dtype):
    trees = {"t4 gemm fp32": stump(7.0, 1.0, 8.0)}
    shape = {"m": [64.0], "n": [64.0], "k": [64.0], "rows": [1.0], "cols": [8.0]}
    assert np.isnan(learned_seconds(devices()[device], op, dtype, shape, trees=trees).seconds).all()


def test_it_passes_where_the_shape_is_missing():
    trees = {"t4 gemm fp32": stump(7.0, 1.0, 8.0)}
    price = learned_seconds(devices()["t4"], "gemm", "fp32", ["", "m=9,n=9"], trees=trees)
    assert np.isnan(price.seconds).all()


@pytest.mark.skipif(not NAMES, reason="no correction beat the formula")
@pytest.mark.parametrize("name", NAMES)
def test_what_ships_is_finite_stays_near_the_formula_and_is_small(name):
    device, op, dtype = name.split()
    trees = shipped_trees()[name]
    assert 0.03 < trees.sigma < 0.6
    low, high = (2.0**x - 1 for x in (trees.low, trees.high))
    middle = np.exp2((trees.low + trees.high) / 2) - 1
    shape = {k: np.array([v]) for k, v in zip(SIZES[op], np.round(middle), strict=True)}
    shape |= {"r": np.round(low[5:6]), "s": np.round(low[6:7])} if op == "conv" else {}
    shape |= {"stride": np.round(low[7:8]), "pad": np.round(low[8:9])} if op == "conv" else {}
    price = learned_seconds(devices()[device], op, dtype, shape).seconds[0]
    formula = kernel.seconds(devices()[device], op, dtype, shape).seconds[0]
    assert (low <= high).all()
    assert abs(np.log(price / formula)) < 1.5


def test_only_what_beats_the_formula_on_left_out_ranges_ships():
    text = files("foretell.cost").joinpath("tables", "kernel_accuracy.json").read_text("utf-8")
    rows = json.loads(text)["learned"]
    assert {r["name"] for r in rows if r["kept"]} == set(NAMES)
    for row in rows:
        assert row["kept"] == (row["learned"] < 0.9 * row["formula"])


def test_the_tables_stay_small():
    tables = files("foretell.cost").joinpath("tables")
    sizes = [len(p.read_bytes()) for p in tables.iterdir() if p.name.startswith("kernel")]
    assert sum(sizes) < 500_000
