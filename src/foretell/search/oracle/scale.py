"""Each parallel strategy against the number of devices: the best layout of each, and where it
ends.

Weak scaling keeps the samples of a device, strong scaling those of a step. Cost is given beside
time: what more devices save, and what they cost.

What each parallel strategy of the oracle is, how it is priced, and where that ends.

A layout's name (`fsdp+tensor`) joins these words. The oracle itself needs none of this: it is what
`foretell explain` tells a person, beside the code it describes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np

from foretell import portable
from foretell.cluster import Cluster
from foretell.cluster.read import MOST
from foretell.errors import InputError
from foretell.plan import Plan
from foretell.plan.costs import with_cuts
from foretell.plan.prices import Estimate, by_collective
from foretell.pool import Pool
from foretell.search.oracle.limits import Finding, findings
from foretell.search.oracle.space import (
    HOUR,
    Fastest,
    Space,
    Swept,
    by_strategy,
    layouts,
    per_node,
    sweep,
)
from foretell.spec import is_whole
from foretell.workload import Workload

_PARADL = "Kahira et al., ParaDL, HPDC 2021"
_MEGATRON = "Shoeybi et al., Megatron-LM, 2019; Narayanan et al., SC 2021"
_ZERO = "Rajbhandari et al., ZeRO, SC 2020"
_ALIKE = "every rank computes as much as every other, at the same time"
ALIKE = 0.01  # of a step: layouts nearer than this are as fast as each other
PARTS = ("compute", "host", "comm", "bubble", "send", "reduce", "update")


class Strategy(NamedTuple):
    """One way to share a step among ranks."""

    does: str
    model: str  # how a step of it is priced
    fields: str  # of a plan
    ends: str  # how far it reaches
    assumes: tuple[str, ...] = ()
    source: str = ""


STRATEGIES: dict[str, Strategy] = {
    "serial": Strategy(
        "One device does everything.",
        "Every kernel at its full shape, the host beside it, then the update.",
        "dp=1", "what one device holds", ("nothing else runs on the device",), _PARADL,
    ),
    "data": Strategy(
        "Every rank has the whole model and a part of the samples.",
        "Kernels at the shape of a rank's samples; gradients all-reduced in buckets, beside the "
        "backward pass where the program does that; every rank updates everything.",
        "dp", "one sample a rank", (_ALIKE,), _PARADL,
    ),
    "zero": Strategy(
        "Data parallel, with optimizer state (and gradients) shared among the ranks.",
        "Gradients are reduce-scattered, each rank updates its part, parameters are gathered once "
        "a step.",
        "dp, zero=1 or 2, shard", "one sample a rank", (_ALIKE,), _ZERO,
    ),
    "fsdp": Strategy(
        "Data parallel, with parameters shared too and gathered layer by layer.",
        "Each layer's parameters are gathered before its forward and its backward, one layer "
        "ahead; gradients are reduce-scattered. Gathers and kernels meet as host and device do.",
        "dp, zero=3, shard", "one sample a rank", (_ALIKE,),
        "Rajbhandari et al., ZeRO, SC 2020; Zhao et al., PyTorch FSDP, VLDB 2023",
    ),
    "tensor": Strategy(
        "The matmuls of each block are split by columns, then by rows.",
        "Every kernel at the shape the split leaves, not work divided by ranks; two all-reduces a "
        "block each way, or gathers and scatters where norms are split too (`sp`).",
        "tp, sp", "heads of attention; ranks of one node, by default", (_ALIKE,),
        _MEGATRON,
    ),
    "pipeline": Strategy(
        "Stages of layers on different ranks, micro-batches behind each other.",
        "Forwards and backwards in the order of the schedule, sends between stages, simulated; the "
        "closed form of the sweep takes the slowest stage and the bubble.",
        "pp, chunks, schedule, micro_batch", "blocks of the model",
        ("stages hold as many blocks as each other, unless `layers` says more",), _MEGATRON,
    ),
    "context": Strategy(
        "The tokens of a sample are split; attention needs all keys and values.",
        "Kernels at a rank's share of the tokens; keys and values gathered before each attention, "
        "their gradients scattered in the backward pass.",
        "cp", "4096 tokens a rank at least, 16 ranks at most",
        ("causal attention is balanced among ranks",), "Grattafiori et al., Llama 3, 2024",
    ),
    "expert": Strategy(
        "The experts of a mixture live on different ranks.",
        "Two all-to-alls a block each way; experts' matmuls at the tokens they get.",
        "ep", "experts of a block", ("tokens are split evenly among experts",),
        "Lepikhin et al., GShard, 2020",
    ),
    "spatial": Strategy(
        "Images (or cubes) are cut into parts; neighbours exchange the rows at the cuts.",
        "Convolutions at the size of a part with its halo; halos are sent before each of them; "
        "gradients all-reduced among all.",
        "spatial=2+2", "pixels of the last layer", (_ALIKE,), _PARADL,
    ),
    "filter": Strategy(
        "Output channels are split: every rank computes some filters.",
        "Convolutions at a rank's filters, activations gathered behind each, their gradients "
        "all-reduced in the backward pass.",
        "filter", "output channels of the narrowest layer", (_ALIKE,), _PARADL,
    ),
    "channel": Strategy(
        "Input channels are split: every rank sums over some of them.",
        "Convolutions at a rank's channels, results all-reduced behind each, gradients gathered.",
        "channel", "input channels of the narrowest layer", (_ALIKE,), _PARADL,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """The best layout of one strategy on so many devices."""

    gpus: int
    strategy: str
    batch: int
    plan: Plan
    step: float
    low: float  # of the 80 % interval
    high: float
    parts: dict[str, float]
    peak: float
    missing: float
    utilisation: float
    money: float  # of a step; 0 where it is unknown
    layouts: int  # that were looked at
    findings: tuple[Finding, ...]
    collectives: dict[str, float]  # seconds by name, hidden or not

    @property
    def exposed(self) -> float:
        """Seconds of the step that wait for messages."""
        return sum(self.parts[name] for name in ("comm", "reduce", "send"))

    @property
    def hidden(self) -> float:
        """Seconds of messages behind compute."""
        return max(sum(self.collectives.values()) - self.exposed, 0.0)

    @property
    def samples(self) -> float:
        """Samples a second."""
        return self.batch / self.step

    def epoch(self, samples: int) -> float:
        """Seconds for so many samples."""
        return samples / self.samples


def counts(text: str) -> list[int]:
    """`1..64` → 1, 2, 4 … 64; `8,12,48` as it stands; `1..48` ends with 48."""
    if ".." not in text:
        return [_whole(part, text) for part in text.split(",")]
    first, _, last = text.partition("..")
    low, high = _whole(first, text), _whole(last, text)
    if low > high:
        raise InputError(f"`{text}` goes from {low} to {high}", hint="write the smaller one first")
    found, n = [], low
    while n < high:
        found.append(n)
        n *= 2
    return [*found, high]


def _whole(part: str, text: str) -> int:
    if not is_whole(part.strip()) or int(part) < 1:
        raise InputError(f"`{text}` is no number of devices", hint="write 1..1024 or 8,16,48")
    if int(part) > MOST:
        raise InputError(
            f"{int(part)} devices are too many", hint=f"at most {MOST} can be asked for"
        )
    return int(part)


def scaling(
    workload: Workload,
    cluster: Callable[[int], Cluster],
    gpus: Iterable[int],
    batch: Callable[[int], int],
    space: Space | None = None,
    progress: Callable[[str], None] = lambda words: None,
    pool: Pool | None = None,
) -> list[Row]:
    """The best layout of every strategy for each number of devices."""
    rows = []
    for n in gpus:
        machines, samples = cluster(n), batch(n)
        plans = layouts(workload, n, samples, per_node(machines), space or Space())
        plans = with_cuts(plans, workload, machines)
        tell = _telling(progress, n)
        tell(0, len(plans))
        if plans:
            swept = sweep(plans, workload, machines, tell, pool)
            rows += _best(swept, workload, machines, n, samples)
    return rows


def _telling(progress: Callable[[str], None], gpus: int) -> Callable[[int, int], None]:
    return lambda done, all_: progress(f"{gpus} devices: {done} of {all_} layouts")


def _best(swept: Swept, workload: Workload, cluster: Cluster, gpus: int, batch: int) -> list[Row]:
    rows = [
        _row(swept, name, one, workload, cluster, gpus, batch)
        for name, one in by_strategy(swept, workload, cluster).items()
    ]
    return sorted(rows, key=_rank)


def _rank(row: Row) -> tuple[bool, int, int, float, str]:
    """Fastest first; of those as fast as each other the plainest."""
    about = round(float(portable.log(row.step)) / ALIKE) if row.step else 0
    plain = row.strategy.count("+") + row.plan.zero
    return row.missing > 0, about, plain, row.step, row.strategy


def _row(
    swept: Swept, name: str, best: Fastest, workload: Workload, cluster: Cluster, gpus: int,
    batch: int,
) -> Row:  # fmt: skip
    plan, one = swept.plans[best.at], best.prediction
    f = as_simulated(swept.found, best)
    return Row(
        gpus, name, batch, plan, one.step, one.low, one.high,
        {p: float(getattr(f, p)[0]) for p in PARTS}, one.peak, one.missing, one.utilisation,
        one.step * swept.price / HOUR, best.layouts,
        tuple(findings(plan, f, 0, workload, cluster)), by_collective(plan, workload, cluster),
    )  # fmt: skip


def as_simulated(found: Estimate, best: Fastest) -> Estimate:
    """What the simulation says of one layout, in the parts of the closed form.

    Kernels and host, bubble and sends share what the simulation has for both as they do there;
    without stages, idle time waits for what is gathered.
    """
    one = best.prediction
    row = {f.name: float(getattr(found, f.name)[best.at]) for f in fields(found)}
    took = {name.removesuffix("_s"): seconds for name, seconds in one.breakdown.items()}
    working, waiting = row["compute"] + row["host"], row["bubble"] + row["send"]
    kernels = row["compute"] / working if working else 1.0
    bubble = row["bubble"] / waiting if waiting else 1.0
    idle = took["idle"] if one.plan.pp > 1 else 0.0
    row |= {
        "step": one.step, "peak": one.peak, "missing": one.missing, "reduce": took["reduce"],
        "compute": took["compute"] * kernels, "host": took["compute"] * (1 - kernels),
        "comm": took["exchange"] + took["idle"] - idle, "update": took["update"],
        "bubble": idle * bubble, "send": idle * (1 - bubble),
    }  # fmt: skip
    return Estimate(**{name: np.array([value]) for name, value in row.items()})


def front(rows: Sequence[Row]) -> list[Row]:
    """Rows that no other beats in time, memory and cost a sample at once, fastest first.

    Cost is money where prices are known, device-seconds where not.
    """
    mine = [row for row in rows if not row.missing]
    known = all(row.money for row in mine)

    def marks(row: Row) -> tuple[float, float, float]:
        cost = row.money / row.batch if known else row.gpus / row.samples
        return 1 / row.samples, row.peak, cost

    def beats(a: Row, b: Row) -> bool:
        return marks(a) != marks(b) and all(x <= y for x, y in zip(marks(a), marks(b), strict=True))

    kept = [row for row in mine if not any(beats(other, row) for other in mine)]
    return sorted(kept, key=lambda row: (1 / row.samples, row.gpus, row.strategy))


def _percent_more(share: float) -> str:
    """0.12 → `12 % more`; below half a percent `the same`."""
    sign = "more" if share >= 0 else "less"
    return f"{100 * abs(share):.0f} % {sign}" if abs(share) >= 5e-3 else "the same"


def marginal_gains(rows: Sequence[Row]) -> list[str]:
    """What each further step in devices saves in time and costs in money, of the best layouts."""
    best: dict[int, Row] = {}
    for row in rows:
        if not row.missing and (row.gpus not in best or row.samples > best[row.gpus].samples):
            best[row.gpus] = row
    found = []
    for fewer, more in zip(sorted(best), sorted(best)[1:], strict=False):
        a, b = best[fewer], best[more]
        time = 1 - a.samples / b.samples
        cost = (b.gpus / b.samples) / (a.gpus / a.samples) - 1
        verb = "save" if time >= 0 else "lose"
        found.append(
            f"{more - fewer} more devices ({fewer} → {more}) {verb} "
            f"{100 * abs(time):.0f} % of the time and cost {_percent_more(cost)} per sample"
        )
    return found
