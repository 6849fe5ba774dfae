"""How long a person waits before anything happens: importing, help, a first answer.

    python benchmarks/startup.py

Wall time of fresh processes, best of several.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from table import Row, show

from foretell.graph import save
from foretell.samples import transformer


def wall(*command: str, times: int = 5) -> float:
    """The least wall time of several runs of a command."""
    spent = []
    for _ in range(times):
        begin = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        spent.append(time.perf_counter() - begin)
    return min(spent)


def rows() -> list[Row]:
    """All figures of starting up."""
    python = sys.executable
    bare = wall(python, "-c", "pass")
    imported = wall(python, "-c", "import foretell") - bare
    helped = wall(python, "-m", "foretell", "--help")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step.graph"
        save(transformer(ranks=8), path)
        answered = wall(python, "-m", "foretell", "simulate", str(path), times=3)
    return [
        Row("`import foretell`", f"{imported:.3f} s", "≤ 0.3"),
        Row("`foretell --help`", f"{helped:.2f} s", "≤ 0.5"),
        Row("`foretell simulate` of 1,926 tasks, cold process", f"{answered:.2f} s"),
    ]


if __name__ == "__main__":
    show("Start-up", rows())
