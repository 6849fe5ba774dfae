"""A bounded, deterministic part of the fuzzing: `make fuzz` runs as much of it as wanted."""

import pytest

from tests.fuzz.fuzz import names, one

CASES = 16  # of each format


@pytest.mark.parametrize("name", names())
def test_no_case_breaks_a_command(name, tmp_path):
    for number in range(CASES):
        argv, wrong, _ = one(name, number, tmp_path)
        assert not wrong, f"{name} {number}: {argv}"
