"""The gate: limits as people write them, exit codes, and what CI reads."""

import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from click.testing import CliRunner

from foretell.cli.main import foretell
from foretell.errors import InputError
from foretell.survey.budget import Verdict, limit, verdicts

STEP = Path(__file__).resolve().parents[2] / "docs" / "guides" / "step.txt"
FOUND = {"predicted_s": 0.1, "low_s": 0.09, "high_s": 0.12, "peak_bytes": None,
         "shares": {"idle": 0.05, "exposed communication": 0.2}}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("120ms", "step", 0.12),
        ("1.5 s", "step", 1.5),
        ("70GiB", "memory", 70 * 2**30),
        ("8 GB", "memory", 8e9),
        ("15%", "idle", 0.15),
        ("0.2", "exposed", 0.2),
        ("0.5", "step", 0.5),
    ],
)
def test_limits_as_people_write_them(text, name, value):
    assert limit(text, name) == pytest.approx(value)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("12 parsec", "step"),
        ("", "step"),
        ("0ms", "step"),
        ("-1s", "step"),
        ("nan", "step"),
        ("inf", "memory"),
        ("70GiB", "step"),
        ("x%", "idle"),
    ],
)
def test_limits_that_mean_nothing(text, name):
    with pytest.raises(InputError, match="under"):
        limit(text, name)


def test_verdicts():
    limits = {"step": 0.11, "memory": 1e9, "idle": 0.05, "exposed": 0.1}
    found = {v.name: v for v in verdicts(FOUND, limits, surely=False)}
    assert {name: v.passed for name, v in found.items()} == {
        "step": True, "memory": False, "idle": True, "exposed": False,
    }  # fmt: skip
    assert "unknown" in str(found["memory"])
    assert "90 to 120 ms" in str(found["step"])
    (surely,) = verdicts(FOUND, {"step": 0.11}, surely=True)
    assert not surely.passed


def test_a_limit_is_kept_where_it_is_reached():
    assert Verdict("step", 1.0, 1.0).passed
    assert not Verdict("step", 1.0, 1.0 + 1e-9).passed


def run(*words):
    return CliRunner().invoke(foretell, ["check", *map(str, words)])


def test_exit_codes_of_the_real_command():
    """As a shell sees them: a gate that never closes is none."""
    for most, code in (("1s", 0), ("1us", 3), ("1parsec", 2)):
        words = [sys.executable, "-m", "foretell", "check", str(STEP), "--step-under", most]
        done = subprocess.run(words, capture_output=True, timeout=120, check=False)
        assert done.returncode == code, done.stderr


def test_what_ci_reads(tmp_path):
    xml, text = tmp_path / "junit.xml", tmp_path / "summary.md"
    text.write_text("before\n")
    result = run(STEP, "faster-host:times=2", "--step-under", "1us", "--idle-under", "99%",
                 "--junit", xml, "--summary", text, "--json")  # fmt: skip
    assert result.exit_code == 3
    found = json.loads(result.stdout)
    assert not found["passed"]
    assert [v["passed"] for v in found["verdicts"]] == [False, True]
    root = ElementTree.parse(xml).getroot()
    assert (root.get("tests"), root.get("failures")) == ("2", "1")
    assert text.read_text().startswith("before\n### foretell")


def test_a_workload_under_a_plan():
    spec = "gpt:layers=4,hidden=256,heads=4,seq=128,vocab=1000"
    words = [spec, "--on", "dgx-a100:nodes=1", "--plan", "dp=8,global_batch=8"]
    result = run(*words, "--step-under", "100s", "--memory-under", "80GiB")
    assert result.exit_code == 0, result.exception
    assert "stays under" in result.stdout
    assert run(*words, "--memory-under", "1MiB").exit_code == 3


@pytest.mark.parametrize(
    "words", [[STEP], ["gpt:layers=4", "--plan", "dp=1", "--step-under", "1s"]]
)
def test_what_is_missing(words):
    assert isinstance(run(*words).exception, InputError)


def test_in_an_action_the_summary_is_its_own(tmp_path, monkeypatch):
    page = tmp_path / "summary.md"
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(page))
    answer = CliRunner().invoke(foretell, ["check", str(STEP), "--step-under", "1s"])
    assert answer.exit_code == 0
    assert "✅ under" in page.read_text()
