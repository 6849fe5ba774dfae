"""Networks: tiers, and the same drawn switch by switch."""

import math

import numpy as np
import pytest

from foretell.cluster import load

from .cases import built

_NODE = {"device": "v100-16", "devices": 2, "nic": "infiniband-edr", "count": 8}


def _tiered(oversubscription: float) -> dict[str, object]:
    lower = {"name": "leaf", "size": 2, "oversubscription": oversubscription, "latency": "0.1 us"}
    middle = {"name": "rack", "size": 2, "oversubscription": 3, "latency": "0.2 us"}
    return {"node": [_NODE], "tier": [lower, middle, {"name": "spine", "latency": "0.4 us"}]}


def _drawn(oversubscription: float) -> dict[str, object]:
    """The same network, switch by switch."""
    up, top = 2 * 12.5 / oversubscription, 2 * 2 * 12.5 / oversubscription / 3
    link = {
        "up": {"kind": "infiniband", "bandwidth": up * 1e9},
        "top": {"kind": "infiniband", "bandwidth": top * 1e9},
    }
    leaves = [
        {"name": f"leaf{i}", "nodes": [2 * i, 2 * i + 1], "latency": "0.1 us"}
        | {"links": [[f"rack{i // 2}", "up"]]}
        for i in range(4)
    ]
    racks = [
        {"name": f"rack{i}", "latency": "0.2 us", "links": [["spine", "top"]]} for i in range(2)
    ]
    spine = {"name": "spine", "latency": "0.4 us"}
    return {"node": [_NODE], "link": link, "switch": [*leaves, *racks, spine]}


@pytest.mark.parametrize("oversubscription", [1, 2, 4])
def test_tiers_and_drawn_switches_are_the_same_network(oversubscription: float) -> None:
    tiered, drawn = built(_tiered(oversubscription)), built(_drawn(oversubscription))
    for a in range(0, 16, 3):
        for b in range(16):
            assert tiered.bandwidth(a, b) == pytest.approx(drawn.bandwidth(a, b))
            assert tiered.latency(a, b) == pytest.approx(drawn.latency(a, b))
    for ranks in (range(16), range(0, 16, 2), range(8), [0, 1, 4], [0, 15]):
        for x, y in zip(tiered.levels(ranks), drawn.levels(ranks), strict=True):
            assert x.sizes == y.sizes
            assert x.bandwidth == pytest.approx(y.bandwidth)
            assert x.latency == pytest.approx(y.latency)
    assert tiered.ring(range(16)) == drawn.ring(range(16))


def test_oversubscription_narrows_what_a_group_sends() -> None:
    full, thin = built(_tiered(1)), built(_tiered(2))
    assert [g.out[0] for g in full.fabric.groupings[:2]] == pytest.approx([25e9, 50e9 / 3])
    assert [g.out[0] for g in thin.fabric.groupings[:2]] == pytest.approx([12.5e9, 25e9 / 3])
    assert full.fabric.groupings[-1].out[0] == math.inf


def test_uplink_may_be_given_outright() -> None:
    tiers = [{"name": "leaf", "size": 4, "uplink": "10 GB/s"}, {"name": "spine"}]
    cluster = built({"node": [_NODE], "tier": tiers})
    assert cluster.levels(range(16))[-1].bandwidth == 10e9


def test_rails_spread_the_nics_of_a_node_over_its_switches() -> None:
    node = {"device": "a100-80", "devices": 2, "sockets": 2, "nics": 2, "nic": "infiniband-hdr"}
    rails = [
        {"name": f"rail{i}", "nodes": [0, 1, 2], "links": [["spine", "infiniband-hdr x3"]]}
        for i in range(2)
    ]
    cluster = built({"node": [node | {"count": 3}], "switch": [*rails, {"name": "spine"}]})
    assert cluster.fabric.home.tolist() == [0, 1] * 3
    same, cross = cluster.route(0, 2), cluster.route(0, 3)
    assert "spine" not in {k.b for k in same}
    assert "spine" in {k.b for k in cross}
    (inner, outer) = cluster.levels(range(6))
    assert (inner.sizes, outer.sizes, outer.channels) == ((2, 2, 2), (3,), 2)


def test_a_ring_of_switches_is_one_tier_bounded_by_two_links() -> None:
    switches = [
        {
            "name": f"s{i}",
            "nodes": [2 * i, 2 * i + 1],
            "links": [[f"s{(i + 1) % 4}", "ethernet-10g"]],
        }
        for i in range(4)
    ]
    cluster = built({"node": [_NODE], "switch": switches})
    names = [(level.name, level.sizes) for level in cluster.levels(range(16))]
    assert names[1:] == [("switch", (2, 2, 2, 2)), ("switches within 1", (4,))]
    assert cluster.levels(range(16))[-1].bandwidth == 2 * 1.25e9
    assert cluster.bandwidth(0, 8) == 1.25e9


def test_abci_as_published() -> None:
    cluster = load("abci")
    levels = cluster.levels(range(cluster.size))
    assert [level.name for level in levels] == ["node", "rack", "spine"]
    node, rack, spine = levels
    assert (node.kind, node.bandwidth, node.channels) == ("nvlink", 150e9, 6)
    assert set(rack.sizes) == {34}
    assert rack.bandwidth == 24e9  # two EDR behind PCIe 3.0
    assert spine.bandwidth == pytest.approx(34 * 25e9 / 3)
    assert spine.sizes == (32,)


@pytest.mark.parametrize("nodes", [1, 7, 64])
def test_nodes_fill_leaves_in_order(nodes: int) -> None:
    cluster = load(f"dgx-h100:nodes={nodes},rack=4")
    leaf = cluster.fabric.groupings[0].group
    assert leaf.tolist() == (np.arange(nodes) // 4 if nodes > 4 else np.zeros(nodes)).tolist()
