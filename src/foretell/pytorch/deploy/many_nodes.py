"""One command for many nodes: the same `foretell run` started on each of them, or a file that does.

    in a Slurm allocation     srun starts it on every node (`srun` is Slurm's)
    --on-ray ADDRESS          a task on every node of a Ray cluster starts it
    --write job.sbatch        a batch script for Slurm
    --write job.yaml          a JobSet for Kubernetes (jobset.x-k8s.io/v1alpha2)

All nodes meet at the first, on one port. Nothing here imports torch.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from foretell.errors import InputError

PORT = 29400  # torchrun's own
KINDS = (".sbatch", ".yaml")
_GPUS = """\
                resources:
                  limits:
                    nvidia.com/gpu: {gpus}
"""
_RANGE = re.compile(r"(\d+)-(\d+)")


def in_allocation() -> bool:
    """Whether this is inside a Slurm allocation, and not already one of its tasks."""
    has = "SLURM_JOB_ID" in os.environ and "SLURM_PROCID" not in os.environ
    return has and shutil.which("srun") is not None


def is_first_node() -> bool:
    """Whether this node's answer is the one to print."""
    return os.environ.get("SLURM_NODEID", "0") == "0"


def hosts(listed: str) -> list[str]:
    """Hosts of a Slurm list: node[01-03,07],login becomes node01, node02, node03, node07, login."""
    found: list[str] = []
    for prefix, inside, plain in re.findall(r"([^,\[\]]+)\[([^\]]+)\]|([^,\[\]]+)", listed):
        if plain:
            found.append(plain)
            continue
        for part in inside.split(","):
            pair = _RANGE.fullmatch(part)
            first, last = (pair[1], pair[2]) if pair else (part, part)
            wide = len(first)
            found += [f"{prefix}{n:0{wide}}" for n in range(int(first), int(last) + 1)]
    return found


def on_slurm(words: Sequence[str], nodes: int) -> int:
    """Start the command on every node of the allocation; its exit code."""
    there = hosts(os.environ.get("SLURM_JOB_NODELIST", ""))
    if len(there) < nodes:
        raise InputError(
            f"the allocation has {len(there)} node{'s' * (len(there) != 1)}, the run wants {nodes}",
            hint=f"salloc --nodes={nodes}",
        )
    command = ["srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"]
    command += ["--kill-on-bad-exit=1", *_program(words, nodes, f"{there[0]}:{_port()}")]
    return subprocess.run(command, check=False).returncode


def _port() -> int:
    """One port a job, so that two jobs on a node do not meet."""
    return PORT + int(os.environ.get("SLURM_JOB_ID", "0")) % 1000


def _program(words: Sequence[str], nodes: int, meet: str, python: str = "") -> list[str]:
    own = [python or sys.executable, "-m", "foretell", "run"]
    return [*own, *([f"--nodes={nodes}", f"--rendezvous={meet}"] if nodes > 1 else []), *words]


def on_ray(address: str, words: Sequence[str], nodes: int) -> str:
    """Start the command on so many nodes of a Ray cluster; what the first printed."""
    try:
        import ray
    except ModuleNotFoundError:
        raise InputError("--on-ray needs ray", hint="pip install 'foretell[ray]'") from None
    if not ray.is_initialized():
        ray.init(address=address or None, log_to_driver=False, configure_logging=False)
    alive = [n for n in ray.nodes() if n["Alive"]]
    if len(alive) < nodes:
        raise InputError(f"the Ray cluster has {len(alive)} nodes, the run wants {nodes}")
    chosen = alive[:nodes]
    meet = f"{chosen[0]['NodeManagerAddress']}:{PORT}"
    task = ray.remote(num_cpus=0, max_retries=0)(_started)
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    def here(node: Any) -> Any:
        return NodeAffinitySchedulingStrategy(node_id=node["NodeID"], soft=False)

    command = _program(words, nodes, meet, "python")
    jobs = [
        task.options(scheduling_strategy=here(node)).remote(
            command, dict(_own_paths()), os.getcwd()
        )
        for node in chosen
    ]
    found = ray.get(jobs)
    failed = [(k, words) for k, (code, _, words) in enumerate(found) if code]
    if failed:
        place, words_said = failed[0]
        raise InputError(f"node {place} of the Ray cluster failed: {words_said.strip()[-600:]}")
    return str(found[0][1])


def _own_paths() -> list[tuple[str, str]]:
    return [(n, os.environ[n]) for n in ("PYTHONPATH", "OMP_NUM_THREADS") if n in os.environ]


def _started(command: list[str], env: dict[str, str], where: str) -> tuple[int, str, str]:
    """What a command on this node exits with and prints."""
    import os
    import subprocess
    import sys

    if command[0] == "python":
        command = [sys.executable, *command[1:]]
    place = where if os.path.isdir(where) else None
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **env}, cwd=place, check=False
    )
    return done.returncode, done.stdout, done.stderr


def job_file(path: Path, words: Sequence[str], nodes: int, gpus: int) -> str:
    """The text of a file that starts the run on a cluster, by its ending; `gpus` of each node."""
    if path.suffix not in KINDS:
        raise InputError(
            f"`{path.name}` is neither a batch script nor a manifest",
            hint="end it with .sbatch (Slurm) or .yaml (Kubernetes)",
        )
    return (_sbatch if path.suffix == ".sbatch" else _jobset)(words, nodes, gpus)


def _sbatch(words: Sequence[str], nodes: int, gpus: int) -> str:
    wanted = f"#SBATCH --gpus-per-node={gpus}\n" if gpus else ""
    command = shlex.join(["foretell", "run", f"--nodes={nodes}", *words])
    return f"""#!/bin/bash
#SBATCH --job-name=foretell
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
{wanted}#SBATCH --exclusive

# inside the allocation foretell starts itself on every node with srun
{command}
"""


def _jobset(words: Sequence[str], nodes: int, gpus: int) -> str:
    name, role = "foretell", "node"
    meet = f"{name}-{role}-0-0.{name}:{PORT}"
    command = ["foretell", "run", f"--nodes={nodes}", f"--rendezvous={meet}", *words]
    wanted = _GPUS.format(gpus=gpus) if gpus else ""
    listed = "\n".join(f"                - {_quoted(word)}" for word in command)
    return f"""apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: {name}
spec:
  network:
    enableDNSHostnames: true
  failurePolicy:
    maxRestarts: 0
  replicatedJobs:
    - name: {role}
      replicas: 1
      template:
        spec:
          parallelism: {nodes}
          completions: {nodes}
          backoffLimit: 0
          completionMode: Indexed
          template:
            spec:
              restartPolicy: Never
              containers:
              - name: {name}
                image: IMAGE  # with foretell, torch and the script
                command:
{listed}
{wanted}"""


def _quoted(word: str) -> str:
    """A word as YAML takes it for text."""
    return "'" + word.replace("'", "''") + "'"
