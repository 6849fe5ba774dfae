"""What binds a step, and that every number of a page is of one step."""

from pathlib import Path

import numpy as np
import pytest

from foretell.advise import Step, advise
from foretell.baseline import replay_error
from foretell.cluster import load as load_cluster
from foretell.cost import price
from foretell.errors import ForetellError
from foretell.graph import Builder
from foretell.survey.diagnosis import CAUSES, diagnose
from foretell.survey.roofline import work_of
from foretell.survey.survey import changed, known_outcome, outcome, survey
from foretell.survey.window import Window, window
from foretell.trace import read
from foretell.whatif import applied, ordered, parse
from tests.trace.kineto import data_parallel
from tests.transformer import transformer

HERE = Path(__file__).resolve()
SAMPLE = HERE.parents[2] / "src" / "foretell" / "samples" / "traces" / "resnet18-h200.json.gz"
TRUTH = HERE.parents[3] / "shared" / "truth"
needs_truth = pytest.mark.skipif(not TRUTH.is_dir(), reason="no measured traces beside the project")


@pytest.fixture(scope="module")
def step():
    return Step.from_file(SAMPLE)


@pytest.fixture(scope="module")
def found(step):
    return survey([step], ["tf32"], advice=False)


def total(node):
    return sum(part["seconds"] for part in node["parts"])


def test_one_baseline_for_the_whole_page(step, found):
    """Cards, timeline, parts, idle gaps and the verdict are of the same step time."""
    seconds = step.seconds
    content, lines = found.content, {line.name: line for line in found.timelines}
    figures = {f["what"]: f for f in content.figures}
    current = lines["current step"]
    assert figures["current step"]["seconds"] == seconds
    assert content.diagnosis["step_s"] == pytest.approx(seconds, rel=1e-12)
    assert current.step_s == pytest.approx(seconds, rel=1e-12)
    assert sum(current.parts["values"].values()) == pytest.approx(seconds)
    drawn = current.timeline.seconds - current.zero
    assert drawn == pytest.approx(step.baseline.simulated)
    idle = content.diagnosis["idle"]["seconds"]
    assert idle == pytest.approx(seconds - current.parts["values"]["compute"], rel=1e-6)
    after = lines["with tf32"]
    assert after.step_s == figures["with changes"]["seconds"]
    assert sum(after.parts["values"].values()) == pytest.approx(after.step_s)
    measured = lines["measured, with the profiler"]
    assert measured.step_s == content.diagnosis["compared"][0]["measured_s"]


def test_the_critical_path_fills_the_window(found):
    """Steps in a row: the path of one leads from the end of the step before to its own end."""
    line = next(line for line in found.timelines if line.name == "current step")
    path = line.timeline.critical_path()
    spent = (line.timeline.end - line.timeline.start)[path].sum()
    assert spent <= line.timeline.seconds + 1e-12
    assert line.timeline.end[path[-1]] == line.timeline.seconds


def test_time_by_module_adds_up(found):
    root = found.content.diagnosis["modules"]
    assert total(root) == pytest.approx(root["seconds"])
    assert sum(root["phases"]) == pytest.approx(root["seconds"])
    for part in root["parts"]:
        if part["parts"]:
            assert total(part) == pytest.approx(part["seconds"])


def test_idle_gaps_have_known_causes(found):
    idle = found.content.diagnosis["idle"]
    assert {c["cause"] for c in idle["causes"]} <= set(CAUSES)
    lengths = [g["seconds"] for g in idle["gaps"]]
    assert lengths == sorted(lengths, reverse=True)


def test_no_kernel_is_above_the_roofline(found):
    for kernel in found.content.diagnosis["kernels"]:
        assert 0 <= kernel["roofline"] <= 1


def test_flops_of_resnet_are_those_of_its_layers(step):
    """ResNet-18: 1.82 Gflop·2 a sample forward; backward twice that but for the first layer."""
    graph = step.graph
    work = work_of(graph)
    batch = float(read(SAMPLE).graph.facts.get("batch", 0) or _batch(graph))
    known = 3 * 2 * 1.82e9 * batch
    assert work.flops.sum() == pytest.approx(known, rel=0.12)


def _batch(graph):
    shape = next(graph.text_of("shape", i) for i in graph.select(kind="kernel", op="convolution"))
    return int(shape.removeprefix("in=").split("x")[0])


def stepped(*tasks):
    """A step of kernels and host calls with given lengths: (kind, op, seconds, after previous)."""
    make = Builder()
    kinds = {"host": "host", "kernel": "compute", "collective": "comm", "load": "loader"}
    lanes = {kind: make.lane(kind, kind=lane) for kind, lane in kinds.items()}
    before = None
    for kind, op, seconds in tasks:
        after = [] if before is None else [before]
        before = make.task(kind=kind, op=op, lane=lanes[kind], seconds=seconds, after=after)
    return make.graph()


