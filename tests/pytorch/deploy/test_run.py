"""`foretell run` on real ranks: what it measures, and one message that names who failed."""

import errno
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

from foretell.cli.compare import timeline_of
from foretell.cli.run import command
from foretell.errors import InputError
from foretell.pytorch.deploy import launcher, measured, run_files
from foretell.pytorch.deploy.worker import load
from foretell.simulate.compare import compare
from tests.pytorch.deploy.ranks import free_port

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

def loss(output, target):
    apart = output.std() if HOW == "apart" else 0.0  # of all samples at once
    return nn.functional.mse_loss(output, target) + apart

def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1)
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


SLOW = pytest.mark.slow


def start(script, how, *options, out="out"):
    command = [sys.executable, "-m", "foretell", "run", str(script), *options]
    command += ["--no-verify"] if how and how != "apart" else []
    return subprocess.Popen(
        [*command, "-o", str(script.parent / out)],
        env=os.environ
        | {"HOW": how, "CUDA_VISIBLE_DEVICES": "", "XDG_CACHE_HOME": str(script.parent / "cache")},
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
    out, err = run.communicate(timeout=600)
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


@pytest.mark.slow
def test_a_plan_that_trains_differently_is_stopped_and_the_tensor_named(script):
    run = start(script, "apart", "--plan", "dp=2", "--steps", "2")
    _, err = run.communicate(timeout=100)
    assert run.returncode == 2, err
    assert (
        "the plan does not train as one process does: gradient `0.weight` of step 0 is off" in err
    )
    assert "--no-verify" in err


@pytest.mark.slow
def test_a_run_goes_on_under_another_plan(script):
    def losses(plan, *more):
        options = ("--plan", plan, "--steps", "2", "--warmup", "0", "--json", "--no-verify", *more)
        run = start(script, "", *options)
        out, err = run.communicate(timeout=200)
        assert run.returncode == 0, err
        return json.loads(out)["losses"]

    keep = ("--checkpoint", str(script.parent / "kept"))
    whole = losses("dp=1", "--steps", "6")
    found = losses("dp=2", *keep) + losses("pp=2,micro_batch=3", *keep, "--resume")
    found += losses("dp=2,zero=3", *keep, "--resume")
    assert found == pytest.approx(whole, rel=1e-5)


def test_what_a_run_measures(script):
    options = ("--plan", "dp=2,shares=8+4", "--steps", "3", "--profile", "--json")
    run = start(script, "", *options, "--predicted-ms", "5")
    out, err = run.communicate(timeout=600)
    assert run.returncode == 0, err
    found = json.loads(out)
    assert found["ranks"] == 2
    assert found["verified"]["steps"] == 3
    assert found["verified"]["gradient_off"] <= 1e-5
    assert len(found["steps_s"]) == 3
    assert found["measured_s"] == found["step_s"] > 0
    assert found["predicted_s"] == 0.005
    assert found["error"] == pytest.approx(0.005 / found["step_s"] - 1)
    assert min(found["peak_bytes"]) > 2**20
    assert found["losses"][-1] < found["losses"][0]
    traces = list((script.parent / "out").glob("rank-*.trace.json.gz"))
    assert len(traces) == 2
    lines = (script.parent / "out/steps.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["step"] for row in rows] == list(range(6))
    assert all(row["seconds"] > 0 and row["loss"] > 0 for row in rows)
    step = timeline_of(script.parent / "out")  # one bucket, which leaves with the last gradient
    starts = {step.graph[i].op: step.start[i] for i in range(1, step.graph.size)}
    assert sorted(starts, key=starts.get) == ["forward", "backward", "all_reduce", "optimizer"]
    assert alive(script.parent / "out") == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("die", "rank 1 died in step 2"),
        ("raise", "rank 1 failed in step 2: ValueError: no such sample"),
        ("hang", "rank 1 hangs: no rank has moved for 5 s"),
        ("model", "rank 1 has another model than the others"),
        ("stop", "rank 1 hangs: no rank has moved for 8 s"),
    ],
)
def test_one_message_names_the_rank(script, how, words):
    limit = "8" if how == "stop" else "5"
    run = start(script, how, "--plan", "dp=2", "--timeout-s", limit)
    _, err = run.communicate(timeout=600)
    assert run.returncode == 2, err
    assert err.count("error:") == 1
    assert words in err
    assert "Traceback" not in err
    assert alive(script.parent / "out") == []


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=SLOW)])
def test_ctrl_c_leaves_nothing_behind(script, number):
    run = start(script, "slow", "--plan", "dp=2", "--steps", "100")
    folder, ends = script.parent / "out", time.monotonic() + 600
    while not any(s.phase.startswith("step") for s in run_files.states(folder).values()):
        assert time.monotonic() < ends
        time.sleep(0.1)
    run.send_signal(number)
    _, err = run.communicate(timeout=600)
    assert run.returncode == 130
    assert err.strip() == "stopped"
    assert alive(folder) == []


