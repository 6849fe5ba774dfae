"""Signs of life: for a person at a terminal alone, with the time left, and never with `--quiet`."""

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from foretell.cli import output
from foretell.cli.main import COMMANDS, foretell
from foretell.cli.output import READ, _unpacked
from foretell.graph import Phase

ROOT = Path(__file__).resolve().parents[2]
TRACE = ROOT / "src/foretell/samples/traces/resnet18-h200.json.gz"
WORK = """
import time
from foretell.cli.output import working
with working("trying", steps=4, about=0) as tell:
    for k in range(3):
        tell(f"piece {k}")
        time.sleep(0.25)
with working("reading", about=9.0) as tell:
    time.sleep(0.6)
with working("counting") as tell:
    for k in range(4):
        tell(f"part {k}", k / 4)
        time.sleep(0.25)
with working("waiting") as tell:
    tell("for something")
    time.sleep(0.3)
"""


def seen(*command, **env):
    """What a person at a terminal of 80 columns reads on stderr, and stdout."""
    ours, theirs = pty.openpty()
    plain = {**os.environ, "COLUMNS": "80", "TERM": "xterm", **env}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, env=plain, cwd=ROOT)
    os.close(theirs)
    parts = []
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # the other end was closed
            break
        if not part:
            break
        parts.append(part)
    out = process.stdout.read().decode()
    process.stdout.close()
    assert process.wait(60) == 0
    os.close(ours)
    return b"".join(parts).decode(), out


def test_bars_tell_the_time_left():
    answer, _ = seen(sys.executable, "-c", WORK)
    assert "trying: piece 2" in answer
    assert "left" in answer
    assert "about 9 s left" in answer or "about 8 s left" in answer
    assert "counting: part 3" in answer
    assert "waiting: for something" in answer


def test_the_time_left_follows_the_pace_that_is_reported(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(output.time, "monotonic", lambda: now[0])
    work = output._ProgressState(began=100.0)
    now[0] += 30  # to start with, which says nothing of the pace
    assert work.bar() == (None, "30 s")
    work.advance(0.0)
    assert work.bar() == (0.0, "30 s")
    now[0] += 10
    work.advance(0.25)
    assert work.bar() == (0.25, "about 30 s left")
    work.advance(7.0)
    assert work.bar()[0] == 1.0


def test_more_pieces_than_were_said_are_no_error():
    work = output._ProgressState(steps=2)
    for _ in range(5):
        work.advance(None)
    assert work.bar()[0] == 0.8


def test_a_capture_says_how_far_it_is():
    pytest.importorskip("torch")
    from foretell.pytorch.capture.record import BACKWARD, Pace

    answer = []
    pace = Pace(lambda words, share: answer.append((words, share)), modules=2)
    for _ in range(2):
        pace.enter()
    for n in range(1, 33):
        pace.note(Phase.FORWARD, n)
    for n in range(33, 129):
        pace.note(Phase.BACKWARD if n < 100 else Phase.UPDATE, n)
    assert answer[0][0] == "forward, module 1 of 2"
    assert [share for _, share in answer] == sorted(share for _, share in answer)
    assert answer[-1] == ("update, 128 operators", BACKWARD)


def test_a_program_that_asks_for_json_gets_no_bar():
    answer, out = seen(sys.executable, "-m", "foretell", "replay", str(TRACE), "--json")
    assert answer == ""
    assert out.startswith("{")


def test_without_colour_there_is_none():
    answer, _ = seen(sys.executable, "-c", WORK, NO_COLOR="1")
    assert "trying: piece 2" in answer
    assert "\x1b[3" not in answer  # no colour; moving the cursor is not one


@pytest.mark.parametrize("quiet", [True, False])
def test_a_command_can_be_quiet(quiet, tmp_path):
    page = tmp_path / "page.html"
    words = ["whatif", str(TRACE), "faster-host:times=2", "-o", str(page)]
    answer, out = seen(sys.executable, "-m", "foretell", *words, *(["--quiet"] if quiet else []))
    assert "→" in out
    assert page.exists()
    assert ("written" in answer) != quiet
    assert not quiet or answer == ""


def test_nothing_moves_without_a_terminal():
    result = CliRunner().invoke(foretell, ["advise", str(ROOT / "docs/guides/step.txt")])
    assert result.exit_code == 0
    assert result.stderr == ""


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_can_be_quiet(name):
    result = CliRunner().invoke(foretell, [name, "--help"])
    assert result.exit_code == 0
    assert "--quiet" in result.output


def test_how_long_reading_takes_is_guessed_from_what_is_unpacked(tmp_path):
    assert _unpacked(TRACE) > 5 * TRACE.stat().st_size
    assert _unpacked(TRACE.parent) >= _unpacked(TRACE)
    assert _unpacked(tmp_path / "missing.json") == 0
    assert READ > 0


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_offers_commands(shell):
    line = CliRunner().invoke(foretell, ["completion", shell]).output
    assert f"_FORETELL_COMPLETE={shell}_source" in line
    words = {"COMP_WORDS": "foretell wha", "COMP_CWORD": "1"}
    env = {**os.environ, "_FORETELL_COMPLETE": "bash_complete", **words}
    done = subprocess.run(
        [str(Path(sys.executable).parent / "foretell")], capture_output=True, text=True, env=env
    )
    assert "whatif" in done.stdout