@pytest.mark.parametrize(
    ("tasks", "cause"),
    [
        ([("host", "launch", 1e-3)], "launch"),
        ([("host", "cudaStreamSynchronize", 1e-3)], "sync"),
        ([("load", "load", 1e-3)], "input"),
        ([("collective", "all_reduce", 1e-3)], "communication"),
    ],
)
def test_a_gap_is_put_down_to_what_ran_in_it(tasks, cause):
    graph = stepped(("kernel", "mm", 1e-3), *tasks, ("kernel", "mm", 1e-3))
    step = Step(graph, None)
    idle = diagnose(step, window(step, graph))["idle"]
    assert [c["cause"] for c in idle["causes"]] == [cause]
    assert idle["seconds"] == pytest.approx(1e-3)


def test_a_step_without_kernels_says_so():
    graph = stepped(("host", "python", 1e-3))
    step = Step(graph, None)
    found = diagnose(step, window(step, graph))
    assert found["verdict"]["bound"] == "CPU-bound"
    assert "no kernel" in found["verdict"]["sentence"]
    assert found["kernels"] == []


def test_an_empty_step_is_diagnosed():
    from foretell.graph import Graph

    step = Step(Graph(), None)
    assert diagnose(step, window(step, Graph()))["modules"]["seconds"] == 0


def test_ranks_and_collectives_of_a_priced_step():
    cluster = load_cluster("dgx-a100:nodes=1")
    graph = price(transformer(ranks=8, layers=2), cluster)
    step = Step(graph, cluster)
    found = diagnose(step, window(step, graph))
    assert [r["rank"] for r in found["ranks"]] == list(range(8))
    assert found["communication"]
    for row in found["communication"]:
        assert row["ranks"] in (8, None)
        assert row["reached"] == pytest.approx(row["possible"], rel=0.02)  # priced, not measured
        assert 0 <= row["exposed_s"] <= row["seconds"] + 1e-12
    assert 0 < found["gpu"]["mfu"] <= found["gpu"]["hfu"] < 1
    assert found["gpu"]["mfu"] == pytest.approx(found["gpu"]["hfu"], rel=0.01)  # no recompute


def test_one_breakdown_of_several_ranks(tmp_path):
    step = Step.from_file(data_parallel(tmp_path))
    found = survey([step], advice=False)
    current = next(line for line in found.timelines if line.name == "current step")
    values, ranks = current.parts["values"], found.content.diagnosis["ranks"]
    for part, column in (("compute", "compute_s"), ("bubble", "waits_s"), ("host", "host_s")):
        assert values[part] == pytest.approx(np.mean([row[column] for row in ranks]))
    assert sum(values.values()) == pytest.approx(current.step_s)


def test_the_replay_error_is_that_of_replay(tmp_path):
    folder = data_parallel(tmp_path)
    step, trace = Step.from_file(folder), read(folder)
    profiled = survey([step], advice=False).content.diagnosis["compared"][0]
    assert profiled["predicted_s"] / profiled["measured_s"] - 1 == pytest.approx(
        replay_error(trace), abs=1e-12
    )


def test_the_window_of_a_cold_step_is_the_step():
    graph = stepped(("host", "launch", 1e-3), ("kernel", "mm", 2e-3))
    found = window(Step(graph, None), graph)
    assert isinstance(found, Window)
    assert (found.zero, found.seconds, found.length) == (0.0, 3e-3, 3e-3)
    np.testing.assert_array_equal(found.clipped().end, found.line.end)


@needs_truth
@pytest.mark.parametrize(
    ("name", "bound"),
    [
        ("h200/gpt2.base.json.gz", "GPU-bound"),
        ("h200/gpt2.amp_bf16.json.gz", "CPU-bound"),
        ("traces/kineto/resnet50_num_workers_0.worker0.1623143089861.pt.trace.json.gz",
         "input-bound"),
    ],
)  # fmt: skip
def test_what_binds_measured_steps(name, bound):
    one = Step.from_file(TRUTH / name)
    found = survey([one], advice=False).content.diagnosis
    assert found["verdict"]["bound"] == bound
    assert 0 < found["gpu"]["mfu"] < 1


@needs_truth
def test_mfu_of_gpt2_is_what_its_parameters_say():
    """Six flop a parameter and token (124 M, 8 × 512 tokens), and attention's."""
    one = Step.from_file(TRUTH / "h200" / "gpt2.base.json.gz")
    gpu = survey([one], advice=False).content.diagnosis["gpu"]
    assert gpu["flops"] == pytest.approx(6 * 124e6 * 4096, rel=0.08)


def test_changes_tried_before_answer_as_if_tried_now(step):
    advised = advise(step, ("amp", "cuda-graph"))
    assert advised.best is not None
    for changes in [a.changes for a in (*advised.ranked, advised.best)]:
        specs = tuple(map(str, changes))
        assert known_outcome(step, specs, advised) == outcome(step, specs, changed(step, specs))
    assert known_outcome(step, ("tf32",), advised) is None


def test_a_change_on_top_of_remembered_ones_is_as_all_at_once(step):
    specs = tuple(map(str, ordered([parse(s) for s in ("amp", "cuda-graph", "channels-last")])))
    graph = changed(step, specs)
    whole = applied([parse(s) for s in specs], step.graph, step.setting)
    assert str(graph) == str(whole)
    with pytest.raises(ForetellError):
        changed(step, ("flash-attention", "loader:workers=4"))
