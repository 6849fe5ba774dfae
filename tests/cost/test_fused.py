"""Prices of fused regions: what they depend on, what they refuse, and how right they are."""

from dataclasses import replace
from math import nan

import numpy as np
import pytest

from foretell.cluster.read import devices
from foretell.cost import fused
from foretell.cost.fused import fused_price, networks
from foretell.cost.fused_regions import WALKED, Regions, assembled, walked
from foretell.errors import InputError
from foretell_lab.fused import data as fused_data

H200 = devices()["h200"]


def chain(rows: int, cols: int, *words: str, dtype: str = "bf16", seconds: float = nan):
    """A tensor that flows through ops, the last of which leaves."""
    n, size = rows * cols, 2 if dtype == "bf16" else 4
    nodes = [("fresh", dtype, n, n, 1, 0, cols, 0, 0, nan)]
    for i, word in enumerate(words):
        inner = cols if word in ("softmax", "sum", "layer_norm") else 1
        out = n // cols if word == "sum" else n
        left = out * size if i == len(words) - 1 else 0
        nodes.append((word, dtype, out, n, inner, 0, cols, left, 0, seconds))
    return nodes, [(i, i + 1, 0) for i in range(len(words))]


def walk(regions: Regions) -> dict[str, np.ndarray]:
    return dict(zip(WALKED, walked(regions, 132.0).region.T, strict=True))


def kernels(regions: Regions) -> list[int]:
    return np.bincount(fused.kernels_of(H200, regions).of).tolist()


def test_a_chain_moves_its_ends_only():
    regions = assembled([chain(4096, 1024, "add", "gelu", "mul")])
    found = walk(regions)
    assert found["read"][0] == found["written"][0] == 4096 * 1024 * 2
    assert kernels(regions) == [1]
    assert found["reread"][0] == 0


def test_rows_of_a_softmax_stay_in_one_kernel_but_one_long_sum_is_split():
    softmax, total = chain(8192, 1024, "mul", "softmax", "mul"), chain(1, 1 << 24, "mul", "sum")
    assert kernels(assembled([softmax, total])) == [1, 2]


def test_what_is_never_used_costs_nothing():
    nodes, edges = chain(4096, 1024, "mul", "mul")
    n = 4096 * 1024
    dead = [*nodes, ("sum", "fp32", 1, n, n, 0, 1024, 0, 0, nan)]
    found = walk(assembled([(nodes, edges), (dead, [*edges, (1, 3, 0)])]))
    assert found["work"][0] == found["work"][1]


