"""Random graphs for property tests: every kind of wait, lane and sharing, with many ties."""

import numpy as np
from hypothesis import strategies as st

from foretell.graph import Builder, Graph

# Few different numbers, so that ends fall together and ties have to be broken.
SECONDS = st.sampled_from([0.0, 0.1, 0.5, 1.0, 1.0, 2.0, 0.3])

USES = st.dictionaries(st.integers(0, 1), st.sampled_from([0.5, 1.0, 2.0]), max_size=2)


@st.composite
def graphs(
    draw,
    most: int = 24,
    links: bool = True,
    free: bool = True,
    delays: bool = True,
    urgent: bool = True,
):
    """A verified graph of up to `most` tasks."""
    size = draw(st.integers(1, most))
    lanes = [
        (draw(st.integers(0, 2)), not free or draw(st.booleans()))
        for _ in range(draw(st.integers(1, 5)))
    ]
    place = draw(st.permutations(range(size)))  # numbers need not be the issue order
    rows = {i: _task(draw, k, place, lanes, links, delays, urgent) for k, i in enumerate(place)}
    return _built(rows, lanes, draw if links else None)


def _task(draw, k, place, lanes, links, delays, urgent):
    held = draw(st.lists(st.integers(0, len(lanes) - 1), max_size=3, unique=True))
    waits = draw(st.lists(st.integers(0, k - 1), max_size=3, unique=True)) if k else []
    ordered = [i for i, lane in enumerate(lanes) if lane[1]]
    return {
        "order": k,
        "lanes": held,
        "seconds": draw(SECONDS),
        "gap": draw(SECONDS) if delays and draw(st.booleans()) else 0.0,
        "priority": draw(st.integers(-1, 1)) if urgent else 0,
        "after": [(place[w], draw(SECONDS) if delays else 0.0) for w in waits],
        "drains": draw(st.lists(st.sampled_from(ordered), max_size=1)) if ordered else [],
        "uses": draw(USES) if links and draw(st.booleans()) else {},
    }


def _built(rows, lanes, draw) -> Graph:
    make = Builder()
    for number, (rank, ordered) in enumerate(lanes):
        make.lane(f"lane {number}", rank=rank, kind="compute", ordered=ordered)
    if draw is not None:
        for name in ("a", "b"):
            make.link(name, draw(st.sampled_from([1.0, 1.5, 3.0])))
    for i in range(len(rows)):
        row = dict(rows[i])
        after = row.pop("after")
        row["rank"] = lanes[row["lanes"][0]][0] if row["lanes"] else 0
        make.task(kind=("kernel", "host", "collective")[i % 3], op=f"op{i % 4}", **row)
        for other, lag in after:
            make.wait(i, other, lag=lag)
    for i in range(0, len(rows), 3):
        make.buffer(
            100.0 + i, born=i, dies=len(rows) - 1 - i // 2 if i % 2 else i, kind="activation"
        )
    return make.graph()


@st.composite
def edits(draw, graph: Graph):
    """An edit of a graph: some of the verbs, at random."""
    edit = graph.edit("random")
    some = st.lists(st.integers(0, graph.size - 1), max_size=4, unique=True)
    edit.scale(np.array(draw(some), np.int64), draw(st.sampled_from([0.5, 2.0, 0.0])))
    if draw(st.booleans()):
        edit.set(np.array(draw(some), np.int64), priority=draw(st.integers(-2, 2)))
    if draw(st.booleans()):
        anchor = draw(st.integers(0, graph.size - 1))
        lane = draw(st.integers(-1, len(graph.lanes) - 1))
        edit.insert(2, after=anchor, lane=lane, seconds=[draw(SECONDS), draw(SECONDS)], kind="copy")
    if draw(st.booleans()):
        edit.remove(np.array(draw(some), np.int64))
    if draw(st.booleans()):
        edit.set(np.array(draw(some), np.int64), gap=draw(SECONDS))
    return edit
