"""Levels: what a collective sees, for known machines and for any uneven group."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell.cluster import Cluster, Level, load

from .cases import clusters_and_ranks


@given(clusters_and_ranks())
@settings(max_examples=100, deadline=None)
def test_levels_count_every_rank_once(case: tuple[Cluster, list[int]]) -> None:
    cluster, ranks = case
    levels = cluster.levels(ranks)
    assert bool(levels) == (len(ranks) > 1)
    members = len(ranks)
    for level in levels:
        assert sum(level.sizes) == members
        assert max(level.sizes) > 1
        members = len(level.sizes)
    assert members == 1


@given(clusters_and_ranks(least=2))
@settings(max_examples=100, deadline=None)
def test_levels_are_sound(case: tuple[Cluster, list[int]]) -> None:
    cluster, ranks = case
    for level in cluster.levels(ranks):
        assert 0 < level.bandwidth < math.inf
        assert level.bandwidth == min(level.bandwidths)
        assert len(level.bandwidths) == len(level.sizes)
        infinite = [b == math.inf for b in level.bandwidths]
        assert infinite == [n == 1 for n in level.sizes]
        assert 0 < level.latency < 1e-3
        assert level.channels >= 1


@given(clusters_and_ranks(least=2))
@settings(max_examples=60, deadline=None)
def test_the_order_of_ranks_does_not_matter(case: tuple[Cluster, list[int]]) -> None:
    cluster, ranks = case
    assert cluster.levels(ranks) == cluster.levels(sorted(ranks)) == cluster.levels(ranks[::-1])


@given(clusters_and_ranks(least=2))
@settings(max_examples=60, deadline=None)
def test_two_ranks_send_at_least_what_their_route_carries(case: tuple[Cluster, list[int]]) -> None:
    cluster, (a, b, *_) = case
    (level,) = cluster.levels([a, b])
    assert level.bandwidth >= cluster.bandwidth(a, b) * (1 - 1e-9)
    assert level.latency >= cluster.latency(a, b) * (1 - 1e-9)


@given(clusters_and_ranks(least=4), st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_company_never_helps(case: tuple[Cluster, list[int]], cut: int) -> None:
    cluster, ranks = case
    own, other = ranks[:cut], ranks[cut:]
    alone, beside = cluster.levels(own), cluster.levels(own, [other])
    assert sum(1 / x.bandwidth for x in beside) >= sum(1 / x.bandwidth for x in alone) * (1 - 1e-9)


def _only(spec: str, ranks: list[int]) -> Level:
    (level,) = load(spec).levels(ranks)
    return level


@pytest.mark.parametrize(
    ("spec", "kind", "bandwidth", "channels"),
    [
        ("dgx-1-p100", "nvlink", 80e9, 4),
        ("dgx-1-v100", "nvlink", 150e9, 6),
        ("dgx-2", "nvswitch", 150e9, 6),
        ("dgx-a100", "nvswitch", 300e9, 12),
        ("dgx-h100", "nvswitch", 450e9, 18),
        ("dgx-b200", "nvswitch", 900e9, 18),
        ("hgx-a100-4", "nvlink", 300e9, 12),
        ("mi300x-box", "xgmi", 448e9, 7),
        ("gb200-nvl72", "nvswitch", 900e9, 18),
        ("2080ti-box", "memory", 3e9, 1),  # no P2P: four share a way to host memory
        ("workstation", "memory", 4.2e9, 1),
    ],
)
def test_a_whole_node(spec: str, kind: str, bandwidth: float, channels: int) -> None:
    cluster = load(spec)
    (level,) = cluster.levels(range(cluster.size))
    assert (level.kind, level.bandwidth, level.channels) == (kind, bandwidth, channels)
    assert level.sizes == (cluster.size,)


@pytest.mark.parametrize(
    ("ranks", "kind", "bandwidth"),
    [
        ([0, 1], "nvlink", 25e9),
        ([0, 3], "nvlink", 50e9),
        ([0, 1, 2, 3], "nvlink", 100e9),
        ([0, 5], "upi", 6e9),
        ([0, 5, 6], "upi", 6e9),
        ([1, 2], "nvlink", 50e9),
        ([0, 1, 4, 5], "nvlink", 50e9),
    ],
)
def test_part_of_a_cube_mesh(ranks: list[int], kind: str, bandwidth: float) -> None:
    level = _only("dgx-1-v100", ranks)
    assert (level.kind, level.bandwidth) == (kind, bandwidth)


def test_uneven_groups() -> None:
    cluster = load("dgx-a100:nodes=2")
    inner, outer = cluster.levels([0, 1, 2, 8, 9, 10, 11, 12])
    assert inner.sizes == (3, 5)
    assert inner.bandwidths == (300e9, 300e9)
    assert outer.sizes == (2,)
    assert outer.bandwidth == 3 * 24e9  # three devices push three NICs' worth, five could more
    assert outer.channels == 3


def test_a_single_rank_on_some_nodes() -> None:
    cluster = load("dgx-a100:nodes=3")
    inner, outer = cluster.levels([0, 8, 9, 16])
    assert inner.sizes == (1, 2, 1)
    assert inner.bandwidths == (math.inf, 300e9, math.inf)
    assert (outer.sizes, outer.bandwidth) == ((3,), 24e9)
    (across,) = cluster.levels([0, 8, 16])
    assert (across.name, across.sizes, across.bandwidth) == ("leaf", (3,), 24e9)


def test_a_tier_that_narrows_nothing_is_no_level() -> None:
    cluster = load("dgx-a100:nodes=64")  # leaves of 20 nodes, not oversubscribed
    assert [x.sizes for x in cluster.levels(range(0, 512, 8))] == [(64,)]
    thin = load("dgx-a100:nodes=64,rack=16,oversubscription=4")
    assert [x.sizes for x in thin.levels(range(512))] == [(8,) * 64, (16,) * 4, (4,)]
    few = [0, 8, 16 * 8, 17 * 8]  # two nodes of two leaves do not fill their uplinks
    assert [x.sizes for x in thin.levels(few)] == [(4,)]


def test_oversubscription_of_single_nodes() -> None:
    full, thin = load("dgx-a100:nodes=8"), load("dgx-a100:nodes=8,oversubscription=2")
    assert full.levels(range(64))[-1].bandwidth == 192e9
    assert thin.levels(range(64))[-1].bandwidth == 100e9
    assert thin.bandwidth(0, 8) == full.bandwidth(0, 8)  # one flow alone does not notice


def test_groups_side_by_side_share_nics() -> None:
    cluster = load("p3dn:nodes=8")  # eight devices behind one 100 Gb/s NIC
    groups = [list(range(i, 64, 8)) for i in range(8)]
    (alone,) = cluster.levels(groups[0])
    assert alone.bandwidth == 12e9
    for i, group in enumerate(groups):
        (shared,) = cluster.levels(group, groups[:i] + groups[i + 1 :])
        assert shared.bandwidth == pytest.approx(12e9 / 8)


def test_groups_side_by_side_need_not_share() -> None:
    cluster = load("dgx-a100:nodes=8")  # a NIC for each device
    groups = [list(range(i, 64, 8)) for i in range(8)]
    assert cluster.levels(groups[0], groups[1:])[0].bandwidth == 24e9
    inside = [list(range(i, i + 8)) for i in range(0, 64, 8)]
    assert cluster.levels(inside[0], inside[1:]) == cluster.levels(inside[0])


def test_groups_inside_a_node_share_its_wires() -> None:
    cluster = load("2080ti-box")
    pairs = [[i, i + 4] for i in range(4)]  # all across the socket link
    (alone,), (shared,) = cluster.levels(pairs[0]), cluster.levels(pairs[0], pairs[1:])
    assert (alone.bandwidth, shared.bandwidth) == (4.2e9, 2.5e9)  # through host memory
    near = [[0, 1], [2, 3]]
    assert cluster.levels(near[0], near[1:]) == cluster.levels(near[0])


def test_groups_share_uplinks() -> None:
    cluster = load("dgx-a100:nodes=4,rack=2,oversubscription=4")
    a, b = [0, 16], [8, 24]  # each leaves its leaf with 24 GB/s; the uplink has 100
    assert cluster.levels(a, [b])[0].bandwidth == 24e9
    rails = [[i, i + 8, i + 16, i + 24] for i in range(8)]
    levels = cluster.levels(rails[0], rails[1:])
    assert levels[-1].bandwidth == pytest.approx(100e9 / 8)


def test_boards_without_peer_access_meet_in_host_memory() -> None:
    geforce, quadro = (
        load(f"{name}:gpus=2").levels([0, 1])[0] for name in ("titan-rtx", "rtx-8000")
    )
    assert (geforce.kind, geforce.bandwidth) == ("memory", 4.2e9)
    assert (quadro.kind, quadro.bandwidth) == ("pcie", 12e9)


def test_a_bridge_needs_no_host_memory() -> None:
    bridged = load("a40-pairs:device=3090")
    assert bridged.levels([0, 1])[0].kind == "nvlink"
    assert bridged.levels([0, 2])[0].kind == "memory"
