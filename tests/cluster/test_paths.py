"""Paths, flows and cuts of small graphs, against scipy and by hand."""

from itertools import combinations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import maximum_flow

from foretell.cluster.node import Wires, flow, quickest, widest


@st.composite
def wires(draw: st.DrawFn) -> Wires:
    size = draw(st.integers(2, 7))
    pairs = draw(st.lists(st.sampled_from(list(combinations(range(size), 2))), unique=True))
    bandwidth = [draw(st.integers(1, 9)) * 100.0 for _ in pairs]
    latency = [draw(st.integers(1, 5)) * 1e-6 for _ in pairs]
    return Wires(size, tuple(pairs), tuple(bandwidth), tuple(latency))


def _capacity(wires: Wires) -> csr_matrix:
    matrix = np.zeros((wires.size, wires.size), dtype=np.int32)
    for (a, b), bandwidth in zip(wires.ends, wires.bandwidth, strict=True):
        matrix[a, b] = matrix[b, a] = int(bandwidth)
    return csr_matrix(matrix)


@given(wires())
@settings(max_examples=60)
def test_flow_is_the_maximum_flow(graph: Wires) -> None:
    expected = maximum_flow(_capacity(graph), 0, graph.size - 1).flow_value
    assert flow(graph, [0], [graph.size - 1]) == expected


@given(wires())
@settings(max_examples=60)
def test_spread_is_the_narrowest_cut_between_any_two(graph: Wires) -> None:
    members = list(range(min(4, graph.size)))
    expected = min(
        maximum_flow(_capacity(graph), a, b).flow_value for a, b in combinations(members, 2)
    )
    cuts = [flow(graph, members[:1], [v]) for v in members[1:]]
    assert min(cuts) == expected


@given(wires())
@settings(max_examples=60)
def test_widest_path_is_a_path_of_the_widest_bottleneck(graph: Wires) -> None:
    for target, path in widest(graph, 0).items():
        here = 0
        for link in path:
            a, b = graph.ends[link]
            assert here in (a, b)
            here = b if here == a else a
        assert here == target
        if target:
            assert min(graph.bandwidth[k] for k in path) == _bottleneck(graph, target)


def _bottleneck(graph: Wires, target: int) -> float:
    """The widest threshold at which vertex 0 still reaches the target."""
    for limit in sorted(set(graph.bandwidth), reverse=True):
        kept = [k for k, b in enumerate(graph.bandwidth) if b >= limit]
        part, grown = {0}, True
        while grown:
            new = {v for k in kept for v in graph.ends[k] if set(graph.ends[k]) & part} - part
            part, grown = part | new, bool(new)
        if target in part:
            return limit
    return 0.0


def test_closed_vertices_pass_nothing_on() -> None:
    line = Wires(3, ((0, 1), (1, 2)), (10.0, 10.0), (1e-6, 1e-6))
    assert set(widest(line, 0)) == {0, 1, 2}
    assert set(widest(line, 0, closed={0, 1, 2})) == {0, 1}


def test_quickest_prefers_few_links_among_equals() -> None:
    graph = Wires(3, ((0, 1), (1, 2), (0, 2)), (1.0, 1.0, 1.0), (1e-6, 0.0, 1e-6))
    assert quickest(graph, 0)[2] == (2,)


def test_flow_avoids_absent_vertices_and_other_links() -> None:
    square = Wires(4, ((0, 1), (1, 3), (0, 2), (2, 3)), (5.0, 5.0, 7.0, 7.0), (0.0,) * 4)
    assert flow(square, [0], [3]) == 12.0
    assert flow(square, [0], [3], absent={1}) == 7.0
    assert flow(square, [0], [3], links={0, 1}) == 5.0
