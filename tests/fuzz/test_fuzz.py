"""A bounded, deterministic part of the fuzzing: `make fuzz` runs as much of it as wanted."""

import pytest

from tests.fuzz.fuzz import names, one
from tests.fuzz.readers import READERS, read

CASES = 8  # of each format


@pytest.mark.parametrize("name", names())
def test_no_case_breaks_a_command(name, tmp_path):
    for number in range(CASES):
        argv, wrong, _ = one(name, number, tmp_path)
        assert not wrong, f"{name} {number}: {argv}"


@pytest.mark.parametrize("name", READERS)
def test_no_case_breaks_a_reader(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number in range(CASES, 4 * CASES):
        _, wrong, _ = read(name, number, tmp_path)
        assert not wrong, f"{name} {number}"


def test_a_reader_that_breaks_is_reported(tmp_path, monkeypatch):
    monkeypatch.setitem(READERS, "prices", lambda path: [][len(path.name)])
    assert "IndexError" in read("prices", 0, tmp_path)[1]
