"""Regions lowered to kernels: how many, what each reads and writes."""

from math import nan

import numpy as np

from foretell.cluster.preset import devices
from foretell.cost import fused_data
from foretell.cost.fused import fused_price
from foretell.cost.fused_lower import lowered
from foretell.cost.fused_reduced import splits
from foretell.cost.fused_regions import assembled
from foretell.cost.fused_walk import WALKED, walked

H200 = devices()["h200"]
N = 4096 * 1024


def tensor(word, n=N, last=1024):
    return (word, "fp32", n, n, 1, 0, last, 0, 0, nan)


def op(word, n=N, places=N, inner=1, across=0, leaves=0):
    return (word, "fp32", n, places, inner, across, 1024, leaves, 0, nan)


def kernels(nodes, edges):
    return lowered(assembled([(nodes, edges)]), 132.0)


def test_a_chain_is_one_kernel():
    found = kernels([tensor("fresh"), op("add"), op("gelu", leaves=4 * N)], [(0, 1, 0), (1, 2, 0)])
    assert found.of.tolist() == [0]
    assert found.regions.lowered
    assert found.regions.writes.sum() == 4 * N


def test_one_long_sum_is_two_kernels_and_what_used_it_a_third():
    nodes = [tensor("fresh"), op("sum", 1, inner=N), op("div", N, leaves=4 * N)]
    found = kernels(nodes, [(0, 1, 0), (0, 2, 0), (1, 2, 1)])
    assert len(found.of) == 3


def test_rows_stay_with_what_uses_their_sums():
    nodes = [tensor("fresh"), op("softmax", inner=1024), op("mul", leaves=4 * N)]
    assert len(kernels(nodes, [(0, 1, 0), (1, 2, 0)]).of) == 1


def test_a_sum_of_columns_is_split_and_finished():
    nodes = [tensor("fresh"), op("sum", 1024, inner=4096, across=1, leaves=4096)]
    found = kernels(nodes, [(0, 1, 0)])
    assert len(found.of) == 2
    walk = dict(zip(WALKED, walked(found.regions, 132.0).region.T, strict=True))
    assert walk["read"][0] == 4 * N
    assert walk["written"][0] == walk["read"][1]


def test_loops_that_read_nothing_in_common_stay_apart():
    nodes = [tensor("input"), tensor("input"), *[op("relu", leaves=4 * N)] * 2]
    assert len(kernels(nodes, [(0, 2, 0), (1, 3, 0)]).of) == 2
    assert len(kernels(nodes, [(0, 2, 0), (0, 3, 0)]).of) == 1


def test_splits_follow_the_devices_units():
    assert splits(1.0, 2.0**22, True, 132.0) > 1
    assert splits(1.0, 4096.0, True, 132.0) == 1
    assert splits(1024.0, 4096.0, False, 132.0) > 1
    assert splits(10000.0, 4096.0, False, 132.0) == 1


def test_most_regions_fall_into_as_many_kernels_as_the_compiler_made():
    data = fused_data.shipped("h200")
    written = data.regions.is_written
    rows = np.flatnonzero(~written)
    true = np.bincount((np.cumsum(~written) - 1)[written], minlength=len(rows))
    found = lowered(data.regions.take(rows), 132.0)
    told = np.bincount(found.of[~found.library], minlength=len(rows))
    known = (true > 0) & ~data.held_out[rows]
    assert np.mean((told == true)[known]) > 0.9  # 92 %


def test_a_region_costs_what_its_kernels_cost():
    nodes = [tensor("fresh"), op("sum", 1024, inner=4096, across=1, leaves=4096)]
    region = assembled([(nodes, [(0, 1, 0)])])
    found = lowered(region, 132.0)
    each = fused_price(found.regions, H200).seconds
    np.testing.assert_allclose(fused_price(region, H200).seconds, each.sum(), rtol=1e-6)
