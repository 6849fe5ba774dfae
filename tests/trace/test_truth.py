"""Measured traces replayed unchanged, and changed in ways whose answer is known."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from foretell.errors import InputError
from foretell.graph import Graph, Kind, concat
from foretell.simulate import simulate
from foretell.trace import Trace
from foretell.trace import read as read_again
from tests.trace.kineto import steps_of

TRUTH = Path(__file__).resolve().parents[2].parent / "shared" / "truth"
H200, KINETO = TRUTH / "h200", TRUTH / "traces" / "kineto"
pytestmark = [
    pytest.mark.truth,
    pytest.mark.skipif(not TRUTH.is_dir(), reason=f"no measured data in {TRUTH.name}"),
]

read = cache(read_again)  # most tests ask the same files
WORST = 0.01  # of the step; the bar is a median of 1 % and a worst of 3 %


def files(*folders: Path, ending: str = "*.json.gz") -> list[Path]:
    return sorted(p for folder in folders for p in folder.glob(ending))


def error(trace: Trace) -> float:
    """How far a replay is from the measured step."""
    return (simulate(trace.warm).seconds - trace.found) / trace.graph.facts["measured"] - 1


def late(trace: Trace) -> np.ndarray:
    """How far each task starts from where it was measured to, in seconds."""
    return np.abs(simulate(trace.warm).start[trace.ahead :] - trace.start)


def in_a_row(graph: Graph) -> float:
    """What one step takes among several in a row."""
    return simulate(concat([graph] * 4)).seconds - simulate(concat([graph] * 3)).seconds


def scaled(graph: Graph, factor: float, *kinds: Kind) -> Graph:
    tasks = np.flatnonzero(np.isin(graph.kind, kinds))
    with graph.edit("scale") as edit:
        edit.scale(tasks, factor)
        edit.scale(tasks, factor, "gap")
    return edit.graph


DEVICE, HOST = (Kind.KERNEL, Kind.COPY), (Kind.HOST, Kind.SYNC, Kind.LOAD)


@pytest.mark.parametrize("path", files(H200, KINETO), ids=lambda p: p.name[:30])
def test_steps_replay(path: Path) -> None:
    for number, _ in steps_of(path)[0][:2]:
        assert abs(error(read(path, step=number))) < WORST


def test_tasks_start_where_they_were_measured() -> None:
    """The step must be right for the right reason: nearly every task, on the spot."""
    offs = [late(read(path)) for path in files(H200, KINETO)]
    assert np.median([np.median(off) for off in offs]) < 2e-6
    assert max(np.quantile(off, 0.95) for off in offs) < 250e-6  # vgg16: streams share the device


def test_eight_ranks_replay_as_one() -> None:
    trace = read(TRUTH / "traces" / "param" / "dlrm_kineto.tar.gz")
    collectives = trace.graph.select(kind="collective")
    assert len(collectives) == 8
    assert {len(trace.graph[int(i)].lanes) for i in collectives} == {8}
    assert abs(error(trace)) < 0.001
    assert np.quantile(late(trace), 0.9) < 5e-6
    with trace.graph.edit("straggler") as edit:
        edit.scale(edit.select(rank=3, kind="kernel", phase="forward"), 20.0)
    ends = [np.max(simulate(g).end[g.rank == 0]) for g in (trace.graph, edit.graph)]
    assert ends[1] > 1.05 * ends[0]  # rank 0 waits for rank 3


@pytest.mark.parametrize("folder", ["hta", "gpupuzzlers"])
def test_odd_traces_replay_or_say_what_is_wrong(folder: str) -> None:
    found, wrong = [], []
    for path in files(TRUTH / "traces" / folder, ending="*"):
        try:
            trace = read(path)
        except InputError as problem:
            wrong.append((path.name, problem.message))
            continue
        if len(trace.start):
            found.append(abs(error(trace)))
    assert all(name in message for name, message in wrong)
    assert max(found) < WORST
    assert len(found) == {"hta": 21, "gpupuzzlers": 8}[folder]


@pytest.mark.parametrize("name", ["vgg16.base", "gpt2.base", "vgg16.amp_bf16"])
def test_a_step_that_the_device_bounds_follows_its_kernels(name: str) -> None:
    graph = read(H200 / f"{name}.json.gz").graph
    before = in_a_row(graph)
    assert in_a_row(scaled(graph, 2.0, *DEVICE)) == pytest.approx(2 * before, rel=0.04)
    host = sum((graph.seconds + graph.gap)[np.isin(graph.kind, HOST)])
    assert in_a_row(scaled(graph, 0.5, *DEVICE)) == pytest.approx(max(before / 2, host), rel=0.04)


@pytest.mark.parametrize("name", ["bert_base.amp_bf16", "swin_t.amp_bf16", "dlrm.base"])
def test_a_step_that_the_host_bounds_follows_the_host(name: str) -> None:
    graph = read(H200 / f"{name}.json.gz").graph
    before = in_a_row(graph)
    assert in_a_row(scaled(graph, 0.5, *DEVICE)) == pytest.approx(before, rel=0.01)
    assert in_a_row(scaled(graph, 0.5, *HOST)) == pytest.approx(before / 2, rel=0.05)


def test_waiting_is_not_kept_as_time() -> None:
    """resnet50 and vgg16 wait half their step for a copy: none of it may be host time."""
    for name in ("resnet50.base", "vgg16.base"):
        graph = read(H200 / f"{name}.json.gz").graph
        waits = graph.select(kind="sync")
        assert graph.seconds[waits].max() < 200e-6
        launches = graph.select(op="cudaLaunchKernel*")
        assert graph.seconds[launches].max() < 200e-6


@pytest.mark.parametrize("path", files(H200), ids=lambda p: p.name[:30])
def test_every_task_has_a_phase_and_a_layer(path: Path) -> None:
    g = read(path).graph
    kernels = g.kind == Kind.KERNEL
    assert (g.phase[kernels] != 0).all()
    assert {"forward", "backward", "update"} <= {g[int(i)].phase for i in np.flatnonzero(kernels)}
    trained = kernels & np.isin(g.phase, (2, 3, 4))  # forward, loss, backward
    assert (g.layer[trained] != 0).all()
    assert (g.shape[kernels] != 0).mean() > 0.99
    assert (g.dtype[kernels] != 0).mean() > 0.95  # a list of tensors has no type of its own


def test_loading_is_found_and_separate() -> None:
    without, with_workers = (read(p).graph for p in files(KINETO))
    seconds = [float(g.seconds[g.select(kind="load")].sum()) for g in (without, with_workers)]
    assert 0.05 < seconds[0] < 0.09
    assert seconds[1] < 0.01


@pytest.mark.parametrize(
    ("name", "tasks"),
    [
        ("param/linear_et.json.gz", 217),
        ("param/dlrm_pytorch_et.tar.gz", 2240),
        ("chakra/1.0.2-chakra.0.0.4.tgz", 40),
        ("chakra/feeder_tests_trace.tar.gz", 3664),
        ("chakra/json_trace.tar.gz", 3671),
    ],
)
def test_traces_without_times_become_graphs(name: str, tasks: int) -> None:
    assert read(TRUTH / "traces" / name).graph.size == tasks
