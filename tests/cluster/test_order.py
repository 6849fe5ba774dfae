"""Rings and trees: whole, deterministic, and along the widest links."""

import pytest
from hypothesis import given, settings

from foretell.cluster import Cluster, Tree, load
from foretell.cluster.levels import double_tree

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


@given(clusters_and_ranks())
@settings(max_examples=60, deadline=None)
def test_trees_span_the_ranks(case: tuple[Cluster, list[int]]) -> None:
    cluster, ranks = case
    for tree in cluster.tree(ranks):
        assert sorted(tree.ranks) == sorted(ranks)
        parent = dict(zip(tree.ranks, tree.parents, strict=True))
        assert list(parent.values()).count(-1) == 1
        for rank in ranks:
            seen = set()
            while rank != -1:
                assert rank not in seen
                seen.add(rank)
                rank = parent[rank]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, 13, 16, 31, 64, 100])
def test_no_node_is_an_inner_vertex_of_both_trees(size: int) -> None:
    first, second = double_tree(size)
    inner = [{p for p in parents if p >= 0} for parents in (first, second)]
    # the root of each has a single child and may be inner in the other as well
    roots = {first.index(-1), second.index(-1)}
    assert not (inner[0] & inner[1]) - roots
    for parents in (first, second):
        assert max(parents.count(i) for i in range(size)) <= 2


@pytest.mark.parametrize("nodes", [2, 16, 64])
def test_a_tree_between_nodes_is_shallow(nodes: int) -> None:
    cluster = load(f"dgx-a100:nodes={nodes}")
    heads = range(0, 8 * nodes, 8)
    for tree in cluster.tree(heads):
        assert tree.depth <= nodes.bit_length()
    for tree in cluster.tree(range(8 * nodes)):
        assert tree.depth <= nodes.bit_length() + 7


def test_a_chain_inside_a_node_follows_nvlink() -> None:
    cluster = load("dgx-1-v100")
    first, second = cluster.tree(range(8))
    assert first == second
    pairs = [(r, p) for r, p in zip(first.ranks, first.parents, strict=True) if p >= 0]
    assert min(cluster.bandwidth(a, b) for a, b in pairs) == 50e9
    assert first.depth == 7


def test_depth_counts_steps_to_the_root() -> None:
    assert Tree((3, 1, 2), (-1, 3, 1)).depth == 2
    assert Tree((5,), (-1,)).depth == 0
