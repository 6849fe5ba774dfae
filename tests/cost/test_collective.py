"""What must hold of every collective price, whatever the topology, size and operation."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell.cluster.node import Level
from foretell.cost.collective import OPS, link_of, links, price, push
from foretell.errors import InputError

GIGA = 1e9
INSIDE = {
    "nvswitch": (100, 900),
    "nvlink": (25, 300),
    "pcie": (6, 48),
    "memory": (2, 10),
    "loopback": (1, 10),
}
BETWEEN = {"infiniband": (12, 400), "ethernet": (1, 400)}
MESSAGES = st.floats(1, 1e10)


@st.composite
def topologies(draw: st.DrawFn, multi_node: bool | None = None) -> tuple[Level, ...]:
    """Nodes of any kind, often several of them, not always equally filled."""
    several = draw(st.booleans()) if multi_node is None else multi_node
    nodes = draw(st.integers(2, 64)) if several else 1
    most = draw(st.integers(1, 16))
    least = draw(st.integers(1, most)) if several else max(most, 2)
    sizes = (*[max(most, 1 if several else 2)] * (nodes - 1), least)
    kind = draw(st.sampled_from(sorted(INSIDE)))
    inside = Level(kind, sizes, draw(st.floats(*INSIDE[kind])) * GIGA, 1e-7, 1)
    if not several:
        return (inside,)
    net = draw(st.sampled_from(sorted(BETWEEN)))
    speed = draw(st.floats(*BETWEEN[net])) * GIGA
    return inside, Level(net, (nodes,), speed, draw(st.sampled_from([0.0, 2e-6, 2e-5])), 1)


def node(ranks: int, kind: str = "nvswitch", gigabytes: float = 450) -> tuple[Level, ...]:
    return (Level(kind, (ranks,), gigabytes * GIGA, 6e-7, 1),)


def cluster(nodes: int) -> tuple[Level, ...]:
    network = Level("infiniband", (nodes,), 384 * GIGA, 2.7e-6, 8)
    return Level("nvswitch", (8,) * nodes, 450 * GIGA, 6e-7, 18), network


@given(topologies(), st.sampled_from(OPS), MESSAGES, st.floats(1, 100))
def test_a_larger_message_never_costs_less(levels, op, size, times):
    assert price(op, size * times, levels).seconds >= price(op, size, levels).seconds


@given(topologies(), MESSAGES)
def test_nothing_is_faster_than_its_links(levels, size):
    """Someone receives what it lacks, over a link of its own."""
    ranks = sum(levels[0].sizes)
    widest = max(level.bandwidth for level in levels)
    share = (ranks - 1) / ranks
    assert price("all_gather", size, levels).seconds > share * size / widest
    assert price("all_reduce", size, levels).seconds > share * size / widest
    assert price("send", size, levels).seconds > size / levels[-1].bandwidth


@given(topologies(multi_node=True), MESSAGES)
def test_nodes_are_bound_by_their_network(levels, size):
    """Every byte of an all-gather enters every node but the one that had it."""
    biggest, ranks = max(levels[0].sizes), sum(levels[0].sizes)
    entering = (ranks - biggest) / ranks * size
    assert price("all_gather", size, levels).seconds > entering / levels[1].bandwidth


@pytest.mark.parametrize("op", OPS)
def test_one_rank_costs_nothing(op):
    alone = (Level("nvswitch", (1,), 450 * GIGA, 6e-7, 1),)
    for levels in ((), alone):
        assert price(op, 1e6, levels).seconds == 0
        assert price(op, np.array([1.0, 1e9]), levels).seconds.tolist() == [0, 0]


@given(topologies(), st.sampled_from(OPS), st.lists(MESSAGES, min_size=1, max_size=20))
def test_arrays_and_single_sizes_agree(levels, op, sizes):
    many = price(op, np.array(sizes), levels)
    for i, size in enumerate(sizes):
        one = price(op, size, levels)
        assert one.seconds == pytest.approx(many.seconds[i], rel=1e-12)
        assert one.sigma == many.sigma[i]
        assert one.way == many.ways[many.choice[i]]


@settings(max_examples=50)
@given(st.integers(2, 16), st.sampled_from(["nvswitch", "nvlink", "pcie"]))
def test_all_reduce_is_about_reduce_scatter_and_all_gather(ranks, kind):
    levels = node(ranks, kind, {"nvswitch": 300, "nvlink": 150, "pcie": 24}[kind])
    both = price("reduce_scatter", 1e9, levels).seconds + price("all_gather", 1e9, levels).seconds
    assert price("all_reduce", 1e9, levels).seconds == pytest.approx(both, rel=0.25)


def test_small_messages_take_the_quick_protocol_and_large_ones_the_full_one():
    levels = node(8, gigabytes=300)
    found = [price("all_reduce", size, levels).way for size in (1e3, 1e6, 1e9)]
    assert [way.protocol for way in found if way] == ["ll", "ll128", "simple"]


def test_trees_give_way_to_rings_as_messages_grow():
    sizes = np.logspace(3, 10, 200)
    found = price("all_reduce", sizes, cluster(4))
    names = [found.ways[i].algorithm for i in found.choice]
    assert names[0] == "tree"
    assert names[-1] == "ring"


def test_two_nodes_are_the_best_case_of_trees():
    found = price("all_reduce", 1e9, cluster(2)).way
    assert found is not None
    assert found.algorithm in ("tree", "multicast")


def test_two_nodes_reduce_by_rings_over_infiniband_and_by_trees_over_ethernet():
    """The A100 has no switch that adds: nothing but the network differs."""
    inside = Level("nvswitch", (8, 8), 300 * GIGA, 6e-7, 12)
    nets = {"infiniband": (96, 2.7e-6), "ethernet": (8, 2e-5)}
    for kind, (speed, latency) in nets.items():
        net = Level(kind, (2,), speed * GIGA, latency, 4)
        found = price("all_reduce", 1e9, (inside, net))
        bus = 2 * 15 / 16 * 1e9 / float(found.seconds) / (speed * GIGA)
        assert found.way is not None
        assert found.way.algorithm == ("ring" if kind == "infiniband" else "tree")
        assert (bus < 1) == (kind == "infiniband")


def test_a_hopper_switch_adds_large_messages_itself():
    found = [price("all_reduce", 1e9, node(ranks)).way for ranks in (2, 8)]
    assert [way.algorithm for way in found if way] == ["ring", "multicast"]


def test_published_bus_bandwidths_between_nodes():
    """192 GB/s for DGX A100 (NVIDIA/nccl issue 812), 360-380 for four of H100 (nccl-tests 309)."""
    a100 = (
        Level("nvswitch", (8,) * 16, 300 * GIGA, 6e-7, 12),
        Level("infiniband", (16,), 192 * GIGA, 2.7e-6, 8),
    )
    for levels, ranks, busy in ((a100, 128, 192), (cluster(4), 32, 370)):
        seconds = price("all_reduce", 1e10, levels).seconds
        assert 1e10 * 2 * (ranks - 1) / ranks / seconds / GIGA == pytest.approx(busy, rel=0.08)


def test_a_rank_drives_one_network_card():
    """One rank a node cannot use the eight cards that eight ranks use."""
    network = Level("infiniband", (2,), 384 * GIGA, 2.7e-6, 8)
    alone = (Level("nvswitch", (1, 1), 450 * GIGA, 6e-7, 18), network)
    full = (Level("nvswitch", (8, 8), 450 * GIGA, 6e-7, 18), network)
    assert price("all_gather", 1e9, alone).seconds > 3 * price("all_gather", 1e9, full).seconds
    assert price("send", 1e9, full).seconds == pytest.approx(price("send", 1e9, alone).seconds)


def test_a_slow_wire_is_felt_in_every_step():
    near = Level("infiniband", (4,), 24 * GIGA, 3e-6, 1)
    far = Level("infiniband", (4,), 24 * GIGA, 1e-3, 1)
    assert price("all_reduce", 1e3, (far,)).seconds > 3e-3
    assert price("all_reduce", 1e3, (near,)).seconds < 1e-3


def test_rdma_ethernet_is_priced_as_infiniband():
    roce = Level("ethernet", (2,), 400 * GIGA, 3e-6, 8)
    sockets = Level("ethernet", (2,), 400 * GIGA, 5e-5, 8)
    assert link_of(roce).kind == "infiniband"
    assert link_of(sockets).kind == "ethernet"


def test_a_server_is_shared_by_those_who_push_to_it():
    levels = node(2, "pcie", 24)
    assert push(1e8, levels, 4).seconds == price("send", 4e8, levels).seconds


def test_leaving_out_protocols():
    levels = node(8)
    only = price("all_reduce", np.array([1e3, 1e9]), levels, protocols=("simple",))
    assert {way.protocol for way in only.ways} == {"simple"}
    assert only.seconds[0] > price("all_reduce", 1e3, levels).seconds


def test_gloo_knows_one_protocol():
    found = price("all_reduce", np.array([1e3, 1e9]), node(4, "loopback", 3))
    assert [(way.algorithm, way.protocol) for way in found.ways] == [("ring", "simple")]


def test_the_interval_is_around_the_price():
    found = price("all_reduce", 1e6, node(8))
    low, high = found.interval()
    assert low < found.seconds < high
    assert low * high == pytest.approx(found.seconds**2)


@pytest.mark.parametrize(
    ("op", "size", "levels", "protocols", "says"),
    [
        ("all_reduse", 1.0, node(8), ("simple",), "did you mean `all_reduce`"),
        ("all_reduce", -1.0, node(8), ("simple",), "-1.0 bytes"),
        ("all_reduce", 1.0, node(8), ("simpel",), "did you mean `simple`"),
        ("all_reduce", 1.0, node(8), (), "no protocol is left"),
        ("all_reduce", 1.0, node(8, "carrier"), ("simple",), "unknown kind of link: `carrier`"),
        ("all_reduce", 1.0, (cluster(4)[0],), ("simple",), "one group of all its ranks"),
        ("all_reduce", 1.0, (*node(8), cluster(4)[1]), ("simple",), "joins 4 members"),
    ],
)
def test_mistakes_are_named(op, size, levels, protocols, says):
    with pytest.raises(InputError, match=says):
        price(op, size, levels, protocols=protocols)


def test_arrays_with_a_negative_size_are_refused():
    with pytest.raises(InputError, match="-2"):
        price("all_reduce", np.array([1.0, -2.0]), node(8))


def test_every_class_of_link_says_where_it_comes_from():
    for link in links().values():
        assert link.source
        for mode in (link.ll, link.ll128, link.simple, link.direct, link.send, link.quick):
            assert mode is None or (0 < mode.efficiency <= 1 and mode.hop >= 0 and mode.start >= 0)
        assert all(min(spread) > 0 for spread in link.sigma.values())
