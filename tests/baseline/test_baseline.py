"""The step before anything is changed: steps in a row, and the profiler's cost taken off."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from foretell.baseline import (
    EVENT,
    USUAL,
    Baseline,
    interval,
    steady_seconds,
    unprofiled,
    why,
    with_host_factor,
)
from foretell.graph import Builder
from foretell.trace import Trace, read

TRUTH = Path(__file__).resolve().parents[2].parent / "shared" / "truth" / "h200"


def step(host: float, device: float, launches: int = 10):
    """A thread that launches kernels one after the other."""
    make = Builder()
    thread, stream = make.lane("thread", kind="host"), make.lane("stream", kind="compute")
    for _ in range(launches):
        launch = make.task(kind="host", op="launch", lane=thread, seconds=host)
        kernel = make.task(kind="kernel", op="gemm", lane=stream, seconds=device)
        make.wait(kernel, launch, kind="launch")
    return make.graph(measured=launches * max(host, device))


def traced(graph, events: int = 1) -> Trace:
    """The same step as a trace in which every host task was recorded as so many events."""
    recorded = np.zeros((graph.size, 2), int)
    recorded[graph.select(kind="host"), 0] = events
    nothing = np.zeros(graph.size)
    return Trace(graph, nothing, nothing, recorded, graph, 0, 0.0)


def test_steps_in_a_row_hide_what_a_single_one_shows():
    assert steady_seconds(step(host=1e-5, device=3e-5)) == pytest.approx(30e-5)
    assert steady_seconds(step(host=5e-5, device=3e-5)) == pytest.approx(50e-5)


def test_an_empty_step():
    assert steady_seconds(Builder().graph()) == 0


def test_the_factor_is_found_from_the_known_time():
    found = unprofiled(traced(step(host=10e-6, device=1e-6)), real=70e-6)
    assert found.factor == pytest.approx(0.7, rel=1e-2)
    assert found.seconds == 70e-6
    assert found.simulated == pytest.approx(70e-6, rel=1e-3)
    assert found.predicted(found.graph) == pytest.approx(70e-6)


def test_without_a_known_time_the_usual_cost_of_an_event_is_taken_off():
    found = unprofiled(traced(step(host=10e-6, device=1e-6)))
    assert found.seconds == pytest.approx(100e-6 - 10 * EVENT)
    assert found.factor == pytest.approx(1 - EVENT / 10e-6, rel=1e-2)
    assert "estimated" in found.note


def test_a_gpu_bound_step_says_nothing_of_the_host():
    found = unprofiled(traced(step(host=10e-6, device=50e-6)), real=490e-6)
    assert found.factor == USUAL
    assert found.seconds == 490e-6
    assert found.predicted(found.graph) == pytest.approx(490e-6)
    assert "hides the profiler" in found.note


def test_a_process_that_was_profiled_before_is_taken_for_slower():
    graph = step(host=10e-6, device=50e-6)
    later = replace(graph, facts=graph.facts | {"profiled_before": True})
    again = unprofiled(traced(later), real=490e-6)
    assert again.factor > unprofiled(traced(graph), real=490e-6).factor == USUAL


def test_what_is_missed_of_a_step_is_time_in_which_the_device_waits():
    graph = step(host=10e-6, device=9.5e-6)
    missed = Baseline(graph, 110e-6, steady_seconds(graph), 1.0, 0.1, "")
    assert missed.predicted(graph) == pytest.approx(110e-6)
    slower = step(host=20e-6, device=9.5e-6)  # the host decides: all of it is missed there too
    assert missed.predicted(slower) / steady_seconds(slower) == pytest.approx(
        110e-6 / missed.simulated
    )
    busy = step(host=1e-6, device=9.5e-6)  # the device decides: next to nothing is
    assert 1 < missed.predicted(busy) / steady_seconds(busy) < 1.02


def test_calls_are_no_longer_than_a_quick_one_of_their_kind():
    graph = step(host=10e-6, device=1e-6)
    host = graph.select(kind="host")
    with graph.edit("cold") as edit:
        edit.set(host[:3], seconds=90e-6)
        edit.set(host[3:4], seconds=4e-6)
    warm = with_host_factor(traced(edit.graph), 1.0)
    assert warm.seconds[host[:3]] == pytest.approx(10e-6)
    assert warm.seconds[host[3:4]] == pytest.approx(4e-6)


def test_pieces_of_one_operator_are_taken_together():
    """One call of an operator with many launches: its pieces differ, and none was in the way."""
    make = Builder()
    thread, stream = make.lane("thread", kind="host"), make.lane("stream", kind="compute")
    for k in range(10):
        piece = {"lane": thread, "name": "rnn", "kind": "host"}
        make.task(op="_cudnn_rnn", seconds=50e-6 if k % 2 else 1e-6, **piece)
        launch = make.task(op="cudaLaunchKernel", seconds=5e-6, **piece)
        kernel = make.task(kind="kernel", op="_cudnn_rnn", lane=stream, seconds=1e-6)
        make.wait(kernel, launch, kind="launch")
    graph = make.graph(measured=1e-3)
    assert with_host_factor(traced(graph), 1.0).seconds == pytest.approx(graph.seconds)


def test_few_of_a_kind_are_left_alone():
    graph = step(host=10e-6, device=1e-6, launches=3)
    host = graph.select(kind="host")
    with graph.edit("cold") as edit:
        edit.set(host[:1], seconds=90e-6)
    assert with_host_factor(traced(edit.graph), 1.0).seconds[host[0]] == pytest.approx(90e-6)


def test_the_interval_feels_the_host_where_the_host_decides():
    slow, fast = step(host=10e-6, device=1e-6), step(host=1e-6, device=10e-6)
    low, high = interval(slow, steady_seconds, host=0.1)
    assert low < steady_seconds(slow) < high
    assert high / low == pytest.approx(2.718281828 ** (2 * 1.2816 * 0.1), rel=1e-3)
    low, high = interval(fast, steady_seconds, host=0.1)
    assert high / low == pytest.approx(1, abs=0.01)


def test_the_interval_feels_unsure_kernels_and_what_is_left_open():
    graph = step(host=1e-6, device=10e-6)
    with graph.edit("unsure") as edit:
        edit.set(graph.select(kind="kernel"), sigma=0.2)
    low, high = interval(edit.graph, steady_seconds)
    assert low < steady_seconds(graph) < high
    wider = interval(edit.graph, steady_seconds, spread=0.3)
    assert wider.low < low < high < wider.high


def test_an_empty_step_has_no_interval():
    assert interval(Builder().graph(), steady_seconds, host=0.1) == (0, 0)


def test_why_names_the_bottleneck():
    slow, fast = step(host=10e-6, device=2e-6), step(host=1e-6, device=10e-6)
    assert why(slow, slow) == "still CPU-bound (GPU idle 80 %)"
    assert "CPU-bound (GPU idle 80 %) → GPU-bound (GPU busy" in why(slow, fast)
    shorter = step(host=10e-6, device=1e-6)
    assert "off the critical path" in why(slow, shorter)


@pytest.mark.truth
@pytest.mark.skipif(not TRUTH.is_dir(), reason=f"no measured data at {TRUTH.name}/")
@pytest.mark.parametrize("name", ["bert_base.amp_bf16", "swin_t.base", "dlrm.base", "vgg16.base"])
def test_measured_steps_are_met(name):
    model, variant = name.split(".")
    rows = json.loads((TRUTH / "truth.json").read_text())["rows"]
    (row,) = [r for r in rows if (r["model"], r["variant"]) == (model, variant)]
    found = unprofiled(read(TRUTH / f"{name}.json.gz"), row["median_ms"] / 1e3)
    assert found.simulated == pytest.approx(row["median_ms"] / 1e3, rel=0.01)


def test_a_step_that_its_events_do_not_explain_gets_a_wide_interval_and_a_note():
    trace = traced(step(host=1e-5, device=1e-6))
    found = unprofiled(trace, 100 * steady_seconds(trace.graph))
    assert "intervals are wider" in found.note
    assert found.sigma > 1.0
    assert "intervals are wider" not in unprofiled(trace, 1.5 * steady_seconds(trace.graph)).note
