"""Graphs put together: sizes, edges, lanes, links, places, and that each copy runs as before."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell.errors import GraphError, InputError
from foretell.graph import Builder, Graph, concat, parse, replicate, verify
from foretell.simulate import simulate
from tests.graph.golden import graph, lines, same
from tests.graph.odd import TEXTS, assert_same, odd_graphs
from tests.strategies import graphs

SOME = settings(max_examples=25, deadline=None)

STEP = """
fact batch 4
lane 0 = compute "s" of rank 0 ordered
lane 1 = comm "n" of rank 1 free
link 0 = "ib" capacity 2.0
%0 = kernel gemm "a" on 0 for 1.0
%1 = collective all_reduce on 0,1 for 2.0 after %0+0.5:event uses 0*1.0 rank=1 group="0-1"
%2 = sync done for 0.0 drains 0
buffer 8.0 parameter "w" of rank 0
buffer 4.0 activation "x" of rank 1 from %0 to %1
"""


def test_over_ranks():
    same(
        lines(replicate(graph(STEP), 2)),
        """
        history "replicate:copies=2,over=rank,stride=2"
        fact batch 4
        lane 0 = compute "s" of rank 0 ordered
        lane 1 = comm "n" of rank 1 free
        lane 2 = compute "s" of rank 2 ordered
        lane 3 = comm "n" of rank 3 free
        link 0 = "ib" capacity 2.0
        %0 = kernel gemm "a" on 0 for 1.0
        %1 = collective all_reduce on 0,1 for 2.0 after %0+0.5:event uses 0*1.0 rank=1 group="0-1"
        %2 = sync done for 0.0 drains 0
        %3 = kernel gemm "a" on 2 for 1.0 rank=2
        %4 = collective all_reduce on 2,3 for 2.0 after %3+0.5:event uses 0*1.0 rank=3 group="2-3"
        %5 = sync done for 0.0 drains 2 rank=2
        buffer 8.0 parameter "w" of rank 0
        buffer 4.0 activation "x" of rank 1 from %0 to %1
        buffer 8.0 parameter "w" of rank 2
        buffer 4.0 activation "x" of rank 3 from %3 to %4
        """,
    )


def test_over_micro_batches():
    same(
        lines(replicate(graph(STEP), 2, over="micro_batch")),
        """
        history "replicate:copies=2,over=micro_batch,stride=1"
        fact batch 4
        lane 0 = compute "s" of rank 0 ordered
        lane 1 = comm "n" of rank 1 free
        link 0 = "ib" capacity 2.0
        %0 = kernel gemm "a" on 0 for 1.0
        %1 = collective all_reduce on 0,1 for 2.0 after %0+0.5:event uses 0*1.0 rank=1 group="0-1"
        %2 = sync done for 0.0 drains 0
        %3 = kernel gemm "a" on 0 for 1.0 micro_batch=1
        %4 = collective all_reduce on 0,1 for 2.0 after %3+0.5:event uses 0*1.0 rank=1 \