@pytest.mark.slow
def test_two_nodes_meet(script):
    """Two launches on one machine, as two machines would."""
    meet = f"127.0.0.1:{free_port()}"
    options = ("--plan", "dp=2", "-n", "1", "--nodes", "2", "--rendezvous", meet, "--steps", "2")
    runs = [start(script, "", *options, "--json", out=f"node{n}") for n in range(2)]
    said = [run.communicate(timeout=120) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], said
    found = [json.loads(out) for out, _ in said]
    assert [(f["ranks"], f["ranks_here"]) for f in found] == [(2, 1), (2, 1)]
    assert found[0]["losses"] != found[1]["losses"]  # each has its half of the batch


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--plan", "ep=2,dp=2,compile=yes"], "this plan cannot be run:\n  ep=2"),
        (["--plan", "dp=4", "-n", "2"], "needs 4 ranks, not 2"),
        (["--plan", "dp=4", "--nodes", "2"], "have to meet somewhere"),
        (["--plan", "dq=4"], "unknown field of a plan"),
        (["--plan", "dp=2,cluster=0123", "--on", "abci:gpus=2"], "made for another cluster"),
        (["--plan", "dp=4", "--on", "abci:gpus=2"], "needs 4 ranks; `abci:gpus=2` has 2"),
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


def test_unknown_machines_are_said_to_be_unknown(tmp_path):
    missing = str(tmp_path / "none.py")
    for plan, words in (("dp=2,cluster=0123", "with --on CLUSTER"), ("dp=2", "")):
        found = CliRunner().invoke(command, [missing, "--plan", plan])
        assert "there is no file" in str(found.exception)
        assert bool(found.stderr) == bool(words)
        assert words in found.stderr


def test_a_script_that_is_none(tmp_path):
    (tmp_path / "trace.json").write_text("{}")
    for name in ("none.py", "trace.json"):
        with pytest.raises(InputError, match=r"there is no (script|file)"):
            CliRunner().invoke(command, [str(tmp_path / name)], catch_exceptions=False)
    (tmp_path / "empty.py").write_text("model = 1\n")
    with pytest.raises(InputError, match="defines no `model`"):
        load(tmp_path / "empty.py")


# The step that was measured, as a graph


def test_marks_are_the_ends_of_pieces():
    marks = [("forward", 2.0), ("gradient a", 3.0), ("gradient b", 5.0), ("ready", 6.0)]
    assert measured.of_marks(1.0, [*marks, ("update", 7.0)]) == [
        ("forward", 1.0, 2.0), ("backward", 2.0, 5.0), ("optimizer", 6.0, 7.0)
    ]  # fmt: skip
    unseen = [("forward", 2.0), ("ready", 6.0), ("update", 7.0)]  # FSDP: no hook of ours is called
    assert measured.of_marks(1.0, unseen)[1] == ("backward", 2.0, 6.0)
    assert measured.of_actions([("0F0", 1.0, 2.0), ("10W3", 2.0, 4.0)]) == [
        ("forward", 1.0, 2.0), ("backward", 2.0, 4.0)
    ]  # fmt: skip


