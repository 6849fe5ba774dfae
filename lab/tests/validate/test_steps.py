"""Captured steps in a small file: they read back as the same tasks at the same price."""

from dataclasses import replace
from importlib.resources import as_file, files
from pathlib import Path

import numpy as np
import pytest

from foretell.cluster import load as cluster_of
from foretell.cost import price
from foretell.graph import Kind
from foretell.graph.build import Builder
from foretell.simulate import simulate
from foretell_lab.validate import steps, timm, workloads

TRUTH = Path(__file__).resolve().parents[3].parent / "shared" / "truth"
needs_truth = pytest.mark.skipif(not TRUTH.is_dir(), reason="no measured data beside the project")
MACHINE = cluster_of("3090:gpus=1")
CONV = (
    "in=64x32x56x56+64x32x3x3+-+-+-+-+-+-+-,types=c10::Half+c10::Half+-+-+-+-+-+-+-,"
    "args=-+-+-+1x1+1x1+1x1+False+0x0+1,strides=100352x1x1792x32+288x1x96x32+-+-+-+-+-+-+-"
)
CAST = "in=64x32x3x3+-,types=float+-,args=-+torch.float16"
ODD = "in=10x128+-,types=float+-,args=-+0.5"  # ten samples of no batch of 64


def step(*calls):
    """A host that issues calls, each of which runs one kernel."""
    b = Builder()
    host, stream = b.lane("host", kind="host"), b.lane("stream", kind="compute")
    for op, shape, phase, dtype, moved in calls:
        said = {"op": op, "phase": phase}
        first = b.task(kind="host", lane=host, shape="direction=fwd,kernels=1", **said)
        task = b.task(
            kind="kernel", lane=stream, shape=shape, dtype=dtype, bytes=moved,
            flops=moved / 4, gap=steps.TURNAROUND, **said,
        )  # fmt: skip
        b.wait(task, first, lag=steps.LATENCY, kind="launch")
    return b.graph(parameters=1000)


CALLS = [
    ("copy_", CAST, "forward", "fp32", 64 * 32 * 9 * 6),
    ("convolution", CONV, "forward", "fp16", 12345),
    ("convolution", CONV, "forward", "fp16", 12345),
    ("unheard_of", ODD, "backward", "fp32", 77777),
]


def packed(tmp_path, graph, batch=64):
    lines: dict[str, int] = {}
    found = {"net": steps.taken(graph, batch, lines)}
    steps.save(steps.Steps(tuple(lines), found, {"other": "too odd"}), tmp_path / "steps.xz")
    return steps.load(tmp_path / "steps.xz")


def test_a_step_reads_back_as_it_was(tmp_path):
    graph = step(*CALLS)
    read = packed(tmp_path, graph)
    assert read.missing == {"other": "too odd"}
    assert (read.models["net"].batch, read.models["net"].parameters) == (64, 1000)
    again = [
        task for i in read.models["net"].calls for task in steps.tasks_of(read.lines[i], 64)
    ]  # fmt: skip
    assert [t[1] for t in again] == graph.texts("op")
    assert [t[2] for t in again] == graph.texts("shape")
    assert [t[4] for t in again] == graph.dtype.tolist()


def test_equal_calls_are_written_once(tmp_path):
    read = packed(tmp_path, step(*CALLS))
    assert len(read.lines) == 3
    assert read.models["net"].calls.tolist() == [0, 1, 1, 2]


def test_sizes_are_recognised_by_the_batch_and_layouts_by_a_letter(tmp_path):
    line = packed(tmp_path, step(CALLS[1])).lines[0]
    assert "in=Bx32x56x56+B" in line
    assert "strides=L+L" in line


def test_the_price_is_that_of_the_graph(tmp_path):
    graph = step(*CALLS)
    whole = price(graph, MACHINE)
    ((name, again),) = steps.priced(packed(tmp_path, graph), MACHINE)
    assert name == "net"
    assert np.allclose(again.seconds, whole.seconds, rtol=1e-12)
    assert simulate(again).seconds == pytest.approx(simulate(whole).seconds, rel=1e-9)


def shipped():
    with as_file(files("foretell_lab.validate") / "tables" / "timm_steps.xz") as path:
        return steps.load(path)


def test_some_of_the_shipped_steps_are_priced():
    found = shipped()
    assert len(found.models) > 800
    few = dict(sorted(found.models.items())[::80])
    for name, graph in steps.priced(replace(found, models=few), MACHINE):
        assert simulate(graph).seconds > 1e-3, name


@pytest.mark.slow
def test_the_shipped_steps_are_whole():
    found = timm.captured()
    assert len(found.seconds) > 800
    assert all(s > 1e-3 for s in found.seconds.values())
    assert not set(found.seconds) & set(found.missing)
    assert not any(" /" in why for why in found.missing.values())  # no path of a machine


@pytest.mark.truth
@needs_truth
def test_models_of_a_family_are_predicted_without_a_capture():
    known = shipped()
    names = ("resnet50", "mobilenetv2_100", "vit_base_patch16_224")
    few = replace(known, models={name: known.models[name] for name in names})
    captured = {name: simulate(graph).seconds for name, graph in steps.priced(few, MACHINE)}
    rows = {row["model"]: row for row in timm._rows(TRUTH / "tables" / "timm_train_rtx3090.csv")}
    for name in names:
        seconds = timm.built_in(rows[name])
        assert seconds == pytest.approx(float(rows[name]["value"]) / 1e3, rel=0.3)
        assert seconds == pytest.approx(captured[name], rel=0.2)
    assert timm.built_in(rows["coat_tiny"]) == 0


@pytest.mark.slow
@pytest.mark.truth
@needs_truth
def test_timm_rows():
    found = list(timm.predictions(TRUTH))
    assert len(found) == 834
    answer = [row for row in found if row.predicted]
    errors = [abs(row.predicted / row.measured - 1) for row in answer]
    assert len(answer) > 810
    assert np.median(errors) <= 0.13
    assert all(row.source for row in found)
    left = "\n".join(workloads._left_out(TRUTH))
    assert all(row.model in left for row in found if not row.predicted)


def test_kernels_wait_for_their_launch(tmp_path):
    ((_, graph),) = steps.priced(packed(tmp_path, step(*CALLS)), MACHINE)
    kernels = np.flatnonzero(graph.kind == Kind.KERNEL)
    assert graph.edges.after.tolist() == (kernels - 1).tolist()
