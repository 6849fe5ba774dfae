"""Predictions: the numbers, their keys, and the command."""

import json

import pytest
from click.testing import CliRunner

from foretell.cli.main import foretell
from foretell.cluster import load as load_cluster
from foretell.errors import ForetellError, InputError
from foretell.graph import load as load_graph
from foretell.plan import Plan
from foretell.predict import predict, predict_many
from foretell.simulate import simulate
from foretell.workload import load as load_workload

SPEC = "gpt:layers=12,hidden=1024,heads=16,seq=1024,vocab=51200"
ON = "dgx-a100:nodes=1"
PLAN = "dp=2,tp=2,pp=2,micro_batch=2,global_batch=32,recompute=full,schedule=1f1b"
KEYS = {"step_s", "low_s", "high_s", "peak_bytes", "fits", "breakdown"}


def run(*args):
    return CliRunner().invoke(foretell, ["predict", *args])


def test_one_layout():
    found = predict(Plan.parse(PLAN), load_workload(SPEC), load_cluster(ON))
    assert found.low < found.step < found.high
    assert found.fits
    assert sum(found.breakdown.values()) == pytest.approx(found.step, rel=1e-6)
    assert 0.05 < found.utilisation < 0.6
    assert sum(found.memory.values()) == pytest.approx(found.peak, rel=0.02)


def test_many_are_each_alone():
    model, node = load_workload(SPEC), load_cluster(ON)
    plans = [Plan.parse(PLAN), Plan.parse("dp=8,global_batch=64")]
    assert predict_many(plans, model, node) == [predict(p, model, node) for p in plans]


def test_too_large_says_what_would_fit():
    big = load_workload("gpt:layers=32,hidden=4096,heads=32,seq=2048,dtype=bf16")
    found = predict(Plan(dp=8, global_batch=8), big, load_cluster(ON))
    assert not found.fits
    assert found.missing > 0
    change, _, cost = found.advice.partition(" fits and takes ")
    fields = dict(item.split("=") for item in change.split(","))
    mended = Plan.parse(
        ",".join(["dp=8", "global_batch=8", *(f"{k}={v}" for k, v in fields.items())])
    )
    after = predict(mended.but(framework=found.plan.framework), big, load_cluster(ON))
    assert after.fits
    assert after.step == pytest.approx(
        float(cost.split()[0]) * {"ms": 1e-3, "s": 1.0}[cost.split()[1]], rel=0.15
    )


def test_too_large_for_any_change():
    huge = load_workload("gpt:layers=96,hidden=12288,heads=96,seq=2048,dtype=bf16")
    found = predict(Plan(dp=8, global_batch=8), huge, load_cluster(ON))
    assert "GiB short" in found.advice


def test_the_graph_that_is_written_simulates_to_the_prediction(tmp_path):
    path = tmp_path / "step.graph"
    answer = run(SPEC, "--on", ON, "--plan", PLAN, "-o", str(path), "--json")
    assert answer.exit_code == 0, answer.output
    found = json.loads(answer.stdout)["step_s"]
    assert simulate(load_graph(path)).seconds == pytest.approx(found, rel=1e-9)


def test_the_command_answers_in_json():
    done = run(SPEC, "--on", ON, "--plan", PLAN, "--json")
    found = json.loads(done.output)
    assert set(found) >= KEYS
    assert found["fits"] is True


def test_the_command_answers_in_words():
    done = run(SPEC, "--on", ON, "--plan", PLAN)
    assert "a step" in done.output
    assert "busiest stage" in done.output


def test_a_plan_may_be_a_file(tmp_path):
    path = tmp_path / "a.plan"
    path.write_text(json.dumps({"dp": 8, "global_batch": 64}))
    found = json.loads(run(SPEC, "--on", ON, "--plan", str(path), "--json").output)
    assert found["plan"].startswith("dp=8")


def test_many_lines(tmp_path):
    path = tmp_path / "many.jsonl"
    asks = [
        {"workload": SPEC, "on": ON, "plan": PLAN},
        {"workload": SPEC, "on": "a100-80:gpus=2", "plan": "dp=2,global_batch=8"},
        {"workload": SPEC, "on": ON, "plan": "dp=8,global_batch=64"},
    ]
    path.write_text("\n".join(map(json.dumps, asks)) + "\n")
    lines = [json.loads(line) for line in run("--batch", str(path), "--json").output.splitlines()]
    assert len(lines) == 3
    assert all(set(line) >= KEYS for line in lines)
    alone = json.loads(run(SPEC, "--on", ON, "--plan", PLAN, "--json").output)
    assert lines[0]["step_s"] == alone["step_s"]


@pytest.mark.parametrize("text", ["not json", '{"workload": "gpt"}', "[1, 2]"])
def test_bad_lines_are_named(tmp_path, text):
    path = tmp_path / "bad.jsonl"
    path.write_text(text + "\n")
    error = run("--batch", str(path)).exception
    assert isinstance(error, InputError)
    assert "line 1 of" in str(error)


@pytest.mark.parametrize(
    ("args", "match"),
    [
        ((SPEC, "--on", ON, "--plan", "dp=2,tp=2,pp=4"), "dp=2 × tp=2 × pp=4 makes 16 ranks"),
        ((SPEC, "--on", ON), "predict needs --plan"),
        (("gtp:layers=2", "--on", ON, "--plan", "dp=8"), "unknown workload"),
        ((SPEC, "--on", "dgx-a1000", "--plan", "dp=8"), "unknown"),
    ],
)
def test_mistakes_are_named(args, match):
    error = run(*args).exception
    assert isinstance(error, ForetellError)
    assert match in str(error)
