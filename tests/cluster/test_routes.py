"""Routes: what must hold between any two ranks of any cluster, and what known machines do."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings

from foretell.cluster import Cluster, load
from foretell.cluster.node import KINDS, VERTICES
from foretell.errors import InputError

from .cases import built, clusters, clusters_and_ranks


@given(clusters_and_ranks(least=2))
@settings(max_examples=80, deadline=None)
def test_a_route_is_a_way_and_its_narrowest_link_bounds_it(
    case: tuple[Cluster, list[int]],
) -> None:
    cluster, (a, b, *_) = case
    route = cluster.route(a, b)
    assert route[0].a == f"node{cluster.nodes[a]}/device{cluster.slots[a]}"
    assert route[-1].b == f"node{cluster.nodes[b]}/device{cluster.slots[b]}"
    assert all(x.b == y.a for x, y in pairwise(route))
    assert all(cluster.bandwidth(a, b) <= link.bandwidth for link in route)
    assert cluster.bandwidth(a, b) == min(link.bandwidth for link in route)
    assert cluster.latency(a, b) == pytest.approx(sum(link.latency for link in route))


@given(clusters_and_ranks(least=2))
@settings(max_examples=80, deadline=None)
def test_both_directions_are_alike(case: tuple[Cluster, list[int]]) -> None:
    cluster, (a, b, *_) = case
    assert cluster.bandwidth(a, b) == cluster.bandwidth(b, a)
    there, back = cluster.route(a, b), cluster.route(b, a)
    if len(there) == len(back):
        assert cluster.latency(a, b) == pytest.approx(cluster.latency(b, a))


@given(clusters_and_ranks(least=2))
@settings(max_examples=60, deadline=None)
def test_a_route_names_rows_of_the_expanded_graph(case: tuple[Cluster, list[int]]) -> None:
    cluster, (a, b, *_) = case
    graph, here = cluster.graph, int(cluster.graph.device[a])
    for link in cluster.route(a, b):
        first, second = graph.ends[link.index]
        assert here == (second if link.back else first)
        here = int(first if link.back else second)
        assert graph.bandwidth[link.index] == pytest.approx(link.bandwidth)
        assert graph.latency[link.index] == pytest.approx(link.latency)
        assert KINDS[graph.link_kind[link.index]] == link.kind
    assert here == graph.device[b]


@given(clusters())
@settings(max_examples=40, deadline=None)
def test_the_expanded_graph_is_whole(cluster: Cluster) -> None:
    graph = cluster.graph
    start, neighbour, link = graph.csr
    assert len(neighbour) == len(link) == 2 * len(graph.ends)
    assert start[-1] == len(neighbour)
    assert graph.ends.min() >= 0
    assert graph.ends.max() < len(graph.kind)
    assert (graph.kind[graph.device] == VERTICES.index("device")).all()
    assert (graph.node[graph.device] == cluster.nodes).all()
    degree = np.bincount(graph.ends.ravel(), minlength=len(graph.kind))
    assert (np.diff(start) == degree).all()


def test_in_a_tree_no_detour_is_wider() -> None:
    cluster = load("abci:nodes=70")
    picks = [0, 1, 5, 67, 68, 140, 279]
    for a in picks:
        for b in picks:
            for c in picks:
                if len({a, b, c}) == 3 and len({int(cluster.nodes[r]) for r in (a, b, c)}) == 3:
                    direct = cluster.bandwidth(a, c)
                    detour = min(cluster.bandwidth(a, b), cluster.bandwidth(b, c))
                    assert direct >= detour
                    assert cluster.latency(a, c) <= cluster.latency(a, b) + cluster.latency(b, c)


def test_a_rank_reaches_itself_through_its_memory() -> None:
    cluster = load("v100-16:gpus=2")
    (link,) = cluster.route(1, 1)
    assert (link.kind, cluster.bandwidth(1, 1)) == ("memory", 900e9)


DGX1V = [  # NVLinks between GPUs of a DGX-1 with V100, as nvidia-smi topo -m prints them
    [0, 1, 1, 2, 2, 0, 0, 0],
    [1, 0, 2, 1, 0, 2, 0, 0],
    [1, 2, 0, 2, 0, 0, 1, 0],
    [2, 1, 2, 0, 0, 0, 0, 1],
    [2, 0, 0, 0, 0, 1, 1, 2],
    [0, 2, 0, 0, 1, 0, 2, 1],
    [0, 0, 1, 0, 1, 2, 0, 2],
    [0, 0, 0, 1, 2, 1, 2, 0],
]


@pytest.mark.parametrize("name", ["dgx-1-v100", "dgx-1-v100-32", "p3.16xlarge", "p3dn.24xlarge"])
def test_cube_mesh_of_v100(name: str) -> None:
    cluster = load(name)
    for a, row in enumerate(DGX1V):
        assert sum(row) == 6
        for b, links in enumerate(row):
            if links:
                assert cluster.bandwidth(a, b) == links * 25e9
            elif a != b:
                assert cluster.bandwidth(a, b) <= 12e9
                assert {k.kind for k in cluster.route(a, b)} >= {"pcie"}


@pytest.mark.parametrize(
    ("name", "bandwidth"),
    [
        ("dgx-1-p100", 20e9),
        ("dgx-2", 150e9),
        ("dgx-a100", 300e9),
        ("dgx-h100", 450e9),
        ("dgx-h200", 450e9),
        ("dgx-b200", 900e9),
        ("abci-node", 50e9),
        ("mi300x-box", 64e9),
        ("2080ti-box", 12e9),
    ],
)
def test_neighbours_inside_a_node(name: str, bandwidth: float) -> None:
    assert load(name).bandwidth(0, 1) == bandwidth


def test_each_device_leaves_by_a_nic_beside_it() -> None:
    cluster = load("dgx-a100:nodes=2")
    out = [next(k.a for k in cluster.route(r, 8) if k.kind == "infiniband") for r in range(8)]
    assert out == [f"node0/nic{i}" for i in range(8)]
    assert cluster.bandwidth(0, 8) == 24e9  # PCIe 4.0, a little below the NIC's 25
    assert cluster.latency(0, 8) == pytest.approx(2.73e-6)  # NCCL has 2.7 us for such a message


def test_latency_grows_with_every_switch_passed() -> None:
    cluster = load("abci:nodes=70")
    near, leaf, spine = (cluster.latency(0, 4 * n) for n in (1, 20, 60))
    assert near < leaf < spine
    assert spine == pytest.approx(near + 3 * 0.09e-6 + 0.4e-6)  # leaf, rack, spine, rack, leaf


def test_host_bandwidth_is_the_bus_of_the_device() -> None:
    assert load("a100-80").host_bandwidth(0) == 24e9
    assert load("h100").host_bandwidth(0) == 48e9
    assert load("k80").host_bandwidth(0) == 12e9


@pytest.mark.parametrize("rank", [-1, 16])
def test_unknown_ranks_are_named(rank: int) -> None:
    with pytest.raises(InputError, match=f"rank {rank} is not in `dgx-a100:nodes=2`"):
        load("dgx-a100:nodes=2").bandwidth(0, rank)


def test_devices_may_forward_where_the_node_says_so() -> None:
    ring = [[f"device{i}", f"device{(i + 1) % 4}", "nvlink2"] for i in range(4)]
    node = {"device": "v100-16", "devices": 4, "sockets": 0, "links": ring, "forwards": True}
    cluster = built({"node": [node]})
    assert len(cluster.route(0, 2)) == 2
    assert cluster.bandwidth(0, 2) == 25e9
