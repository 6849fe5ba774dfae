"""Factors learned from runs: those that made the runs are found again, the others stay."""

import json
import math
from dataclasses import replace

import pytest
from click.testing import CliRunner

from foretell.cli.fit import _measured_run
from foretell.cli.fit import command as fit_command
from foretell.cli.predict import command as predict_command
from foretell.cluster import Calibration, load
from foretell.errors import InputError
from foretell.plan import Plan
from foretell.predict import predict
from foretell.predict.fit import PART, Run, _parts, _Seen, fit, table
from foretell.workload import load as workload

MODEL = workload("resnet18")
ONE, TWO, FAR = (load(f"abci:gpus={n}") for n in (1, 4, 16))
TRUE = Calibration(compute=1.4, beta=2.5)


def plan(ranks):
    return Plan(dp=ranks, overlap=False, global_batch=64 * ranks, framework="ddp")


def run(cluster, true=TRUE):
    seconds = predict(plan(cluster.size), MODEL, cluster.calibrated(true)).step
    return Run(MODEL, cluster, plan(cluster.size), seconds)


@pytest.fixture(scope="module")
def found():
    return fit([run(c) for c in (ONE, TWO, FAR)])


def test_what_made_the_runs_is_found_again(found):
    assert found.calibration.compute == pytest.approx(1.4, rel=0.02)
    slower = found.calibration.comm * found.calibration.beta
    assert slower == pytest.approx(2.5, rel=0.25)  # drawn a little to what was priced
    assert found.accuracy(found.after) > 0.99 > 0.8 > found.accuracy(found.before)


def test_unseen_runs_are_predicted_better(found):
    far = load("abci:gpus=64")
    real = predict(plan(64), MODEL, far.calibrated(TRUE)).step
    before = predict(plan(64), MODEL, far).step
    after = predict(plan(64), MODEL, far.calibrated(found.calibration)).step
    assert abs(after / real - 1) < 0.02 < abs(before / real - 1)


def test_what_no_run_tells_of_stays_and_says_so():
    alone = fit([run(ONE)])
    by_name = {f.name: f for f in alone.factors}
    for name in ("comm", "alpha", "beta", "inside"):
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
    assert "effect on step" in told.output
    learned = json.loads(out.read_text())
    assert learned["accuracy_after"] > 0.99 > learned["accuracy_before"]
    query = ["resnet50", "--on", "abci:gpus=4", "--plan", "dp=4,global_batch=256", "--json"]
    runner = CliRunner()
    with_it = runner.invoke(predict_command, [*query, "--calibration", str(out)])
    assert json.loads(with_it.output)["step_s"] == pytest.approx(0.5, rel=0.01)


def left(folder, plan="dp=2", steps=((0.4, 0.5, 0.6), (0.5, 0.4, 0.6)), **more):
    """The folder of a run of two ranks."""
    folder.mkdir(exist_ok=True)
    (folder / "run.json").write_text(json.dumps({"script": "vgg11", "plan": plan}))
    for rank, took in enumerate(steps):
        found = {"steps_s": list(took), "at": rank, **more}
        (folder / f"rank-{rank}.result.json").write_text(json.dumps(found))
    return str(folder)


FEW = workload("vgg11")
WHERE = ["--on", "abci:gpus=2", "--json"]


def learned(*words):
    return json.loads(CliRunner().invoke(fit_command, [*words, *WHERE]).stdout)


def test_what_a_run_left_is_read(tmp_path):
    folder = left(tmp_path / "run", samples=32)
    told = learned(folder)  # its script says what was run
    assert told["fitted_on"][0]["measured_s"] == 0.5
    assert "global_batch=64" in told["fitted_on"][0]["run"]
    assert (tmp_path / "run" / "calibration.json").exists()
    assert "vgg:depth=11 on" in told["fitted_on"][0]["run"]
    assert _measured_run(tmp_path / "run", "resnet50", "abci:gpus=2").workload.name == "resnet"
    without = CliRunner().invoke(fit_command, [folder])
    assert "--on" in str(without.exception)


