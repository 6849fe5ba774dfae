"""What becomes of waits, buffers and tables when tasks go."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from foretell.errors import GraphError
from foretell.graph import verify
from tests.graph.golden import edited, graph, same
from tests.strategies import graphs

CHAIN = """
lane 0 = compute "s" of rank 0 ordered
%0 = kernel a on 0 for 1.0
%1 = kernel b on 0 for 1.0 after %0+0.25
%2 = kernel c on 0 for 1.0 after %1+0.5:launch
%3 = kernel d on 0 for 1.0 after %0 %2+0.125
"""


def test_lags_along_a_chain_add_up():
    same(
        edited(CHAIN, lambda e: e.remove([1, 2])),
        """
        lane 0 = compute "s" of rank 0 ordered
        %0 = kernel a on 0 for 1.0
        %1 = kernel d on 0 for 1.0 after %0+0.875
        """,
    )


def test_kinds_of_waits_that_stay_are_kept():
    same(
        edited(CHAIN, lambda e: e.remove(0)),
        """
        lane 0 = compute "s" of rank 0 ordered
        %0 = kernel b on 0 for 1.0
        %1 = kernel c on 0 for 1.0 after %0+0.5:launch
        %2 = kernel d on 0 for 1.0 after %1+0.125
        """,
    )


def test_without_a_bridge():
    same(
        edited(CHAIN, lambda e: e.remove([1, 2], bridge=False)),
        """
        lane 0 = compute "s" of rank 0 ordered
        %0 = kernel a on 0 for 1.0
        %1 = kernel d on 0 for 1.0 after %0
        """,
    )


def test_each_removal_has_its_own_bridge():
    fan = """
    %0 = host a
    %1 = host b after %0
    %2 = host c after %0
    %3 = host d after %1
    %4 = host e after %2
    """

    def change(edit):
        edit.remove(1, bridge=False)
        edit.remove(2)

    same(
        edited(fan, change),
        """
        %0 = host a for 0.0
        %1 = host d for 0.0
        %2 = host e for 0.0 after %0
        """,
    )


def test_many_to_many():
    hub = """
    %0 = host a
    %1 = host b
    %2 = sync hub after %0 %1+2.0
    %3 = host c after %2
    %4 = host d after %1+3.0 %2
    """
    same(
        edited(hub, lambda e: e.remove(2)),
        """
        %0 = host a for 0.0
        %1 = host b for 0.0
        %2 = host c for 0.0 after %0 %1+2.0
        %3 = host d for 0.0 after %0 %1+3.0
        """,
    )


def test_tables_follow():
    before = """
    lane 0 = compute "s" of rank 0 ordered
    lane 1 = compute "t" of rank 0 ordered
    link 0 = "ib" capacity 2.0
    %0 = kernel a on 0,1 uses 0*1.0
    %1 = kernel b on 0 uses 0*2.0
    %2 = kernel c on 1 drains 0
    %3 = kernel d on 0,1 uses 0*4.0 flops=3.0
    """
    same(
        edited(before, lambda e: e.remove([0, 1])),
        """
        lane 0 = compute "s" of rank 0 ordered
        lane 1 = compute "t" of rank 0 ordered
        link 0 = "ib" capacity 2.0
        %0 = kernel c on 1 for 0.0 drains 0
        %1 = kernel d on 0,1 for 0.0 uses 0*4.0 flops=3.0
        """,
    )


def test_columns_that_no_longer_say_anything_leave():
    with graph(CHAIN.replace("a on 0", "a on 0 flops=1.0")).edit() as edit:
        edit.remove(0)
    assert "flops" not in edit.graph.columns


BUFFERS = """
%0 = kernel a
%1 = kernel b after %0
%2 = kernel c after %1
%3 = kernel d after %2
"""


@pytest.mark.parametrize(
    ("buffer", "gone", "left"),
    [
        ("from %0 to %3", [3], "from %0 to %2"),  # dies with what its last user waited for
        ("from %0 to %3", [2, 3], "from %0 to %1"),  # along a chain
        ("from %1 to %3", [2, 3], "from %1 to %1"),  # never before its maker
        ("from %0 to %3", [1, 2, 3], "from %0 to %0"),
        ("from %0 to %2", [1], "from %0 to %1"),  # numbers move
        ("from %0", [3], "from %0"),  # for good
        ("to %3", [3], "to %2"),  # there from the beginning
        ("to %0", [0], ""),  # nobody left to let it go
        ("from %1 to %2", [1], None),  # never made
    ],
)
def test_buffers(buffer, gone, left):
    found = edited(BUFFERS + f'buffer 8.0 other "x" of rank 0 {buffer}\n', lambda e: e.remove(gone))
    kept = [line for line in found.splitlines() if line.startswith("buffer")]
    expected = [] if left is None else [f'buffer 8.0 other "x" of rank 0 {left}'.strip()]
    assert kept == expected


def test_the_heir_is_the_latest_wait_and_not_the_highest_number():
    before = """
    %0 = kernel late after %2
    %1 = kernel user after %0 %2
    %2 = kernel maker
    buffer 8.0 other "x" of rank 0 from %2 to %1
    """
    assert "from %1 to %0" in edited(before, lambda e: e.remove(1))


def test_a_buffer_does_not_follow_a_ring_that_goes():
    edit = graph(BUFFERS + 'buffer 8.0 other "x" of rank 0 from %0 to %2\n').edit()
    edit.wait(2, 3)
    edit.remove([2, 3], bridge=False)
    assert edit.commit().buffers.dies.tolist() in ([0], [1])


def test_a_ring_through_what_goes_is_refused():
    edit = graph(BUFFERS).edit()
    edit.wait(0, 3)
    edit.remove([1, 2])
    with pytest.raises(GraphError, match="wait on each other"):
        edit.commit()


def test_what_was_just_inserted_can_go_and_bridge():
    def change(edit):
        new = edit.insert(after=0, before=2, op="x")
        edit.remove(new)

    with graph(BUFFERS).edit() as edit:
        change(edit)
    assert edit.graph.size == 4
    assert edit.graph[2].after == (0, 1)


def test_all_of_them():
    with graph(CHAIN + 'buffer 8.0 other "x" of rank 0 from %0 to %1\n').edit() as edit:
        edit.remove(range(4))
    assert edit.graph.size == 0
    assert len(edit.graph.buffers) == 0
    assert str(edit.graph).splitlines()[1:] == ['lane 0 = compute "s" of rank 0 ordered']


def reach(graph) -> np.ndarray:
    """Longest lag from each task to each that waits for it, over any path; -inf where none."""
    far = np.full((graph.size, graph.size), -np.inf)
    e = graph.edges
    far[e.after, e.waiting] = e.lags
    for k in range(graph.size):
        far = np.maximum(far, far[:, k : k + 1] + far[k : k + 1, :])
    return far


@settings(max_examples=60, deadline=None)
@given(graphs(most=14), st.data())
def test_what_waited_still_waits_and_nothing_else(graph, data):
    """Reachability and the lags on the way are the same for all that stay."""
    numbers = st.integers(0, graph.size - 1)
    gone = data.draw(st.lists(numbers, max_size=graph.size, unique=True))
    edit = graph.edit()
    edit.remove(np.array(gone, np.int64))
    try:
        made = edit.commit()
    except GraphError:
        assume(False)
    keep = np.setdiff1d(np.arange(graph.size), gone)
    np.testing.assert_allclose(reach(made), reach(graph)[np.ix_(keep, keep)], rtol=1e-12)
    np.testing.assert_array_equal(made.seconds, graph.seconds[keep])
    if gone:
        np.testing.assert_array_equal(made.origin, keep)
    verify(made)


@settings(max_examples=40, deadline=None)
@given(graphs(most=14), st.data())
def test_without_a_bridge_only_own_edges_stay(graph, data):
    gone = data.draw(st.lists(st.integers(0, graph.size - 1), max_size=graph.size, unique=True))
    edit = graph.edit()
    edit.remove(np.array(gone, np.int64), bridge=False)
    try:
        made = edit.commit()
    except GraphError:
        assume(False)
    keep = np.setdiff1d(np.arange(graph.size), gone)
    number = {int(old): new for new, old in enumerate(keep)}
    e, m = graph.edges, made.edges
    pairs = zip(e.waiting.tolist(), e.after.tolist(), e.lags.tolist(), strict=True)
    expected = {(number[i], number[p], w) for i, p, w in pairs if i in number and p in number}
    assert set(zip(m.waiting.tolist(), m.after.tolist(), m.lags.tolist(), strict=True)) == expected
