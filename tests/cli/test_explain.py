"""`foretell explain` for planners and strategies; what-ifs are in test_advise_command."""

import json

import pytest
from click.testing import CliRunner

from foretell.cli.main import foretell
from foretell.search.oracle.space import WORDS
from foretell.search.oracle.strategies import STRATEGIES
from foretell.search.planners import PLANNERS


def told(*words):
    result = CliRunner().invoke(foretell, ["explain", *words])
    assert result.exit_code == 0, result.exception
    return result.stdout


@pytest.mark.parametrize("name", PLANNERS)
def test_every_planner_explains_itself(name):
    found = json.loads(told(name, "--json"))
    assert (found["kind"], found["name"]) == ("planner", name)
    assert found["does"].endswith(".")
    assert found["model"]
    assert found["source"]
    assert found["options"]


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_explains_itself(name):
    found = json.loads(told(name, "--json"))
    mine = next(f for f in (found, *found.get("also", [])) if f["kind"] == "strategy")
    assert mine["does"].endswith(".")
    assert mine["model"].endswith(".")
    assert mine["plan"]
    assert mine["ends"]


def test_every_word_of_a_layout_s_name_is_a_strategy():
    assert {*WORDS.values(), "serial", "zero", "fsdp"} == set(STRATEGIES)


def test_a_name_that_is_two_things_tells_both():
    found = json.loads(told("fsdp", "--json"))
    assert [found["kind"], *(f["kind"] for f in found["also"])] == ["what-if", "strategy"]
    assert "fsdp, a what-if:" in told("fsdp")
    assert "fsdp, a strategy:" in told("fsdp")


def test_accuracy_is_told_where_it_was_measured():
    assert "measured: seven models" in told("amp")
    assert "measured: not here" in told("expert")
    assert any("vTrain" in line for line in json.loads(told("oracle", "--json"))["accuracy"])


def test_all_names_are_listed():
    found = json.loads(told("--json"))
    assert set(found["planners"]) == set(PLANNERS)
    assert set(found["strategies"]) == set(STRATEGIES)
    shown = told()
    assert "planner" in shown
    assert "strategy" in shown
