"""Loops over edges: what is made outside them is large enough, and grows where it is not."""

import numpy as np

from foretell.graph import Builder
from foretell.graph.build import a_cycle, placed, topological, transposed


def test_a_hub_that_goes_leaves_every_pair_behind():
    """Fifty before it, fifty behind: far more edges than it had."""
    make = Builder()
    first = [make.task(op="a") for _ in range(50)]
    hub = make.task(op="hub", after=first)
    last = [make.task(op="b", after=[hub]) for _ in range(50)]
    with make.graph().edit() as edit:
        edit.remove(edit.select(op="hub"))
    assert edit.graph.edges.size == 2500
    assert edit.graph.edges.of(50).tolist() == list(range(50))
    assert len(first) + len(last) == edit.graph.size


def test_rows_of_followers():
    start, after = np.array([0, 0, 1, 3]), np.array([0, 0, 1], np.int32)
    begins, follower, position = transposed(start, after)
    assert begins.tolist() == [0, 2, 3, 3]
    assert follower.tolist() == [1, 2, 2]
    assert position.tolist() == [0, 1, 2]


def test_a_ring_has_no_order_and_is_named():
    start, after = np.array([0, 1, 2, 3]), np.array([1, 2, 0], np.int32)
    none = np.zeros(4, np.int64), after[:0]
    assert len(topological(start, after, *none)) == 0
    assert sorted(a_cycle(start, after, *none).tolist()) == [0, 1, 2]


def test_tasks_put_next_to_each_other_in_a_ring_have_no_place():
    both = np.array([0, 1]), np.array([1, 0]), np.array([True, True])
    assert len(placed(np.arange(3), *both)) == 1
    one = np.array([0]), np.array([2]), np.array([True])
    assert placed(np.arange(3), *one).tolist() == [1, 2, 0]
