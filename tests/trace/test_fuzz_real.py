"""Measured traces, damaged: a graph or a clear error, never another exception, never a hang."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from foretell.cli.main import foretell
from foretell.errors import ForetellError
from tests.trace.test_fuzz import survives

TRACES = Path(__file__).resolve().parents[2].parent / "shared" / "truth" / "traces"
ODD = sorted(p for name in ("gpupuzzlers", "hta") for p in (TRACES / name).glob("*"))
SMALL = [p for p in ODD if p.stat().st_size < 26_000]  # packed: a few thousand events at most
pytestmark = [
    pytest.mark.truth,
    pytest.mark.skipif(not ODD, reason="no measured data in ../shared/truth"),
]
SETTINGS = settings(
    max_examples=15,
    deadline=30_000,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.data_too_large],
)


def text_of(path: Path) -> bytes:
    data = path.read_bytes()
    return gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data


@SETTINGS
@given(st.sampled_from(SMALL or [None]), st.integers(0, 2**32), st.integers(1, 40))
def test_bytes_changed(tmp_path: Path, origin: Path, seed: int, count: int) -> None:
    chance = random.Random(seed)
    text = bytearray(text_of(origin))
    for _ in range(count):
        at = chance.randrange(len(text))
        text[at : at + chance.randrange(8)] = chance.randbytes(chance.randrange(8))
    path = tmp_path / "t.json"
    path.write_bytes(bytes(text))
    survives(path)


@SETTINGS
@given(st.sampled_from(SMALL or [None]), st.floats(0, 1), st.booleans())
def test_cut_short(tmp_path: Path, origin: Path, share: float, packed: bool) -> None:
    text = text_of(origin)
    data = gzip.compress(text) if packed else text
    path = tmp_path / ("t.json.gz" if packed else "t.json")
    path.write_bytes(data[: int(share * len(data))])
    survives(path)


def events_of(origin: Path) -> tuple[dict[str, Any], list[Any]]:
    """A trace as values; two of them are not JSON at the source."""
    try:
        page = json.loads(text_of(origin))
    except ValueError:
        return {}, []
    if isinstance(page, list):
        return {}, page
    return page, list(page.get("traceEvents", []))


LOSSES = {
    "no kernels": lambda e, _: str(e.get("cat", "")).lower() not in ("kernel", "gpu_memcpy"),
    "no calls": lambda e, _: str(e.get("cat", "")).lower() not in ("cuda_runtime", "runtime"),
    "no operators": lambda e, _: str(e.get("cat", "")).lower() not in ("cpu_op", "operator"),
    "no steps": lambda e, _: not str(e.get("name", "")).startswith("ProfilerStep"),
    "some events": lambda _, chance: chance.random() < 0.7,
}


@SETTINGS
@given(
    st.sampled_from(SMALL or [None]),
    st.sampled_from(sorted(LOSSES)),
    st.integers(0, 2**32),
    st.sampled_from(["", "jump", "overlap", "backwards", "same instant"]),
)
def test_events_lost_and_clocks_broken(
    tmp_path: Path, origin: Path, loss: str, seed: int, clock: str
) -> None:
    page, events = events_of(origin)
    chance = random.Random(seed)
    kept = [e for e in events if isinstance(e, dict) and LOSSES[loss](e, chance)]
    for e in kept:
        if isinstance(e.get("ts"), (int, float)) and isinstance(e.get("dur"), (int, float)):
            _broken(e, clock, chance)
    path = tmp_path / "t.json"
    path.write_text(json.dumps({**page, "traceEvents": kept}))
    survives(path)


def _broken(event: dict[str, Any], clock: str, chance: random.Random) -> None:
    if clock == "jump" and chance.random() < 0.02:
        event["ts"] += chance.choice((-1e12, 1e12, 5e6))
    elif clock == "overlap" and str(event.get("name", "")).startswith("ProfilerStep"):
        event["dur"] *= 3
    elif clock == "backwards":
        event["ts"] = -event["ts"]
    elif clock == "same instant":
        event["ts"], event["dur"] = 1000.0, 0


SPECS = ("scale:select=kind=kernel", "faster-host", "remove-sync")


@pytest.mark.parametrize("path", ODD, ids=lambda p: p.name[:40])
def test_every_odd_trace_is_answered_or_refused_in_one_message(path: Path) -> None:
    replayed = CliRunner().invoke(foretell, ["replay", str(path), "--json"])
    if replayed.exit_code:
        assert isinstance(replayed.exception, ForetellError), replayed.exception
        message = str(replayed.exception)
        assert path.name in message or "measured" in message
        assert "Traceback" not in message
    else:
        assert json.loads(replayed.stdout)["tasks"] > 0
    for spec in SPECS:
        query = CliRunner().invoke(foretell, ["whatif", str(path), spec, "--json"])
        if query.exit_code:
            assert isinstance(query.exception, ForetellError), (spec, query.exception)
        else:
            assert json.loads(query.stdout)["predicted_s"] >= 0
