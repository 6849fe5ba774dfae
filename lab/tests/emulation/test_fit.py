"""Runs fed back: predictions get better, and say so."""

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from emulation.made import PROFILE, known, machine
from foretell.cli.fit import command as fit_command
from foretell.errors import InputError
from foretell.graph import Kind
from foretell_lab.cli.lab import command as lab_command
from foretell_lab.emulation import accuracy, fit, table
from foretell_lab.emulation.predicted import Busy, compared, predict
from foretell_lab.emulation.step import Knobs
from foretell_lab.emulation.table import Config, Row

TRUE = Knobs(compute=1.5, wire=1.2)
PLANS = ("ddp", "one", "late", "server", "sharded", "accumulate", "uneven", "1mb")


def rows(ranks=(1, 2), noise=(0.98, 1.0, 1.02)):
    found = []
    for r in ranks:
        for plan in PLANS if r > 1 else ("ddp",):
            config = Config("tiny", plan, "slow" if r > 1 else "loopback", r)
            true = predict(known(), config, Busy(1.5), TRUE).seconds
            for k, times in enumerate(noise):
                step = true * times
                found.append(
                    Row("tiny", plan, config.network, r, "1", k, step, step, step, 5, 0.01, 1.5, k)
                )
    return found


def test_what_made_the_runs_is_found_again():
    found = fit.fit(known(), rows())
    before = accuracy.summary(compared(known(), rows()))
    after = accuracy.summary(compared(known(), rows(), found))
    assert before["error"] > 0.12
    assert after["error"] < 0.03
    assert found.wire == pytest.approx(TRUE.wire, rel=0.1)


def test_what_is_learned_holds_for_runs_not_seen():
    configs = list(table.by_config(rows()))
    chosen = set(fit.chosen(configs, 0.4))
    assert len(chosen) == 4
    learned = fit.fit(known(), [r for r in rows() if r.config in chosen])
    rest = [r for r in rows() if r.config not in chosen]
    assert (
        accuracy.summary(compared(known(), rest, learned))["error"]
        < accuracy.summary(compared(known(), rest))["error"] / 2
    )


def test_the_same_share_is_chosen_each_time():
    configs = list(table.by_config(rows()))
    assert fit.chosen(configs, 0.3) == fit.chosen(configs[::-1], 0.3)
    with pytest.raises(InputError, match="share of 0"):
        fit.chosen(configs, 0)


def test_nothing_to_fit():
    with pytest.raises(InputError, match="no runs"):
        fit.fit(known(), [])


def test_spread_is_taken_off_errors():
    found = {h.config: h for h in compared(known(), rows(), TRUE)}
    one = found[Config("tiny", "one", "slow", 2)]
    assert one.spread == pytest.approx(0.04 / 3)
    assert one.beyond == 0.0
    assert one.runs == 3


def test_the_plan_predicted_best_and_what_it_costs():
    picked = accuracy.picks(compared(known(), rows()))
    assert [(p["model"], p["ranks"]) for p in picked] == [("tiny", 2)]
    assert picked[0]["regret"] >= 0


@pytest.fixture
def folder(tmp_path):
    table.write(tmp_path / table.PROFILES, {"tiny": PROFILE})
    table.write(tmp_path / table.MACHINE, machine())
    for row in rows():
        table.append(tmp_path, row)
    return tmp_path


def test_rows_read_back_and_bad_ones_are_named(folder):
    found = table.rows(folder)
    assert [r.config for r in found] == [r.config for r in rows()]
    assert found[0].step_s == pytest.approx(rows()[0].step_s, rel=1e-5)
    with (folder / table.ROWS).open("a") as file:
        file.write("tiny,ddp\n")
    with pytest.raises(InputError, match=f"line {len(found) + 2}: not a row"):
        table.rows(folder)


def test_fit_writes_what_lab_then_predicts_with(folder):
    before = CliRunner().invoke(lab_command, ["-o", str(folder), "--no-run", "--json"])
    assert before.exit_code == 0, before.output
    answer = CliRunner().invoke(fit_command, [str(folder), "--share", "0.5", "--json"])
    assert answer.exit_code == 0, answer.output
    fitted = json.loads(answer.stdout)
    assert fitted["after"]["error"] < fitted["before"]["error"]
    after = CliRunner().invoke(lab_command, ["-o", str(folder), "--no-run", "--json"])
    errors = [json.loads(r.stdout)["figures"]["error"] for r in (before, after)]
    assert errors[1] < errors[0]
    assert json.loads(after.stdout)["is_fitted"]


def test_a_file_that_holds_nothing_fitted(tmp_path):
    (tmp_path / "x.json").write_text('{"knobs": {"speed": 1}}')
    with pytest.raises(InputError, match="holds nothing that was fitted"):
        fit.load(tmp_path / "x.json")


def test_the_op_table_is_learned_from_core_seconds_alone():
    config = Config("tiny", "one", "slow", 2)
    plain = predict(known(), config, Busy(1.0)).graph
    core = float(plain.seconds[plain.kind == Kind.HOST].sum()) / 2
    made = [
        replace(row, main_s=1.4 * core, step_s=99.0 if row.ranks > 1 else 1.4 * core, stretch=1.0)
        for row in rows(ranks=(2,))
        if row.plan == "one"
    ]
    few = fit.op_table(known(), made)["tiny"]
    assert 1.0 < few < 1.05  # ranks that mostly wait say little of work
    busy = [replace(row, step_s=1.4 * core) for row in made * 20]
    assert fit.op_table(known(), busy)["tiny"] == pytest.approx(1.4, rel=0.01)
    assert fit.op_table(known(), rows()) == {}  # nobody clocked them


def test_what_was_run_once_has_the_spread_of_others():
    once = [row for row in rows() if row.plan != "one" or row.round == 0]
    found = {h.config.plan: h for h in compared(known(), once) if h.config.ranks == 2}
    assert found["one"].runs == 1
    assert found["one"].spread == pytest.approx(found["ddp"].spread)


def test_picks_are_compared_with_measuring():
    again = accuracy.again(rows(), compared(known(), rows(), TRUE))
    assert again == {"tries": 3, "predicted": 1.0, "measured": 1.0}
    assert accuracy.again([], [])["tries"] == 0
