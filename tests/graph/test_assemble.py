"""Graphs from whole columns: what is dropped, copied, sorted and refused."""

import numpy as np
import pytest

from foretell.errors import GraphError, InputError
from foretell.graph import Buffers, Drained, Edges, Held, Lanes, Links, Names, Used, assemble, edges
from foretell.graph.graph import Graph, frozen, owned

NONE_YET = edges(2, [], [])
LANES = Lanes([0, 0], [1, 2], [0, 0], [True, True])
NAMES = Names(["", "a", "b"])


def test_what_is_all_default_is_dropped():
    columns = {
        "seconds": [1, 2],
        "flops": [0, 0],
        "lane": [-1, -1],
        "order": [0, 1],
        "kind": np.zeros(2),
    }
    made = assemble(2, columns, NONE_YET)
    assert set(made.columns) == {"seconds"}
    assert made.order.tolist() == [0, 1]
    assert set(assemble(2, {"order": [1, 0]}, NONE_YET).columns) == {"order"}


def writable_inputs():
    return {
        "seconds": np.array([1.0, 2.0]),
        "rank": np.array([3, 4], np.int32),
        "kind": np.array([1, 2], np.uint8),
        "order": np.array([5, 4]),
    }


def test_writing_to_what_was_given_changes_nothing():
    given = writable_inputs()
    waits = [np.array(v) for v in ([1], [0], [2.0], [3])]
    rows = [np.array(v, np.int32) for v in ([1], [1])]
    lanes = [np.array([0, 0], np.int32), np.array([1, 2], np.int32), np.zeros(2, np.uint8)]
    made = assemble(
        2,
        given,
        edges(2, *waits),
        names=NAMES,
        lanes=Lanes(*lanes, np.array([True, True])),
        held=Held(*rows),
        facts=(facts := {"a": 1}),
    )
    was = made.fingerprint()
    for array in (*given.values(), *waits, *rows, *lanes):
        array += 1
    facts["a"] = 2
    assert made.fingerprint() == was
    assert made.facts["a"] == 1


def test_a_read_only_view_of_what_can_be_written_is_copied():
    mine = np.array([1.0, 2.0])
    made = assemble(2, {"seconds": frozen(mine)}, NONE_YET)
    mine[0] = 9
    assert made.seconds[0] == 1
    buffer = bytearray(16)
    made = assemble(2, {"seconds": np.frombuffer(buffer), "rank": [1, 2]}, NONE_YET)
    assert "seconds" not in made.columns


def test_what_is_read_only_is_not_copied():
    mine = np.array([1.0, 2.0])
    mine.flags.writeable = False
    assert assemble(2, {"seconds": mine}, NONE_YET).seconds is mine
    raw = np.frombuffer(b"12345678" * 2)
    assert np.shares_memory(owned(raw, np.float64, "x"), raw)
    held = Held(np.array([0]), np.array([1]))
    assert np.shares_memory(held.replace(lane=held.lane).task, held.task)


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("kind", np.array([0, 256])),
        ("rank", np.array([0, 2**32])),
        ("rank", np.array([0, 0.5])),
        ("lane", [0, 10**30]),
        ("micro_batch", [0.0, np.nan]),
        ("seconds", ["1", "2"]),
    ],
)
def test_values_that_would_change_are_refused(column, values):
    with pytest.raises(GraphError, match=f"`{column}` holds"):
        assemble(2, {column: values}, NONE_YET)


def test_columns_that_do_not_fit():
    with pytest.raises(GraphError, match="`seconds` has 3 values for 2 tasks"):
        assemble(2, {"seconds": [0, 0, 0]}, NONE_YET)
    with pytest.raises(GraphError, match="`rank` has 4 values for 2 tasks"):
        assemble(2, {"rank": np.ones((2, 2))}, NONE_YET)
    with pytest.raises(InputError, match="did you mean `seconds`"):
        assemble(2, {"second": [0, 0]}, NONE_YET)
    with pytest.raises(InputError, match="unknown column"):
        Graph(2, {"second": np.zeros(2)})


def test_rows_come_in_any_order():
    made = assemble(
        2,
        {},
        NONE_YET,
        names=NAMES,
        lanes=LANES,
        links=Links([1, 2], [1.0, 1.0]),
        held=Held([1, 0, 1, 1], [1, 1, 0, 1]),
        drained=Drained([1, 0], [0, 0]),
        used=Used([1, 0, 1, 1], [1, 1, 0, 1], [1.0, 2.0, 4.0, 8.0]),
    )
    assert made.held == Held([0, 1, 1], [1, 0, 1])
    assert made.drained == Drained([0, 1], [0, 0])
    assert made.used == Used([0, 1, 1], [1, 0, 1], [2.0, 4.0, 9.0])  # what is demanded adds up


def test_a_table_that_is_not_one():
    with pytest.raises(GraphError, match="not equally long"):
        Held([0, 1], [0])
    with pytest.raises(GraphError, match="not equally long"):
        Held(np.zeros((1, 1)), np.zeros((1, 1)))
    with pytest.raises(GraphError, match=r"`born` of buffers holds 0\.5"):
        Buffers([1.0], [0], [0.5], [0], [0], [0])
    assert Held([0], [1]) != Drained([0], [1])
    assert Held([0], [1]) != Held([0], [2])


def test_tables_are_sorted_and_found():
    lanes = Lanes([0, 1, 1], [1, 1, 2], [1, 2, 4], [1, 1, 0])
    assert lanes.find(1, 1) == 1
    assert lanes.find(0, 2) == -1
    assert lanes.of_kind(2, 4).tolist() == [1, 2]
    held = Held([0, 0, 2], [1, 2, 0])
    assert held.lane[held.of(0)].tolist() == [1, 2]
    assert held.lane[held.of(1)].tolist() == []
    assert Held.empty().tidy().is_tidy()


def test_edges_are_sorted_and_unique():
    made = edges(3, [2, 1, 2, 2], [1, 0, 0, 1], [0.5, 0, 0, 0.75], [0, 1, 0, 2])
    assert made.waiting.tolist() == [1, 2, 2]
    assert made.after.tolist() == [0, 0, 1]
    assert made.lags.tolist() == [0, 0, 0.75]
    assert made.kinds.tolist() == [1, 0, 2]
    assert made.of(2).tolist() == [0, 1]
    assert edges(3, [1], [0], [0.0], [0]).lag is None  # what says nothing takes no memory
    assert made.equals(edges(3, [1, 2, 2], [0, 0, 1], [0, 0, 0.75], [1, 0, 2]))
    assert not made.equals(edges(3, [1, 2, 2], [0, 0, 1]))


@pytest.mark.parametrize(("waiting", "after"), [(0, 2), (2, 0), (-1, 0), (0, -1)])
def test_an_edge_to_nowhere_is_not_taken_for_another(waiting, after):
    with pytest.raises(GraphError, match=f"%{waiting} waits for %{after}"):
        edges(2, [1, waiting], [0, after])


def test_a_lag_that_is_no_number_is_not_dropped():
    made = edges(2, [1, 1], [0, 0], [1.0, np.nan])
    assert np.isnan(made.lag).tolist() == [True]


def test_edges_made_by_hand_are_read_only_and_of_their_types():
    made = Edges(np.array([0, 0, 1]), np.array([0]), np.array([1]))
    assert (made.start.dtype, made.after.dtype, made.lag.dtype) == (np.int64, np.int32, np.float64)
    assert not made.after.flags.writeable
