"""What large questions take: time and memory of a fresh process each, one after the other.

    python benchmarks/scale.py                 all of them, minutes
    python benchmarks/scale.py ranks layers    some
    python benchmarks/scale.py --small         all at a hundredth of their size

CPU seconds hardly depend on what else the machine does, and count processes that a command starts;
memory is the most that was resident of one process.
"""

import argparse
import contextlib
import ctypes
import os
import resource
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from multiprocessing import Process
from pathlib import Path

from simulator import random_graph
from table import Row, show
from traces import GIBI, tiled

from foretell.graph import save

HERE = Path(__file__).resolve().parent
TRACE = HERE / "measured" / "h200" / "resnet18.base.json.gz"
LLAMA = "llama:layers=32,hidden=4096,heads=32,seq=4096"
Words = tuple[str, ...]


def spent(words: Words, folder: Path) -> str:
    """CPU seconds of a command and all it started, wall seconds, and the largest process."""
    with open(folder / "said", "wb") as said:
        began = os.times().elapsed
        process = subprocess.Popen(
            [sys.executable, *words], stdout=subprocess.DEVNULL, stderr=said, cwd=folder
        )
        _, status, used = os.wait4(process.pid, 0)
        wall = os.times().elapsed - began
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        last = (folder / "said").read_text(errors="replace").strip().splitlines()[-1:]
        return f"ended with {process.returncode}: {' '.join(last)[:120]}"
    every = [used, *_left_behind()]
    cpu = sum(u.ru_utime + u.ru_stime for u in every)
    held = max(u.ru_maxrss for u in every) * 1024
    return f"{cpu:.1f} CPU-s, {wall:.1f} s, {held / GIBI:.2f} GiB"


def _left_behind() -> Iterator[resource.struct_rusage]:
    """What processes used that outlived the one that started them, as a fork server does."""
    with contextlib.suppress(ChildProcessError):
        while True:
            yield os.wait4(-1, 0)[2]


def adopt() -> None:
    """Become the parent of processes whose own has ended, so that they are counted (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def apart(work: Callable[..., object], *args: object) -> None:
    """Make a file in another process: what this one holds would count as the command's."""
    child = Process(target=work, args=args)
    child.start()
    child.join()
    assert child.exitcode == 0


def trace(folder: Path, share: float) -> Words:
    """2 GiB of JSON."""
    apart(tiled, TRACE, folder / "large.json", 2 * GIBI * share)
    return ("-m", "foretell", "show", "large.json")


def ranks(folder: Path, share: float) -> Words:
    """1 000 files of one job, a rank each."""
    (folder / "job").mkdir()
    raw = TRACE.read_bytes()
    for rank in range(int(1000 * share)):
        (folder / "job" / f"rank{rank}.json.gz").write_bytes(raw)
    return ("-m", "foretell", "show", "job")


def tasks(folder: Path, share: float) -> Words:
    """10⁷ tasks."""
    apart(_saved, int(10**7 * share), folder / "large.graph")
    return ("-m", "foretell", "simulate", "large.graph")


def _saved(many: int, path: Path) -> None:
    save(random_graph(many), path)


def gpus(folder: Path, share: float) -> Words:
    """10⁴ GPUs, all strategies."""
    many = max(int(10_240 * share) // 8 * 8, 8)
    return ("-m", "foretell", "oracle", LLAMA, "--on", "dgx-h100", "--gpus", str(many))


def layers(folder: Path, share: float) -> Words:
    """1 000 layers, in 64 stages."""
    many = max(int(1000 * share), 64)
    model = f"llama:layers={many},hidden=4096,heads=32,seq=4096"
    plan = "dp=2,tp=8,pp=64,micro_batch=1,global_batch=256,recompute=full"
    return ("-m", "foretell", "predict", model, "--on", "dgx-h100:nodes=128", "--plan", plan)


def schedule(folder: Path, share: float) -> Words:
    """A pipeline of 64 devices, searched for at most 20 seconds."""
    many = max(int(64 * share), 2)
    options = ("-n", str(2 * many), "--time", "20", "--no-cache")
    return ("-m", "foretell", "schedule", f"v:devices={many}", *options)


def uploads(folder: Path, share: float) -> Words:
    """200 traces sent to a studio, which holds as many as it keeps open."""
    return (str(HERE / "scale.py"), "--uploads", str(max(int(200 * share), 2)))


def upload(many: int) -> None:
    """Send a studio so many traces."""
    from foretell.studio import serve

    running = serve([HERE.parent / "docs" / "guides" / "step.txt"])
    try:
        for k in range(many):
            request = urllib.request.Request(
                f"{running.url}upload?name=trace{k}.json.gz", TRACE.read_bytes(),
                {"Origin": running.url.rpartition("/")[0].rpartition("/")[0]},
            )  # fmt: skip
            with urllib.request.urlopen(request, timeout=600) as answer:
                assert answer.status == 200
    finally:
        running.close()


QUESTIONS = (trace, ranks, tasks, gpus, layers, schedule, uploads)


def rows(names: list[str], share: float) -> list[Row]:
    """A row for each question."""
    found = []
    for question in QUESTIONS:
        if names and question.__name__ not in names:
            continue
        with tempfile.TemporaryDirectory() as folder:
            words = question(Path(folder), share)
            row = Row(str(question.__doc__).rstrip("."), spent(words, Path(folder)))
        print(row.what, row.figure, file=sys.stderr, flush=True)
        found.append(row)
    return found


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("names", nargs="*", choices=[[], *(q.__name__ for q in QUESTIONS)])
    options.add_argument("--small", action="store_true")
    options.add_argument("--uploads", type=int, default=0, help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.uploads:
        upload(given.uploads)
    else:
        adopt()
        show("Scale", rows(given.names, 0.01 if given.small else 1.0))
