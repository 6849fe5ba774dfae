"""Events set as Kineto sets them are cut apart without looking at brackets, and read the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from foretell.trace import read, source
from foretell.trace.split import _kineto_cut
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
    assert _kineto_cut(text.encode()) == 0  # in doubt: brackets are looked at
    plain = prints(tmp_path / "t.json", json.dumps({"schemaVersion": 1, "traceEvents": events()}))
    assert prints(tmp_path / "t.json", text) == plain


def test_where_it_cuts() -> None:
    assert _kineto_cut(b'  {\n    "a": 1\n  },\n  {\n    "b"') == len(b'  {\n    "a": 1\n  }')
    assert _kineto_cut(b'  {"a": 1},{"b": 2}') == 0
    assert _kineto_cut(b'  {\n    "a": "}"\n  },\n  {\n    "b"') == 0  # braces do not come out even
