"""What the shipped runs of the laboratory say of predictions, with bounds."""

import json

import pytest
from click.testing import CliRunner

from foretell_lab.cli.validate import command
from foretell_lab.emulation import accuracy, host, table
from foretell_lab.emulation.predicted import compared
from foretell_lab.validate import lab
from foretell_lab.validate.lab import (
    CROWDED,
    FOLDER,
    LATER,
    PINNED,
    QUIET,
    UNSEEN,
    WARM,
    Runs,
    report,
    shipped,
)


@pytest.fixture(scope="module")
def found():
    return report()


def test_one_laboratory_is_predicted_within_bounds():
    runs = Runs.read(shipped(FOLDER))
    figures = accuracy.summary(lab._compared([runs]))
    assert figures["beyond"] <= 0.05
    assert figures["within"] >= 0.90


def test_there_are_enough_of_every_kind():
    for places in ([FOLDER], [CROWDED], QUIET, PINNED, WARM):
        rows = [row for place in places for row in table.rows(shipped(place))]
        configs = table.by_config(rows)
        assert len(configs) >= 100
        assert len({c.model for c in configs}) >= 6
        assert {c.ranks for c in configs} >= {1, 2, 4}
        assert len({c.network for c in configs}) >= 4
        for model in {c.model for c in configs}:
            assert len({c.plan for c in configs if c.model == model}) >= 5
    assert min(map(len, table.by_config(table.rows(shipped(FOLDER))).values())) >= 3


def test_the_later_networks_are_others():
    names = [{row.network for row in Runs.read(shipped(f)).rows} for f in (FOLDER, LATER)]
    assert not names[0] & names[1]


@pytest.mark.slow
def test_errors_beyond_the_spread_stay_within_bounds(found):
    assert found["predicted"]["beyond"] <= 0.05
    assert found["predicted"]["within"] >= 0.90
    assert found["blind"]["beyond"] <= 0.085
    assert found["later"]["beyond"] <= 0.05
    assert found["quiet"]["beyond"] <= 0.08
    assert found["quiet"]["within"] >= 0.85
    assert found["crowded"]["beyond"] <= 0.08
    assert found["pinned"]["beyond"] <= 0.06
    assert found["unseen"]["beyond"] <= 0.05
    assert found["unseen"]["within"] >= 0.90
    assert found["unseen_with_load"]["within"] >= 0.90
    assert found["warm"]["beyond"] <= 0.05
    assert found["warm"]["within"] >= 0.95


@pytest.mark.slow
def test_fit_helps_on_what_it_has_not_seen(found):
    assert found["rest_after"]["beyond"] <= found["rest_before"]["beyond"] + 0.001
    assert found["rest_after"]["beyond"] <= 0.05
    assert found["quiet_after"]["beyond"] < 0.9 * found["quiet_before"]["beyond"]
    assert found["quiet_after"]["beyond"] <= 0.05
    assert found["pinned_after"]["beyond"] < 0.95 * found["pinned_before"]["beyond"]
    assert found["pinned_after"]["beyond"] <= 0.05
    assert found["warm_after"]["beyond"] <= 0.05


@pytest.mark.slow
def test_plans_are_picked_within_three_percent_beyond_the_spread(found):
    assert found["predicted"]["picked_beyond"] >= 0.9
    assert found["unseen"]["picked_beyond"] >= 0.9
    assert found["unseen"]["picked"] >= 0.65
    assert found["warm"]["picked_beyond"] >= 0.9
    assert "as measured  beyond the spread" in found["text"]


@pytest.mark.slow
def test_plans_are_picked_as_well_as_by_measuring(found):
    assert found["again"]["tries"] >= 100
    assert found["again"]["predicted"] >= found["again"]["measured"]


@pytest.mark.slow
def test_that_messages_stall_helps_with_models_held_back(monkeypatch, found):
    monkeypatch.setattr(host, "STALL", 0.0)
    unseen = [Runs.read(shipped(name)).of(UNSEEN) for name in PINNED]
    rows = [h for part in unseen for h in compared(part.known, part.rows, is_blind=True)]
    without = accuracy.summary(rows)
    assert found["unseen"]["beyond"] < without["beyond"]
    assert found["unseen"]["regret"] < without["regret"]


@pytest.mark.slow
def test_to_know_how_busy_the_machine_was_helps(found):
    assert found["predicted"]["error"] < found["blind"]["error"]


@pytest.mark.slow
def test_the_command_needs_no_other_data(monkeypatch, tmp_path, found):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FORETELL_TRUTH", raising=False)
    monkeypatch.setattr("foretell_lab.validate.lab.report", lambda _: found)
    result = CliRunner().invoke(command, ["--lab", "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["predicted"]["configs"] == found["predicted"]["configs"]
    assert "runs of the same configuration lie" in found["text"]
