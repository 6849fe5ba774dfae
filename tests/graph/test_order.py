"""Where inserted and moved tasks stand in the issue order of their lanes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell.errors import GraphError, InputError
from foretell.graph import Builder
from tests.graph.golden import edited, graph, same

THREE = """
lane 0 = compute "s" of rank 0 ordered
%0 = kernel a on 0
%1 = kernel b on 0
%2 = kernel c on 0
"""


def issued(change, before: str = THREE) -> str:
    """The ops of all tasks in issue order."""
    with graph(before).edit() as edit:
        change(edit)
    made = edit.graph
    return "".join(made.texts("op")[i] for i in np.argsort(made.order, kind="stable"))


def test_inserted_text():
    same(
        edited(THREE, lambda e: e.insert(after=[0, 1], op=["x", "y"], kind="copy", lane=0)),
        """
        lane 0 = compute "s" of rank 0 ordered
        %0 = kernel a on 0 for 0.0
        %1 = kernel b on 0 for 0.0 order=2
        %2 = kernel c on 0 for 0.0 order=4
        %3 = copy x on 0 for 0.0 after %0 order=1
        %4 = copy y on 0 for 0.0 after %1 order=3
        """,
    )


def test_where_an_inserted_task_is_issued():
    assert issued(lambda e: e.insert(op="x", lane=0)) == "abcx"
    assert issued(lambda e: e.insert(op="x", lane=0, after=0)) == "axbc"
    assert issued(lambda e: e.insert(op="x", lane=0, before=1)) == "axbc"
    assert issued(lambda e: e.insert(op="x", lane=0, after=0, before=2)) == "axbc"
    assert issued(lambda e: e.insert(op="x", lane=0, after=0, issued_after=1)) == "abxc"
    assert issued(lambda e: e.insert(op="x", lane=0, after=0, issued_before=2)) == "abxc"
    assert issued(lambda e: e.insert(op="x", lane=0, issued_before=0)) == "xabc"
    assert issued(lambda e: e.insert(op="x", lane=0, after=0, order=7)) == "abcx"


def test_several_next_to_one_keep_their_order():
    assert issued(lambda e: e.insert(after=[1, 1], op=["x", "y"])) == "abxyc"
    assert issued(lambda e: e.insert(issued_before=[1, 1], op=["x", "y"])) == "axybc"


def test_one_by_one_is_as_all_at_once():
    def change(edit):
        for op in "xyz":
            edit.insert(after=1, op=op)

    assert issued(change) == "abxyzc"


def test_next_to_what_was_inserted():
    def chain(edit):
        x = edit.insert(after=0, op="x")
        edit.insert(after=x, op="y")
        edit.insert(after=0, op="z")

    assert issued(chain) == "axyzbc"

    def ahead(edit):
        x = edit.insert(issued_before=1, op="x")
        edit.insert(issued_after=x, op="y")
        edit.insert(issued_before=x, op="z")

    assert issued(ahead) == "azxybc"


def test_as_many_as_the_arrays_have():
    assert issued(lambda e: e.insert(after=np.array([], int), op="x")) == "abc"
    assert issued(lambda e: e.insert(0, op="x")) == "abc"
    assert issued(lambda e: e.insert(2, op="x")) == "abcxx"
    assert issued(lambda e: e.insert(seconds=[1, 2], op="x")) == "abcxx"


def test_inserting_nothing_changes_nothing():
    before = graph(THREE)
    with before.edit() as edit:
        assert edit.insert(after=[], op="x", seconds=1.0).tolist() == []
    assert edit.graph.fingerprint() == before.fingerprint()


def test_reorder():
    assert issued(lambda e: e.reorder(2, before=0)) == "cab"
    assert issued(lambda e: e.reorder(0, after=2)) == "bca"
    assert issued(lambda e: e.reorder([2, 1], before=0)) == "cba"
    assert issued(lambda e: e.reorder([2, 0], after=1)) == "bca"
    assert issued(lambda e: e.reorder(0, after=1)) == "bac"


def test_what_is_said_last_of_a_task_holds():
    def change(edit):
        edit.reorder(0, after=2)
        edit.reorder(0, after=1)

    assert issued(change) == "bac"


def test_what_stands_next_to_a_task_goes_with_it():
    def change(edit):
        edit.reorder(0, after=1)
        edit.reorder(1, after=2)

    assert issued(change) == "cba"


def test_a_ring_of_places_is_refused():
    for pairs in ([(0, 0)], [(0, 1), (1, 0)]):
        edit = graph(THREE).edit()
        for task, after in pairs:
            edit.reorder(task, after=after)
        with pytest.raises(GraphError, match="next to each other in a ring"):
            edit.commit()


def test_reorder_takes_one_side():
    edit = graph(THREE).edit()
    with pytest.raises(InputError, match="either"):
        edit.reorder(0)
    with pytest.raises(InputError, match="either"):
        edit.reorder(0, after=1, before=2)


def test_an_order_against_the_waits_is_refused():
    edit = graph(THREE + "%3 = kernel d on 0 after %2\n").edit()
    edit.reorder(3, before=0)
    with pytest.raises(GraphError, match="wait on each other"):
        edit.commit()


def test_an_order_that_was_given_is_kept():
    backwards = THREE.replace("a on 0", "a on 0 order=9").replace("c on 0", "c on 0 order=-4")
    assert issued(lambda e: None, backwards) == "cba"
    assert issued(lambda e: e.insert(op="x"), backwards) == "cbax"
    assert issued(lambda e: e.insert(op="x", after=1), backwards) == "cbxa"
    assert issued(lambda e: e.remove(1), backwards) == "ca"


def test_an_order_that_is_set_is_kept():
    def change(edit):
        edit.set([0, 1, 2], order=[2, 1, 0])
        edit.insert(op="x")
        edit.insert(op="y", after=1)

    assert issued(change) == "cbyax"


def test_places_that_are_shared_stay_shared():
    shared = THREE.replace("a on 0", "a on 0 order=5").replace("c on 0", "c on 0 order=5")
    with graph(shared).edit() as edit:
        edit.remove(1)
    assert edit.graph.order.tolist() == [0, 0]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_places_as_a_list_would_have_them(data):
    """The same by hand: take each task out and put it next to its anchor, children and all."""
    size = data.draw(st.integers(1, 6))
    make = Builder()
    for _ in range(size):
        make.task()
    edit = make.graph().edit()
    behind: dict[int, list[int]] = {}
    ahead: dict[int, list[int]] = {}
    for new in range(size, size + data.draw(st.integers(1, 8))):
        anchor = data.draw(st.integers(0, new - 1))
        if data.draw(st.booleans()):
            edit.insert(issued_after=anchor)
            behind.setdefault(anchor, []).append(new)
        else:
            edit.insert(issued_before=anchor)
            ahead.setdefault(anchor, []).append(new)

    def walk(task):
        for other in ahead.get(task, []):
            yield from walk(other)
        yield task
        for other in behind.get(task, []):
            yield from walk(other)

    expected = [t for root in range(size) for t in walk(root)]
    assert np.argsort(edit.commit().order).tolist() == expected
