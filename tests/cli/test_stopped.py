"""Ctrl-C, kills and time limits: exit code 130, the best so far, and no file half written."""

import json
import os
import resource
import shlex
import signal
import subprocess
import sys

import pytest
from tests.fuzz.formats import GUIDE, MODEL

from foretell import cluster
from foretell.cli.main import main
from foretell.search.kit import parse
from foretell.workload import load

MIXED = "dgx-a100:nodes=1"


def interrupting(at: int):
    """A progress callback that Ctrl-C meets at its n-th call."""
    left = [at]

    def progress(words: str, best: float) -> None:
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt

    return progress


@pytest.mark.parametrize(
    ("planner", "at"),
    [("fusion:evaluations=60", 12), ("placement:strokes=160,polish=40,playouts=4", 16)],
)
def test_a_planner_that_is_stopped_answers_its_best(planner, at):
    where, model = cluster.load(MIXED), load(MODEL)
    counted = []
    whole = parse(planner).plan(model, where, lambda words, best: counted.append(words))
    assert not whole.stopped
    found = parse(planner).plan(model, where, interrupting(min(at, len(counted))))
    assert found.stopped
    assert found.predicted >= whole.predicted
    assert found.predicted <= min(found.baselines.values())


def test_joint_answers_what_was_found_before_it_was_stopped():
    where, model = cluster.load(MIXED), load(MODEL)
    found = parse("joint").plan(model, where, interrupting(2))
    assert found.stopped
    with pytest.raises(KeyboardInterrupt):
        parse("joint").plan(model, where, interrupting(1))


def test_the_command_ends_with_130_and_the_plan(tmp_path, monkeypatch, capsys):
    from foretell.api import planning

    searcher = planning.searcher

    def stopped(*asked):
        return lambda model, where, _: searcher(*asked)(model, where, interrupting(2))

    monkeypatch.setattr(planning, "searcher", stopped)
    path = tmp_path / "best.plan"
    with pytest.raises(SystemExit) as ended:
        main(["plan", MODEL, "--on", MIXED, "-o", str(path), "--json"])
    assert ended.value.code == 130
    said = capsys.readouterr()
    assert json.loads(said.out)["predicted_s"] > 0
    assert "best plan so far" in said.err
    main(["predict", MODEL, "--on", MIXED, "--plan", str(path), "--json"])


# Time limits, by a clock that stands still while other programs have the CPU.

ALONE = """
import time
time.monotonic = time.process_time
from foretell.cli import main
main()
"""
LARGE = "schedule gpt:layers=96,hidden=12288,heads=96 --on dgx-h100:nodes=8 -n 32 --work 1000"
NARROW = "schedule nn:devices=32 -m 40 -n 512 --work 1000"
EVERY = "schedule m:devices=16,split=yes -m 40 -n 64 --work 1000 --compare"
JOINT = "plan gpt:layers=24,hidden=1024,heads=16 --on dgx-1-v100:nodes=2"


@pytest.mark.parametrize("asked", [LARGE, NARROW, EVERY, JOINT])
def test_a_time_limit_holds_from_the_start_of_the_command_to_its_end(asked, tmp_path, monkeypatch):
    """More work than fits: what loads, prices, searches and prints takes 0.7 to 1.2 of a limit."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for words in ("schedule nn -m 3 --work 0.5", f"plan {MODEL} --on dgx-a100 --with oracle"):
        _spent(words)  # builds the compiled loops where nobody has
    spent, found = _spent(f"{asked} --time 3")
    assert 0.7 * 3 < spent < 1.2 * 3
    if asked == JOINT:
        assert "the time limit ended the search: the best plan so far" in found["notes"]
    elif asked != EVERY:
        assert found["stopped"] == "time"


def _spent(words):
    """CPU seconds of a whole command, and its answer."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-c", ALONE, *words.split(), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return spent, json.loads(done.stdout)


# Kills: a child ends itself at its n-th touch of a file, for every n there is.

TOUCHES = {"open", "os.rename", "os.chmod", "os.remove", "os.truncate"}
CSV = f'workload,on,plan,step_s\n"{MODEL}",{MIXED},"dp=8,global_batch=8",0.01\n'
WRITERS = {
    "plan": ["plan", MODEL, "--on", MIXED, "--with", "oracle", "-o", "OUT"],
    "fit": ["fit", "runs.csv", "-o", "OUT"],
    "simulate": ["simulate", str(GUIDE), "-o", "OUT.json"],
    "report": ["report", str(GUIDE), "--no-advice", "-o", "OUT.html"],
    "check": ["check", str(GUIDE), "--step-under", "1s", "--junit", "OUT.xml"],
}


def _touches_a_file(event: str, args: tuple) -> bool:
    if event == "open":
        return isinstance(args[2], int) and bool(args[2] & (os.O_WRONLY | os.O_RDWR))
    return event in TOUCHES


def _ended(argv: list[str], kill_at: int) -> int:
    """How a command ended in a forked child that kills itself at its n-th touch of a file."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    left = [kill_at]

    def hook(event: str, args: tuple) -> None:
        if _touches_a_file(event, args):
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)

    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1), os.dup2(null, 2)
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # the child ends below
    sys.addaudithook(hook)
    code = 1
    try:
        main(argv)
        code = 0
    except SystemExit as done:
        code = int(done.code or 0)
    finally:
        os._exit(code)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n == "fit" else n for n in WRITERS]
)
def test_a_kill_at_any_write_leaves_a_whole_file(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "runs.csv").write_text(CSV)
    argv = WRITERS[name]
    path = tmp_path / argv[-1]
    assert os.waitstatus_to_exitcode(_ended(argv, 0)) == 0  # loads modules, fills no file yet
    whole = path.read_bytes()
    path.write_bytes(b"what was there")
    for kill_at in range(1, 60):
        code = os.waitstatus_to_exitcode(_ended(argv, kill_at))
        now = path.read_bytes()
        assert now == b"what was there" or len(now) == len(whole), kill_at
        if code == 0:
            assert kill_at > 2, "nothing was killed"
            break
        assert code == -signal.SIGKILL, kill_at
    else:
        pytest.fail("more touches of files than are tried")
    assert len(path.read_bytes()) == len(whole)


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_streams_that_are_closed_lead_nowhere(closed, tmp_path):
    out = tmp_path / "step.json"
    words = shlex.join([sys.executable, "-m", "foretell", "simulate", str(GUIDE), "-o", str(out)])
    done = subprocess.run(f"exec {words} {closed}", shell=True, capture_output=True, text=True)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False)
    assert json.loads(out.read_text())["traceEvents"]
