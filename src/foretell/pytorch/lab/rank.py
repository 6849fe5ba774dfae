"""One rank of the laboratory: does what it is told, line by line, until its input ends.

    {"do": "run", "model": "mlp", "plan": "dp=2", "steps": 6, "warmup": 2, "threads": 1}
    {"do": "collective", "op": "all_reduce", "bytes": 65536, "repeats": 9, "burst": 1}
    {"do": "speed", "model": "mlp", "samples": 128, "steps": 5, "threads": 2}
    {"do": "acts", "steps": 5}
    {"do": "same", "model": "mlp", "plan": "dp=2,global_batch=8", "steps": 3}
    {"do": "beside", "bytes": 524288, "repeats": 9}                      work beside messages
    {"do": "hooks", "repeats": 9}                                        what taking gradients costs
    {"do": "burn"}                                                       how busy the machine is
    {"do": "ceilings"}                                                   the best rates of a core
    {"do": "profile", "model": "mlp", "samples": [128, 64], "steps": 10}

Each line is answered by one line of JSON on the file that `FORETELL_LAB_REPLY` names. Its process
stays for many runs, because starting one takes longer than most runs do.
"""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from queue import Queue
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from foretell.plan import Plan
from foretell.pytorch.deploy.apply import Deployed, deploy
from foretell.pytorch.deploy.grouped import Groups
from foretell.pytorch.lab import models
from foretell.pytorch.lab.alone import ceilings, profile, worked
from foretell.pytorch.lab.hooking import hooks
from foretell.pytorch.lab.notes import Notes
from foretell.pytorch.lab.same import same

_PATIENCE = 60.0  # seconds a collective may take before a rank gives up
_WARM = 0.15  # seconds of steps before any counts: clocks rise, caches and the allocator fill
_LONG = 0.15  # seconds of steps that count, at least

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
    return notes.rows()


def _let_go(deployed: Deployed) -> None:
    if deployed.sync is not None:
        deployed.sync.remove()
    if isinstance(deployed.pipeline, Groups):
        deployed.pipeline.close()


def collective(job: Job) -> dict[str, Any]:
    """Seconds of one collective, or of several begun together; core seconds of the rank for it,
    and those of the thread that asked."""
    numbers, burst = max(1, int(job["bytes"]) // 4), job.get("burst", 1)
    op, _, ends = job["op"].partition(" ")  # `reduce 1`, `send 0 2`: whom it is with
    start = partial(_STARTS[op], *map(int, ends.split()))
    turns = job["repeats"] + 1
    buffers = [[torch.ones(numbers) for _ in range(burst)] for _ in range(turns)]
    took: list[tuple[float, float, float]] = []
    for each in buffers:  # others each time: no cache holds a gradient either
        dist.barrier()
        begin = _clocks()
        for work in filter(None, [start(buffer=b) for b in each]):
            work.wait()
        took.append(_since(begin))
    wall, cpu, main = zip(*took[1:], strict=True)
    return {"all_s": wall, "cpu_s": median(cpu), "main_s": median(main)}


def beside(job: Job) -> dict[str, float]:
    """Wall seconds of a little work alone and beside two all-reduces, and of those alone and beside
    work: what ranks that compute and send at once cost themselves."""
    buffers = [torch.ones(int(job["bytes"]) // 4) for _ in range(2)]
    rows = [
        (*_both(buffers, works=False), *_both(buffers, works=True)) for _ in range(job["repeats"])
    ]
    quiet, _, sent, work = (median(column) for column in zip(*rows[1:], strict=True))
    alone = median(worked(1)[0] for _ in range(20))
    return {"alone_s": alone, "beside_s": work, "sent_s": quiet, "sent_beside_s": sent}


def _both(buffers: list[Any], *, works: bool) -> tuple[float, float]:
    """Seconds of two messages at once, and of a piece of the work that was done meanwhile."""
    dist.barrier()
    begun = time.perf_counter()
    sent = [dist.all_reduce(b, async_op=True) for b in buffers]
    done = 0
    while works and not all(one.is_completed() for one in sent):
        worked(1)
        done += 1
    worked_s = time.perf_counter() - begun
    for one in sent:
        one.wait()
    return time.perf_counter() - begun, worked_s / max(done, 1)


def _clocks() -> tuple[float, float, float]:
    """The wall's, all threads', this thread's."""
    return time.perf_counter(), time.process_time(), time.thread_time()


def _since(begin: tuple[float, float, float]) -> tuple[float, float, float]:
    wall, cpu, main = (now - then for now, then in zip(_clocks(), begin, strict=True))
    return wall, cpu, main


def _gathered(buffer: Any) -> Any:
    rows = buffer.new_empty(dist.get_world_size() * buffer.numel())
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(rows, buffer, async_op=True)


def _passed(source: int, target: int, buffer: Any) -> Any:
    """A message between two ranks; nothing for the others."""
    if dist.get_rank() == source:
        return dist.isend(buffer, dst=target)
    return dist.irecv(buffer, src=source) if dist.get_rank() == target else None


_STARTS: dict[str, Callable[..., Any]] = {
    "all_reduce": lambda buffer: dist.all_reduce(buffer, async_op=True),
    "reduce": lambda to=0, *, buffer: dist.reduce(buffer, dst=to, async_op=True),
    "broadcast": lambda of=0, *, buffer: dist.broadcast(buffer, src=of, async_op=True),
    "all_gather": _gathered,
    "send": _passed,
}


def burn(job: Job) -> dict[str, float]:
    """A fixed piece of work on every rank at once: what a core is worth at this moment."""
    dist.barrier()
    rest, slept = job.get("rest", 0.0), time.perf_counter()
    time.sleep(rest)
    woke = time.perf_counter() - slept - rest
    times = [job["times"]] if "times" in job else []
    wall, cpu = worked(*times)
    _, awake = worked(*times)  # a core that has slept is slow at first
    return {"wall_s": wall, "cpu_s": cpu, "awake_s": awake, "woke_s": woke}


DO: dict[str, Callable[[Job], Any]] = {
    "run": run,
    "collective": collective,
    "beside": beside,
    "hooks": hooks,
    "burn": burn,
    "speed": speed,
    "acts": acts,
    "same": same,
    "ceilings": ceilings,
    "profile": profile,
}

if __name__ == "__main__":
    main()
