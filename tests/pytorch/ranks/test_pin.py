"""Cores dealt out to ranks: whole ones, of those that this process may use."""

import os
import subprocess
import sys

import pytest

from foretell.pytorch.ranks.pin import cores, cores_of_ranks, kept_to


@pytest.fixture
def system(tmp_path, monkeypatch):
    """Four cores of two hyperthreads, the second of each eight further on in number."""
    for cpu in range(8):
        place = tmp_path / f"cpu{cpu}" / "topology"
        place.mkdir(parents=True)
        (place / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    return tmp_path


def test_hyperthreads_of_a_core_stay_together(system):
    assert cores(system) == [{0, 4}, {1, 5}, {2, 6}, {3, 7}]
    assert cores_of_ranks(2, system) == [{0, 4, 1, 5}, {2, 6, 3, 7}]
    assert cores_of_ranks(3, system) == [{0, 4}, {1, 5}, {2, 6}]
    assert cores_of_ranks(5, system) == []


def test_a_lab_keeps_to_what_it_was_given(system, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 4, 1})
    assert cores(system) == [{0, 4}, {1}]


def test_a_range_and_no_word_at_all(system):
    (system / "cpu0/topology/thread_siblings_list").write_text("0-1\n")
    assert {0, 1} in cores(system)
    (system / "cpu7/topology/thread_siblings_list").unlink()
    assert {7} in cores(system)


def test_what_is_started_inside_keeps_to_its_cores():
    before = os.sched_getaffinity(0)
    one = frozenset({min(before)})
    code = "import os; print(sorted(os.sched_getaffinity(0)))"
    with kept_to(one):
        answer = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
    assert answer.stdout.strip() == str(sorted(one))
    assert os.sched_getaffinity(0) == before
