"""Every script of the table, profiled and captured as it is: `make scripts`.

    python -m tests.pytorch.intake [WORD …]     those whose names have one of the words

With all of them the table in docs/concepts/capture.md is written anew.
"""

from __future__ import annotations

import ast
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from foretell.graph import load
from foretell.trace import read
from tests.pytorch.intake.table import SCRIPTS, SLOW, TABLE, Case, run

PAGE = Path(__file__).parents[3] / "docs" / "concepts" / "capture.md"
BEGIN, END = "<!-- scripts -->", "<!-- end of scripts -->"


def main(words: list[str]) -> int:
    """Print the table; how many scripts failed."""
    cases = [c for c in (*TABLE, *SLOW) if not words or any(w in c.name for w in words)]
    rows = []
    for case in cases:
        rows.append(_row(case))
        print("  ".join(rows[-1]), flush=True)
    failed = sum("failed" in row[2] or "failed" in row[3] for row in rows)
    absent = sum(row[2] == "-" for row in rows)
    done = f"{len(rows) - failed - absent} of {len(rows) - absent} scripts profiled and captured"
    print(done + (f"; {absent} need a package that is not installed" if absent else ""))
    if not words and not absent:
        _write(rows, done)
    return failed


def _row(case: Case) -> tuple[str, str, str, str]:
    if not case.is_here:
        return str(case), f"needs {case.needs}", "-", "-"
    return str(case), _about(case), _tried(case, "profile"), _tried(case, "capture")


def _about(case: Case) -> str:
    name = case.name.replace(".", "/") + ".py" if case.is_module else case.name
    said = ast.get_docstring(ast.parse((SCRIPTS / name).read_text())) or "No docstring."
    return said.splitlines()[0]


def _tried(case: Case, goal: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        try:
            (answer, *_) = run(case, goal, Path(folder))
        except AssertionError as error:
            return "failed: " + str(error).splitlines()[0][:80]
        if goal == "profile":
            graph = read(Path(answer["trace"])).graph
            return f"{len(graph):,} tasks"
        graph = load(Path(answer["graph"]))
        kernels = len(graph.select(kind="kernel"))
        return f"{kernels:,} kernels" + (", real CPU tensors" if answer["is_real"] else "")


def _lines(rows: list[tuple[str, str, str, str]]) -> Iterator[str]:
    yield "| script | what it does | profile | capture |"
    yield "|---|---|---|---|"
    for row in rows:
        yield "| " + " | ".join(row) + " |"


def _write(rows: list[tuple[str, str, str, str]], done: str) -> None:
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    table = "\n".join(_lines(rows))
    PAGE.write_text(f"{before}{BEGIN}\n{done}:\n\n{table}\n{END}{after}")


if __name__ == "__main__":
    sys.exit(bool(main(sys.argv[1:])))
