"""Profiles of several passes, and steps that are shorter than the kernel's slices."""

import pytest

from foretell_lab.emulation import passes, table
from foretell_lab.emulation.matrix import blocks
from foretell_lab.emulation.predicted import Known


def one(seconds):
    step = {"forward": seconds, "backward": [["b", 2 * seconds], ["a", 3 * seconds]]}
    return {"model": "tiny", "samples": 8, "steps": {"8": step}}


def test_a_profile_is_the_median_of_its_passes(tmp_path):
    for seconds in (0.03, 0.01, 0.02):
        passes.add(tmp_path, one(seconds))
    assert table.read(tmp_path / table.PROFILES) == {"tiny": one(0.02)}
    assert passes.count(tmp_path, "tiny") == 3
    assert passes.count(tmp_path, "other") == 0


def test_a_profile_without_passes_counts_as_one(tmp_path):
    table.write(tmp_path / table.PROFILES, {"tiny": one(0.01)})
    assert passes.count(tmp_path, "tiny") == 1


def test_cores_are_worth_what_most_looks_said():
    rows = [{"ranks": 2, "stretch": s, "late": 1.0, "cpu_s": 0.01} for s in (1.0, 3.0, 1.2)]
    known = Known({}, {"cores": [*rows, {"ranks": 4, "stretch": 9.0, "late": 1.0, "cpu_s": 0.01}]})
    assert known.cores(2)["stretch"] == 1.2
    assert known.cores(3)["stretch"] == 1.2


def test_short_steps_are_taken_together():
    held_up = [0.003] * 9 + [0.03] + [0.003] * 9 + [0.03]  # one in ten waits for a slice
    assert blocks(held_up) == pytest.approx([0.0057, 0.0057])
    assert blocks([0.1, 0.2]) == [0.1, 0.2]
    assert blocks([0.001]) == [0.001]
