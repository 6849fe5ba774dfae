"""The rule by example: small graphs whose timelines can be checked by hand."""

import numpy as np
import pytest
from tests.transformer import transformer

from foretell.errors import InputError
from foretell.graph import Builder, parse
from foretell.simulate import Timeline, simulate
from foretell.simulate.memory import held_by_kind, memory, peak_bytes
from foretell.simulate.timeline import (
    breakdown,
    busy,
    covered,
    overlap,
    path_seconds,
    union,
)

ENGINES = ("readable", "compiled")


@pytest.fixture(params=ENGINES)
def simulate_readable(request):
    return lambda text: simulate(parse("foretell graph 1\n" + text), engine=request.param)


def starts(timeline):
    return timeline.start.tolist()


def test_an_ordered_lane_keeps_its_order(simulate_readable):
    """The second is ready first, and waits all the same."""
    played = simulate_readable("""
        lane 0 = compute "s" of rank 0 ordered
        %0 = host a for 5.0
        %1 = kernel b on 0 for 1.0 after %0
        %2 = kernel c on 0 for 1.0
    """)
    assert starts(played) == [0, 5, 6]
    assert played[2].why == "lane was taken by"
    assert played[2].cause == 1


def test_a_free_lane_takes_the_task_that_is_ready(simulate_readable):
    played = simulate_readable("""
        lane 0 = compute "s" of rank 0 free
        %0 = host a for 5.0
        %1 = kernel b on 0 for 1.0 after %0
        %2 = kernel c on 0 for 1.0
    """)
    assert starts(played) == [0, 5, 0]


def test_priority_then_ready_then_number(simulate_readable):
    played = simulate_readable("""
        lane 0 = comm "c" of rank 0 free
        %0 = collective first on 0 for 10.0
        %1 = host a for 2.0
        %2 = collective late on 0 for 1.0 after %1
        %3 = collective early on 0 for 1.0
        %4 = collective urgent on 0 for 1.0 after %1 priority=1
        %5 = collective early_too on 0 for 1.0
    """)
    assert starts(played) == [0, 0, 13, 11, 10, 12]


def test_a_task_holds_all_its_lanes_and_blocks_none_while_it_waits(simulate_readable):
    """Task 2 needs both lanes; meanwhile task 3 may use the one that is free."""
    played = simulate_readable("""
        lane 0 = comm "a" of rank 0 free
        lane 1 = comm "b" of rank 1 free
        %0 = kernel x on 0 for 4.0
        %1 = kernel y on 1 for 1.0
        %2 = collective z on 0,1 for 1.0
        %3 = kernel w on 1 for 2.0 after %1
    """)
    assert starts(played) == [0, 0, 4, 1]


def test_a_gap_holds_the_lane_and_not_the_followers(simulate_readable):
    played = simulate_readable("""
        lane 0 = host "t" of rank 0 ordered
        lane 1 = compute "s" of rank 0 ordered
        %0 = host launch on 0 for 1.0 gap=3.0
        %1 = kernel k on 1 for 1.0 after %0
        %2 = host launch on 0 for 1.0
    """)
    assert starts(played) == [0, 1, 4]


def test_a_lag_delays_the_follower_and_holds_nothing(simulate_readable):
    played = simulate_readable("""
        lane 0 = host "t" of rank 0 ordered
        %0 = host launch on 0 for 1.0
        %1 = kernel k for 1.0 after %0+0.5:launch
        %2 = host more on 0 for 1.0
    """)
    assert starts(played) == [0, 1.5, 1]


def test_a_drained_lane_is_decided_when_the_graph_is_simulated():
    graph = parse("""foretell graph 1
        lane 0 = compute "s" of rank 0 ordered
        %0 = kernel a on 0 for 1.0
        %1 = sync wait for 0.0 drains 0
        %2 = kernel later on 0 for 9.0
    """)
    assert simulate(graph).end[1] == 1
    with graph.edit() as edit:
        edit.insert(1, kind="kernel", lane=0, seconds=2.0, issued_after=0)
    assert simulate(edit.graph).end[1] == 3


