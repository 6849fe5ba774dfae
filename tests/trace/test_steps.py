"""Which parts of a trace are steps, and which one is taken."""

from __future__ import annotations

from pathlib import Path

import pytest

from foretell.errors import InputError
from foretell.trace import read
from tests.trace.kineto import Kineto, steps_of, training_step


def steps(tmp_path: Path, k: Kineto) -> dict[int, float]:
    return dict(steps_of(k.write(tmp_path / "t.json"))[0])


def several(scales: list[float]) -> Kineto:
    k, at = Kineto(), 0.0
    for number, scale in enumerate(scales, 1):
        at = training_step(k, at, number, scale)
    return k


def test_the_step_of_median_length_is_taken(tmp_path: Path) -> None:
    path = several([3.0, 1.0, 2.0]).write(tmp_path / "t.json")
    assert read(path).graph.facts["step"] == 3
    assert read(path, step=1).graph.facts["step"] == 1
    assert read(path).graph.facts["measured"] == pytest.approx(2e-3)


def test_of_two_the_shorter_is_taken(tmp_path: Path) -> None:
    assert read(several([2.0, 1.0]).write(tmp_path / "t.json")).graph.facts["step"] == 2


def test_an_empty_step_does_not_count(tmp_path: Path) -> None:
    k = several([2.0, 3.0])
    k.note("ProfilerStep#3", 5000, 5010)
    assert read(k.write(tmp_path / "t.json")).graph.facts["step"] == 1


def test_a_step_that_is_not_there_is_an_error_with_those_that_are(tmp_path: Path) -> None:
    path = several([1.0, 1.0]).write(tmp_path / "t.json")
    with pytest.raises(InputError, match="no step 7") as error:
        read(path, step=7)
    assert "1, 2" in error.value.hint


def test_overlapping_steps_are_cut_where_the_next_begins(tmp_path: Path) -> None:
    k = several([1.0, 1.0])
    k.events[0]["dur"] = 1500.0  # the first range reaches into the second
    assert steps(tmp_path, k)[1] == pytest.approx(1e-3)


def test_without_ranges_the_optimizer_ends_steps(tmp_path: Path) -> None:
    k = several([1.0, 1.0, 1.0, 1.0])
    k.events = [e for e in k.events if not e["name"].startswith("ProfilerStep")]
    found, by = steps_of(k.write(tmp_path / "t.json"))
    assert by == "optimizer"
    assert [s for _, s in found] == pytest.approx([1e-3] * 3)


def test_without_anything_the_trace_is_one_step(tmp_path: Path) -> None:
    k = Kineto()
    k.op("aten::mm", 0, 50)
    k.launch("gemm", 20, 30, 1, (32, 90))
    found, by = steps_of(k.write(tmp_path / "t.json"))
    assert by == "trace"
    assert [s for _, s in found] == pytest.approx([90e-6])


def test_a_step_is_measured_from_where_the_last_one_left_the_device(tmp_path: Path) -> None:
    k = Kineto()
    for number in (1, 2):
        at = 100.0 * (number - 1)
        k.note(f"ProfilerStep#{number}", at, at + 100)
        k.op("aten::mm", at + 10, at + 50)
        k.launch("gemm", at + 20, at + 30, number, (200 * number - 160, 200 * number))
    # The device is 100 behind the host after the first step and 200 behind after the second.
    assert steps(tmp_path, k) == {1: pytest.approx(200e-6), 2: pytest.approx(200e-6)}
