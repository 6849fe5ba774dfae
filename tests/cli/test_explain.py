"""`foretell explain` for planners and strategies; what-ifs are in test_advise_command."""

import json
import re
import tomllib
from importlib.resources import files
from pathlib import Path

import pytest
from click.testing import CliRunner

from foretell.cli.main import foretell
from foretell.search.kit import PLANNERS
from foretell.search.oracle.scale import STRATEGIES
from foretell.search.oracle.space import WORDS
from foretell.whatif import WHATIFS

ROOT = Path(__file__).resolve().parents[2]


def reported(*words):
    result = CliRunner().invoke(foretell, ["explain", *words])
    assert result.exit_code == 0, result.exception
    return result.stdout


@pytest.mark.parametrize("name", PLANNERS)
def test_every_planner_explains_itself(name):
    found = json.loads(reported(name, "--json"))
    assert (found["kind"], found["name"]) == ("planner", name)
    assert found["does"].endswith(".")
    assert found["model"]
    assert found["source"]
    assert found["options"]


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_explains_itself(name):
    found = json.loads(reported(name, "--json"))
    mine = next(f for f in (found, *found.get("also", [])) if f["kind"] == "strategy")
    assert mine["does"].endswith(".")
    assert mine["model"].endswith(".")
    assert mine["plan"]
    assert mine["ends"]


VERBS = {"faster", "insert", "remove", "scale"}  # of the graph: nothing to assume or to measure


@pytest.mark.parametrize("name", [*WHATIFS, *PLANNERS, *STRATEGIES])
def test_every_name_tells_all_four(name):
    """Its model, what it assumes, where it comes from, how right it was or what it was held to."""
    found = json.loads(reported(name, "--json"))
    for one in (found, *found.get("also", [])):
        assert len(one["model"]) > 30
        assert one["assumes"] or name in VERBS
        assert one["source"]
        assert one["accuracy"] or one["checked_against"]
    text = reported(name)
    assert "source: " in text
    assert "measured: " in text or "checked against " in text
    assert all(len(line) <= 80 for line in text.splitlines())


def test_what_was_measured_is_named():
    """Accuracy is kept for names that there are, under the kind they have."""
    kept = json.loads((files("foretell.cli") / "accuracy.json").read_text())
    assert set(kept["what-ifs"]) <= set(WHATIFS)
    assert set(kept["planners"]) <= set(PLANNERS)
    assert set(kept["strategies"]) <= set(STRATEGIES)
    assert len(kept["what-ifs"]) >= 9


def test_what_names_were_checked_against_is_there():
    kept = tomllib.loads((files("foretell.cli") / "checked.toml").read_text())
    known = {"what-ifs": WHATIFS, "planners": PLANNERS, "strategies": STRATEGIES}
    for kind, lines in kept.items():
        assert set(lines) <= set(known[kind])
        for line in lines.values():
            for path in re.findall(r"tests/[\w/]+\.py", line):
                assert (ROOT / path).is_file(), path


def test_every_word_of_a_layout_s_name_is_a_strategy():
    assert {*WORDS.values(), "serial", "zero", "fsdp"} == set(STRATEGIES)


def test_a_name_that_is_two_things_tells_both():
    found = json.loads(reported("fsdp", "--json"))
    assert [found["kind"], *(f["kind"] for f in found["also"])] == ["what-if", "strategy"]
    assert "fsdp, a what-if:" in reported("fsdp")
    assert "fsdp, a strategy:" in reported("fsdp")


def test_accuracy_is_reported_where_it_was_measured():
    assert "measured: seven models" in reported("amp")
    assert "measured: made and timed on an H200" in " ".join(reported("p3").split())
    assert "not measured here; checked against" in " ".join(reported("remove").split())
    assert any("vTrain" in line for line in json.loads(reported("oracle", "--json"))["accuracy"])


def test_all_names_are_listed():
    found = json.loads(reported("--json"))
    assert set(found["planners"]) == set(PLANNERS)
    assert set(found["strategies"]) == set(STRATEGIES)
    shown = reported()
    assert "planner" in shown
    assert "strategy" in shown
