"""Events set as Kineto sets them are cut apart without looking at brackets, and read the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from foretell.trace import read, source
from foretell.trace.decode import Seen, _kineto_cut, tried
from tests.trace.kineto import Kineto, training_step


def events() -> list[dict[str, Any]]:
    k = Kineto()
    for number in (1, 2):
        training_step(k, 1000.0 * number, number)
    page: dict[str, Any] = json.loads(k.text())
    return list(page["traceEvents"])


def laid_out(rows: list[dict[str, Any]], tail: str = "") -> str:
    """Events with the line breaks and indents that Kineto writes."""
    lines = ["  {\n    " + json.dumps(e)[1:-1] + "\n  }" for e in rows]
    return '{\n  "schemaVersion": 1,\n  "traceEvents": [\n' + ",\n".join(lines) + f"\n  ]{tail}}}"


def prints(path: Path, text: str) -> str:
    path.write_text(text)
    return read(path).graph.fingerprint()


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.integers(40, 5000))
def test_the_graph_is_that_of_any_other_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(source, "BLOCK", block)
    plain = prints(tmp_path / "t.json", json.dumps({"schemaVersion": 1, "traceEvents": events()}))
    assert prints(tmp_path / "t.json", laid_out(events())) == plain


def test_names_with_braces_do_not_mislead(tmp_path: Path) -> None:
    rows = events()
    for k, e in enumerate(rows):
        if e.get("cat") == "kernel":
            e["name"] = f"void f<{'{' * (k % 3)}lambda(float)#1{'}' * (k % 2)}>"
    plain = prints(tmp_path / "t.json", json.dumps({"schemaVersion": 1, "traceEvents": rows}))
    assert prints(tmp_path / "t.json", laid_out(rows)) == plain


def test_a_list_of_objects_behind_the_events_is_no_event(tmp_path: Path) -> None:
    tail = ',\n  "more": [\n  {\n    "a": 1\n  },\n  {\n    "b": 2\n  }\n  ]'
    text = laid_out(events(), tail)
    cut = text.encode()[text.index("[") + 1 : _kineto_cut(text.encode())]
    assert tried(cut, Seen()) is None  # in doubt: brackets are looked at
    plain = prints(tmp_path / "t.json", json.dumps({"schemaVersion": 1, "traceEvents": events()}))
    assert prints(tmp_path / "t.json", text) == plain


def test_objects_in_an_event_set_like_events_are_no_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = events()
    plain = prints(tmp_path / "t.json", json.dumps({"schemaVersion": 1, "traceEvents": rows}))
    lines = laid_out(rows).replace('"External id"', '"x": [\n  {\n  },\n  {\n  }], "External id"')
    assert "[\n  {\n  },\n  {" in lines
    for block in (300, 1000, 1 << 18):
        monkeypatch.setattr(source, "BLOCK", block)
        assert prints(tmp_path / "t.json", lines) == plain


@pytest.mark.parametrize("block", [500, 4000, 1 << 18])
def test_a_few_damaged_events_are_left_out_however_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    rows = events() * 20
    text = laid_out(rows)
    for k in (5, 9):  # in the second half: one in a hundred of what was read by then
        at = text.index('"dur": ', k * len(text) // 10) + len('"dur": ')
        text = text[:at] + "?" + text[at:]
    monkeypatch.setattr(source, "BLOCK", block)
    (tmp_path / "t.json").write_text(text)
    assert read(tmp_path / "t.json").notes == (
        f"2 of {len(rows)} events are not JSON and were left out",
    )


def test_events_of_other_phases_are_passed_over_whatever_they_hold(tmp_path: Path) -> None:
    plain = prints(tmp_path / "t.json", laid_out(events()))
    odd = [{"ph": "M", "args": 3}, {"ph": "s", "ts": "then"}, {"ph": "Z"}, {"ph": 7}, {"ts": 1.0}]
    assert prints(tmp_path / "t.json", laid_out(odd + events())) == plain


def test_where_it_cuts() -> None:
    assert _kineto_cut(b'  {\n    "a": 1\n  },\n  {\n    "b"') == len(b'  {\n    "a": 1\n  }')
    assert _kineto_cut(b'  {"a": 1},{"b": 2}') == 0