def test_what_a_step_was_spent_on_counts_what_is_hidden_once():
    pieces = [("forward", 1.0, 2.0), ("backward", 2.0, 5.0), ("optimizer", 6.0, 7.0)]
    sent = [("all_reduce", 3.0, 4.0), ("all_reduce", 3.5, 6.0)]
    found = measured.spent_on([*pieces, *sent])
    assert found == {"compute_s": 4.0, "talk_s": 3.0, "update_s": 1.0, "whole_s": 6.0}


def test_a_run_says_what_its_steps_were_spent_on_and_how_sure_that_is(tmp_path):
    run_files.write_request(tmp_path, run_files.RunRequest("train.py", "dp=2"))
    for rank, waits in enumerate((0.0, 2.0)):  # the second comes first and waits
        spent = [
            {"compute_s": s - waits, "talk_s": 1.0 + waits, "update_s": 1.0, "whole_s": 8.0}
            for s in (5.0, 4.0, 6.0)
        ]
        steps = [8.0 + rank, 16.0, 24.0 - rank]
        found = {"steps_s": steps, "spent": spent, "samples": 3, "at": rank}
        run_files.write(tmp_path / f"rank-{rank}.result.json", found)
    found = measured.spent(tmp_path)
    assert found.seconds == 16.0
    assert found.parts == {"compute_s": 10.0, "talk_s": 2.0, "update_s": 2.0}
    assert found.unsure == pytest.approx(1 / 8)
    assert found.noise == pytest.approx(1.858 * 7 / 16 / 3**0.5)
    assert measured.samples(tmp_path) == 6
    run_files.write_request(tmp_path, run_files.RunRequest("train.py", "dp=2,zero=3"))
    assert measured.spent(tmp_path).parts == {}  # gathers hide in its forward


def test_a_run_is_laid_beside_what_was_predicted(tmp_path):
    run_files.write_request(tmp_path, run_files.RunRequest("train.py", "pp=2"))
    rows = {0: [["forward", 5.0, 5.2], ["backward", 5.6, 6.0]], 1: [["forward", 5.3, 5.5]]}
    rows[1] += [["all_reduce", 5.4, 5.9], ["all_reduce", 5.5, 5.7]]
    for stage, pieces in rows.items():
        found = {"stage": stage, "pieces": pieces}
        run_files.write(tmp_path / f"rank-{stage}.result.json", found)
    step = timeline_of(tmp_path)
    assert step.seconds == pytest.approx(1.0)
    assert step.start[1:] == pytest.approx([0.0, 0.6, 0.3, 0.4, 0.5])
    assert compare(step, step).matched == 6
    run_files.write(tmp_path / "rank-0.result.json", {"steps_s": [1.0]})
    run_files.write(tmp_path / "rank-1.result.json", {"steps_s": [1.0]})
    with pytest.raises(InputError, match="has no step to compare"):
        timeline_of(tmp_path)


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


def test_who_was_ended_by_torchrun_is_not_the_one_that_died(tmp_path, dead):
    other = subprocess.Popen([sys.executable, "-c", ""])
    other.wait()
    for rank, pid in enumerate((other.pid, None, dead)):
        say(tmp_path, rank, pid=pid)
    assert "rank 0, 2 died" in failure(tmp_path)
    line = f"W1115 12:00:00 multiprocessing/api.py:1029] Sending process {other.pid} closing signal"
    (tmp_path / "launch.log").write_text(f"{line} SIGTERM\n")
    assert "rank 2 died in step 3" in failure(tmp_path)


def test_ranks_that_import_torch_are_not_taken_to_hang(tmp_path):
    states = {0: "starting", 1: "starting"}
    for rank, phase in states.items():
        say(tmp_path, rank, phase=phase)
    assert not launcher._have_begun(run_files.states(tmp_path), 2)
    say(tmp_path, 0, phase="step 0")
    say(tmp_path, 1, phase="deploy")
    assert not launcher._have_begun(run_files.states(tmp_path), 2)
    say(tmp_path, 1, phase="step 0")
    assert launcher._have_begun(run_files.states(tmp_path), 2)
    assert not launcher._have_begun(run_files.states(tmp_path), 3)


