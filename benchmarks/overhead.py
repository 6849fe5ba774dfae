"""What `foretell run` costs over PyTorch written by hand: DDP, FSDP2, 1F1B, steps in turn.

    python benchmarks/overhead.py [--pairs 60] [--makes 6] [--pin] [--only DDP] [--control]

Two gloo ranks with one thread each hold both versions of a model and take steps in turn, ABBA, so
that whatever else the machine does falls on both. Each pair of neighbours gives one ratio of wall
seconds and one of CPU seconds (all threads of both ranks; waiting takes none); told is the median
of the ratios with the interval that holds it 19 times in 20, from the ranks of the sorted ratios.
Both versions are made anew `--makes` times, by turns first: its place in memory tells, too.
`--pin` gives each rank cores of its own. `--control` compares two versions by hand: how far from
zero nothing at all comes out. `--device cuda` puts both ranks on one GPU (DDP alone: gloo sends
nothing else from there).

DDP is the baseline twice: as people write it, and with `gradient_as_bucket_view`, which saves it
the copy of every gradient out of its bucket that we do not make either. A step of ours is all that
`foretell run` does around one: the state that is written, the plan's machinery, the user's model,
the loss that is read.
"""

import argparse
import json
import math
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
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
from foretell.pytorch.deploy.units import cut
from foretell.pytorch.deploy.worker import Heartbeat
from foretell.pytorch.ranks.pin import cores_of_ranks

LAYERS = 6
MOST = 0.01  # of a step, what it may cost
LOSS = nn.functional.mse_loss
Step = Callable[[], None]


class Took(NamedTuple):
    """One step, in seconds."""

    wall: float
    cpu: float


def model(x: Any) -> nn.Sequential:
    """Plain layers as wide as a batch."""
    torch.manual_seed(0)
    width = x.shape[1]
    rows = [layer for _ in range(LAYERS) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*rows).to(x.device)


def sgd(module: Any) -> Any:
    return torch.optim.SGD(module.parameters(), lr=0.01)


def ours(text: str, x: Any, heartbeat: Heartbeat) -> Step:
    """A step of `foretell run`."""
    made, plan, kind = model(x), Plan.parse(text), x.device.type
    deployed = deploy(made, sgd(made), plan, loss=LOSS, samples=len(x), device=kind)

    def step() -> None:
        heartbeat.enter("step")
        loss = deployed.step((x,), x)
        _ = None if loss is None else float(loss)

    return step


def looped(module: Any, x: Any) -> Step:
    """A step as a person writes it."""
    update = sgd(module)

    def step() -> None:
        update.zero_grad()
        LOSS(module(x), x).backward()
        update.step()

    return step


def by_ddp(x: Any) -> Step:
    return looped(DistributedDataParallel(model(x)), x)


def by_ddp_views(x: Any) -> Step:
    return looped(DistributedDataParallel(model(x), gradient_as_bucket_view=True), x)


def by_fsdp(x: Any) -> Step:
    made, mesh = model(x), init_device_mesh("cpu", (2,))
    for layer in made:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return looped(fully_shard(made, mesh=mesh), x)


def by_1f1b(x: Any) -> Step:
    rank = dist.get_rank()
    part = cut(model(x), 2)[rank]
    stage = PipelineStage(part, rank, 2, torch.device("cpu"))
    schedule, update = Schedule1F1B(stage, 8, LOSS), sgd(part)

    def step() -> None:
        update.zero_grad()
        _ = schedule.step(x) if rank == 0 else schedule.step(target=x)
        update.step()

    return step


CASES = {
    "DDP": (by_ddp, "dp=2"),
    "DDP with views": (by_ddp_views, "dp=2"),
    "FSDP2": (by_fsdp, "dp=2,zero=3"),
    "1F1B": (by_1f1b, "pp=2,micro_batch={micro}"),
}


