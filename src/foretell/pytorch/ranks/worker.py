"""One rank of a pool: runs requests, a line each, until EOF.

    {"do": "collective", "op": "all_reduce", "bytes": 65536, "repeats": 9, "burst": 1}
    {"do": "beside", "bytes": 524288, "repeats": 9}                      work beside messages
    {"do": "hooks", "repeats": 9}                                        cost of gradient hooks
    {"do": "burn"}                                                       how busy the machine is
    {"do": "ceilings"}                                                   the best rates of a core

Each line is answered by one line of JSON on the file that `FORETELL_RANK_REPLY` names. The process
serves many jobs, because starting one takes longer than most jobs do.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from queue import Queue
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from foretell.pytorch.deploy.buckets import Buckets, Layout

_PATIENCE = 60.0  # seconds a collective may take before a rank gives up

Job = dict[str, Any]
Jobs = Mapping[str, Callable[[Job], Any]]


def serve(known: Jobs) -> None:
    """Join the process group and serve jobs until EOF."""
    torch.set_num_threads(1)
    reply = os.fdopen(int(os.environ["FORETELL_RANK_REPLY"]), "w", buffering=1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=_PATIENCE))
    jobs: Queue[Job] = Queue()
    threading.Thread(target=_listen, args=(jobs,), daemon=True).start()
    print(json.dumps({"ready": os.getpid()}), file=reply)
    while True:
        job = jobs.get()
        try:
            answer = known[job["do"]](job)
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"}
        print(json.dumps(answer), file=reply)


def _listen(jobs: Queue[Job]) -> None:
    """Read jobs; when the parent is gone, so is this rank, whatever it is waiting for."""
    for line in sys.stdin:
        jobs.put(json.loads(line))
    os._exit(0)


def collective(job: Job) -> dict[str, Any]:
    """Seconds of one collective, or of several begun together; core seconds of the rank for it,
    and those of the calling thread."""
    numbers, burst = max(1, int(job["bytes"]) // 4), job.get("burst", 1)
    op, _, ends = job["op"].partition(" ")  # `reduce 1`, `send 0 2`: whom it is with
    start = partial(_STARTS[op], *map(int, ends.split()))
    turns = job["repeats"] + 1
    buffers = [[torch.ones(numbers) for _ in range(burst)] for _ in range(turns)]
    took: list[tuple[float, ...]] = []
    for each in buffers:  # others each time: no cache holds a gradient either
        dist.barrier()
        begin = _clocks()
        for work in filter(None, [start(buffer=b) for b in each]):
            work.wait()
        took.append(tuple(now - then for now, then in zip(_clocks(), begin, strict=True)))
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


def worked(times: int = 64) -> tuple[float, float]:
    """Wall and core seconds of a fixed piece of work, about 25 ms of a core."""
    a = torch.ones(256, 256)
    wall, cpu = time.perf_counter(), time.thread_time()
    for _ in range(times):
        a @ a
    return time.perf_counter() - wall, time.thread_time() - cpu


def ceilings(_: Job) -> dict[str, float]:
    """The best of one thread here: flop/s of a product, bytes/s read and written by a copy; and
    bytes/s of gradients that go to their buckets when no cache holds either any more."""
    n, count = 512, 1 << 22
    a, source, sink = torch.ones(n, n), torch.ones(count), torch.ones(count)
    flops = 2.0 * n**3 / min(core_seconds(lambda: a @ a) for _ in range(9))
    rate = 8.0 * count / min(core_seconds(lambda: sink.copy_(source)) for _ in range(9))
    many, each = 64, 1 << 19  # 2 MiB each, 256 MiB in all
    pairs = zip(torch.ones(many, each), torch.ones(many, each), strict=True)
    taken = [core_seconds(lambda g=g, slot=slot: torch.mul(g, 0.5, out=slot)) for g, slot in pairs]
    return {"fp32": flops, "bytes": rate, "taken": 4.0 * each / median(taken)}


def core_seconds(call: Any) -> float:
    """Seconds of this thread's processor clock that a call takes."""
    begun = time.thread_time()
    call()
    return time.thread_time() - begun


# What it costs a rank's own thread that gradients leave: steps in buckets less plain steps, by
# turns on every rank, of chains of linear layers with a bucket each. Of a short and a long chain of
# small layers comes what a parameter and what a step costs, of large layers what a byte does: in
# the backward, which copies it, and in the update, which finds it in no cache.
_FEW, _MANY, _SMALL = 8, 40, 16  # layers, and numbers in and out of each
_LARGE, _WIDE = 4, 256  # a megabyte: seconds on the slowest of links
_TURN = 4  # steps of one kind in a row; the first of them is warm-up

Extra = tuple[float, float]  # core seconds of a step's backward and of its update


def hooks(job: dict[str, Any]) -> dict[str, float]:
    """Core seconds of a parameter, of a step, of a byte in the backward and in the update."""
    few, many, large = (
        _extra(layers, width, job["repeats"])
        for layers, width in ((_FEW, _SMALL), (_MANY, _SMALL), (_LARGE, _WIDE))
    )
    hook = max(0.0, (sum(many) - sum(few)) / (_MANY - _FEW))
    wait = max(0.0, sum(few) - _FEW * hook)
    size = 4.0 * _LARGE * _WIDE**2
    back = large[0] - _LARGE * hook - (few[0] - _FEW * hook)
    return {
        "hook_s": hook,
        "wait_s": wait,
        "copy_s": max(0.0, back) / size,
        "cold_s": max(0.0, large[1] - few[1]) / size,
    }


def _extra(layers: int, width: int, repeats: int) -> Extra:
    """What a chain's step takes longer when its gradients leave, medians over turns."""
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(layers)))
    names = dict(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    sync = Buckets(names, Layout((tuple(reversed(names)),)), weight=1.0 / dist.get_world_size())
    x = torch.randn(32, width)

    def plain() -> None:
        sync.is_syncing = False
        model(x).sum().backward()
        sync.is_syncing = True

    def sent() -> None:
        model(x).sum().backward()
        sync.finish()

    rows = [(_took(optimizer, plain), _took(optimizer, sent)) for _ in range(repeats)]
    sync.remove()
    back, update = (median(b[k] - a[k] for a, b in rows) for k in (0, 1))
    return back, update


def _took(optimizer: Any, there_and_back: Callable[[], None]) -> Extra:
    """Core seconds of a step up to its update, and of that; medians of some in a row."""
    rows = []
    dist.barrier()
    for _ in range(_TURN):
        optimizer.zero_grad()
        begun = time.thread_time()
        there_and_back()
        middle = time.thread_time()
        optimizer.step()
        rows.append((middle - begun, time.thread_time() - middle))
    back, update = (median(column) for column in zip(*rows[1:], strict=True))
    return back, update


JOBS: Jobs = {
    "collective": collective,
    "beside": beside,
    "hooks": hooks,
    "burn": burn,
    "ceilings": ceilings,
}

if __name__ == "__main__":
    serve(JOBS)