def test_the_first_failure_of_its_own_is_named(tmp_path):
    for rank in range(3):
        say(tmp_path, rank)
    fail(tmp_path, 0, "RuntimeError: gloo", consequence=True, ago=5)
    fail(tmp_path, 1, "ValueError: late", ago=1)
    fail(tmp_path, 2, "ValueError: early", ago=2)
    assert "rank 2 failed in step 3: ValueError: early\n  at train.py:7" in failure(tmp_path)


def test_a_node_that_lost_another_does_not_blame_its_own_rank(tmp_path):
    say(tmp_path, 1)
    fail(tmp_path, 1, "RuntimeError: gloo: Connection reset by peer", consequence=True)
    said = str(launcher._failure(tmp_path, 1, Ended(1), nodes=2))
    assert "rank 1 lost its peers of another node in step 3" in said
    assert "named on its own node" in said


def test_a_refusal_is_printed_as_it_is(tmp_path):
    fail(tmp_path, 1, "no such layer", ours=True)
    assert failure(tmp_path) == "no such layer"


def test_a_launch_that_never_began(tmp_path):
    say(tmp_path, 0)
    assert "before rank 1, 2 began" in failure(tmp_path)
    for line, words in (
        ("OSError: [Errno 98] Address already in use", "the port of --rendezvous is in use"),
        ("OSError: [Errno 28] No space left on device", "the disk is full"),
        ("RendezvousConnectionError: The connection …", "no node answers at --rendezvous"),
    ):
        (tmp_path / "launch.log").write_text(line)
        assert words in failure(tmp_path)


def test_a_full_disk_is_named(tmp_path, dead, monkeypatch):
    say(tmp_path, 0)
    say(tmp_path, 1, pid=dead)
    monkeypatch.setattr(launcher, "_is_full", lambda folder: True)
    assert "is full" in failure(tmp_path)