def test_two_transfers_share_a_link(simulate_readable):
    """Each could fill it: together each takes twice as long, and the rest runs at full speed."""
    played = simulate_readable("""
        link 0 = "wire" capacity 1.0
        %0 = send a for 2.0 uses 0*1.0
        %1 = send b for 4.0 uses 0*1.0
        %2 = send c for 4.0
    """)
    assert played.end.tolist() == [4, 6, 4]


def test_a_small_transfer_leaves_the_rest_to_others(simulate_readable):
    """Both slow down by the same factor; what the narrow link keeps from one, the other gets."""
    played = simulate_readable("""
        link 0 = "wide" capacity 3.0
        link 1 = "narrow" capacity 0.5
        %0 = send a for 1.0 uses 0*2.0,1*1.0
        %1 = send b for 1.0 uses 0*2.0
    """)
    assert played.end.tolist() == [2, 1]


def test_engines_agree_on_a_real_step_and_after_edits():
    graph = _timed(transformer(ranks=3, layers=2))
    expected = simulate(graph, engine="readable")
    got = simulate(graph, engine="compiled")
    np.testing.assert_array_equal(got.start, expected.start)
    with graph.edit("late") as edit:
        edit.scale(graph.select(phase="update"), 3.0)
    resumed = simulate(edit.graph, engine="compiled", before=got)
    np.testing.assert_array_equal(resumed.end, simulate(edit.graph, engine="readable").end)


def test_memory_counts_from_birth_to_death():
    make = Builder()
    lane = make.lane("s", kind="compute")
    tasks = [make.task(kind="kernel", lane=lane, seconds=1.0) for _ in range(4)]
    make.buffer(100, kind="parameter")
    make.buffer(10, born=tasks[0], dies=tasks[2], kind="activation", name="x")
    make.buffer(7, born=tasks[1], dies=tasks[1], kind="workspace")
    make.buffer(20, born=tasks[3], kind="gradient")
    make.buffer(1000, rank=1)
    played = simulate(make.graph())
    first, second = memory(played)
    assert (first.peak, first.at) == (120, 3.0)
    assert held_by_kind(played, first) == {"parameter": 100, "gradient": 20}
    assert first.held.tolist() == [100, 110, 117, 110, 100, 120]
    assert (second.rank, peak_bytes(played)) == (1, 1000)


def test_where_the_step_goes(simulate_readable):
    played = simulate_readable("""
        lane 0 = host "t" of rank 0 ordered
        lane 1 = compute "s" of rank 0 ordered
        lane 2 = comm "c" of rank 0 ordered
        %0 = host a on 0 for 2.0
        %1 = kernel b on 1 for 3.0 after %0
        %2 = collective all_reduce on 2 for 4.0 after %0
        %3 = kernel d on 1 for 1.0 after %2+1.0
    """)
    (part,) = breakdown(played)
    assert (part.compute, part.exposed, part.hidden, part.host, part.idle) == (4, 1, 3, 2, 1)
    assert [b.share for b in busy(played)] == [2 / 8, 4 / 8, 4 / 8]
    assert path_seconds(played, "op") == {"all_reduce": 4, "a": 2, "d": 1, "(waiting)": 1}


def test_intervals():
    start, end = np.array([0.0, 1, 5, 5]), np.array([2.0, 3, 6, 5])
    assert [x.tolist() for x in union(start, end)] == [[0, 5], [3, 6]]
    assert covered(start, end) == 4
    assert overlap((start, end), (np.array([2.5]), np.array([5.5]))) == 1


def test_a_measured_timeline_knows_no_causes():
    graph = _timed(transformer(ranks=1, layers=1))
    played = simulate(graph)
    measured = Timeline(graph, played.start, played.end)
    assert measured[0].why == "measured"
    with pytest.raises(InputError, match="knows no causes"):
        measured.critical_path()


def test_an_empty_graph_takes_no_time():
    played = simulate(Builder().graph())
    assert (played.seconds, len(played), breakdown(played), memory(played)) == (0, 0, [], [])


def _timed(graph):
    with graph.edit() as edit:
        edit.set(np.arange(graph.size), seconds=1e-6 * (1 + np.arange(graph.size) % 7))
    return edit.graph
