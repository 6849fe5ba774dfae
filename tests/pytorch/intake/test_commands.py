"""The commands on scripts that nobody changed, each in processes of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

pytest.importorskip("torch")

from foretell.cli.main import foretell
from foretell.errors import InputError
from foretell.trace import read
from tests.pytorch.intake.table import SCRIPTS


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


def invoke(*words: object) -> dict:
    done = CliRunner().invoke(foretell, [str(w) for w in words], catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)


def test_a_script_that_ends_soon_is_profiled_with_fewer_steps(here: Path) -> None:
    found = invoke("profile", SCRIPTS / "short.py", "-o", "short.json.gz", "--json")
    trace = read(here / found["trace"])
    assert trace.real == found["unprofiled_s"]
    assert [p.name for p in here.iterdir()] == ["short.json.gz"]


def test_a_what_if_of_a_script(here: Path) -> None:
    script, args = SCRIPTS / "argparse_loader.py", ("--", "--lr", "0.1")
    found = invoke("whatif", script, "faster-host:times=2", "--json", "--on", "h100", *args)
    assert 0 < found["predicted_s"] < found["baseline_s"]
    assert not list(here.iterdir())


def test_arguments_that_a_script_needs(here: Path) -> None:
    with pytest.raises(InputError, match="exited with 2") as error:
        invoke("profile", SCRIPTS / "argparse_loader.py", "--json")
    assert "the following arguments are required: --lr" in str(error.value)  # its last line


def test_a_layout_of_a_script_with_arguments(here: Path) -> None:
    where = ("--on", "h100:gpus=2", "--plan", "dp=2", "--json")
    script = SCRIPTS / "argparse_loader.py"
    found = invoke("predict", script, *where, "--", "--lr", "0.1")
    assert found["step_s"] > 0
    quoted = f"{script} --lr 0.1"  # the same as one word
    assert invoke("predict", quoted, *where)["step_s"] == found["step_s"]
    with pytest.raises(InputError, match="no training script"):
        invoke("predict", "gpt2", *where, "--", "--lr", "0.1")


def test_a_module_with_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(SCRIPTS)
    found = invoke("whatif", "-m", "package.train", "faster-host", "--json", "--", "8")
    assert 0 < found["predicted_s"] < found["baseline_s"]
    planned = ("--on", "h100:gpus=2", "--plan", "dp=2", "--json", "--", "8")
    assert invoke("predict", "-m", "package.train", *planned)["step_s"] > 0


@pytest.mark.parametrize("line", ["train.py --lr 0.1", "-m package.train 8"])
def test_a_file_never_runs_a_script_with_arguments(here: Path, line: str) -> None:
    query = {"workload": line, "on": "h100:gpus=2", "plan": "dp=2"}
    (here / "many.jsonl").write_text(json.dumps(query) + "\n")
    found = invoke("predict", "--batch", "many.jsonl", "--json")
    assert "code is never run because a file says so" in found["error"]


def test_a_script_that_lacks_a_package_is_tried_once(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from foretell.pytorch.intake import launch

    runs = []
    plain = launch.launch
    monkeypatch.setattr(launch, "launch", lambda *args: runs.append(1) or plain(*args))
    (tmp_path / "lacks.py").write_text("import a_package_that_is_not_there\n")
    with pytest.raises(InputError, match="a_package_that_is_not_there"):
        invoke("capture", tmp_path / "lacks.py")
    assert runs == [1]


def test_options_for_functions_are_refused_for_scripts() -> None:
    with pytest.raises(InputError, match="--autocast is for functions"):
        invoke("capture", SCRIPTS / "plain_loop.py", "--autocast", "bf16")


@pytest.mark.slow
def test_two_ranks(here: Path) -> None:
    counts = ("--warmup", 2, "--timed", 3, "--traced", 1)
    found = invoke("profile", "--nproc", 2, *counts, "-o", "job", "--json", SCRIPTS / "ddp.py")
    assert (found["ranks"], found["trace"]) == (2, "job")
    graph = read(here / "job").graph
    assert graph.facts["ranks"] == [0, 1]
    assert graph.rank.tolist().count(0) == graph.rank.tolist().count(1) > 20
    assert abs(invoke("replay", "job", "--json")["error"]) < 0.03


@pytest.mark.slow
def test_ranks_that_torchrun_starts(here: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    counts = ["--warmup", "2", "--timed", "3", "--traced", "1", "-o", "job"]
    script = ["-m", "foretell", "profile", *counts, str(SCRIPTS / "ddp.py")]
    done = subprocess.run(
        [*command, *script], capture_output=True, text=True, env=os.environ.copy(), check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("a step takes") == 1
    assert sorted(p.name for p in (here / "job").iterdir()) == ["rank0.json.gz", "rank1.json.gz"]
