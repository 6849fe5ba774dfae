"""Fused regions on a CPU: what loop nests move and compute, and what they are priced at."""

from math import nan

import numpy as np

from foretell.cluster.read import devices
from foretell.cost import fused
from foretell.cost.fused import fused_price, networks
from foretell.cost.fused_regions import HOST_WEIGHT, NESTED, Regions, assembled, nested
from foretell_lab.fused import data as fused_data
from foretell_lab.fused.tuning import one_core

CORE = one_core()
N = 1 << 18


def walk(regions: Regions) -> dict[str, np.ndarray]:
    return dict(zip(NESTED, nested(regions, HOST_WEIGHT).region.T, strict=True))


def node(word: str, writes: float = 0, dtype: str = "fp32", inner: float = 1, across: int = 0):
    made = N / inner if word == "sum" else N
    return (word, dtype, made, N, inner, across, 256, writes, 0, nan)


def test_a_chain_is_one_nest_that_moves_its_ends():
    nodes = [node("fresh"), node("add"), node("gelu", 4 * N)]
    found = walk(assembled([(nodes, [(0, 1, 0), (1, 2, 0)])]))
    assert found["read"][0] == found["written"][0] == 4 * N
    assert found["kernels"][0] == 1
    assert found["reread"][0] == found["lone"][0] == 0


def test_what_uses_a_sum_waits_for_the_next_pass_and_reads_again():
    nodes = [node("fresh"), node("sum", inner=256), node("div", 4 * N)]
    found = walk(assembled([(nodes, [(0, 1, 0), (0, 2, 0), (1, 2, 1)])]))
    assert found["kernels"][0] == 2
    assert found["levels"][0] == 2
    assert found["reread"][0] >= 4 * N
    assert found["chained"][0] == N
    assert found["columns"][0] == 0


def test_a_sum_of_columns_runs_down_them():
    nodes = [node("fresh"), node("sum", 4 * 256, inner=N / 256, across=1)]
    found = walk(assembled([(nodes, [(0, 1, 0)])]))
    assert found["columns"][0] == N
    assert found["chained"][0] == 0


def test_an_exponential_two_passes_use_is_computed_once():
    def region(word: str):
        nodes = [node("fresh"), node(word), node("sum", inner=256), node("div", 4 * N)]
        return nodes, [(0, 1, 0), (1, 2, 0), (1, 3, 0), (2, 3, 1)]

    visits = nested(assembled([region("exp"), region("mul")]), HOST_WEIGHT).node[:, 0]
    assert visits[1] == 1
    assert visits[5] == 2


def test_truth_values_in_memory_are_counted():
    nodes = [node("fresh"), node("input", dtype="bool"), node("where", 4 * N)]
    nodes += [node("gt", N, dtype="bool")]
    found = walk(assembled([(nodes, [(0, 2, 0), (1, 2, 0), (2, 3, 0)])]))
    assert found["asked"][0] == found["told"][0] == N


def test_a_mask_costs_more_than_its_bytes():
    plain = [node("fresh"), node("input", dtype="int8"), node("where", 4 * N)]
    masked = [node("fresh"), node("input", dtype="bool"), node("where", 4 * N)]
    edges = [(0, 2, 0), (1, 2, 0)]
    regions = assembled([(plain, edges), (masked, edges)])
    seconds = fused_price(regions, CORE, learned=False).seconds
    assert seconds[1] > 1.5 * seconds[0]


def test_a_products_own_time_is_kept_and_guessed_where_unknown():
    def region(own: float):
        nodes = [node("fresh"), ("mm", "fp32", N, N, 1, 0, 256, 0, 1e9, own), node("relu", 4 * N)]
        return nodes, [(0, 1, 0), (1, 2, 0)]

    price = fused_price(assembled([region(0.03), region(nan)]), CORE, learned=False)
    assert 0.03 < price.seconds[0] < 0.032
    assert 0 < price.seconds[1] < 0.03


def test_a_network_ships_for_a_cpu_and_all_weights_stay_small():
    members, scale = networks("cpu")
    assert len(members) >= 3
    assert np.all(scale > 0)
    tables = fused.files("foretell.cost").joinpath("tables")
    nets = [f for f in tables.iterdir() if f.name.startswith("fused_net")]
    assert sum(len(f.read_bytes()) for f in nets) < 2e6
    assert len(nets) == 3


def test_another_cpu_is_answered_less_surely():
    regions = assembled([([node("fresh"), node("gelu", 4 * N)], [(0, 1, 0)])])
    here, there = fused_price(regions, CORE), fused_price(regions, devices()["epyc-7742"])
    assert there.seconds[0] < here.seconds[0]
    assert there.sigma[0] > 0.12


def test_the_cpu_set_has_models_kept_out_and_scatter():
    data = fused_data.shipped("cpu")
    assert data.held_out.sum() > 100
    assert np.all(data.spread <= 0.1001)
    assert data.seconds.min() > 1e-6
    assert data.seconds.max() <= 0.02
