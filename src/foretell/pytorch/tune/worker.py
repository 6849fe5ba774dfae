"""One rank of `foretell tune-ddp`, for scripts as `foretell run` takes them.

profile   the model on every rank at once, a message of all its gradients going beside the
          backward: when each gradient is there, how long a step computes and updates; then
          all-reduces of growing size, for the wire
verify    DistributedDataParallel with each list of caps, in turns, round after round, so that a
          machine that gets slower or faster meanwhile treats all alike
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from foretell.errors import InputError
from foretell.pytorch.deploy import run_files
from foretell.pytorch.deploy.worker import Heartbeat, done, failed, load, redirect
from foretell.pytorch.script import default_loss, prepared, share
from foretell.pytorch.tune.launch import TuneRequest

_SWEEP = tuple(2.0**k for k in range(12, 27, 2))  # bytes of the all-reduces that are timed
_REPEAT = 5
_LONG = 0.2  # seconds


def main(folder: Path) -> None:
    """Measure, and write what was found or why not."""
    rank = int(os.environ["RANK"])
    redirect(folder / f"rank-{rank}.log")
    given = run_files.read(folder / "request.json")
    request = TuneRequest(**given | {"candidates": tuple(tuple(c) for c in given["candidates"])})
    heartbeat = Heartbeat(folder, rank, request.launcher)
    try:
        found = _measured(request, _Count(heartbeat, request))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException as error:
        failed(folder, rank, error, heartbeat.phase)
    done(folder, rank, found, heartbeat)


class _Count:
    """Counts steps, and reports them."""

    def __init__(self, heartbeat: Heartbeat, request: TuneRequest) -> None:
        turns = request.rounds if request.candidates else 1
        self.of = max(len(request.candidates), 1) * (request.warmup + turns * request.steps)
        self.heartbeat, self.steps = heartbeat, 0

    def add(self, steps: int) -> None:
        """So many more steps are over."""
        self.steps += steps
        self.heartbeat.enter(f"step {self.steps} of {self.of}", self.steps / self.of)


def _measured(request: TuneRequest, count: _Count) -> dict[str, Any]:
    device = request.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    script = load(Path(request.script))
    if request.candidates:
        return {"rounds": verify(script, request, device, count)}
    return profile(script, request, device, count) | {"wire": sweep(device)}


class Training:
    """A model with its optimizer and batches, and one step of it."""

    def __init__(self, script: ModuleType, device: str, caps: tuple[float, ...] | None) -> None:
        torch.manual_seed(0)
        self.script, self.device, self.count = script, device, 0
        self.model = self.run = script.model().to(device)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        if not trained:
            raise InputError(
                "the model has no parameter that is trained: there is nothing to send",
                hint="leave `requires_grad` on for what is to be trained",
            )
        if caps is not None:
            more = {"bucket_cap_mb_list": list(caps)} if caps else {}
            self.run = DistributedDataParallel(self.model, **more)
        make = getattr(script, "optimizer", None)
        self.optimizer = (
            make(self.model.parameters()) if make else torch.optim.SGD(trained, lr=0.01)
        )
        self.loss = getattr(script, "loss", None) or default_loss

    def batch(self) -> tuple[tuple[Any, ...], Any]:
        """This rank's share of the next batch, on the device."""
        rank, size = dist.get_rank(), dist.get_world_size()
        found = share(self.script.batch, rank, size, self.count, device=self.device)
        self.count += 1
        return prepared(self.model, found, getattr(self.script, "loss", None))[:2]

    def step(self, beside: Any = None) -> tuple[float, float]:
        """Seconds of forward and backward, and of the update; the batch not counted.

        What is given to go `beside` the backward is reduced while it runs, and not waited for.
        """
        inputs, target = self.batch()
        dist.barrier()
        _wait(self.device)
        start = time.perf_counter()
        self.optimizer.zero_grad()
        loss = self.loss(self.run(*inputs), target)
        work = None if beside is None else dist.all_reduce(beside, async_op=True)
        loss.backward()
        _wait(self.device)
        middle = time.perf_counter()
        self.optimizer.step()
        _wait(self.device)
        ended = time.perf_counter()
        if work is not None:
            work.wait()
        return middle - start, ended - middle