def test_of_a_view_only_what_is_read_is_moved():
    n = 1 << 20
    nodes = [
        ("fresh", "fp32", n, n, 1, 0, 1024, 0, 0, nan),
        ("view", "fp32", n, n, 1, 0, 1024, 0, 0, nan),
        ("slice", "fp32", n // 4, n // 4, 1, 0, 256, 0, 0, nan),
        ("relu", "fp32", n // 4, n // 4, 1, 0, 256, n, 0, nan),
    ]
    found = walk(assembled([(nodes, [(0, 1, 0), (1, 2, 0), (2, 3, 0)])]))
    assert found["read"][0] == n // 4 * 4


def test_of_what_was_pooled_only_the_shape_is_asked():
    n = 1 << 20
    nodes = [
        ("fresh", "fp32", n, n, 1, 0, 32, 0, 0, nan),
        ("input", "fp32", 4 * n, 4 * n, 1, 0, 64, 0, 0, nan),
        ("avg_pool2d_backward", "fp32", 4 * n, 4 * n, 4, 0, 64, 16 * n, 0, nan),
    ]
    found = walk(assembled([(nodes, [(0, 2, 0), (1, 2, 0)])]))
    assert found["read"][0] == 4 * n


def test_loops_that_a_third_reads_together_are_one_kernel():
    n = 1 << 20
    enters = [("input", "fp32", n, n, 1, 0, 1024, 0, 0, nan)] * 2
    gates = [("sigmoid", "fp32", n, n, 1, 0, 1024, 4 * n, 0, nan)] * 2
    apart, edges = [*enters, *gates], [(0, 2, 0), (1, 3, 0)]
    joined = [*apart, ("mul", "fp32", n, n, 1, 0, 1024, 4 * n, 0, nan)]
    regions = assembled([(apart, edges), (joined, [*edges, (2, 4, 0), (3, 4, 0)])])
    assert kernels(regions) == [2, 1]


def test_what_reads_nothing_is_a_kernel_of_its_own():
    n = 1 << 20
    nodes = [
        ("fresh", "fp32", n, n, 1, 0, 1024, 0, 0, nan),
        ("ones_like", "fp32", n, n, 1, 0, 1024, 0, 0, nan),
        ("div", "fp32", n, n, 1, 0, 1024, 4 * n, 0, nan),
        ("relu", "fp32", n, n, 1, 0, 1024, 4 * n, 0, nan),
    ]
    assert kernels(assembled([(nodes, [(0, 1, 0), (1, 2, 0), (0, 3, 0)])])) == [2]


def test_fusing_is_cheaper_than_one_by_one():
    whole = assembled([chain(8192, 4096, "add", "gelu", "mul", "relu")])
    alone = assembled([chain(8192, 4096, word) for word in ("add", "gelu", "mul", "relu")])
    for learned in (True, False):
        price, apart = (fused_price(r, H200, learned=learned).seconds for r in (whole, alone))
        assert price[0] < 0.5 * apart.sum()


def test_batches_answer_as_one_by_one():
    many = [chain(64 << i, 512, "add", "layer_norm") for i in range(6)]
    together = fused_price(assembled(many), H200)
    singly = [fused_price(assembled([one]), H200) for one in many]
    np.testing.assert_allclose(together.seconds, [p.seconds[0] for p in singly], rtol=1e-5)
    np.testing.assert_allclose(together.sigma, [p.sigma[0] for p in singly], rtol=1e-4)


def test_order_of_regions_does_not_matter():
    data = fused_data.shipped("h200").regions
    rows = np.random.default_rng(0).permutation(len(data))[:60]
    there, back = fused_price(data.take(rows), H200), fused_price(data.take(np.sort(rows)), H200)
    np.testing.assert_allclose(there.seconds[np.argsort(rows)], back.seconds, rtol=1e-4)


def test_a_device_of_half_the_rates_is_slower_and_less_sure():
    regions = assembled([chain(8192, 4096, "add", "gelu")])
    slow = replace(H200, name="half", memory_bandwidth=H200.memory_bandwidth / 2, units=66)
    fast, other = fused_price(regions, H200), fused_price(regions, slow)
    assert 1.5 < other.seconds[0] / fast.seconds[0] < 3
    assert other.sigma[0] > fast.sigma[0]


def test_every_preset_answers():
    regions = assembled([chain(2048, 1024, "add", "softmax"), chain(512, 512, "relu")])
    for device in devices().values():
        price = fused_price(regions, device)
        assert np.all(np.isfinite(price.seconds)), device.name
        assert np.all(price.seconds > 0), device.name
        assert np.all(price.sigma > 0), device.name


def test_known_own_times_of_a_product_are_used():
    n = 4096 * 4096
    nodes = [
        ("fresh", "bf16", n, n, 1, 0, 4096, 0, 0, nan),
        ("input", "bf16", n, n, 1, 0, 4096, 0, 0, nan),
        ("mm", "bf16", n, n, 1, 0, 4096, 0, 2 * 4096.0**3, 0.01),
        ("relu", "bf16", n, n, 1, 0, 4096, 2 * n, 0, 2e-5),
    ]
    edges = [(0, 2, 0), (1, 2, 0), (2, 3, 0)]
    assert fused_price(assembled([(nodes, edges)]), H200, learned=False).seconds[0] > 0.01


def test_no_regions_no_prices():
    empty = assembled([chain(8, 8, "relu")]).take([])
    assert len(fused_price(empty, H200).seconds) == 0


@pytest.mark.parametrize(
    ("nodes", "edges", "says"),
    [
        ([("relu", "bf17", 8, 8, 1, 0, 8, 0, 0, nan)], [], "unknown number format"),
        ([("relu", "bf16", -8, 8, 1, 0, 8, 0, 0, nan)], [], "negative size"),
        ([("relu", "bf16", 8, 8, 1, 0, 8, 0, 0, nan)], [(0, 4, 0)], "outside"),
    ],
)
def test_bad_regions_are_refused(nodes, edges, says):
    with pytest.raises(InputError, match=says):
        assembled([(nodes, edges)])


def test_an_edge_between_regions_is_refused():
    good = chain(8, 8, "relu")
    with pytest.raises(InputError, match="joins two regions"):
        assembled([(good[0], [(0, 1, 0), (0, 2, 0)]), good])


def test_a_region_of_nothing_is_refused():
    with pytest.raises(InputError, match="without nodes"):
        assembled([([], [])])


def test_weights_are_small_and_there():
    members, scale = networks()
    assert len(members) >= 3
    assert np.all(scale > 0.5)
    kernel, _ = networks("kernel")
    assert len(kernel) >= 2
    both = [w for m in (*members, *kernel) for w in m.values()]
    assert sum(w.nbytes // 2 for w in both) < 2_000_000


def test_data_names_its_unknown_sets():
    with pytest.raises(InputError, match="h100"):
        fused_data.shipped("h100")


def test_held_out_models_are_held_out():
    data = fused_data.shipped("h200")
    kernel = data.regions.is_written
    assert np.sum(~kernel) >= 10_000
    assert np.sum(kernel) >= 10_000
    assert 1800 < np.sum(data.held_out & ~kernel) < 2100


def test_a_kernel_as_written_is_one_and_its_long_rows_are_visited_twice():
    rows = [chain(8192, 512, "mul", "layer_norm"), chain(512, 8192, "mul", "layer_norm")]
    total = chain(1, 1 << 24, "mul", "sum")
    regions = assembled([*rows, total])
    found = walk(regions)
    assert found["kernels"].tolist() == [1, 1, 1]
    assert found["reread"][0] == 0
    assert found["reread"][1] == 8192 * 512 * 2
    assert found["work"][1] > found["work"][0]


def test_kernels_and_regions_asked_together_answer_as_apart():
    regions = assembled([chain(4096, 1024, "add", "gelu"), chain(4096, 1024, "mul", "softmax")])
    both = replace(regions, written=np.array([False, True]))
    found = fused_price(both, H200)
    alone = [fused_price(both.take([k]), H200).seconds[0] for k in (0, 1)]
    np.testing.assert_allclose(found.seconds, alone, rtol=1e-5)
    assert found.seconds[1] != fused_price(regions, H200).seconds[1]


def test_constants_of_every_sort_ship():
    calibrate = pytest.importorskip("foretell_lab.fused.calibrate")
    host_fit = pytest.importorskip("foretell_lab.fused.host_fit")
    for kind in ("gpu", "kernel", "cpu"):
        found = fused.constants_by_sort()[kind]
        names = host_fit.GUESS if kind == "cpu" else calibrate.GUESS
        assert set(found["constants"]) == set(names)
        assert found["sigma"]["seen"] > 0
