"""One command for many nodes: Slurm, Kubernetes, Ray."""

import json
import os
import stat
import subprocess
import sys

import pytest
from click.testing import CliRunner

from foretell.cli.run import command
from foretell.errors import InputError
from foretell.pytorch.deploy import many_nodes
from tests.pytorch.deploy.ranks import free_port

SCRIPT = """
import torch
def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
def batch(rank, size):
    return torch.randn(4, 4), torch.randn(4, 2)
"""
# As many tasks as are asked for, each told which node it is; one line a call in $CALLS
SRUN = """#!/usr/bin/env python3
import json, os, subprocess, sys
with open(os.environ["CALLS"], "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
if os.environ.get("DRY"):
    sys.exit(int(os.environ["DRY"]))
options = [a for a in sys.argv[1:] if a.startswith("--")]
nodes = int(next(o for o in options if o.startswith("--ntasks=")).split("=")[1])
words = sys.argv[1 + next(k for k, a in enumerate(sys.argv[1:]) if not a.startswith("--")):]
tasks = [
    subprocess.Popen(words, env={**os.environ, "SLURM_NODEID": str(k), "SLURM_PROCID": str(k)})
    for k in range(nodes)
]
sys.exit(max(task.wait() for task in tasks))
"""


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """An allocation of two nodes, with a `srun` of our own; what it was called with."""
    (tmp_path / "train.py").write_text(SCRIPT)
    program = tmp_path / "bin" / "srun"
    program.parent.mkdir()
    program.write_text(SRUN.replace("/usr/bin/env python3", sys.executable))
    program.chmod(program.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("SLURM_JOB_ID", str(free_port() - many_nodes.PORT))
    monkeypatch.setenv("SLURM_JOB_NODELIST", "localhost,localhost")
    monkeypatch.delenv("SLURM_PROCID", raising=False)
    return tmp_path


def test_the_hosts_of_a_list():
    found = many_nodes.hosts("gpu[008-010,12],login,a-[1]")
    assert found == ["gpu008", "gpu009", "gpu010", "gpu12", "login", "a-1"]


def test_an_allocation_starts_it_on_every_node(slurm, monkeypatch):
    monkeypatch.setenv("DRY", "0")
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    script = str(slurm / "train.py")
    done = CliRunner().invoke(
        command, [script, "--plan", "dp=4,zero=1", "--nodes", "2", "--steps", "7", "--no-verify"]
    )
    assert done.exit_code == 0, done.output
    (line,) = (slurm / "calls").read_text().splitlines()
    words = json.loads(line)
    assert words[:3] == ["--nodes=2", "--ntasks=2", "--ntasks-per-node=1"]
    answer = words[words.index("run") + 1 :]
    assert answer[:2] == ["--nodes=2", f"--rendezvous=localhost:{many_nodes.PORT + 12}"]
    assert set(answer[2:-1]) == {"--plan=dp=4,zero=1", "--steps=7", "--no-verify"}
    assert answer[-1] == script


def test_what_srun_exits_with_is_the_exit_code(slurm, monkeypatch):
    monkeypatch.setenv("DRY", "3")
    done = CliRunner().invoke(command, [str(slurm / "train.py"), "--plan", "dp=2", "--nodes", "2"])
    assert done.exit_code == 3


def test_an_allocation_that_is_too_small(slurm, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_NODELIST", "one")
    done = CliRunner().invoke(command, [str(slurm / "train.py"), "--plan", "dp=2", "--nodes", "2"])
    assert isinstance(done.exception, InputError)
    assert "the allocation has 1 node, the run wants 2" in str(done.exception)


def test_jobs_are_written(slurm):
    script = str(slurm / "train.py")
    for name in ("job.sbatch", "job.yaml"):
        path = slurm / name
        options = ["--plan", "dp=8,zero=3", "--nodes", "4", "--write", str(path), script]
        done = CliRunner().invoke(command, options)
        assert done.exit_code == 0, done.output
    batch = (slurm / "job.sbatch").read_text()
    assert "#SBATCH --nodes=4\n" in batch
    assert "#SBATCH --gpus-per-node=2\n" in batch
    assert f"foretell run --nodes=4 --plan=dp=8,zero=3 {script}" in batch
    yaml = pytest.importorskip("yaml")
    job = yaml.safe_load((slurm / "job.yaml").read_text())
    inner = job["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert (inner["parallelism"], inner["completions"]) == (4, 4)
    (box,) = inner["template"]["spec"]["containers"]
    assert box["resources"]["limits"] == {"nvidia.com/gpu": 2}
    assert box["command"][2:4] == ["--nodes=4", "--rendezvous=foretell-node-0-0.foretell:29400"]
    assert not (slurm / "calls").exists()


@pytest.mark.parametrize("name", ["job.sbatch", "job.yaml"])
def test_a_job_on_hosts_asks_for_no_gpus(slurm, name):
    options = ["--plan", "dp=2", "--device", "cpu", "--write", str(slurm / name)]
    assert CliRunner().invoke(command, [*options, str(slurm / "train.py")]).exit_code == 0
    assert "gpu" not in (slurm / name).read_text()


def test_a_job_that_would_be_refused_is_not_written(slurm):
    (slurm / "whole.py").write_text("print('a loop of its own')\n")
    options = ["--plan", "dp=2", "--checkpoint", "kept", "--write", str(slurm / "job.yaml")]
    done = CliRunner().invoke(command, [*options, str(slurm / "whole.py")])
    assert "writes its own checkpoints" in str(done.exception)
    assert not (slurm / "job.yaml").exists()


def test_a_job_of_no_known_kind(slurm):
    options = ["--plan", "dp=2", "--write", str(slurm / "job.txt"), str(slurm / "train.py")]
    done = CliRunner().invoke(command, options)
    assert "neither a batch script nor a manifest" in str(done.exception)


@pytest.mark.slow
def test_two_nodes_of_an_allocation_train(slurm):
    pytest.importorskip("torch")
    words = [sys.executable, "-m", "foretell", "run", str(slurm / "train.py"), "--plan", "dp=2"]
    words += ["--nodes", "2", "--steps", "2", "--warmup", "0", "--no-verify", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)  # the first node's alone
    assert (found["ranks"], found["ranks_here"], len(found["losses"])) == (2, 1, 2)


@pytest.mark.slow
def test_a_ray_cluster_trains(slurm):
    pytest.importorskip("torch")
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        words = ["--plan=dp=2", "--steps=2", "--warmup=0", "--no-verify", "--json"]
        said = many_nodes.on_ray("", [*words, str(slurm / "train.py")], 1)
    finally:
        ray.shutdown()
    assert len(json.loads(said)["losses"]) == 2
