"""One rank of the lab: serves runs of models under plans besides the jobs of any rank.

    {"do": "run", "model": "mlp", "plan": "dp=2", "steps": 6, "warmup": 2, "threads": 1}
    {"do": "speed", "model": "mlp", "samples": 128, "steps": 5, "threads": 2}
    {"do": "acts", "steps": 5}
    {"do": "same", "model": "mlp", "plan": "dp=2,global_batch=8", "steps": 3}
    {"do": "profile", "model": "mlp", "samples": [128, 64], "steps": 10}

The other jobs and the protocol: `foretell.pytorch.ranks.worker`.
"""

from __future__ import annotations

import math
import time
from typing import Any

import torch
import torch.distributed as dist

from foretell.plan import Plan
from foretell.pytorch.deploy.apply import Deployed, deploy
from foretell.pytorch.deploy.grouped import Groups
from foretell.pytorch.deploy.measured import Notes
from foretell.pytorch.ranks import worker
from foretell.pytorch.ranks.worker import Job, Jobs, burn
from foretell_lab.emulation import models
from foretell_lab.emulation.same import same
from foretell_lab.emulation.single_rank_profile import profile

_WARM = 0.15  # seconds of steps before any counts: clocks rise, caches and the allocator fill
_LONG = 0.15  # seconds of steps that count, at least


def run(job: Job) -> dict[str, Any]:
    """Some steps of a model under a plan, and how busy the machine was just before.

    As many more than asked for as it takes until they are long enough, at first and in all.
    """
    torch.set_num_threads(job.get("threads", 1))
    plan, kind = Plan.parse(job["plan"]), models.model(job["model"])
    torch.manual_seed(0)
    made, optimizer = models.trained(kind.make())
    samples = job.get("samples") or _samples(plan, kind)
    deployed = deploy(made, optimizer, plan, loss=models.loss, device="cpu", samples=samples)
    x, y = kind.batch(samples)
    busy = burn({})
    warm = [_timed(deployed, x, y) for _ in range(job["warmup"] + 1)]
    each = _agreed(min(warm))
    for _ in range(math.ceil(_WARM / each) - len(warm)):
        deployed.step((x,), y)
    dist.barrier()
    cpu, main = time.process_time(), time.thread_time()
    steps = [_timed(deployed, x, y) for _ in range(max(job["steps"], math.ceil(_LONG / each)))]
    cpu, main = time.process_time() - cpu, time.thread_time() - main
    notes = _noted(deployed, x, y) if job.get("notes") else []
    _let_go(deployed)
    torch.set_num_threads(1)
    return {"steps_s": steps, "cpu_s": cpu / len(steps), "main_s": main / len(steps),
            "busy": busy, "notes": notes}  # fmt: skip


def _agreed(seconds: float) -> float:
    """The longest of all ranks', so that each of them takes as many steps."""
    longest = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    return float(longest)


def _samples(plan: Plan, kind: models.Model) -> int:
    """What a rank gives a step: its share, or of layers on ranks of their own the whole batch."""
    if plan.groups:
        return plan.global_batch
    return plan.shares[dist.get_rank()] if plan.shares else kind.samples


def speed(job: Job) -> dict[str, Any]:
    """Steps of a model by itself, on all ranks at once and without a network: what each is worth.

    Wall seconds of every step: a rank's threads, its share of the cores and what others do are in.
    """
    torch.set_num_threads(job.get("threads", 1))
    kind = models.model(job["model"])
    made, optimizer = models.trained(kind.make())
    x, y = kind.batch(job["samples"])
    took = []
    dist.barrier()
    for turn in range(job["steps"] + 1):
        begin = time.perf_counter()
        optimizer.zero_grad()
        models.loss(made(x), y).backward()
        optimizer.step()
        took += [time.perf_counter() - begin] if turn else []
    torch.set_num_threads(1)
    return {"steps_s": took}


def acts(job: Job) -> dict[str, float]:
    """Core seconds that layers apart cost a rank besides their own work, for each pass of a run."""
    ranks, batches = dist.get_world_size(), 8
    rows = tuple((f"{r}", f"{r}", "all-reduce", f"{r}:{batches}") for r in range(ranks))
    plan = Plan(groups=rows, global_batch=batches, micro_batch=1)
    made, optimizer = models.trained(torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in rows)))
    deployed = deploy(made, optimizer, plan, loss=models.loss, device="cpu")
    x, y = torch.randn(batches, 4), torch.zeros(batches, dtype=torch.long)
    deployed.step((x,), y)
    begun = time.thread_time()
    for _ in range(job["steps"]):
        deployed.step((x,), y)
    took = time.thread_time() - begun
    _let_go(deployed)
    return {"act_s": took / job["steps"] / (2 * batches)}


def _timed(deployed: Deployed, x: Any, y: Any) -> float:
    start = time.perf_counter()
    deployed.step((x,), y)
    return time.perf_counter() - start


def _noted(deployed: Deployed, x: Any, y: Any) -> list[dict[str, Any]]:
    """One more step, with a note of when each piece of it began and ended."""
    dist.barrier()
    with Notes(deployed) as notes:
        deployed.step((x,), y)
    return _rows(notes)


def _rows(notes: Notes) -> list[dict[str, Any]]:
    """Every piece: name, op, start, end, bytes; seconds of the shared clock."""
    found: list[dict[str, Any]] = []
    before = notes.begun
    for name, at in notes.marks:
        if name != "ready":  # what lies before it is waiting
            own = {"name": name, "op": name.split()[0], "start": before, "end": at, "bytes": 0}
            found.append(own)
        before = at
    counts: dict[str, int] = {}
    for row in notes.sent:
        op = row["op"]
        number = counts[op] = counts.get(op, -1) + 1
        found.append(row | {"name": f"{row['op']} {number}", "end": row["end"] or notes.ended})
    return found


def _let_go(deployed: Deployed) -> None:
    if deployed.sync is not None:
        deployed.sync.remove()
    if isinstance(deployed.pipeline, Groups):
        deployed.pipeline.close()


JOBS: Jobs = {
    **worker.JOBS,
    "run": run,
    "speed": speed,
    "acts": acts,
    "same": same,
    "profile": profile,
}

if __name__ == "__main__":
    worker.serve(JOBS)
