"""Chrome traces: the fields viewers need, on every event."""

import gzip
import json

import pytest

from foretell.graph import Builder
from foretell.report.chrome import events, write
from foretell.simulate import Timeline, simulate
from tests.transformer import transformer

NEEDED = {
    "X": {"name", "pid", "tid", "ts", "dur"},
    "M": {"name", "pid", "args"},
    "s": {"name", "cat", "id", "pid", "tid", "ts"},
    "f": {"name", "cat", "id", "pid", "tid", "ts", "bp"},
    "C": {"name", "pid", "ts", "args"},
}


@pytest.fixture(scope="module")
def simulated():
    graph = transformer(ranks=2, layers=1)
    with graph.edit() as edit:
        edit.set(edit.select(kind=("kernel", "collective")), seconds=1e-4)
        link = edit.link("nvlink", 300e9)
        edit.use(edit.select(kind="collective"), link, 150e9)
    return simulate(edit.graph)


def test_every_event_has_what_viewers_need(simulated):
    for event in events([("predicted", simulated)]):
        assert NEEDED[event["ph"]] <= set(event)
        assert event.get("dur", 0) >= 0


def test_a_collective_is_on_all_its_ranks(simulated):
    spans = [e for e in events([("predicted", simulated)]) if e["ph"] == "X"]
    reduces = [e for e in spans if e["args"]["op"] == "all_reduce"]
    assert {e["pid"] for e in reduces} == {0, 1}
    assert len(spans) == len(simulated) + len(simulated.graph.held)


def test_flows_come_in_pairs_and_never_point_back(simulated):
    starts = {e["id"]: e for e in events([("p", simulated)]) if e["ph"] == "s"}
    ends = {e["id"]: e for e in events([("p", simulated)]) if e["ph"] == "f"}
    assert set(starts) == set(ends) != set()
    assert all(starts[k]["ts"] <= ends[k]["ts"] + 1e-6 for k in starts)


def test_counters_of_memory_and_links(simulated):
    names = {e["name"] for e in events([("p", simulated)]) if e["ph"] == "C"}
    assert names == {"memory held", "link nvlink"}
    use = [e["args"]["demand"] for e in events([("p", simulated)]) if e["name"] == "link nvlink"]
    assert max(use) == 0.5
    assert use[-1] == 0


def test_two_timelines_in_one_file(simulated, tmp_path):
    measured = Timeline(simulated.graph, simulated.start * 1.1, simulated.end * 1.1)
    path = tmp_path / "both.json.gz"
    write([("predicted", simulated), ("measured", measured)], path)
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


def test_arrows_of_two_timelines_are_not_confused(simulated):
    small = simulate(transformer(ranks=1, layers=1))
    found = list(events([("a", simulated), ("b", small), ("c", simulated)]))
    numbers = [e["id"] for e in found if e["ph"] == "s"]
    assert len(set(numbers)) == len(numbers) > 0


def test_arrows_leave_from_inside_a_span(simulated):
    """Viewers tie an arrow to the span that is open at its time."""
    found = list(events([("p", simulated)]))
    spans = [e for e in found if e["ph"] == "X" and e["dur"] > 0]
    by_place = {}
    for e in spans:
        by_place.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"]))
    for e in found:
        if e["ph"] == "s":
            inside = [a <= e["ts"] < b for a, b in by_place[e["pid"], e["tid"]]]
            assert any(inside), e


def test_a_measured_timeline_shows_what_waited_for_what(simulated):
    measured = Timeline(simulated.graph, simulated.start, simulated.end)
    flows = [e for e in events([("m", measured)]) if e["ph"] in "sf"]
    assert {e["cat"] for e in flows} == {"waited for"}
    starts = {e["id"]: e["ts"] for e in flows if e["ph"] == "s"}
    assert all(starts[e["id"]] <= e["ts"] for e in flows if e["ph"] == "f")


def test_a_trace_is_plain_json_with_finite_numbers(simulated, tmp_path):
    path = tmp_path / "trace.json"
    write([("</script> ☃", simulated)], path)
    found = json.loads(path.read_text(), parse_constant=lambda text: pytest.fail(text))
    assert found["displayTimeUnit"] == "ms"
    for event in found["traceEvents"]:
        assert isinstance(event["pid"], int)
        assert isinstance(event.get("tid", 0), int)
        assert isinstance(event.get("ts", 0.0), (int, float))
        if event["ph"] == "C":
            assert all(isinstance(v, (int, float)) for v in event["args"].values())
    sorts = [
        e["args"]["sort_index"] for e in found["traceEvents"] if e["name"] == "process_sort_index"
    ]
    assert sorts == sorted(sorts)
