"""Factors learned from runs: those that made the runs are found again, the others stay."""

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from foretell.cli.fit import command as fit_command
from foretell.cli.predict import command as predict_command
from foretell.cluster import Calibration, load
from foretell.errors import InputError
from foretell.plan import Plan
from foretell.predict import predict
from foretell.predict.fit import Run, fit
from foretell.predict.runs import table
from foretell.workload import load as workload

MODEL = workload("resnet50")
ONE, TWO, FAR = (load(f"abci:gpus={n}") for n in (1, 4, 16))
TRUE = Calibration(compute=1.4, beta=2.5)


def plan(ranks):
    return Plan(dp=ranks, overlap=False, global_batch=64 * ranks, stack="ddp")


def run(cluster, true=TRUE):
    seconds = predict(plan(cluster.size), MODEL, cluster.calibrated(true)).step
    return Run(MODEL, cluster, plan(cluster.size), seconds)


@pytest.fixture(scope="module")
def found():
    return fit([run(c) for c in (ONE, TWO, FAR)])


def test_what_made_the_runs_is_found_again(found):
    assert found.calibration.compute == pytest.approx(1.4, rel=0.02)
    slower = found.calibration.talk * found.calibration.beta
    assert slower == pytest.approx(2.5, rel=0.25)  # drawn a little to what was priced
    assert found.accuracy(found.after) > 0.99 > 0.8 > found.accuracy(found.before)


def test_runs_nobody_showed_are_foretold_better(found):
    far = load("abci:gpus=64")
    real = predict(plan(64), MODEL, far.calibrated(TRUE)).step
    before = predict(plan(64), MODEL, far).step
    after = predict(plan(64), MODEL, far.calibrated(found.calibration)).step
    assert abs(after / real - 1) < 0.02 < abs(before / real - 1)


def test_what_no_run_tells_of_stays_and_says_so():
    alone = fit([run(ONE)])
    by_name = {f.name: f for f in alone.factors}
    for name in ("talk", "alpha", "beta", "inside"):
        assert by_name[name].value == 1
        assert by_name[name].moves == 0
        assert by_name[name].sigma == pytest.approx(0.693, abs=0.001)
    assert by_name["compute"].sigma < 0.05


def test_noisy_runs_move_less():
    runs = [run(ONE)]
    sure, vague = fit(runs, 0.01), fit(runs, 1.0)
    assert 1 < vague.calibration.compute < sure.calibration.compute


def test_a_limit_on_trees_is_kept():
    start = replace(Calibration(), tree_bytes=0.0)
    assert fit([replace(run(ONE), cluster=ONE.calibrated(start))]).calibration.tree_bytes == 0


def test_runs_that_cannot_be_are_refused():
    with pytest.raises(InputError, match="no runs"):
        fit([])
    with pytest.raises(InputError, match="noise"):
        fit([run(ONE)], 0.0)
    with pytest.raises(InputError, match="measured"):
        fit([replace(run(ONE), seconds=0.0)])


HEAD = "workload,on,plan,step_s,samples_per_s,epoch_s,samples\n"
ROW = 'resnet50,abci:gpus=4,"dp=4,global_batch=256"'


def test_tables_tell_time_in_three_ways(tmp_path):
    path = tmp_path / "runs.csv"
    path.write_text(f"{HEAD}{ROW},0.5,,,\n{ROW},,512,,\n{ROW},,,100,51200\n")
    assert [r.seconds for r in table(path)] == [0.5, 0.5, 0.5]
    lines = tmp_path / "runs.jsonl"
    lines.write_text(json.dumps({"plan": "dp=4,global_batch=256", "step_s": 0.5}))
    assert table(lines, "resnet50", "abci:gpus=4")[0].seconds == 0.5


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (HEAD, "no runs"),
        (f"{HEAD}{ROW},,,,\n", "how long"),
        (f"{HEAD}{ROW},-1,,,\n", "step_s"),
        (f"{HEAD}resnet50,,dp=4,1,,,\n", "does not say"),
    ],
)
def test_tables_that_say_too_little_are_refused(tmp_path, text, words):
    path = tmp_path / "runs.csv"
    path.write_text(text)
    with pytest.raises(InputError, match=words):
        table(path)


def test_the_commands_learn_and_use_it(tmp_path):
    path, out = tmp_path / "runs.csv", tmp_path / "c.json"
    path.write_text(f"{HEAD}{ROW},0.5,,,\n")
    told = CliRunner().invoke(fit_command, [str(path), "-o", str(out)], catch_exceptions=False)
    assert "moves the step" in told.output
    learned = json.loads(out.read_text())
    assert learned["accuracy_after"] > 0.99 > learned["accuracy_before"]
    asked = ["resnet50", "--on", "abci:gpus=4", "--plan", "dp=4,global_batch=256", "--json"]
    runner = CliRunner()
    with_it = runner.invoke(predict_command, [*asked, "--calibration", str(out)])
    assert json.loads(with_it.output)["step_s"] == pytest.approx(0.5, rel=0.01)


def test_what_a_run_left_is_read(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps({"script": "x.py", "plan": "dp=2"}))
    for rank, steps in enumerate(([0.4, 0.5, 0.6], [0.5, 0.4, 0.6])):
        (tmp_path / f"rank-{rank}.result.json").write_text(json.dumps({"steps_s": steps}))
    where = ["--workload", "resnet50", "--on", "abci:gpus=2"]
    told = CliRunner().invoke(fit_command, [str(tmp_path), *where, "--json"])
    assert json.loads(told.stdout)["fitted_on"][0]["measured_s"] == 0.5
    assert (tmp_path / "calibration.json").exists()
    without = CliRunner().invoke(fit_command, [str(tmp_path)])
    assert "--workload" in str(without.exception)
