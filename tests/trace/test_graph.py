"""From events to a graph: every kind of edge, and that waiting is decided when it is played."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from foretell.graph import Graph, Kind, concat
from foretell.simulate import simulate
from foretell.trace import Trace, read
from tests.trace.kineto import BACKWARD, Kineto, training_step

US = 1e-6


def made(k: Kineto, tmp_path: Path) -> Trace:
    return read(k.write(tmp_path / "t.json"))


def named(graph: Graph, name: str) -> int:
    return int(graph.select(name=name)[0])


def replayed(trace: Trace) -> float:
    return simulate(trace.warm).seconds - trace.found


def times(trace: Trace, graph: Graph, name: str) -> tuple[float, float]:
    """Simulated start and end of one task of a changed graph, in microseconds."""
    timeline = simulate(graph)
    i = named(graph, name)
    return float(timeline.start[i]) / US, float(timeline.end[i]) / US


def scaled(graph: Graph, factor: float, **which: object) -> Graph:
    with graph.edit("scale") as edit:
        edit.scale(edit.select(**which), factor)
    return edit.graph


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    k = Kineto()
    training_step(k)
    return made(k, tmp_path)


def test_a_whole_step_replays_to_the_last_task(trace: Trace) -> None:
    assert replayed(trace) == pytest.approx(1e-3)
    assert simulate(trace.graph).start == pytest.approx(trace.start, abs=1e-9)


def test_phases_and_layers_need_no_help(trace: Trace) -> None:
    g = trace.graph
    phase = {n: g[named(g, n)].phase for n in ("conv_kernel", "loss_kernel", "conv_backward")}
    assert phase == {"conv_kernel": "forward", "loss_kernel": "loss", "conv_backward": "backward"}
    assert g[named(g, "update_kernel")].phase == "update"
    assert g[named(g, "conv_kernel")].layer == g[named(g, "conv_backward")].layer == "conv2d.0"
    assert g[named(g, "loss_backward")].layer == "cross_entropy_loss.0"


def test_an_operator_has_one_word_and_its_shapes(trace: Trace) -> None:
    kernel = trace.graph[named(trace.graph, "conv_kernel")]
    assert (kernel.op, kernel.dtype) == ("convolution", "fp32")
    assert kernel.shape == "in=8x3x32x32+16x3x3x3,types=float+float"


def test_loading_is_one_task_whatever_runs_inside(trace: Trace) -> None:
    loads = trace.graph.select(kind="load")
    assert trace.graph.seconds[loads] == pytest.approx([100 * US])
    assert trace.graph[int(loads[0])].phase == "load"


def test_host_time_is_kept_once(trace: Trace) -> None:
    """Tasks and gaps of the main thread and the stretch it waits for make up the whole step."""
    g = trace.graph
    main = g.lane == 0
    # For the backward thread until the optimizer begins, and for the copy of the loss.
    waits = (600 - 330 + 844 - 841) * US
    assert (g.seconds + g.gap)[main].sum() + waits == pytest.approx(1e-3)


def test_the_optimizers_own_time_is_its_own(trace: Trace) -> None:
    own = trace.graph.select(name="Optimizer.step#SGD.step")
    assert trace.graph.seconds[own] == pytest.approx([50 * US])
    assert trace.graph[int(own[0])].phase == "update"


def test_backward_runs_on_its_own_thread_and_is_waited_for(trace: Trace) -> None:
    g = scaled(trace.graph, 3.0, phase="backward", kind="host")
    late = times(trace, g, "Optimizer.step#SGD.step")[0]
    # Two pieces of 20 and 30, a launch of 10, twice; gaps stay as they were.
    assert late == pytest.approx(600 + 2 * (50 + 100), abs=0.1)


def test_a_kernel_waits_for_its_launch(tmp_path: Path) -> None:
    k = Kineto()
    k.op("aten::mm", 0, 50)
    k.launch("gemm", 20, 30, 1, (33, 90))
    g = scaled(made(k, tmp_path).graph, 2.0, op="mm", kind="host")
    start, _ = times(made(k, tmp_path), g, "gemm")
    assert start == pytest.approx(53)  # 40 before the launch, the launch, the latency


def test_work_may_begin_before_its_launch_returns(tmp_path: Path) -> None:
    k = Kineto()
    k.op("aten::mm", 0, 100)
    k.launch("gemm", 20, 60, 1, (30, 50))
    t = made(k, tmp_path)
    assert simulate(t.graph).start == pytest.approx(t.start, abs=1e-9)
    call = int(t.graph.select(op="cudaLaunchKernel")[0])
    assert (t.graph.seconds[call], t.graph.gap[call]) == pytest.approx((10 * US, 30 * US))


def test_queued_kernels_keep_the_turnaround_of_the_device(tmp_path: Path) -> None:
    k = Kineto()
    k.op("aten::mm", 0, 100)
    for i in range(8):
        at = 10.0 + 10 * i
        k.launch(f"k{i}", at, at + 5, i + 1, (20 + 52 * i, 70 + 52 * i))  # 2 between any two
    t = made(k, tmp_path)
    half = scaled(t.graph, 0.5, kind="kernel")
    assert replayed(t) == pytest.approx(434 * US)
    assert simulate(half).seconds == pytest.approx((20 + 8 * 25 + 7 * 2) * US)


@pytest.mark.parametrize("call", ["cudaDeviceSynchronize", "hipDeviceSynchronize"])
def test_what_a_synchronisation_waits_for_is_decided_when_simulated(
    tmp_path: Path, call: str
) -> None:
    k = Kineto()
    k.op("aten::mm", 0, 50)
    k.launch("gemm", 20, 30, 1, (31, 1031))
    k.call(call, 60, 1035, 2)
    k.op("aten::relu", 1040, 1050)
    t = made(k, tmp_path)
    assert t.graph[named(t.graph, "relu")].kind == "host"
    sync = int(t.graph.select(kind="sync")[0])
    assert t.graph.seconds[sync] == pytest.approx(4 * US)  # not the 975 that were measured
    assert replayed(t) == pytest.approx(1050 * US)
    shorter = scaled(t.graph, 0.1, kind="kernel")
    assert simulate(shorter).seconds == pytest.approx(150 * US)


def test_a_stream_synchronisation_waits_for_its_stream_alone(tmp_path: Path) -> None:
    k = Kineto()
    k.op("aten::mm", 0, 80)
    k.launch("side", 10, 15, 1, (20, 900), stream=20)
    k.launch("own", 30, 35, 2, (40, 300))
    k.call("cudaStreamSynchronize", 100, 305, 3)
    t = made(k, tmp_path)
    lanes = [t.graph.names[int(n)] for n in t.graph.lanes.name[t.graph.drained.lane]]
    assert lanes == ["stream 7"]
    assert replayed(t) == pytest.approx(900 * US)


def test_a_blocking_copy_waits_for_what_was_issued_before_it(tmp_path: Path) -> None:
    k = Kineto()
    k.op("aten::mm", 0, 50)
    k.launch("gemm", 20, 30, 1, (31, 531))
    k.op("aten::item", 60, 560)
    k.call("cudaMemcpyAsync", 70, 550, 2)
    k.work("Memcpy DtoH (Device -> Pageable)", 533, 535, 2, cat="gpu_memcpy", bytes=4)
    t = made(k, tmp_path)
    assert replayed(t) == pytest.approx(560 * US, rel=0.01)
    host = np.isin(t.graph.kind, (Kind.HOST, Kind.SYNC))
    assert t.graph.seconds[host].sum() < 150 * US
    half = scaled(t.graph, 0.5, kind="kernel")
    assert simulate(half).seconds == pytest.approx(310 * US, rel=0.01)


def test_an_event_is_waited_for_from_where_it_was_recorded(tmp_path: Path) -> None:
    k = Kineto()
    k.op("aten::mm", 0, 100)
    k.launch("first", 10, 15, 1, (20, 200))
    k.call("cudaEventRecord", 20, 21, 2)
    k.launch("second", 30, 35, 3, (202, 500))
    k.call("cudaEventSynchronize", 110, 206, 4)
    k.sync("Event Sync", 110, 206, 4, stream=-1, wait_on_stream=7,
           wait_on_cuda_event_record_corr_id=2)  # fmt: skip
    k.op("aten::relu", 210, 220)
    t = made(k, tmp_path)
    faster = scaled(t.graph, 0.5, name="first")
    assert times(t, t.graph, "relu")[0] == pytest.approx(210)
    assert times(t, faster, "relu")[0] == pytest.approx(120)  # nothing left to wait for


@pytest.mark.parametrize("is_told", [True, False])
def test_one_stream_waits_for_another(tmp_path: Path, is_told: bool) -> None:
    k = Kineto()
    k.op("aten::conv2d", 0, 100)
    k.launch("before", 10, 15, 1, (20, 220))
    k.call("cudaEventRecord", 20, 21, 2)
    k.call("cudaStreamWaitEvent", 22, 23, 3)
    k.launch("beside", 30, 35, 4, (221, 321), stream=20)
    k.call("cudaEventRecord", 40, 41, 5)
    k.call("cudaStreamWaitEvent", 42, 43, 6)
    k.launch("behind", 50, 55, 7, (322, 400))
    if is_told:
        for wait, record, stream, source in ((3, 2, 20, 7), (6, 5, 7, 20)):
            k.sync("Stream Wait Event", 22, 23, wait, stream=stream, wait_on_stream=source,
                   wait_on_cuda_event_record_corr_id=record)  # fmt: skip
    t = made(k, tmp_path)
    g = scaled(t.graph, 0.5, name="before")
    assert times(t, g, "beside")[0] == pytest.approx(120, abs=3)
    assert times(t, g, "behind")[0] == pytest.approx(220, abs=5)
    kinds = t.graph.edges.kinds[t.graph.edges.waiting == named(t.graph, "beside")]
    assert 3 in kinds.tolist()  # WaitKind.EVENT


def test_kernels_that_want_the_device_at_once_share_it(tmp_path: Path) -> None:
    k = Kineto()
    k.op("aten::conv2d", 0, 60)
    k.launch("one", 10, 15, 1, (20, 220))
    k.launch("two", 30, 35, 2, (215, 420), stream=20)  # waited although nothing told it to
    t = made(k, tmp_path)
    assert len(t.graph.used) == 2
    assert replayed(t) == pytest.approx(420 * US, rel=0.03)
    assert simulate(scaled(t.graph, 0.5, kind="kernel")).seconds < 230 * US


def test_a_full_queue_holds_the_launch_and_not_a_number(tmp_path: Path) -> None:
    """1500 launches of 5 a piece run into kernels of 50: the queue takes 1000 of them."""
    k = Kineto()
    depth, n = 1000, 1500
    begin, end = [0.0] * n, [0.0] * n
    host = 10.0
    for i in range(n):
        k_start = 20.0 + 50 * i
        back = host + 5.0
        if i >= depth:
            back = max(back, 20.0 + 50 * (i - depth) + 2)
        k.op("aten::mm", host - 1, back + 1)
        k.launch(f"k{i}", host, back, i + 1, (k_start, k_start + 49))
        begin[i], end[i] = host, back
        host = back + 3
    t = made(k, tmp_path)
    calls = t.graph.select(op="cudaLaunchKernel")
    assert max(e - b for b, e in zip(begin, end, strict=True)) > 40
    assert t.graph.seconds[calls].max() < 8 * US
    assert replayed(t) == pytest.approx(t.graph.facts["measured"], rel=1e-3)
    last = simulate(t.graph).start[calls[-1]]
    assert last == pytest.approx(begin[-1] * US, rel=0.05)
    assert simulate(scaled(t.graph, 0.01, kind="kernel")).start[calls[-1]] < 0.5 * last


def test_a_graph_launch_starts_all_its_kernels(tmp_path: Path) -> None:
    k = Kineto()
    k.op("aten::replay", 0, 50)
    k.call("cudaGraphLaunch", 10, 40, 1)
    for i in range(5):
        k.work(f"k{i}", 50 + 20 * i, 69 + 20 * i, 1)
    t = made(k, tmp_path)
    assert replayed(t) == pytest.approx(149 * US, rel=0.01)
    assert len(t.graph.select(kind="kernel")) == 5
    assert t.graph.edges.size == 1


def test_work_without_a_launch_stays_where_it_was(tmp_path: Path) -> None:
    k = Kineto()
    k.op("aten::mm", 0, 50)
    k.launch("gemm", 20, 30, 1, (31, 60))
    k.op("my::triton", 200, 260, external=77)
    k.work("triton_kernel", 230, 280, None, **{"External id": 77})
    t = made(k, tmp_path)
    assert times(t, t.graph, "triton_kernel")[0] == pytest.approx(230)
    assert t.graph[named(t.graph, "triton_kernel")].op == "my::triton"


@pytest.mark.parametrize(("number", "is_later"), [(77, False), (5121, True)])
def test_a_process_numbers_its_operators_on_from_one_profile_to_the_next(
    tmp_path: Path, number: int, is_later: bool
) -> None:
    k = Kineto()
    k.op("aten::mul", 10, 20, external=number)
    k.launch("kernel", 12, 15, 1, (16, 30))
    assert ("profiled_before" in made(k, tmp_path).graph.facts) == is_later


def test_what_was_running_before_is_there_only_when_replayed(tmp_path: Path) -> None:
    k = Kineto()
    k.work("orphan", 0, 500, 900)
    k.note("ProfilerStep#1", 100, 300)
    k.op("aten::mm", 110, 160)
    k.launch("gemm", 120, 130, 1, (501, 700))
    t = made(k, tmp_path)
    assert t.ahead == 1
    assert t.found == pytest.approx(400 * US)
    assert replayed(t) == pytest.approx(200 * US, rel=0.01)
    assert "orphan" not in t.graph.texts("name")
    assert simulate(t.graph).seconds == pytest.approx(230 * US, rel=0.02)


def test_steps_in_a_row_take_what_the_slower_side_takes(tmp_path: Path) -> None:
    k = Kineto()
    k.note("ProfilerStep#1", 0, 100)
    k.op("aten::mm", 10, 60)
    k.launch("gemm", 20, 30, 1, (31, 531))
    g = made(k, tmp_path).graph
    row = [simulate(concat([g] * n)).seconds for n in (3, 4)]
    assert row[1] - row[0] == pytest.approx(501 * US, rel=0.01)  # the kernel and its turnaround


def test_a_side_thread_without_waits_does_not_hold_the_main_one(tmp_path: Path) -> None:
    k = Kineto()
    k.op("aten::mm", 0, 100)
    k.op("aten::copy_", 120, 140, tid=555)
    k.op("aten::relu", 300, 400)
    g = scaled(made(k, tmp_path).graph, 100.0, op="copy_")
    assert times(made(k, tmp_path), g, "relu")[0] == pytest.approx(300)


def test_checkpointed_forward_in_backward_is_backward(tmp_path: Path) -> None:
    k = Kineto()
    training_step(k)
    k.op("aten::relu", 520, 530, tid=BACKWARD)
    k.launch("again", 522, 525, 99, (701, 702), tid=BACKWARD)
    g = made(k, tmp_path).graph
    assert g[named(g, "again")].phase == "backward"


def test_modules_and_layer_notes_name_layers(tmp_path: Path) -> None:
    k = Kineto()
    training_step(k)
    k.add("python_function", "nn.Module: Conv2d_0", 140, 260)
    k.note("layer:head.loss", 270, 340)
    g = made(k, tmp_path).graph
    assert g[named(g, "conv_kernel")].layer == g[named(g, "conv_backward")].layer == "Conv2d_0"
    assert g[named(g, "loss_kernel")].layer == "head.loss"


def test_a_trace_of_the_cpu_alone(tmp_path: Path) -> None:
    k = Kineto()
    k.op("aten::mm", 0, 50)
    k.op("aten::relu", 60, 70)
    t = made(k, tmp_path)
    assert replayed(t) == pytest.approx(70 * US)
    assert set(t.graph.kind.tolist()) == {Kind.HOST}


def test_a_trace_of_the_device_alone(tmp_path: Path) -> None:
    k = Kineto()
    for i in range(4):
        k.work(f"k{i}", 10 * i, 10 * i + 9, i)
    t = made(k, tmp_path)
    assert len(t.graph.select(kind="kernel")) == 4
    assert replayed(t) == pytest.approx(39 * US, rel=0.05)


def test_what_the_profiler_recorded_is_counted(trace: Trace) -> None:
    ops, calls = trace.recorded.sum(axis=0).tolist()
    assert calls == 7
    assert ops == 11  # operators and notes, without the step's own
