"""The command: rows to a file, words to standard error, 2 for a mistake, and few imports."""

import subprocess
import sys
from pathlib import Path

import pytest

from foretell_lab.bench import load
from foretell_lab.bench.command import left_for, main

HEAVY = ("numba", "msgspec", "zstandard", "click", "rich", "scipy")
CASES = """relu forward fp32 - n=1024
linear forward fp32 nk m=8;n=8;k=8

relu forward fp32 - n=1000000000000
"""


def imported(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(' '.join(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(ran.stdout.split())


def test_reading_tables_needs_no_torch_and_nothing_heavy() -> None:
    found = imported("import foretell_lab.bench, foretell_lab.bench.command")
    assert not found & {"torch", *HEAVY}


def test_measuring_needs_torch_and_numpy_alone() -> None:
    pytest.importorskip("torch", reason="measuring operators needs torch")
    modules = "sweep, host, machine, ops"
    found = imported(f"from foretell_lab.bench import {modules}")
    assert "torch" in found
    assert not found & set(HEAVY)


def test_cases_of_a_file_are_measured_and_a_second_run_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch", reason="measuring operators needs torch")
    out = tmp_path / "mine.csv"
    (tmp_path / "cases.txt").write_text(CASES)
    query = ["-o", str(out), "--device", "cpu", "--part", "device", "--seconds", "60"]
    query += ["--longest", "1", "--cases", str(tmp_path / "cases.txt")]
    assert main(query) == 0
    assert [str(r.case) for r in load(out)] == CASES.split("\n")[:2]
    assert "too large" in Path(f"{out}.skipped.txt").read_text()
    assert main([*query, "--resume"]) == 0
    assert len(load(out)) == 2
    assert "2 rows, 1 skipped" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--shard", "2/2"], "no shard"),
        (["--shard", "x"], "no shard"),
        (["--only", "lineer"], "did you mean `linear`"),
    ],
)
def test_a_mistake_is_reported_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], wrong: list[str], said: str
) -> None:
    pytest.importorskip("torch", reason="measuring operators needs torch")
    out = str(tmp_path / "x.csv")
    assert main(["--device", "cpu", "-o", out, "--seconds", "1", *wrong]) == 2
    assert said in capsys.readouterr().err


def test_little_time_is_not_all_kept_for_the_end():
    assert left_for(450.0) == 438.0
    assert left_for(10.0) == 8.0