group="0-1" micro_batch=1
        %5 = sync done for 0.0 drains 0 micro_batch=1
        buffer 8.0 parameter "w" of rank 0
        buffer 4.0 activation "x" of rank 1 from %0 to %1
        buffer 4.0 activation "x" of rank 1 from %3 to %4
        """,
    )


def test_what_replicate_refuses():
    base = graph(STEP)
    for copies in (0, -1):
        with pytest.raises(InputError, match="copies of a graph"):
            replicate(base, copies)
    with pytest.raises(InputError, match="over `rank` or `micro_batch`, not `layer`"):
        replicate(base, 2, over="layer")
    with pytest.raises(InputError, match="-1 apart"):
        replicate(base, 2, stride=-1)
    with base.edit() as edit:
        edit.set(0, group="all")
    with pytest.raises(InputError, match="names no ranks"):
        replicate(edit.graph, 2)
    for over in ("rank", "micro_batch"):
        with pytest.raises(GraphError, match="holds 2147483648, which is not a int32"):
            replicate(graph("%0 = host\n"), 2, over=over, stride=2**31)


def test_nothing():
    assert concat([]).size == 0
    base = graph(STEP)
    made = concat([Graph(), base, Graph()])
    assert made.fingerprint() == base.fingerprint()
    assert replicate(Graph(), 3).size == 0


def test_lanes_of_the_same_rank_and_name_become_one():
    one, other = Builder(), Builder()
    one.lane("a")
    one.lane("b", rank=1)
    one.task(lanes=[0, 1])
    for name, rank in (("b", 1), ("new", 0), ("a", 0), ("a", 1)):
        other.lane(name, rank=rank)
    other.task(lanes=[3, 2, 1, 0])
    made = verify(concat([one.graph(), other.graph()]))
    assert [(made.names[n], r) for n, r in zip(made.lanes.name, made.lanes.rank, strict=True)] == [
        ("a", 0),
        ("b", 1),
        ("new", 0),
        ("a", 1),
    ]
    assert made[1].lanes == (3, 0, 1, 2)


def test_lanes_that_share_a_name_in_one_graph_stay_apart():
    make = Builder()
    make.lane("twin")
    make.lane("twin")
    make.task(lanes=[0, 1], seconds=1.0)
    made = verify(concat([make.graph(), make.graph()]))
    assert len(made.lanes) == 2
    assert [task.lanes for task in made] == [(0, 1), (0, 1)]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"s" of rank 0 ordered', '"s" of rank 0 free', "lane `s` has ordered True in one"),
        ("capacity 2.0", "capacity 3.0", "link `ib` has capacity 2.0 in one graph and 3.0"),
    ],
)
def test_lanes_and_links_that_are_not_alike(old, new, words):
    other = STEP.replace(old, new).replace(" drains 0", "")
    with pytest.raises(InputError) as error:
        concat([graph(STEP), graph(other)])
    assert words in error.value.message
    assert "another name" in error.value.hint


def test_earlier_graphs_go_first_whatever_their_places():
    lane = 'lane 0 = host "s" of rank 0 ordered\n'
    far = graph(f"{lane}%0 = host a on 0 order=100\n%1 = host b on 0 order=-7\n")
    near = graph(f"{lane}%0 = host c on 0\n")
    made = concat([far, near, far])
    assert [made.texts("op")[i] for i in np.argsort(made.order)] == ["b", "a", "c", "b", "a"]


@SOME
@given(odd_graphs(most=5), st.data())
def test_concat_keeps_everything(graph, data):
    edit = graph.edit()
    edit.set(range(graph.size), name=data.draw(TEXTS), seconds=2.0)
    edit.insert(op=data.draw(TEXTS), lane=edit.lane(data.draw(TEXTS), rank=10))
    two = replicate(graph, 2, over="micro_batch")
    parts = data.draw(st.permutations([graph, edit.commit(), Graph(), two]))
    made = verify(concat(parts, spec="put together"))
    starts = np.cumsum([0] + [g.size for g in parts])
    assert made.size == starts[-1]
    assert made.history == (*parts[0].history, "put together")
    assert dict(made.facts) == dict(parts[0].facts)
    assert len(made.buffers) == sum(len(g.buffers) for g in parts)
    for part, start in zip(parts, starts, strict=False):
        span = slice(start, start + part.size)
        for name in ("op", "name", "layer", "shape", "group"):
            assert made.texts(name)[span] == part.texts(name)
        for name in ("kind", "rank", "seconds", "gap", "flops", "priority", "micro_batch", "sigma"):
            np.testing.assert_array_equal(made.column(name)[span], part.column(name))
        for task in part:
            twin = made[start + task.number]
            assert twin.after == tuple(i + start for i in task.after)
            assert sorted(lane_names(made, twin)) == sorted(lane_names(part, task))
    assert_same(parse(str(made)), made)


def lane_names(graph, task):
    return [(int(graph.lanes.rank[k]), graph.names[graph.lanes.name[k]]) for k in task.lanes]


def test_concat_of_one_is_itself():
    base = graph(STEP)
    assert concat([base]).fingerprint() == base.fingerprint()


@SOME
@given(graphs(most=12, links=False), st.integers(1, 3), st.integers(0, 2))
def test_each_copy_on_its_own_ranks_runs_as_the_original(graph, copies, more):
    """Nothing is shared but links, so every copy has the times of the one it was made from."""
    apart = 3 + more
    made = verify(replicate(graph, copies, stride=apart))
    assert made.size == copies * graph.size
    assert made.edges.size == copies * graph.edges.size
    assert len(made.lanes) == copies * len(graph.lanes)
    assert made.history[-1] == f"replicate:copies={copies},over=rank,stride={apart}"
    alone, together = simulate(graph), simulate(made)
    for k in range(copies):
        mine = slice(k * graph.size, (k + 1) * graph.size)
        np.testing.assert_array_equal(together.start[mine], alone.start)
        np.testing.assert_array_equal(together.end[mine], alone.end)
        np.testing.assert_array_equal(made.rank[mine], graph.rank + k * apart)


@SOME
@given(graphs(most=8), st.integers(1, 3))
def test_micro_batches_share_lanes_and_keep_their_order(graph, copies):
    made = verify(replicate(graph, copies, over="micro_batch"))
    assert len(made.lanes) == len(graph.lanes)
    assert len(made.links) == len(graph.links)
    np.testing.assert_array_equal(made.micro_batch, np.repeat(np.arange(copies), graph.size))
    played = simulate(made)
    for lane in np.flatnonzero(graph.lanes.ordered):
        mine = [t.number for t in made if lane in t.lanes]
        issued = sorted(mine, key=lambda i: made.order[i])
        assert [i // graph.size for i in issued] == sorted(i // graph.size for i in issued)
        starts = played.start[issued]
        assert (np.diff(starts) >= 0).all()
