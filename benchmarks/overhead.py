"""What deploying a plan costs over PyTorch written by hand: DDP, FSDP2, 1F1B, steps in turn.

    python benchmarks/overhead.py [--steps 40] [--width 768]

Two gloo ranks with one thread each hold both versions of a model and take steps in turn, ABBA, so
that whatever else the machine does falls on both. Compared are the CPU seconds of a step, all
threads of the rank (waiting takes none), which a busy machine disturbs less than the wall clock;
the wall clock's ratio is printed with the middle half of the ratios of neighbours, which tells how
quiet the machine was.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from table import Row, show
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

from foretell.plan import Plan
from foretell.pytorch.deploy import deploy
from foretell.pytorch.deploy.shard import quiet
from foretell.pytorch.deploy.units import cut

BATCH, LAYERS = 64, 6
LOSS = nn.functional.mse_loss
Step = Callable[[], None]


class Took(NamedTuple):
    """One step, in seconds."""

    wall: float
    cpu: float


def model(width: int) -> nn.Sequential:
    """Plain layers of one width."""
    torch.manual_seed(0)
    rows = [layer for _ in range(LAYERS) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*rows)


def sgd(module: Any) -> Any:
    return torch.optim.SGD(module.parameters(), lr=0.01)


def ours(text: str, width: int, x: Any) -> Step:
    """A step of a deployed plan."""
    made = model(width)
    deployed = deploy(made, sgd(made), Plan.parse(text), loss=LOSS, samples=len(x))
    return lambda: deployed.step((x,), x)


def looped(module: Any, x: Any) -> Step:
    """A step as a person writes it."""
    update = sgd(module)

    def step() -> None:
        update.zero_grad()
        LOSS(module(x), x).backward()
        update.step()

    return step


def by_ddp(width: int, x: Any) -> Step:
    return looped(DistributedDataParallel(model(width)), x)


def by_fsdp(width: int, x: Any) -> Step:
    made, mesh = model(width), init_device_mesh("cpu", (2,))
    for layer in made:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return looped(fully_shard(made, mesh=mesh), x)


def by_1f1b(width: int, x: Any) -> Step:
    rank = dist.get_rank()
    part = cut(model(width), 2)[rank]
    stage = PipelineStage(part, rank, 2, torch.device("cpu"))
    schedule, update = Schedule1F1B(stage, 8, LOSS), sgd(part)

    def step() -> None:
        update.zero_grad()
        _ = schedule.step(x) if rank == 0 else schedule.step(target=x)
        update.step()

    return step


CASES = {
    "DDP": (by_ddp, "dp=2"),
    "FSDP2": (by_fsdp, "dp=2,zero=3"),
    "1F1B, 8 micro-batches": (by_1f1b, "pp=2,micro_batch=8"),
}


def measure(rank: int, folder: str, asked: Any) -> None:
    """One rank: each case, both versions in turn."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=120)
    )
    x = torch.randn(BATCH, asked.width, generator=torch.Generator().manual_seed(1))
    found = {}
    with quiet():
        for name, (theirs, text) in CASES.items():
            found[name] = in_turn(theirs(asked.width, x), ours(text, asked.width, x), asked.steps)
    if rank == 0:
        torch.save(found, f"{folder}/found")
    dist.destroy_process_group()


def in_turn(first: Step, second: Step, steps: int) -> list[tuple[Took, Took]]:
    """What both take, in pairs of neighbours."""
    for _ in range(3):
        timed(first), timed(second)
    pairs = []
    for k in range(steps):
        if k % 2:
            late, early = timed(second), timed(first)
            pairs.append((early, late))
        else:
            pairs.append((timed(first), timed(second)))
    return pairs


def timed(step: Step) -> Took:
    dist.barrier()
    start, worked = time.perf_counter(), time.process_time()
    step()
    dist.barrier()
    return Took(time.perf_counter() - start, time.process_time() - worked)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--width", type=int, default=768)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        processes.spawn(measure, args=(folder, asked), nprocs=2, daemon=True)
        found = torch.load(f"{folder}/found", weights_only=False)
    rows = []
    for name, pairs in found.items():
        low, middle, high = statistics.quantiles((b.wall / a.wall - 1 for a, b in pairs), n=4)
        by_hand, deployed = (
            statistics.median(took.cpu for took in side) for side in zip(*pairs, strict=True)
        )
        wall = f"wall {100 * middle:+.0f} %, neighbours {100 * low:+.0f} to {100 * high:+.0f} %"
        figure = f"{100 * (deployed / by_hand - 1):+.1f} % of {1e3 * by_hand:.1f} CPU-ms ({wall})"
        rows.append(Row(f"deployed over {name}", figure, "1 %"))
    show("What deploying costs", rows)


if __name__ == "__main__":
    main()
