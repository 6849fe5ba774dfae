"""Chrome traces: the fields viewers need, on every event."""

import gzip
import json

import pytest

from foretell.graph import Builder
from foretell.report.chrome import events, write
from foretell.samples import transformer
from foretell.simulate import Timeline, simulate

NEEDED = {
    "X": {"name", "pid", "tid", "ts", "dur"},
    "M": {"name", "pid", "args"},
    "s": {"name", "cat", "id", "pid", "tid", "ts"},
    "f": {"name", "cat", "id", "pid", "tid", "ts", "bp"},
    "C": {"name", "pid", "ts", "args"},
}


@pytest.fixture(scope="module")
def played():
    graph = transformer(ranks=2, layers=1)
    with graph.edit() as edit:
        edit.set(edit.select(kind=("kernel", "collective")), seconds=1e-4)
        link = edit.link("nvlink", 300e9)
        edit.use(edit.select(kind="collective"), link, 150e9)
    return simulate(edit.graph)


def test_every_event_has_what_viewers_need(played):
    for event in events([("predicted", played)]):
        assert NEEDED[event["ph"]] <= set(event)
        assert event.get("dur", 0) >= 0


def test_a_collective_is_on_all_its_ranks(played):
    spans = [e for e in events([("predicted", played)]) if e["ph"] == "X"]
    reduces = [e for e in spans if e["args"]["op"] == "all_reduce"]
    assert {e["pid"] for e in reduces} == {0, 1}
    assert len(spans) == len(played) + len(played.graph.held)


def test_flows_come_in_pairs_and_never_point_back(played):
    starts = {e["id"]: e for e in events([("p", played)]) if e["ph"] == "s"}
    ends = {e["id"]: e for e in events([("p", played)]) if e["ph"] == "f"}
    assert set(starts) == set(ends) != set()
    assert all(starts[k]["ts"] <= ends[k]["ts"] + 1e-6 for k in starts)


def test_counters_of_memory_and_links(played):
    names = {e["name"] for e in events([("p", played)]) if e["ph"] == "C"}
    assert names == {"memory held", "link nvlink"}
    use = [e["args"]["demand"] for e in events([("p", played)]) if e["name"] == "link nvlink"]
    assert max(use) == 0.5
    assert use[-1] == 0


def test_two_timelines_in_one_file(played, tmp_path):
    measured = Timeline(played.graph, played.start * 1.1, played.end * 1.1)
    path = tmp_path / "both.json.gz"
    write([("predicted", played), ("measured", measured)], path)
    found = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    names = {e["args"]["name"] for e in found if e["name"] == "process_name"}
    assert names == {f"{n}: rank {r}" for n in ("predicted", "measured") for r in (0, 1)}
    assert {e["pid"] for e in found} == {0, 1, 2, 3}


def test_a_task_without_a_lane(tmp_path):
    make = Builder()
    make.task(kind="sync", op="barrier", rank=0)
    path = tmp_path / "one.json"
    write([("p", simulate(make.graph()))], path)
    (span,) = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]
    assert (span["name"], span["tid"], span["dur"]) == ("barrier", 0, 0)
