"""What was given: files told apart by what they hold, and errors that name them."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from foretell.advise import Step, peak, untracked_ops
from foretell.cli.main import foretell
from foretell.errors import InputError
from foretell.graph import Builder
from foretell.report.page import Content, PageTimeline, numbers
from foretell.simulate import simulate
from foretell.survey.inputs import Inputs, kind_of_input, sections_of
from foretell.survey.survey import survey

STEP = Path(__file__).resolve().parents[2] / "docs" / "guides" / "step.txt"
ROW = {"gpus": 8, "strategy": "data", "step_s": 2.0, "peak_bytes": 10, "fits": True, "plan": "dp=8"}
SCHEDULE = {"blocks": [{"block": 0, "micro_batch": 0, "start": 0, "end": 1, "devices": [0]}],
            "makespan": 1, "period": 1}  # fmt: skip
PLACEMENT = {"name": "p", "ndevs": 1, "mode": "infer", "deps": [],
             "blocks": [{"id": 0, "kind": "F", "devices": [0], "time": 1, "mem": 0}]}  # fmt: skip


def written(folder, name, value):
    path = folder / name
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return str(path)


@pytest.fixture
def files(tmp_path):
    return {
        "oracle": written(tmp_path, "oracle.json", {"workload": "x", "rows": [ROW]}),
        "schedule": written(tmp_path, "schedule.json", SCHEDULE),
        "placement": written(tmp_path, "placement.json", PLACEMENT),
        "plan": written(tmp_path, "best.plan", {"dp": 2}),
        "plan json": written(tmp_path, "plan.json", {"dp": 2}),
        "planned": written(tmp_path, "planned.json", {"plan": "dp=2", "predicted_s": 1.0}),
        "lines": written(tmp_path, "batch.jsonl", json.dumps(ROW) + "\n" + json.dumps(ROW)),
    }


def test_files_are_distinguished(files):
    assert kind_of_input(str(STEP)) == "steps"
    assert kind_of_input("amp:dtype=bf16") == "specs"
    assert {name: kind_of_input(path) for name, path in files.items()} == {
        "oracle": "answers", "schedule": "answers", "placement": "answers", "plan": "plans",
        "plan json": "plans", "planned": "answers", "lines": "answers",
    }  # fmt: skip


def test_scripts_are_steps(tmp_path):
    script = written(tmp_path, "train.py", "def make(): ...")
    assert kind_of_input(script) == kind_of_input(f"{script}:make") == "steps"
    with pytest.raises(InputError, match="there is no file"):
        kind_of_input("missing.py")


def test_a_run_is_shown_measured_beside_predicted(tmp_path):
    path = written(tmp_path, "run.json", {"losses": [1.0], "measured_s": 0.2, "predicted_s": 0.19})
    found = survey([], drawn=sections_of(Inputs.of([path]))).content.diagnosis
    assert found["compared"] == [{"what": "run.json", "measured_s": 0.2, "predicted_s": 0.19}]


def test_everything_is_drawn(files):
    found = sections_of(Inputs.of(files.values()))
    assert len(found.oracle) == 2
    assert len(found.oracle[1]["rows"]) == 2
    assert len(found.schedules) == 2
    assert [p["name"] for p in found.plans] == ["planned.json", "best.plan", "plan.json"]


def test_what_is_not_there():
    with pytest.raises(InputError, match="there is no file"):
        Inputs.of(["missing.json"])


def test_what_holds_nothing(tmp_path):
    path = written(tmp_path, "x.json", {"step_s": "no number"})
    with pytest.raises(InputError, match="nothing a report could show"):
        sections_of(Inputs.of([path]))


def test_what_is_cut_short(tmp_path):
    path = written(tmp_path, "x.json", '{"makespan": 1, ')
    with pytest.raises(InputError, match="is not JSON"):
        sections_of(Inputs.of([path]))


def test_a_survey_of_a_graph():
    found = survey([Step.from_file(STEP)], ["faster-host:times=2"], advice=False)
    assert [line.name for line in found.timelines] == ["current step", "with faster-host"]
    figures = {f["what"]: f for f in found.content.figures}
    answer = figures["with changes"]
    assert answer["low"] <= answer["seconds"] <= answer["high"]
    assert answer["gain"] == pytest.approx(
        1 - answer["seconds"] / figures["current step"]["seconds"]
    )
    assert found.content.advice is None


def test_advice_gives_what_is_shown_after():
    found = survey([Step.from_file(STEP)])
    assert found.content.advice["ranked"] is not None
    best = found.content.advice["together"]
    assert len(found.timelines) == (2 if best else 1)


def run(*words):
    return CliRunner().invoke(foretell, ["report", *map(str, words)])


def test_a_report_of_everything(files, tmp_path):
    out = tmp_path / "all.html"
    result = run(STEP, "faster-host:times=2", *files.values(), "-o", out, "--json")
    assert result.exit_code == 0, result.exception
    found = json.loads(result.stdout)
    assert {"advice", "split", "changes", "memory", "sources", "timelines"} <= set(found)
    assert out.read_text().startswith("<!doctype html>")


def test_a_report_as_a_trace(tmp_path):
    out = tmp_path / "trace.json"
    assert run(STEP, "--no-advice", "-o", out).exit_code == 0
    assert json.loads(out.read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["amp"], "no step to change"),
        (["nothing.graph"], "no file"),
        ([STEP, "fastr:op=x"], "unknown what-if"),
    ],
)
def test_mistakes_are_named(words, says):
    result = run(*words)
    assert isinstance(result.exception, InputError)
    assert says in str(result.exception)


def test_an_ending_that_is_never_written(tmp_path):
    result = run(STEP, "--no-advice", "-o", tmp_path / "x.pdf")
    assert "neither a page nor a trace" in str(result.exception)


def test_memory_of_a_captured_step_is_not_drawn_for_changes_it_does_not_follow():
    make = Builder()
    lane = make.lane("stream", rank=0, kind="compute")
    task = make.task(kind="kernel", op="mm", phase="forward", lane=lane, seconds=1e-3)
    make.buffer(2.0**20, born=task, dies=task)
    graph = make.graph()
    step = Step(graph, None, name="captured")
    with graph.edit("checkpoint") as edit:
        edit.set(edit.select(), seconds=2e-3)
    assert untracked_ops(edit.graph) == ["checkpoint"]
    assert untracked_ops(graph) == []
    assert peak(edit.graph) is None
    assert peak(step.graph) == 2.0**20
    drawn = [
        PageTimeline("now", simulate(graph)),
        PageTimeline("then", simulate(edit.graph), has_memory=False),
    ]
    assert [m["name"] for m in numbers(drawn, Content())["memory"]] == ["now"]
