"""How far a reader of one answer walks: at most 50 files, and 15 of our functions on each other."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILES, DEEP = 50, 15


@pytest.mark.parametrize("name", ["whatif", pytest.param("plan", marks=pytest.mark.slow)])
def test_an_answer_passes_through_few_files(name):
    done = subprocess.run(
        [sys.executable, "benchmarks/walk.py", name], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    files, deep = map(int, re.search(r"in (\d+) files, (\d+) deep", done.stdout).groups())
    assert files <= FILES, done.stdout
    assert deep <= DEEP, done.stdout
