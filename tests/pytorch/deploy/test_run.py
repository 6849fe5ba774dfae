"""`foretell run` on real ranks: what it measures, and one message that names who failed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

from click.testing import CliRunner

from foretell.cli.run import command
from foretell.errors import InputError
from foretell.pytorch.deploy import launcher, run_files
from foretell.pytorch.deploy.worker import load

SCRIPT = """
import os, signal, time
import torch
from torch import nn

HOW, RANK = os.environ.get("HOW", ""), int(os.environ["RANK"])

def model():
    layers = [nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)]
    return nn.Sequential(*layers[: 1 if HOW == "model" and RANK == 1 else 3])

def batch(rank, size, step):
    if step == 2 and RANK == 1:
        if HOW == "die": os.kill(os.getpid(), signal.SIGKILL)
        if HOW == "raise": raise ValueError("no such sample")
        if HOW == "hang": time.sleep(1000)
        if HOW == "stop": os.kill(os.getpid(), signal.SIGSTOP)
    if HOW == "slow": time.sleep(1)
    made = torch.Generator().manual_seed(step)
    x = torch.randn(12, 8, generator=made)
    return x.chunk(size)[rank], x[:, :4].square().chunk(size)[rank]

def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1)
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def start(script, how, *options):
    command = [sys.executable, "-m", "foretell", "run", str(script), *options]
    return subprocess.Popen(
        [*command, "-o", str(script.parent / "out")],
        env=os.environ | {"HOW": how, "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def alive(folder):
    """Ranks of a run that are still there."""
    pids = [s.pid for s in run_files.states(folder).values()]
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@pytest.mark.slow
def test_layers_on_ranks_of_their_own_run(script):
    import torch

    plan = "groups=0+1+all-reduce+0:8+1:4/2+2+ps+1:9+2:3,global_batch=12,micro_batch=6"
    run = start(script, "", "--plan", plan, "--steps", "2", "--warmup", "1", "--json")
    out, err = run.communicate(timeout=100)
    assert run.returncode == 0, err
    found = json.loads(out)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    update, wanted = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(3):
        x = torch.randn(12, 8, generator=torch.Generator().manual_seed(step))
        loss = torch.nn.functional.mse_loss(model(x), x[:, :4].square())
        update.zero_grad()
        loss.backward()
        update.step()
        wanted.append(loss.item())
    assert found["ranks"] == 3
    assert found["losses"] == pytest.approx(wanted, rel=1e-5)


def test_what_a_run_measures(script):
    options = ("--plan", "dp=2,shares=8+4", "--steps", "3", "--profile", "--json")
    run = start(script, "", *options, "--predicted-ms", "5")
    out, err = run.communicate(timeout=100)
    assert run.returncode == 0, err
    found = json.loads(out)
    assert found["ranks"] == 2
    assert len(found["steps_s"]) == 3
    assert found["step_s"] > 0
    assert found["predicted_s"] == 0.005
    assert found["error"] == pytest.approx(0.005 / found["step_s"] - 1)
    assert min(found["peak_bytes"]) > 2**20
    assert found["losses"][-1] < found["losses"][0]
    traces = list((script.parent / "out").glob("rank-*.trace.json.gz"))
    assert len(traces) == 2
    assert alive(script.parent / "out") == []


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("die", "rank 1 died in step 2"),
        *(
            pytest.param(how, words, marks=pytest.mark.slow)
            for how, words in (
                ("raise", "rank 1 failed in step 2: ValueError: no such sample"),
                ("hang", "rank 1 hangs: no rank has moved for 5 s"),
                ("model", "rank 1 has another model than the others"),
                ("stop", "rank 1 hangs: no rank has moved for 8 s"),
            )
        ),
    ],
)
def test_one_message_names_the_rank(script, how, words):
    limit = "8" if how == "stop" else "5"
    begun = time.monotonic()
    run = start(script, how, "--plan", "dp=2", "--timeout-s", limit)
    _, err = run.communicate(timeout=100)
    assert run.returncode == 2, err
    assert err.count("error:") == 1
    assert words in err
    assert "Traceback" not in err
    assert alive(script.parent / "out") == []
    assert time.monotonic() - begun < 60


