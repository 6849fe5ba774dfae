"""`foretell advise` and `foretell explain` as a person meets them."""

import json

import pytest
from click.testing import CliRunner
from tests.whatif.test_precision import mlp

from foretell.cli.main import foretell
from foretell.graph.file import save
from foretell.whatif import WHATIFS


def said(*words):
    found = CliRunner().invoke(foretell, [str(w) for w in words], catch_exceptions=False)
    assert found.exit_code == 0, found.output
    return found.stdout


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "step.graph"
    save(mlp(), path)
    return path


def test_changes_are_ranked(file):
    found = json.loads(said("advise", file, "--json"))
    gains = [a["gain"] for a in found["ranked"]]
    assert gains == sorted(gains, reverse=True)
    assert all(a["low_s"] <= a["predicted_s"] <= a["high_s"] for a in found["ranked"])
    assert found["together"]["code"]
    assert {r["change"] for r in found["refused"]} >= {"channels-last"}


def test_the_table_fits_a_terminal(file, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = said("advise", file, "tf32", "amp:dtype=bf16")
    head = text.partition("does not apply")[0]
    assert "the best combination" in head
    assert all(len(line) <= 80 for line in head.splitlines() if "–" in line)


def test_named_changes_alone_are_tried(file):
    found = json.loads(said("advise", file, "tf32", "--json"))
    assert [a["changes"] for a in found["ranked"]] == [["tf32"]]


@pytest.mark.parametrize("name", sorted(WHATIFS))
def test_every_whatif_explains_itself(name):
    found = json.loads(said("explain", name, "--json"))
    assert found["name"] == name
    assert found["does"].endswith(".")
    assert len(found["model"]) > 40
    assert found["assumes"] or name in ("faster", "insert", "remove", "scale")


def test_all_names_are_listed():
    assert set(json.loads(said("explain", "--json"))["names"]) == set(WHATIFS)


def test_an_unknown_name_offers_the_nearest():
    from foretell.errors import InputError

    with pytest.raises(InputError, match="amp"):
        CliRunner().invoke(foretell, ["explain", "ampp"], catch_exceptions=False)
