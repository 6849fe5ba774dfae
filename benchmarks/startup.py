"""How long a person waits before anything happens: importing, help, a first answer.

    python benchmarks/startup.py

Wall time of fresh processes, best of several; of a whole trace, CPU seconds, also with nothing
compiled yet, as it is right after installation.
"""

import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from longer import longer
from table import Row, show

from foretell.graph import save
from foretell.samples import transformer

TRACE = Path(__file__).parent / "measured" / "h200" / "resnet18.base.json.gz"


def wall(*command: str, times: int = 5) -> float:
    """The least wall time of several runs of a command."""
    spent = []
    for _ in range(times):
        begin = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        spent.append(time.perf_counter() - begin)
    return min(spent)


def worked(*command: str, **env: str) -> float:
    """CPU seconds of a command."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, **env})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def first_answers(folder: Path) -> list[Row]:
    """What a newcomer waits for with a trace of their own."""
    path = folder / "trace.json.gz"
    events = longer(TRACE, path, 50_000)
    found = []
    for words in (("show",), ("whatif", "fused-optimizer"), ("advise",)):
        line = [sys.executable, "-m", "foretell", words[0], str(path), *words[1:]]
        cold = worked(*line, NUMBA_CACHE_DIR=str(folder / words[0]))
        figure = f"{worked(*line):.1f} CPU-s, {cold:.1f} with nothing compiled"
        found.append(Row(f"`foretell {words[0]}` of {events:,} events", figure, "≤ 10"))
    return found


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
        first = first_answers(Path(folder))
    return [
        Row("`import foretell`", f"{imported:.3f} s", "≤ 0.3"),
        Row("`foretell --help`", f"{helped:.2f} s", "≤ 0.5"),
        Row("`foretell simulate` of 1,926 tasks, cold process", f"{answered:.2f} s"),
        *first,
    ]


if __name__ == "__main__":
    show("Start-up", rows())