def test_ctrl_c_leaves_nothing_behind(script):
    run = start(script, "slow", "--plan", "dp=2", "--steps", "100")
    folder, ends = script.parent / "out", time.monotonic() + 60
    while not any(s.phase.startswith("step") for s in run_files.states(folder).values()):
        assert time.monotonic() < ends
        time.sleep(0.1)
    run.send_signal(signal.SIGINT)
    _, err = run.communicate(timeout=20)
    assert run.returncode == 130
    assert err.strip() == "stopped"
    assert alive(folder) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--plan", "cp=2"], "this plan cannot be deployed:\n  cp=2"),
        (["--plan", "dp=4", "-n", "2"], "needs 4 ranks, not 2"),
        (["--plan", "dp=4", "--nodes", "2"], "have to meet somewhere"),
        (["--plan", "dq=4"], "unknown field of a plan"),
    ],
)
def test_refused_before_launch(script, options, words):
    folder = script.parent / "out"
    with pytest.raises(InputError) as error:
        CliRunner().invoke(
            command, [str(script), *options, "-o", str(folder)], catch_exceptions=False
        )
    assert words in str(error.value)
    assert not folder.exists()


def test_a_script_that_is_none(tmp_path):
    with pytest.raises(InputError, match="there is no script"):
        CliRunner().invoke(command, [str(tmp_path / "none.py")], catch_exceptions=False)
    (tmp_path / "empty.py").write_text("model = 1\n")
    with pytest.raises(InputError, match="defines no `model`"):
        load(tmp_path / "empty.py")


# Who is named, from what ranks have written


class Ended:
    """A launch that has ended with a code, or goes on."""

    def __init__(self, code=None):
        self.code = code

    def poll(self):
        return self.code


def say(folder, rank, phase="step 3", *, pid=None, waits=True, ago=0.0, seen=0.0):
    now = time.time()
    state = run_files.State(pid or os.getpid(), phase, now - ago, now - seen, "train.py:7", waits)
    run_files.write(folder / f"rank-{rank}.state.json", vars(state))


def fail(folder, rank, message, *, consequence=False, ago=0.0, ours=False):
    error = {"message": message, "hint": "", "is_ours": ours, "is_consequence": consequence}
    error |= {"phase": "step 3", "where": "train.py:7", "time": time.time() - ago}
    run_files.write(folder / f"rank-{rank}.error.json", error)


@pytest.fixture
def dead():
    """The id of a process that is gone."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    return gone.pid


def failure(folder, code=1):
    return str(launcher._failure(folder, 3, Ended(code)))


def test_a_silent_death_is_named_before_what_it_caused(tmp_path, dead):
    for rank in range(3):
        say(tmp_path, rank, pid=dead if rank == 2 else None)
    fail(tmp_path, 0, "RuntimeError: Connection reset by peer", consequence=True)
    assert "rank 2 died in step 3" in failure(tmp_path)


def test_the_first_failure_of_its_own_is_named(tmp_path):
    for rank in range(3):
        say(tmp_path, rank)
    fail(tmp_path, 0, "RuntimeError: gloo", consequence=True, ago=5)
    fail(tmp_path, 1, "ValueError: late", ago=1)
    fail(tmp_path, 2, "ValueError: early", ago=2)
    assert "rank 2 failed in step 3: ValueError: early\n  at train.py:7" in failure(tmp_path)


def test_a_refusal_is_told_as_it_is(tmp_path):
    fail(tmp_path, 1, "no such layer", ours=True)
    assert failure(tmp_path) == "no such layer"


def test_a_launch_that_never_began(tmp_path):
    say(tmp_path, 0)
    assert "before rank 1, 2 began" in failure(tmp_path)


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        ({"waits": False}, "it is at train.py:7"),
        ({"seen": 60.0}, "it gives no sign of life"),
        ({"ago": 100.0}, "rank 1 hangs"),
    ],
)
def test_who_keeps_the_others_waiting(tmp_path, odd, words):
    for rank in range(3):
        say(tmp_path, rank, **({"ago": 50.0} | (odd if rank == 1 else {})))
    said = str(launcher._hang(run_files.states(tmp_path), 3, 30.0, tmp_path))
    assert "rank 1 hangs: no rank has moved for 30 s" in said
    assert words in said


def test_a_rank_that_never_came(tmp_path):
    say(tmp_path, 0)
    say(tmp_path, 2)
    said = str(launcher._hang(run_files.states(tmp_path), 3, 30.0, tmp_path))
    assert "rank 1 did not begin within 30 s" in said


def test_a_state_is_written_over_and_read_whole(tmp_path):
    board = run_files.Board(tmp_path / "rank-0.state.json")
    assert run_files.read(tmp_path / "rank-0.state.json") is None  # nothing whole in it yet
    state = {"pid": 7, "phase": "a long one" * 20, "moved": 1.0, "seen": 2.0}
    for phase in (state["phase"], "step 3"):
        board.write(state | {"phase": phase, "where": "train.py:7", "waits": False})
        assert run_files.states(tmp_path)[0].phase == phase
