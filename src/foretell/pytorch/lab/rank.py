"""One rank of the laboratory: does what it is told, line by line, until its input ends.

    {"do": "run", "model": "mlp", "plan": "dp=2", "steps": 6, "warmup": 2, "threads": 1}
    {"do": "collective", "op": "all_reduce", "bytes": 65536, "repeats": 9, "burst": 1}
    {"do": "burn"}                                                       how busy the machine is
    {"do": "ceilings"}                                                   the best rates of a core
    {"do": "profile", "model": "mlp", "samples": [128, 64], "steps": 10}

Each line is answered by one line of JSON on the file that `FORETELL_LAB_REPLY` names. Its process
stays for many runs, because starting one takes longer than most runs do.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from queue import Queue
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from foretell.plan import Plan
from foretell.pytorch.deploy.apply import Deployed, deploy
from foretell.pytorch.lab import models
from foretell.pytorch.lab.alone import profile
from foretell.pytorch.lab.notes import Notes

_PATIENCE = 60.0  # seconds a collective may take before a rank gives up
_SIDE, _TIMES = 256, 64  # of the product that says how busy the machine is, about 25 ms of a core

Job = dict[str, Any]


def main() -> None:
    """Join the others, then serve until nobody asks any more."""
    torch.set_num_threads(1)
    reply = os.fdopen(int(os.environ["FORETELL_LAB_REPLY"]), "w", buffering=1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=_PATIENCE))
    jobs: Queue[Job] = Queue()
    threading.Thread(target=_listen, args=(jobs,), daemon=True).start()
    print(json.dumps({"ready": os.getpid()}), file=reply)
    while True:
        job = jobs.get()
        try:
            answer = DO[job["do"]](job)
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"}
        print(json.dumps(answer), file=reply)


def _listen(jobs: Queue[Job]) -> None:
    """Read jobs; when the lab is gone, so is this rank, whatever it is waiting for."""
    for line in sys.stdin:
        jobs.put(json.loads(line))
    os._exit(0)


def run(job: Job) -> dict[str, Any]:
    """Some steps of a model under a plan, and how busy the machine was just before."""
    torch.set_num_threads(job.get("threads", 1))
    plan, kind = Plan.parse(job["plan"]), models.model(job["model"])
    torch.manual_seed(0)
    made, optimizer = models.trained(kind.make())
    samples = plan.shares[dist.get_rank()] if plan.shares else kind.samples
    deployed = deploy(made, optimizer, plan, loss=models.loss, device="cpu", samples=samples)
    x, y = kind.batch(samples)
    for _ in range(job["warmup"]):
        deployed.step((x,), y)
    busy = burn({})
    dist.barrier()
    cpu = time.process_time()
    steps = [_timed(deployed, x, y) for _ in range(job["steps"])]
    cpu = (time.process_time() - cpu) / job["steps"]
    notes = _noted(deployed, x, y) if job.get("notes") else []
    _let_go(deployed)
    torch.set_num_threads(1)
    return {"steps_s": steps, "cpu_s": cpu, "busy": busy, "notes": notes}


def _timed(deployed: Deployed, x: Any, y: Any) -> float:
    start = time.perf_counter()
    deployed.step((x,), y)
    return time.perf_counter() - start


def _noted(deployed: Deployed, x: Any, y: Any) -> list[dict[str, Any]]:
    """One more step, with a note of when each piece of it began and ended."""
    dist.barrier()
    with Notes(deployed) as notes:
        deployed.step((x,), y)
    return notes.rows()


def _let_go(deployed: Deployed) -> None:
    if deployed.sync is not None:
        deployed.sync.remove()


def collective(job: Job) -> dict[str, Any]:
    """Seconds of one collective, or of several begun together, and of the core for it."""
    numbers, burst = max(1, int(job["bytes"]) // 4), job.get("burst", 1)
    start = _STARTS[job["op"]]
    buffers = [torch.ones(numbers) for _ in range(burst)]
    wall, cpu = [], []
    for turn in range(job["repeats"] + 1):
        dist.barrier()
        begin, spent = time.perf_counter(), time.process_time()
        for work in [start(b) for b in buffers]:
            work.wait()
        if turn:
            wall.append(time.perf_counter() - begin)
            cpu.append(time.process_time() - spent)
    return {"seconds": median(wall), "all_s": wall, "cpu_s": median(cpu)}


def _gathered(buffer: Any) -> Any:
    rows = buffer.new_empty(dist.get_world_size() * buffer.numel())
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(rows, buffer, async_op=True)


_STARTS: dict[str, Callable[[Any], Any]] = {
    "all_reduce": lambda b: dist.all_reduce(b, async_op=True),
    "reduce": lambda b: dist.reduce(b, dst=0, async_op=True),
    "broadcast": lambda b: dist.broadcast(b, src=0, async_op=True),
    "all_gather": _gathered,
}


def burn(job: Job) -> dict[str, float]:
    """A fixed piece of work on every rank at once: what a core is worth at this moment."""
    a = torch.ones(_SIDE, _SIDE)
    dist.barrier()
    rest, slept = job.get("rest", 0.0), time.perf_counter()
    time.sleep(rest)
    woke = time.perf_counter() - slept - rest
    wall, cpu = time.perf_counter(), time.thread_time()
    for _ in range(job.get("times", _TIMES)):
        a @ a
    wall, cpu = time.perf_counter() - wall, time.thread_time() - cpu
    return {"wall_s": wall, "cpu_s": cpu, "woke_s": woke}


def ceilings(_: Job) -> dict[str, float]:
    """The best of one thread here: flop/s of a product, bytes/s read and written by a copy."""
    n, count = 512, 1 << 22
    a, source, sink = torch.ones(n, n), torch.ones(count), torch.ones(count)
    flops = 2.0 * n**3 / _least(lambda: a @ a)
    return {"fp32": flops, "bytes": 8.0 * count / _least(lambda: sink.copy_(source))}


def _least(call: Callable[[], Any]) -> float:
    """Core seconds of the quickest of several calls."""
    took = []
    for _ in range(9):
        begin = time.thread_time()
        call()
        took.append(time.thread_time() - begin)
    return min(took)


DO: dict[str, Callable[[Job], Any]] = {
    "run": run,
    "collective": collective,
    "burn": burn,
    "ceilings": ceilings,
    "profile": profile,
}

if __name__ == "__main__":
    main()
