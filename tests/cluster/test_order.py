"""Rings and trees: whole, deterministic, and along the widest links."""

import pytest
from hypothesis import given, settings

from foretell.cluster import Cluster, load

from .cases import clusters_and_ranks


def _narrowest(cluster: Cluster, order: tuple[int, ...]) -> float:
    return min(cluster.bandwidth(a, b) for a, b in zip(order, order[1:] + order[:1], strict=True))


@given(clusters_and_ranks(least=2))
@settings(max_examples=60, deadline=None)
def test_a_ring_visits_every_rank_once_and_is_no_worse_than_counting(
    case: tuple[Cluster, list[int]],
) -> None:
    cluster, ranks = case
    ring = cluster.ring(ranks)
    assert sorted(ring) == sorted(ranks)
    assert ring[0] == min(ranks)
    assert ring == cluster.ring(ranks[::-1])
    assert _narrowest(cluster, ring) >= _narrowest(cluster, tuple(sorted(ranks))) * (1 - 1e-9)


@given(clusters_and_ranks(least=2))
@settings(max_examples=60, deadline=None)
def test_a_ring_enters_every_node_once(case: tuple[Cluster, list[int]]) -> None:
    cluster, ranks = case
    nodes = [int(cluster.nodes[r]) for r in cluster.ring(ranks)]
    changes = sum(a != b for a, b in zip(nodes, nodes[1:] + nodes[:1], strict=True))
    assert changes == (len(set(nodes)) if len(set(nodes)) > 1 else 0)


@pytest.mark.parametrize("name", ["dgx-1-v100", "p3.16xlarge"])
def test_the_ring_of_a_cube_mesh_takes_the_double_links(name: str) -> None:
    cluster = load(name)
    assert cluster.ring(range(8)) == (0, 3, 2, 1, 5, 6, 7, 4)  # the one NCCL takes
    assert _narrowest(cluster, cluster.ring(range(8))) == 50e9


def test_a_ring_keeps_to_one_side_of_a_pcie_box() -> None:
    cluster = load("2080ti-box")
    sides = [int(r >= 4) for r in cluster.ring(range(8))]
    assert sum(a != b for a, b in zip(sides, sides[1:] + sides[:1], strict=True)) == 2


def test_a_ring_finishes_a_rack_before_the_next() -> None:
    cluster = load("abci:nodes=70")
    racks = [int(cluster.nodes[r]) // 34 for r in cluster.ring(range(280))]
    assert sum(a != b for a, b in zip(racks, racks[1:] + racks[:1], strict=True)) == 3
