"""How long a person waits before anything happens: importing, help, a first answer.

    python benchmarks/startup.py

CPU seconds of fresh processes, the least of several; of each command the first time, from a fresh
copy of the package with empty caches and no bytecode, as after an editable installation, and later.
"""

import os
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from longer import longer
from table import Row, show

import foretell
from foretell.cluster import load
from foretell.cost import price
from foretell.graph import Graph, save

SCRIPT = Path(foretell.__file__).parent / "samples" / "train.py"
TRACE = Path(__file__).parent / "measured" / "h200" / "resnet18.base.json.gz"


def worked(*command: str, cwd: Path | None = None, **env: str) -> float:
    """CPU seconds of a command and what it starts."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "", **env}  # empty: bytecode is written
    subprocess.run(command, check=True, capture_output=True, cwd=cwd, env=env)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def least(*command: str, times: int = 3) -> float:
    """The least CPU seconds of several runs of a command."""
    return min(worked(*command) for _ in range(times))


MODEL = "gpt:layers=2,hidden=64,heads=2,seq=32,vocab=100"
ON = ("--on", "dgx-a100:nodes=1")
LAYOUT = "dp=8,global_batch=8"
# What a newcomer types; TRACE, STEP and RUNS stand for files.
COMMANDS = (
    ("show", "TRACE"), ("replay", "TRACE"), ("simulate", "STEP"), ("advise", "TRACE"),
    ("whatif", "TRACE", "fused-optimizer"), ("compare", "STEP", "STEP"),
    ("check", "STEP", "--step-under", "1s"), ("report", "TRACE", "-o", "page.html"),
    ("predict", MODEL, *ON, "--plan", LAYOUT), ("oracle", MODEL, "--on", "dgx-a100", "--gpus", "8"),
    ("plan", MODEL, *ON, "--with", "fusion:evaluations=50"),
    ("plan", MODEL, *ON, "--with", "placement:strokes=2000,polish=200"),
    ("plan", MODEL, *ON), ("schedule", "v:devices=2", "-n", "4", "--time", "1", "--no-cache"),
    ("fit", "RUNS", "-o", "fitted.json"), ("export", LAYOUT, "--to", "megatron"),
    ("explain", "amp"), ("capture", "SCRIPT", "-o", "step.graph"),
)  # fmt: skip


def timed(ranks: int) -> Graph:
    """A small step with its times."""
    sys.path.append(str(Path(__file__).resolve().parents[1]))
    from tests.transformer import transformer

    return price(transformer(ranks=ranks), load("dgx-a100"))


def first_and_later(folder: Path) -> list[Row]:
    """CPU seconds of each command: the first time from a fresh copy, and the second."""
    files = {"TRACE": folder / "trace.json.gz", "STEP": folder / "step.txt"}
    files |= {"RUNS": folder / "runs.csv", "SCRIPT": SCRIPT}
    longer(TRACE, files["TRACE"], 20_000)
    save(timed(2), files["STEP"].with_suffix(".graph"))
    files["STEP"] = files["STEP"].with_suffix(".graph")
    row = f'"{MODEL}",dgx-a100:nodes=1,"{LAYOUT}",0.01'
    files["RUNS"].write_text(f"workload,on,plan,step_s\n{row}\n{row}\n")
    found = []
    for k, words in enumerate(COMMANDS):
        line = [sys.executable, "-m", "foretell", *(str(files.get(w, w)) for w in words)]
        fresh = folder / f"fresh{k}"
        bare = shutil.ignore_patterns("__pycache__")
        shutil.copytree(SCRIPT.parents[1], fresh / "foretell", ignore=bare)
        here = {"XDG_CACHE_HOME": str(fresh / "cache"), "PYTHONPATH": str(fresh)}
        cold, warm = (worked(*line, cwd=folder, **here) for _ in range(2))
        shutil.rmtree(fresh)
        name = " ".join(w for w in (words[0], *words[2:]) if len(w) < 40 and w not in (*ON, LAYOUT))
        figure = f"{cold:.1f} CPU-s first, {warm:.1f} later"
        found.append(Row(f"`foretell {name}`", figure, "≤ 3 more"))
    return found


def rows() -> list[Row]:
    """All figures of starting up."""
    python = sys.executable
    bare = least(python, "-c", "pass")
    imported = least(python, "-c", "import foretell") - bare
    helped = least(python, "-m", "foretell", "--help")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step.graph"
        save(timed(8), path)
        answered = least(python, "-m", "foretell", "simulate", str(path))
        first = first_and_later(Path(folder))
    return [
        Row("`import foretell`", f"{imported:.3f} CPU-s", "≤ 0.3"),
        Row("`foretell --help`", f"{helped:.2f} CPU-s", "≤ 0.15"),
        Row("`foretell simulate` of 1,926 tasks", f"{answered:.2f} CPU-s"),
        *first,
    ]


if __name__ == "__main__":
    show("Start-up", rows())
