"""What an edit shares with the graph before, and what it signs."""

import copy
import pickle

import numpy as np
import pytest

from foretell.graph import Builder, Graph
from foretell.graph.build import wiring
from tests.graph.golden import graph

TABLES = ("lanes", "links", "held", "drained", "used", "buffers")


@pytest.fixture
def before() -> Graph:
    return graph(
        """
        fact batch 8
        lane 0 = compute "s" of rank 0 ordered
        lane 1 = comm "t" of rank 0 free
        link 0 = "ib" capacity 2.0
        %0 = kernel a on 0 for 1.0 flops=2.0
        %1 = kernel b on 0,1 for 2.0 after %0 uses 0*1.0 flops=3.0
        %2 = sync c for 0.5 after %1 drains 0
        buffer 8.0 other "x" of rank 0 from %0 to %1
        """
    )


def shared(before: Graph, after: Graph) -> set[str]:
    """What is one and the same object in two graphs."""
    columns = {c for c in before.columns if after.columns.get(c) is before.columns[c]}
    parts = (*TABLES, "edges", "names", "cache", "facts")
    return columns | {p for p in parts if getattr(after, p) is getattr(before, p)}


EVERYTHING = {"kind", "op", "lane", "seconds", "flops", *TABLES, "edges", "names", "cache", "facts"}


@pytest.mark.parametrize(
    ("change", "own"),
    [
        (lambda e: e.scale(0, 2), {"seconds"}),
        (lambda e: e.set(0, flops=1), {"flops"}),
        (lambda e: e.set(0, priority=1), set()),
        (lambda e: e.set(0, op="new"), {"op", "names"}),
        (lambda e: e.set(0, op="b"), {"op"}),
        (lambda e: e.set(2, lane=1), {"lane", "cache"}),
        (lambda e: e.wait(2, 0), {"edges", "cache"}),
        (lambda e: e.release(1, 0), {"edges", "cache"}),
        (lambda e: e.hold(0, 1), {"held", "cache"}),
        (lambda e: e.drain(1, 0), {"drained", "cache"}),
        (lambda e: e.use(0, 0, 1.0), {"used"}),
        (lambda e: e.buffer(1.0, name="x"), {"buffers"}),
        (lambda e: e.lane("new"), {"lanes", "names", "cache"}),
        (lambda e: e.link("ib", 3.0), {"links"}),
        (lambda e: e.fact(batch=9), {"facts"}),
        (lambda e: e.reorder(1, after=0), {"cache"}),
        (lambda e: None, set()),
    ],
)
def test_what_was_not_edited_is_shared(before, change, own):
    with before.edit("x") as edit:
        change(edit)
    assert shared(before, edit.graph) == EVERYTHING - own


def test_a_column_that_becomes_default_takes_no_memory(before):
    with before.edit() as edit:
        edit.set([0, 1], flops=0)
    assert "flops" not in edit.graph.columns
    assert edit.graph.flops.tolist() == [0, 0, 0]


def test_a_shared_cache_is_right(before):
    wires = wiring(before)
    with before.edit() as edit:
        edit.scale(0, 2)
    assert wiring(edit.graph) is wires
    with before.edit() as edit:
        edit.wait(2, 0)
    assert wiring(edit.graph) is not wires
    assert wiring(edit.graph).waits.of(2).tolist() == [0, 1]


def test_the_graph_before_is_untouched(before):
    was = before.fingerprint(), str(before)
    with before.edit("many") as edit:
        edit.scale(0, 2)
        edit.set(1, op="new")
        edit.insert(after=1, op="newer", lane=0)
        edit.wait(2, 0)
        edit.remove(0)
        edit.fact(batch=1)
    assert (before.fingerprint(), str(before)) == was
    assert edit.graph.fingerprint() != was[0]


def test_history_and_facts(before):
    with before.edit("one:a=1") as first:
        first.fact(measured=0.5)
    with first.graph.edit() as silent:
        silent.scale(0, 2)
    with silent.graph.edit("two") as second:
        second.remove(0)
    assert second.graph.history == ("one:a=1", "two")
    assert dict(second.graph.facts) == {"batch": 8, "measured": 0.5}
    assert dict(before.facts) == {"batch": 8}
    assert before.history == ()


def test_parent_and_origin(before):
    with before.edit() as edit:
        edit.scale(0, 2)
    assert edit.graph.parent is before
    assert edit.graph.origin is None  # as it was
    with before.edit() as edit:
        edit.insert(2, after=0)
    assert edit.graph.origin.tolist() == [0, 1, 2, -1, -1]
    with before.edit() as edit:
        new = edit.insert(2, after=0)
        edit.remove([0, new[0]])
    assert edit.graph.parent is before
    assert edit.graph.origin.tolist() == [1, 2, -1]


def test_a_copy_for_another_process(before):
    with before.edit("x") as edit:
        edit.scale(0, 2)
    wiring(edit.graph)
    for made in (pickle.loads(pickle.dumps(edit.graph)), copy.deepcopy(edit.graph)):
        assert made.fingerprint() == edit.graph.fingerprint()
        assert made.history == ("x",)
        assert dict(made.facts) == {"batch": 8}
        assert made.parent is None
        assert made.cache == {}


# Nobody can change a graph


def arrays(graph: Graph):
    yield from ((f"column {name}", graph.column(name)) for name in ("seconds", "gap", "order"))
    yield from graph.columns.items()
    e = graph.edges
    for name in ("start", "after", "lags", "kinds", "waiting"):
        yield f"edges.{name}", getattr(e, name)
    for table in TABLES:
        for name, array in getattr(graph, table).columns().items():
            yield f"{table}.{name}", array


def test_writing_raises(before):
    with before.edit("x") as edit:
        edit.scale(0, 2)
        edit.insert(after=0, lane=0)
        edit.wait(2, 0, lag=1.0, kind="event")
        edit.use(0, 0, 2.0)
    with edit.graph.edit() as less:
        less.remove(0)
    for made in (before, edit.graph, less.graph, Graph(), Graph(1, {"seconds": np.ones(1)})):
        for name, array in arrays(made):
            assert not array.flags.writeable, name
            if len(array):
                with pytest.raises(ValueError, match="read-only"):
                    array[0] = 1


def test_mappings_and_fields_cannot_be_set(before):
    for mapping in (before.columns, before.facts):
        with pytest.raises(TypeError):
            mapping["seconds"] = 1  # type: ignore[index]
    with pytest.raises(AttributeError):
        before.size = 7  # type: ignore[misc]
    with pytest.raises(AttributeError):
        before.lanes.rank = np.ones(2)  # type: ignore[misc]


def test_what_a_builder_made_does_not_follow_it():
    make = Builder()
    make.task(seconds=1.0)
    made = make.graph()
    make.task(seconds=2.0)
    make.wait(1, 0)
    assert made.size == 1
    assert make.graph().size == 2
