"""Every rule of a graph, broken one at a time and at random."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell.errors import GraphError
from foretell.graph import Edges, Graph, Held, Lanes, Names, Used, assemble, edges, parse, verify
from foretell.graph.fingerprint import arrays
from foretell.graph.graph import COLUMNS
from foretell.simulate import simulate
from tests.graph.golden import graph
from tests.strategies import graphs

SOME = settings(max_examples=20, deadline=None)


def with_column(graph: Graph, name: str, at: int, value) -> Graph:
    values = np.array(graph.column(name))
    values[at] = value
    return replace(graph, columns={**graph.columns, name: values}, cache={})


def with_row(graph: Graph, part: str, **row) -> Graph:
    """The graph with one more row at the end of a table."""
    table = getattr(graph, part)
    whole = type(table).stack([table, type(table)(**{k: [v] for k, v in row.items()})])
    return replace(graph, **{part: whole}, cache={})


def broken(graph: Graph) -> str:
    with pytest.raises(GraphError) as error:
        verify(graph)
    return str(error.value)


@SOME
@given(graphs(), st.data())
def test_numbers_that_are_none(graph, data):
    name = data.draw(st.sampled_from([c for c, s in COLUMNS.items() if s.dtype is np.float64]))
    at = data.draw(st.integers(0, graph.size - 1))
    value = data.draw(st.sampled_from([np.nan, np.inf, -np.inf, -1e-300, -1.0]))
    message = broken(with_column(graph, name, at, value))
    assert f"`{name}` is " in message
    assert f"in 1 of {graph.size} tasks" in message
    assert f"  %{at} = " in message


@SOME
@given(graphs(), st.data())
def test_codes_that_stand_for_nothing(graph, data):
    coded = [c for c, s in COLUMNS.items() if s.words or s.is_text]
    name = data.draw(st.sampled_from(coded))
    high = len(COLUMNS[name].words or graph.names)
    at = data.draw(st.integers(0, graph.size - 1))
    value = high + data.draw(st.integers(0, 50))
    message = broken(with_column(graph, name, at, value))
    assert f"`{name}` has a code that stands for nothing" in message
    assert f"%{at}" in message
    if COLUMNS[name].is_text:
        assert "below 0" in broken(with_column(graph, name, at, -1))


@SOME
@given(graphs(), st.data())
def test_ranks_and_micro_batches_below_zero(graph, data):
    name = data.draw(st.sampled_from(["rank", "micro_batch"]))
    assert f"`{name}` is below 0" in broken(with_column(graph, name, 0, -1))


@SOME
@given(graphs(), st.data())
def test_lanes_that_do_not_exist(graph, data):
    at = data.draw(st.integers(0, graph.size - 1))
    lanes = len(graph.lanes)
    message = broken(with_column(graph, "lane", at, lanes))
    assert f"the lane does not exist ({lanes} lanes)" in message
    assert "`lane` is below -1" in broken(with_column(graph, "lane", at, -2))
    for part in ("held", "drained"):
        for lane in (lanes, -1):
            found = broken(with_row(graph, part, task=graph.size - 1, lane=lane))
            assert f"name {lane}, which does not exist" in found


@SOME
@given(graphs(), st.data())
def test_links_that_do_not_exist_or_make_no_sense(graph, data):
    last = graph.size - 1
    found = broken(with_row(graph, "used", task=last, link=len(graph.links), demand=1.0))
    assert "which does not exist (2 links)" in found
    value = data.draw(st.sampled_from([0.0, -1.0, np.nan, np.inf]))
    assert "the capacity of a link is" in broken(with_row(graph, "links", name=0, capacity=value))
    alone = replace(graph, used=Used([last], [0], [value]))
    assert "the demand of a link is" in broken(alone)


@SOME
@given(graphs(), st.data())
def test_tables_that_name_no_task_or_are_not_sorted(graph, data):
    part = data.draw(st.sampled_from(["held", "drained", "used"]))
    table = getattr(graph, part)
    more = {"demand": 1.0} if part == "used" else {}
    for task in (graph.size, -1):
        found = broken(with_row(graph, part, task=task, **{table_key(part): 0}, **more))
        assert f"name task %{task} of {graph.size} tasks" in found
    if len(table):
        assert "not sorted" in broken(replace(graph, **{part: table.take(_twice(len(table)))}))
    if len(table) > 1:
        assert "not sorted" in broken(replace(graph, **{part: table.take(slice(None, None, -1))}))


def table_key(part: str) -> str:
    return "link" if part == "used" else "lane"


def _twice(size: int) -> np.ndarray:
    return np.sort(np.append(np.arange(size), 0))


@SOME
@given(graphs(), st.data())
def test_edges_that_dangle(graph, data):
    e = graph.edges
    lone = np.zeros(graph.size + 1, np.int64)
    lone[data.draw(st.integers(1, graph.size)) :] = 1
    for other in (graph.size, -1, 2**31 - 1):
        found = broken(replace(graph, edges=Edges(lone, np.array([other])), cache={}))
        assert f"waits for %{other}, which is not there" in found
    short = replace(graph, edges=Edges(e.start[:-1], e.after, e.lag, e.kind), cache={})
    assert "edge rows do not fit" in broken(short)
    longer = Edges(e.start + np.r_[0, np.ones(graph.size, int)], e.after, e.lag, e.kind)
    assert "edge rows do not fit" in broken(replace(graph, edges=longer, cache={}))


def test_edges_of_other_shapes():
    base = graph("%0 = host\n%1 = host after %0\n%2 = host after %0 %1\n")
    start, after = base.edges.start, base.edges.after

    def made(*parts):
        return broken(replace(base, edges=Edges(*parts), cache={}))

    assert "edge rows overlap" in made([0, 2, 1, 3], after)
    assert "not sorted, or named twice" in made(start, [0, 1, 0])
    assert "not sorted, or named twice" in made(start, [0, 0, 0])
    assert "2 values of `lag` for 3 edges" in made(start, after, [0, 1])
    assert "1 values of `kind` for 3 edges" in made(start, after, None, [1])
    assert "the kind of an edge is 9" in made(start, after, None, [0, 0, 9])
    for lag in (-1.0, np.nan, np.inf):
        assert f"task %2 waits {lag} seconds longer than %1" in made(start, after, [0, 0, lag])


@SOME
@given(graphs(), st.data())
def test_rings(graph, data):
    """A wait that goes back along a chain, at a random place of a random graph."""
    first = data.draw(st.integers(0, graph.size - 1))
    last = first
    chain = [first]
    while len(graph.edges.of(last)) and len(chain) < 5:
        last = int(data.draw(st.sampled_from(graph.edges.of(last).tolist())))
        chain.append(last)
    e = graph.edges
    ring = edges(graph.size, np.append(e.waiting, last), np.append(e.after, first))
    message = broken(replace(graph, edges=ring, cache={}))
    assert "wait on each other" in message
    assert "hint: " in message


def test_a_ring_of_turns():
    before = graph(
        """
        lane 0 = compute "s" of rank 0 ordered
        %0 = kernel a on 0
        %1 = kernel b on 0
        """
    )
    ring = replace(before, edges=edges(2, [0], [1]), cache={})
    assert "2 tasks wait on each other" in broken(ring)
    verify(replace(ring, lanes=Lanes([0], [1], [2], [False]), cache={}))  # no order, no ring


def test_a_long_ring_shows_some_of_its_tasks():
    size = 50
    chain = np.arange(size)
    with pytest.raises(GraphError) as error:
        assemble(size, {}, edges(size, chain, np.roll(chain, 1)))
    lines = error.value.message.splitlines()
    assert lines[0] == "50 tasks wait on each other:"
    assert lines[-1] == "  …"
    assert len(lines) == 8


def test_a_task_with_many_waits_does_not_fill_the_screen():
    size = 500
    waits = edges(size, np.full(size - 1, size - 1), np.arange(size - 1))
    seconds = np.zeros(size)
    seconds[-1] = -1
    with pytest.raises(GraphError) as error:
        assemble(size, {"seconds": seconds}, waits)
    assert max(map(len, error.value.message.splitlines())) <= 202


def test_lanes_held_and_drained_as_they_must_not_be():
    base = graph(
        """
        lane 0 = compute "s" of rank 0 ordered
        lane 1 = comm "t" of rank 0 free
        %0 = kernel a on 0
        """
    )
    assert "task %0 holds its own lane twice" in broken(replace(base, held=Held([0], [0])))
    found = broken(with_row(base, "drained", task=0, lane=1))
    assert "task %0 drains lane 1, which has no issue order" in found
    assert "hint: only ordered lanes" in found


@pytest.mark.parametrize(
    ("part", "row", "words"),
    [
        ("lanes", {"rank": -1, "name": 0, "kind": 0, "ordered": True}, "a lane is of rank -1"),
        ("lanes", {"rank": 0, "name": 9, "kind": 0, "ordered": True}, "name of a lane is 9"),
        ("lanes", {"rank": 0, "name": -1, "kind": 0, "ordered": True}, "name of a lane is -1"),
        ("lanes", {"rank": 0, "name": 0, "kind": 6, "ordered": True}, "kind of a lane is 6"),
        ("links", {"name": 9, "capacity": 1.0}, "name of a link is 9"),
        ("buffers", {"rank": -1}, "a buffer is of rank -1"),
        ("buffers", {"name": 9}, "name of a buffer is 9"),
        ("buffers", {"kind": 8}, "kind of a buffer is 8"),
        ("buffers", {"born": 1}, "`born` is task %1 of 1 tasks"),
        ("buffers", {"dies": -2}, "`dies` is task %-2 of 1 tasks"),
        ("buffers", {"bytes": -1.0}, "a buffer has -1.0 bytes"),
        ("buffers", {"bytes": np.nan}, "a buffer has nan bytes"),
    ],
)
def test_rows_of_tables(part, row, words):
    if part == "buffers":
        row = {"bytes": 1.0, "rank": 0, "born": 0, "dies": 0, "name": 0, "kind": 0} | row
    assert words in broken(with_row(graph("%0 = host\n"), part, **row))


def test_names_kept_twice():
    alone = edges(1, [], [])
    with pytest.raises(GraphError, match="kept twice"):
        assemble(1, {}, alone, names=Names(["", "a", "a"]))


def test_columns_of_another_length():
    assert "`seconds` has 2 values for 1 tasks" in broken(Graph(1, {"seconds": np.ones(2)}))


def test_what_was_not_touched_is_not_looked_at():
    bad = replace(graph("%0 = host\n"), columns={"seconds": np.array([-1.0])})
    assert verify(bad, columns=["flops"], structure=False) is bad
    with pytest.raises(GraphError):
        verify(bad, columns=["seconds"], structure=False)
    dangling = replace(bad, columns={}, edges=Edges([0, 1], [5]))
    assert verify(dangling, columns=[], structure=False) is dangling


@settings(max_examples=100, deadline=None)
@given(graphs(most=8), st.data())
def test_any_byte_of_any_array(graph, data):
    """A graph with a byte changed is refused, or is a graph in every respect."""
    found = {name: np.array(array) for name, array in arrays(graph) if len(array)}
    name = data.draw(st.sampled_from(sorted(found)))
    raw = found[name].view(np.uint8)
    raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    changed = _rebuilt(graph, name, found[name])
    try:
        verify(changed)
    except GraphError:
        return
    assert parse(str(changed)).fingerprint() == changed.fingerprint()
    assert len(simulate(changed)) == graph.size


def _rebuilt(graph: Graph, name: str, array: np.ndarray) -> Graph:
    part, column = name.split(".")
    if part == "column":
        return replace(graph, columns={**graph.columns, column: array}, cache={})
    if part == "edges":
        e = graph.edges
        parts = {"start": e.start, "after": e.after, "lag": e.lag, "kind": e.kind}
        return replace(graph, edges=Edges(**{**parts, column: array}), cache={})
    if array.dtype == bool:
        array = array.view(np.uint8) != 0
    table = getattr(graph, part).replace(**{column: array})
    return replace(graph, **{part: table}, cache={})
