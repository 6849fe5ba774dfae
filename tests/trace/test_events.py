"""Events as columns: both schemas, every way of writing a number, and what is left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foretell.errors import InputError
from foretell.trace import read
from foretell.trace.decode import opened
from foretell.trace.events import Events, What, read_events
from foretell.trace.source import members
from tests.trace.kineto import Kineto, training_step


def events_of(path: Path) -> Events:
    return read_events(opened(members(path)[0]))


def write(path: Path, document: Any) -> Path:
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return path


@pytest.fixture
def step() -> Kineto:
    k = Kineto(displayTimeUnit="ms", baseTimeNanoseconds=1_700_000_000_000_000_000)
    training_step(k)
    return k


def test_old_and_new_schema_make_the_same_graph(tmp_path: Path) -> None:
    graphs = []
    for old in (False, True):
        k = Kineto(old=old)
        training_step(k)
        graphs.append(read(k.write(tmp_path / f"{old}.json")).graph)
    new, old_graph = graphs
    assert new.texts("op") == old_graph.texts("op")
    assert np.allclose(new.seconds, old_graph.seconds)
    assert new.edges.equals(old_graph.edges)


def test_times_are_seconds_after_the_first_event(tmp_path: Path, step: Kineto) -> None:
    e = events_of(step.write(tmp_path / "t.json"))
    assert e.start[0] == 0.0
    assert e.end[0] == pytest.approx(1e-3)
    assert e.origin == pytest.approx(1_700_000_000.001, abs=1e-6)


def test_a_bare_list_is_a_trace_and_may_lack_its_end(tmp_path: Path, step: Kineto) -> None:
    whole = json.dumps(step.events)
    for k, text in enumerate((whole, whole[:-1], whole[:-1] + ",\n")):
        assert len(events_of(write(tmp_path / f"{k}.json", text))) == len(step.events)


def test_what_stands_around_the_events_may_be_broken(tmp_path: Path, step: Kineto) -> None:
    text = '{\n  {"id": 6},\n' + step.text().lstrip("{")
    trace = read(write(tmp_path / "t.json", text))
    assert trace.graph.size > 10
    assert any("not JSON" in note for note in trace.notes)


def test_events_behind_a_nested_key_of_the_head_are_found(tmp_path: Path, step: Kineto) -> None:
    step.facts["deviceProperties"] = [{"id": 0, "name": 'G "PU" } ]'}]
    trace = read(step.write(tmp_path / "t.json"))
    assert trace.graph.facts["device"] == 'G "PU" } ]'


def test_arguments_of_odd_types_are_passed_over(tmp_path: Path, step: Kineto) -> None:
    step.events[4]["args"] = {"External id": "7", "correlation": [1], "Input Dims": "none"}
    step.events[5]["args"] = None
    step.events[6]["pid"] = 1.5
    e = events_of(step.write(tmp_path / "t.json"))
    assert len(e) == len(step.events)
    assert e.external[4] == 7
    assert e.correlation[4] == -1


def test_ids_beyond_63_bits_are_none(tmp_path: Path, step: Kineto) -> None:
    step.op("x", 1, 2, sequence=2**64 - 1)
    assert events_of(step.write(tmp_path / "t.json")).sequence[-1] == -1


def test_incomplete_events_are_left_out_and_counted(tmp_path: Path, step: Kineto) -> None:
    del step.events[2]["dur"], step.events[3]["ts"]
    e = events_of(step.write(tmp_path / "t.json"))
    assert len(e) == len(step.events) - 2
    assert e.notes == (f"2 of {len(step.events)} events lack a time and were left out",)


def test_a_clock_jump_is_left_out_and_said(tmp_path: Path, step: Kineto) -> None:
    step.events[3]["ts"] += 1e12
    e = events_of(step.write(tmp_path / "t.json"))
    assert len(e) == len(step.events) - 1
    assert "hours away" in e.notes[0]


def test_a_malformed_event_names_its_place(tmp_path: Path, step: Kineto) -> None:
    text = step.text().replace('"conv_kernel"', '"conv_kernel" x').replace('"loss_kernel"', "nan")
    with pytest.raises(InputError, match=r"event \d+ of `.*t\.json`, at byte \d+"):
        read(write(tmp_path / "t.json", text))


def test_one_malformed_event_of_many_is_left_out(tmp_path: Path) -> None:
    k = Kineto()
    for number in range(1, 12):
        training_step(k, 1000.0 * number, number)
    text = k.text().replace('"External id": 7}', '"External id": nan}', 1)
    trace = read(write(tmp_path / "t.json", text))
    assert trace.notes == (f"1 of {len(k.events)} events are not JSON and were left out",)


@pytest.mark.parametrize("cut", [0.3, 0.9, 0.999])
def test_json_cut_short_says_where(tmp_path: Path, step: Kineto, cut: float) -> None:
    text = step.text()
    with pytest.raises(InputError, match="in the middle of its events"):
        read(write(tmp_path / "t.json", text[: text.index("[") + int(cut * (len(text) - 300))]))


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"traceEvents": []}, "has 0 events"),
        ({"traceEvents": [{"ph": "M", "name": "x"}]}, "none an operator"),
        ({"traceEvents": [3, 4]}, "none an operator"),
        ({"traceEvents": [[1], [2]]}, "event 1 .* cannot be read"),
        ([["alloc", 3]], "not a trace"),
        ({"other": 1}, "not a trace"),
        ("", "not a trace"),
        ("hello", "not a trace"),
        ("[", "has 0 events"),
    ],
)  # fmt: skip
def test_what_is_no_trace(tmp_path: Path, document: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read(write(tmp_path / "t.json", document))


def test_a_split_anywhere_gives_the_same_events(
    tmp_path: Path, step: Kineto, monkeypatch: pytest.MonkeyPatch
) -> None:
    step.note('a "quoted\\" ] } name', 2, 3)
    path = step.write(tmp_path / "t.json")
    whole = events_of(path)
    for block in (7, 64, 1000):
        monkeypatch.setattr("foretell.trace.source.BLOCK", block)
        split = events_of(path)
        assert np.array_equal(split.start, whole.start)
        assert [split.texts[k] for k in split.name] == [whole.texts[k] for k in whole.name]


def test_python_functions_are_dropped_but_modules_stay(tmp_path: Path, step: Kineto) -> None:
    step.add("python_function", "torch/nn.py(3): forward", 0, 9)
    step.add("python_function", "nn.Module: Conv2d_0", 140, 260)
    e = events_of(step.write(tmp_path / "t.json"))
    assert (e.what == What.MODULE).sum() == 1
    assert len(e) == len(step.events) - 1


def test_memory_instants_tell_the_peak_of_the_device(tmp_path: Path, step: Kineto) -> None:
    """What `profile_memory` records; allocations on the host and other instants do not count."""
    assert "peak_bytes" not in read(step.write(tmp_path / "without.json")).graph.facts
    for kind, total in ((1, 4096), (1, 8192), (1, 2048), (0, 1 << 40), (1, "unknown")):
        args = {"Device Type": kind, "Total Allocated": total, "Bytes": 1}
        step.events.append({"ph": "i", "s": "t", "name": "[memory]", "ts": 1, "args": args})
    step.events.append({"ph": "i", "s": "g", "name": "Iteration Start", "ts": 1, "args": None})
    found = read(step.write(tmp_path / "with.json"))
    assert found.graph.facts["peak_bytes"] == 8192