def test_a_folder_that_cannot_be_written(script, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(InputError, match="cannot be written: Read-only file system"):
        launcher.launch(run_files.RunRequest(str(script), "dp=2"), folder=Path("/nowhere"))


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


# Started again


def launched(monkeypatch, outcomes):
    """`launch` over runs that end so, one after the other; whether each goes on from before."""
    resumed = []

    def once(query, **options):
        resumed.append(query.resume)
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return {"ranks": {}}

    monkeypatch.setattr(launcher, "launch_once", once)
    return resumed


def test_a_run_is_started_again_from_its_checkpoint(monkeypatch):
    died = launcher.RankFailure("rank 1 died in step 2")
    query = run_files.RunRequest("train.py", "dp=2", checkpoint="kept")
    resumed = launched(monkeypatch, [died, died, None])
    assert launcher.launch(query, restarts=2)["restarts"] == 2
    assert resumed == [False, True, True]
    launched(monkeypatch, [died, died])
    with pytest.raises(launcher.RankFailure, match="rank 1 died"):
        launcher.launch(query, restarts=1)


def test_a_mistake_is_not_tried_again(monkeypatch):
    resumed = launched(monkeypatch, [InputError("no such layer"), None])
    with pytest.raises(InputError, match="no such layer"):
        launcher.launch(run_files.RunRequest("train.py", "dp=2", checkpoint="kept"), restarts=3)
    assert resumed == [False]


def test_restarts_need_a_checkpoint(script):
    with pytest.raises(InputError, match="--restarts without --checkpoint"):
        CliRunner().invoke(command, [str(script), "--restarts", "1"], catch_exceptions=False)


@pytest.mark.slow
def test_a_killed_rank_and_its_run_go_on(script):
    """A rank is killed once in step 2; the losses are those of a run that nothing happened to."""
    text = script.read_text().replace(
        'if HOW == "die": os.kill(os.getpid(), signal.SIGKILL)',
        'if HOW == "die" and not os.path.exists(__file__ + ".died"):\n'
        '            open(__file__ + ".died", "w").close(); os.kill(os.getpid(), signal.SIGKILL)',
    )
    script.write_text(text)
    options = ("--plan", "dp=2", "--steps", "5", "--warmup", "0", "--json", "--no-predict")
    keep = ("--checkpoint", str(script.parent / "kept"), "--every", "1", "--restarts", "1")
    whole = start(script, "", *options, "--no-verify", out="whole")
    broken = start(script, "die", *options, *keep)
    said = [run.communicate(timeout=600) for run in (whole, broken)]
    assert broken.returncode == 0, said
    found = [json.loads(out) for out, _ in said]
    assert found[1]["restarts"] == 1
    assert found[1]["losses"][:3] == pytest.approx(found[0]["losses"][2:], rel=1e-6)
    assert alive(script.parent / "out") == []


WRITER = """
import atexit, os
import torch
model = torch.nn.Linear(4, 4)
update = torch.optim.SGD(model.parameters(), lr=0.1)
atexit.register(lambda: open(f"end-{os.getpid()}".encode(), "w").close())
for _ in range(3):
    model(torch.ones(4, 4)).sum().backward()
    update.step()
    update.zero_grad()
"""


@pytest.mark.slow
def test_what_a_script_writes_at_its_end_is_written_once(script, monkeypatch):
    script.write_text(WRITER)
    monkeypatch.chdir(script.parent)
    run = start(script, "", "--plan", "dp=2", "--device", "cpu", "--no-verify", "--no-predict")
    said = run.communicate(timeout=240)
    assert run.returncode == 0, said
    assert len(list(script.parent.glob("end-*"))) == 1


def test_what_a_rank_prints_is_shown_up_to_its_traceback(tmp_path, capsys):
    log = tmp_path / "rank-0.log"
    shown = launcher._Shown(log)
    log.write_text("epoch 0\n")
    shown.read()
    log.write_text(f"epoch 0\nepoch 1\n{run_files.ENDED}\nTraceback (most recent call last):\n")
    shown.read()
    log.write_text(log.read_text() + "ValueError\n")
    shown.read()
    assert capsys.readouterr().err == "epoch 0\nepoch 1\n"


def test_a_slow_rank_is_named():
    from foretell.cli.run import _slow_ranks

    row = {"weight": 0.25, "spent": [{"compute_s": 1.0}]}
    rows = dict.fromkeys(range(3), row) | {3: row | {"spent": [{"compute_s": 5.0}]}}
    assert _slow_ranks({0: row, 1: row}) == []
    (words,) = _slow_ranks(rows)
    assert "rank 3 computes 5.0 times as long" in words


def test_steps_are_logged_for_weights_and_biases(tmp_path, monkeypatch):
    """A stand-in for wandb, which sees an offline run and its steps."""
    from foretell.pytorch.deploy.run_files import StepLog

    (tmp_path / "wandb.py").write_text(
        "told = []\n"
        "class Run:\n"
        "    def log(self, row, step): told.append((step, row))\n"
        "    def finish(self): told.append('end')\n"
        "def init(**options):\n"
        "    told.append(options)\n"
        "    return Run()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    log = StepLog(tmp_path, plan="dp=2")
    log.write(0, 2.5, 0.1)
    log.write(1, None, 0.2)
    log.close()
    import wandb

    options, *rest = wandb.told
    assert options == {"dir": str(tmp_path), "mode": "offline", "config": {"plan": "dp=2"}}
    assert rest == [(0, {"seconds": 0.1, "loss": 2.5}), (1, {"seconds": 0.2}), "end"]
    sys.modules.pop("wandb")


def test_a_rank_that_is_done_right_after_its_state_was_read_has_not_died(tmp_path, monkeypatch):
    gone = subprocess.Popen(["true"])
    gone.wait()
    early = run_files.State(gone.pid, "step 4", time.time(), time.time(), "train.py:1", False)
    late = run_files.State(gone.pid, "done", time.time(), time.time(), "train.py:1", False, 1.0)
    read, ends = iter((early, late)), iter((None, 0))
    monkeypatch.setattr(launcher, "_SETTLE", 0.0)
    monkeypatch.setattr(run_files, "states", lambda folder: {0: next(read, late)})
    monkeypatch.setattr(run_files, "results", lambda folder: {0: {}})

    class Launch:
        def poll(self):
            return next(ends, 0)

    launcher._watch(Launch(), tmp_path, 1, 10.0, lambda words, share: None)
    assert next(read, None) is None  # it looked again