def profile(script: ModuleType, request: TuneRequest, device: str, count: _Count) -> dict[str, Any]:
    """When gradients are there, and how long ops and update take, beside a message under way.

    Of the steps the one at the lower quartile counts: what else a machine does makes some longer.
    """
    training = Training(script, device, None)
    numbers = sum(p.numel() for p in training.model.parameters() if p.requires_grad)
    message = torch.zeros(numbers, device=device)
    names = {id(p): n for n, p in training.model.named_parameters() if p.requires_grad}
    marks: dict[str, list[float]] = {n: [] for n in names.values()}
    begun = [0.0]

    def seen(parameter: Any) -> None:
        _wait(device)  # the host runs ahead of a GPU; waiting here tells when the gradient is there
        marks[names[id(parameter)]].append(time.perf_counter() - begun[0])

    for _ in range(request.warmup):
        training.step()
    count.add(request.warmup)
    for parameter in training.model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(seen)
    times: list[tuple[float, float]] = []
    forward = training.run.register_forward_pre_hook(
        lambda *_: begun.__setitem__(0, time.perf_counter())
    )
    for _ in range(request.steps):
        times.append(training.step(message))
        count.add(1)
    forward.remove()
    return _profile_text(training, marks, times)


def _profile_text(
    training: Training, marks: dict[str, list[float]], times: list[tuple[float, float]]
) -> dict[str, Any]:
    unused = [n for n, seen in marks.items() if not seen]
    if unused:
        raise InputError(
            f"no gradient reached `{unused[0]}` in a step",
            hint="DistributedDataParallel needs every trained parameter in every step",
        )
    best = sorted(range(len(times)), key=lambda k: sum(times[k]))[len(times) // 4]
    held = {n: p.numel() * p.element_size() for n, p in training.model.named_parameters()}
    return {
        "gradients": [
            {"name": n, "bytes": held[n], "ready_s": seen[best]} for n, seen in marks.items()
        ],
        "compute_s": times[best][0],
        "update_s": times[best][1],
    }


def sweep(device: str) -> list[tuple[float, float]]:
    """Bytes and seconds of all-reduces, the best of a few each: what the slowest rank saw.

    Once a message takes long enough to tell the rate, larger ones are not waited for.
    """
    found: list[tuple[float, float]] = []
    for size in _SWEEP:
        if found and found[-1][1] > _LONG:
            break
        tensor = torch.zeros(int(size) // 4, device=device)
        seconds = []
        for _ in range(_REPEAT):
            dist.barrier()
            start = time.perf_counter()
            dist.all_reduce(tensor)
            _wait(device)
            seconds.append(_slowest(time.perf_counter() - start, device))
        found.append((size, min(seconds)))
    return found


def verify(
    script: ModuleType, request: TuneRequest, device: str, count: _Count
) -> list[list[list[float]]]:
    """For each list of caps the steps of every round."""
    trainings = [Training(script, device, caps) for caps in request.candidates]
    for training in trainings:
        for _ in range(request.warmup):  # DDP puts its buckets right in the first step
            training.step()
        count.add(request.warmup)
    rounds: list[list[list[float]]] = [[] for _ in trainings]
    for turn in range(request.rounds):
        order = range(len(trainings)) if turn % 2 == 0 else reversed(range(len(trainings)))
        for k in order:
            took = [_slowest(sum(trainings[k].step()), device) for _ in range(request.steps)]
            rounds[k].append(took)
            count.add(request.steps)
    return rounds


def _slowest(seconds: float, device: str) -> float:
    """What the slowest rank measured."""
    slowest = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