def test_several_runs_are_read_at_once(tmp_path):
    folders = [left(tmp_path / name, samples=32) for name in "ab"]
    assert len(learned(*folders)["fitted_on"]) == 2
    (tmp_path / "lab").mkdir()
    beside = CliRunner().invoke(fit_command, [str(tmp_path / "lab"), folders[0]])
    assert "by itself" in str(beside.exception)
    nothing = CliRunner().invoke(fit_command, [folders[0], str(tmp_path / "lab"), *WHERE])
    assert "no folder of a run" in str(nothing.exception)


@pytest.mark.parametrize("name", ["run.json", "rank-1.result.json"])
def test_a_file_that_is_cut_is_named(tmp_path, name):
    folder = left(tmp_path / "run", samples=32)
    whole = (tmp_path / "run" / name).read_text()
    (tmp_path / "run" / name).write_text(whole[: len(whole) // 2])
    found = CliRunner().invoke(fit_command, [folder, *WHERE])
    assert isinstance(found.exception, InputError)
    assert f"{name}` is cut short" in str(found.exception)
    assert "foretell run" in found.exception.hint


def test_an_update_is_fitted_apart_only_by_runs_that_say_what_it_took(tmp_path):
    plan = Plan.parse("dp=2,global_batch=64,stack=ddp")
    step, parts = spent(plan, Calibration(update=5.0))
    folder = left(tmp_path / "run", str(plan), ((step,) * 9, (step,) * 9), spent=parts)
    bare = left(tmp_path / "bare", str(plan), ((step,) * 9, (step,) * 9))
    told, blind = (Calibration.of(learned(f)["calibration"], "") for f in (folder, bare))
    assert told.update * told.compute > 1.5
    assert told.update > 1.5 * told.compute
    assert blind.update == pytest.approx(1.0, abs=1e-3)


def spent(plan, true):
    """What a run would leave on a machine that is not as priced: its step, and its parts."""
    cluster = load("abci:gpus=2").calibrated(true)
    step = predict(plan, FEW, cluster).step
    parts = _parts(Run(FEW, cluster, plan, step), cluster)
    return step, [{**parts, "whole_s": step}] * 5


def test_a_run_that_says_what_it_was_spent_on_tells_work_from_messages(tmp_path):
    plans = [Plan.parse(f"dp=2,global_batch=64{more},stack=ddp") for more in ("", ",overlap=false")]
    true = Calibration(compute=6.0)
    step, parts = spent(plans[0], true)
    folder = left(tmp_path / "run", str(plans[0]), ((step,) * 9, (step,) * 9), spent=parts)
    bare = left(tmp_path / "bare", str(plans[0]), ((step,) * 9, (step,) * 9))
    told, blind = (Calibration.of(learned(f)["calibration"], "") for f in (folder, bare))
    assert told.compute == pytest.approx(6.0, rel=0.1)
    assert told.comm * told.inside == pytest.approx(1.0, abs=0.35)
    real = predict(plans[1], FEW, load("abci:gpus=2").calibrated(true)).step
    off = {
        name: abs(predict(plans[1], FEW, load("abci:gpus=2").calibrated(c)).step / real - 1)
        for name, c in (("priced", Calibration()), ("told", told), ("blind", blind))
    }
    assert off["told"] < 0.05 < off["priced"]
    assert off["told"] <= off["blind"]


def test_runs_and_parts_that_differ_from_step_to_step_count_for_less():
    cluster, plan = load("abci:gpus=2"), Plan.parse("dp=2,global_batch=64,stack=ddp")
    parts = {"compute_s": 1.0, "talk_s": 0.5}
    sure, vague = (
        _Seen.of([Run(FEW, cluster, plan, 2.0, parts, *told)], 0.03) for told in ((), (0.2, 0.3))
    )
    assert sure.values.tolist() == pytest.approx([math.log(2.0), 0.5, 0.25])
    assert sure.noise.tolist() == [0.03, PART, PART]
    assert vague.noise.tolist() == [0.2, 0.3, 0.3]