def measure(rank: int, folder: str, options: Any) -> None:
    """One rank: each case, both versions in turn."""
    if options.pin and (cores := cores_of_ranks(2)):
        os.sched_setaffinity(0, cores[rank])
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=120)
    )
    x = torch.randn(options.batch, options.width, generator=torch.Generator().manual_seed(1))
    x = x.to(options.device)
    heartbeat = Heartbeat(Path(folder), rank, os.getppid())
    found = {}
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    for name in options.only:
        found[name] = one_case(name, options, x, heartbeat)
    Path(folder, f"found-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def one_case(name: str, options: Any, x: Any, heartbeat: Heartbeat) -> list[tuple[Took, Took]]:
    """The pairs of every make, each version made first in every other."""
    by_hand, text = CASES[name]
    theirs = partial(by_hand, x)
    mine = partial(ours, text.format(micro=options.batch // 8), x, heartbeat)
    mine = theirs if options.control else mine
    pairs: list[tuple[Took, Took]] = []
    for turn in range(options.makes):
        made = [make() for make in ((mine, theirs) if turn % 2 else (theirs, mine))]
        first, second = reversed(made) if turn % 2 else made
        pairs += in_turn(first, second, options.pairs // options.makes)
    return pairs


def in_turn(first: Step, second: Step, pairs: int) -> list[tuple[Took, Took]]:
    """What both take, in pairs of neighbours."""
    for _ in range(3):
        timed(first), timed(second)
    found = []
    for k in range(pairs):
        if k % 2:
            late, early = timed(second), timed(first)
            found.append((early, late))
        else:
            found.append((timed(first), timed(second)))
    return found


def timed(step: Step) -> Took:
    dist.barrier()
    start, worked = time.perf_counter(), time.process_time()
    step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.barrier()
    return Took(time.perf_counter() - start, time.process_time() - worked)


def joined(ranks: list[Any]) -> list[tuple[Took, Took]]:
    """The pairs of all ranks as one: the slowest's wall seconds, everybody's CPU seconds."""
    return [
        tuple(
            Took(max(took[0] for took in side), sum(took[1] for took in side))
            for side in zip(*pair, strict=True)
        )
        for pair in zip(*ranks, strict=True)
    ]


def middle(values: list[float]) -> tuple[float, float, float]:
    """The median, and between which of the values it lies 19 times in 20."""
    ordered = sorted(values)
    away = math.ceil(0.98 * math.sqrt(len(ordered)))  # 1.96 standard deviations of a fair coin
    at = len(ordered) // 2
    low, high = max(at - away, 0), min(at + away, len(ordered) - 1)
    return statistics.median(ordered), ordered[low], ordered[high]


def figures_of(pairs: list[tuple[Took, Took]]) -> dict[str, Any]:
    """The figures of one case."""
    found: dict[str, Any] = {"pairs": len(pairs)}
    for field in Took._fields:
        by_hand, deployed = ([getattr(t, field) for t in side] for side in zip(*pairs, strict=True))
        ratios = [b / a - 1 for a, b in zip(by_hand, deployed, strict=True)]
        found[f"{field}_s"] = statistics.median(by_hand)
        found[field] = middle(ratios)
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--makes", type=int, default=6)
    parser.add_argument("--pin", action="store_true", help="each rank to cores of its own")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--only", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--control", action="store_true", help="both by hand: what noise makes")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        processes.spawn(measure, args=(folder, options), nprocs=2, daemon=True)
        ranks = [json.loads(Path(folder, f"found-{r}.json").read_text()) for r in range(2)]
    found = {name: figures_of(joined([rank[name] for rank in ranks])) for name in ranks[0]}
    if options.json:
        options.json.write_text(json.dumps(found))
    rows = []
    for name, one in found.items():
        both = [
            f"{field} {100 * mid:+.2f} % ({100 * low:+.2f} to {100 * high:+.2f}) "
            f"of {1e3 * one[f'{field}_s']:.1f} ms"
            for field, (mid, low, high) in ((f, one[f]) for f in Took._fields)
        ]
        rows.append(Row(f"over {name}, {one['pairs']} pairs", "; ".join(both), f"{MOST:.0%}"))
    show("By hand, against itself" if options.control else "What `foretell run` costs", rows)


if __name__ == "__main__":
    main()
