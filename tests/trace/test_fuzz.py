"""Whatever is in a file: a graph or a clear error, never another exception, never a hang."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from foretell.errors import ForetellError
from foretell.graph import verify
from foretell.trace import read, write_chakra
from tests.trace.kineto import Kineto, training_step

SETTINGS = settings(
    max_examples=30,
    deadline=20_000,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def survives(path: Path) -> None:
    """Reading gives verified graphs or an error a user can act on."""
    try:
        trace = read(path)
    except ForetellError:
        return
    verify(trace.graph)
    verify(trace.warm)
    assert len(trace.start) in (0, trace.graph.size)


def whole() -> Kineto:
    k = Kineto(deviceProperties=[{"id": 0, "name": "GPU"}])
    for number in (1, 2):
        training_step(k, 1000.0 * number, number)
    k.call("cudaEventRecord", 1100, 1101, 71)
    k.call("cudaStreamWaitEvent", 1102, 1103, 72)
    k.launch("side", 1104, 1106, 73, (1300, 1400), stream=20)
    k.sync("Stream Wait Event", 1102, 1103, 72, stream=20, wait_on_stream=7)
    return k


TEXT = whole().text().encode()


@SETTINGS
@given(st.data())
def test_bytes_changed(tmp_path: Path, data: st.DataObject) -> None:
    text = bytearray(TEXT)
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(text) - 1))
        text[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=4))
    path = tmp_path / "t.json"
    path.write_bytes(bytes(text))
    survives(path)


@SETTINGS
@given(st.integers(0, len(TEXT)), st.booleans(), st.binary(max_size=40))
def test_cut_short(tmp_path: Path, keep: int, packed: bool, tail: bytes) -> None:
    data = gzip.compress(TEXT)[: keep // 10] if packed else TEXT[:keep]
    path = tmp_path / "t.json"
    path.write_bytes(data + tail)
    survives(path)


ODD: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**65), 2**65),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(["", "7", "kernel", "cudaStreamSynchronize", "ProfilerStep#9", "x" * 50]),
    st.lists(st.integers(-5, 5), max_size=3),
    st.just({}),
)


@SETTINGS
@given(st.data())
def test_values_changed(tmp_path: Path, data: st.DataObject) -> None:
    """Fields of events, and of their arguments, lost or given values of any kind."""
    events: list[Any] = json.loads(TEXT)["traceEvents"]
    for _ in range(data.draw(st.integers(1, 12))):
        event = data.draw(st.sampled_from(events))
        inner = event.get("args")
        where = inner if isinstance(inner, dict) and inner and data.draw(st.booleans()) else event
        if not where:
            continue
        key = data.draw(st.sampled_from(sorted(where)))
        if data.draw(st.booleans()):
            where[key] = data.draw(ODD)
        else:
            del where[key]
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"traceEvents": events}))
    survives(path)


@SETTINGS
@given(st.data())
def test_times_changed(tmp_path: Path, data: st.DataObject) -> None:
    """Events moved and stretched at will: they overlap, lie in nothing, run before their launch."""
    events: list[Any] = json.loads(TEXT)["traceEvents"]
    for event in data.draw(st.lists(st.sampled_from(events), min_size=1, max_size=30)):
        event["ts"] = data.draw(st.floats(0, 5000))
        event["dur"] = data.draw(st.floats(-10, 3000))
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"traceEvents": events}))
    survives(path)


@SETTINGS
@given(st.data())
def test_events_lost_doubled_and_shuffled(tmp_path: Path, data: st.DataObject) -> None:
    events: list[Any] = json.loads(TEXT)["traceEvents"]
    chosen = data.draw(st.lists(st.sampled_from(events), max_size=60))
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"traceEvents": chosen}))
    survives(path)


@SETTINGS
@given(st.data())
def test_chakra_bytes_changed(tmp_path: Path, data: st.DataObject) -> None:
    origin = tmp_path / "origin.json"
    origin.write_bytes(TEXT)
    (path,) = write_chakra(read(origin).graph, tmp_path / "step")
    text = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 5))):
        at = data.draw(st.integers(0, len(text) - 1))
        text[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=3))
    path.write_bytes(bytes(text))
    survives(path)


@SETTINGS
@given(st.recursive(ODD, lambda inner: st.lists(inner, max_size=4), max_leaves=12))
def test_any_json(tmp_path: Path, value: Any) -> None:
    for k, document in enumerate((value, {"traceEvents": value}, {"nodes": value},
                                  {"traceEvents": [value]}, {"nodes": [value]},
                                  {"workload_graph": [value]})):  # fmt: skip
        path = tmp_path / f"{k}.json"
        path.write_text(json.dumps(document))
        survives(path)


@pytest.mark.slow
@settings(SETTINGS, max_examples=2000)
@given(st.data())
def test_bytes_changed_at_length(tmp_path: Path, data: st.DataObject) -> None:
    text = bytearray(TEXT)
    for _ in range(data.draw(st.integers(1, 40))):
        at = data.draw(st.integers(0, len(text) - 1))
        text[at : at + data.draw(st.integers(0, 30))] = data.draw(st.binary(max_size=30))
    path = tmp_path / "t.json"
    path.write_bytes(bytes(text))
    survives(path)
