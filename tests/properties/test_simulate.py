"""What must hold for any graph, and that all engines agree to the last bit."""

import os
from itertools import pairwise

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.strategies import edits, graphs

from foretell.errors import GraphError
from foretell.graph import NONE
from foretell.graph.build import wiring
from foretell.simulate import simulate
from foretell.simulate.engine import is_ordered, run, timeline
from foretell.simulate.timeline import breakdown, busy, critical_path

# `make test-all` draws more
MANY = settings(max_examples=int(os.environ.get("EXAMPLES", "40")), deadline=None)
EACH = (
    {},
    {"links": False},
    {"links": False, "free": False},
    {"free": False},
    {"links": False, "delays": False},
    {"links": False, "delays": False, "urgent": False},
)
SHAPES = st.sampled_from(EACH)


def same(a, b):
    for column in ("start", "end", "cause", "why"):
        np.testing.assert_array_equal(getattr(a, column), getattr(b, column), column)


@MANY
@given(SHAPES.flatmap(lambda shape: graphs(**shape)))
def test_engines_agree(graph):
    expected = simulate(graph, engine="readable")
    same(simulate(graph, engine="compiled"), expected)
    same(timeline(graph, run(graph, wiring(graph))), expected)


@MANY
@given(graphs(free=False))
def test_transfers_between_ordered_lanes_agree(graph):
    same(simulate(graph, engine="compiled"), simulate(graph, engine="readable"))


@MANY
@given(st.data(), SHAPES)
def test_resumed_is_the_same_as_simulated_anew(data, shape):
    graph = data.draw(graphs(**shape))
    before = simulate(graph, engine="compiled")
    edit = data.draw(edits(graph))
    try:
        after = edit.commit()
    except GraphError:
        assume(False)
    same(simulate(after, engine="compiled", before=before), simulate(after, engine="readable"))


@MANY
@given(graphs())
def test_no_task_starts_too_early(graph):
    played = simulate(graph, engine="compiled")
    waits = wiring(graph).waits
    assert (played.start[waits.waiting] >= played.end[waits.after] + waits.lags).all()
    assert (played.end >= played.start + graph.seconds * (1 - 1e-9)).all()


@MANY
@given(graphs())
def test_lanes_are_held_by_one_at_a_time(graph):
    played = simulate(graph, engine="compiled")
    for lane in range(len(graph.lanes)):
        mine = [t.number for t in graph if lane in t.lanes]
        spans = sorted(
            (played.start[i], played.end[i] + graph.gap[i], graph.order[i]) for i in mine
        )
        for one, other in pairwise(spans):
            assert one[1] <= other[0]
        if graph.lanes.ordered[lane]:
            issued = sorted(mine, key=lambda i: graph.order[i])
            starts = [played.start[i] for i in issued]
            assert starts == sorted(starts)


@MANY
@given(graphs())
def test_the_critical_path_has_no_hole(graph):
    played = simulate(graph, engine="compiled")
    path = critical_path(played)
    assert played.end[path[-1]] == played.seconds
    lag = dict(
        zip(
            zip(wiring(graph).waits.waiting, wiring(graph).waits.after, strict=True),
            wiring(graph).waits.lags,
            strict=True,
        )
    )
    assert played.start[path[0]] == 0
    for p, i in pairwise(path):
        after = lag[i, p] if played.why[i] == 1 else graph.gap[p]
        assert played.start[i] == played.end[p] + after


@MANY
@given(graphs())
def test_the_step_is_no_shorter_than_the_busiest_lane(graph):
    played = simulate(graph, engine="compiled")
    assert all(b.seconds <= played.seconds * (1 + 1e-12) for b in busy(played))
    for part in breakdown(played):
        parts = part.compute + part.exposed + part.host + part.idle
        assert np.isclose(parts, part.seconds)
        assert part.hidden >= -1e-12


@MANY
@given(graphs())
def test_two_runs_are_equal(graph):
    same(simulate(graph, engine="compiled"), simulate(graph, engine="compiled"))


def test_every_loop_is_drawn():
    """The strategies reach both loops, or the tests above would prove less than they say."""
    seen = set()

    for shape in EACH:

        @settings(max_examples=20, deadline=None, database=None)
        @given(graphs(**shape))
        def look(graph):
            seen.add(is_ordered(graph))

        look()
    assert seen == {True, False}
    assert NONE == -1
