"""Steps measured on ranks of unequal speed, in the repository, beside what is predicted of them."""

from functools import cache
from pathlib import Path
from statistics import mean, median

import pytest

from foretell_lab.emulation import mixed

FACTORS = Path(__file__).resolve().parents[3] / "benchmarks" / "measured" / "factors"
FOLDER = Path(__file__).resolve().parents[3] / "benchmarks" / "measured" / "mixed"
pytestmark = pytest.mark.skipif(not FOLDER.exists(), reason=f"there is no {FOLDER}")


@cache
def found():
    return mixed.compared(FOLDER)


def test_steps_are_predicted_within_a_tenth():
    settings = {row.setting for row in found()}
    assert len(settings) >= 20
    assert mean(row.runs for row in found()) == 3
    assert mean(abs(row.error) for row in found()) <= 0.10
    assert mean(row.spread for row in found()) <= 0.06


def test_the_best_plan_is_picked():
    picked = mixed.picks(found())
    assert mean(p["ours"] == p["best"] for p in picked) >= 0.85
    assert min(p["plans"] for p in picked) >= 4


def test_factors_predicted_shorter_are_shorter():
    rows = {(r.setting, r.plan): r for r in found()}
    pairs = [(rows[s, "proportional"], rows[s, "factors"]) for s, p in rows if p == "factors"]
    said = [(plain, sent) for plain, sent in pairs if sent.predicted < plain.predicted]
    assert len(said) >= 12
    assert all(sent.measured < plain.measured for plain, sent in said)


def test_factors_were_never_slower_where_the_program_sent_them():
    took = {}
    for row in mixed.rows(FACTORS):
        key = (row["model"], row["network"], row["ranks"], row["plan"])
        took.setdefault(key, []).append(median(row["steps_s"]))
    middle = {key: median(each) for key, each in took.items()}
    sent = [key for key in middle if key[-1] == "program"]
    assert len(sent) == 12
    assert all(middle[key] < middle[(*key[:-1], "proportional")] for key in sent)
