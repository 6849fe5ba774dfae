"""Measures links and cores with a pool of ranks: collectives by size, shares of a core.

For each network and number of ranks: seconds of each collective at each size, and the core seconds
it takes of a rank; then α and β of seconds = α + β·wire, wire the bytes that cross the busiest link
(2(n−1)/n of an all-reduce).
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np

from foretell.pytorch.ranks.pool import Pool

SIZES = (1024, 16384, 65536, 262144, 1048576, 4194304)
OPS = ("all_reduce", "reduce", "broadcast", "all_gather")
_LONG = 0.25  # seconds: what takes longer is repeated three times only
_BURNS = 15
_HOOKED = 9
BESIDE = 524288  # bytes of a message beside work: a gradient of some layers
_REST = 0.02  # seconds of sleep before it is seen how late a rank wakes


def measure_links(
    pool: Pool, network: str, sizes: Sequence[int] = SIZES, ops: Sequence[str] = OPS,
    tell: Callable[[str], None] = lambda _: None,
) -> list[dict[str, Any]]:  # fmt: skip
    """One row an op and size on the network as it is shaped now."""
    found = []
    for op in ops:
        last = 0.0
        for size in sizes:
            tell(f"{op} of {size} bytes on {pool.ranks} x {network}")
            found.append(_row(pool, network, op, size, 3 if 4 * last > _LONG else 9))
            last = found[-1]["seconds"]
    return found


def measure_beside(pool: Pool, network: str) -> dict[str, Any]:
    """Work beside messages over work alone, and messages beside work over messages alone."""
    answers = pool.ask({"do": "beside", "bytes": BESIDE, "repeats": _BURNS})
    means = {key: mean(a[key] for a in answers) for key in answers[0]}
    return {
        "network": network,
        "ranks": pool.ranks,
        "work": means["beside_s"] / means["alone_s"],
        "wire": means["sent_beside_s"] / means["sent_s"],
        "two_s": means["sent_s"],
    }


def measure_hooks(pool: Pool) -> dict[str, float]:
    """What taking gradients costs a rank, the mean of ranks (→ `worker.hooks`)."""
    answers = pool.ask({"do": "hooks", "repeats": _HOOKED})
    return {key: mean(a[key] for a in answers) for key in answers[0]}


def _row(pool: Pool, network: str, op: str, size: int, repeats: int) -> dict[str, Any]:
    answers = pool.ask({"do": "collective", "op": op, "bytes": size, "repeats": repeats})
    each = [max(times) for times in zip(*(a["all_s"] for a in answers), strict=True)]
    return {
        "network": network,
        "ranks": pool.ranks,
        "op": op,
        "bytes": size,
        "seconds": round(median(each), 7),
        "spread": round(float(np.ptp(np.quantile(each, [0.25, 0.75]))) / median(each), 4),
        "cpu_s": round(median(a["cpu_s"] for a in answers), 7),
        "main_s": round(median(a["main_s"] for a in answers), 7),
    }


def measure_cores(pool: Pool) -> dict[str, float]:
    """Wall and core seconds of the same work on every rank at once, and how late the slowest is."""
    runs = [pool.ask({"do": "burn"}) for _ in range(_BURNS)]
    each = [a["wall_s"] for run in runs for a in run]
    cpu = median(a["cpu_s"] for run in runs for a in run)
    late = mean(max(a["wall_s"] for a in run) for run in runs) / mean(each)
    slept = [pool.ask({"do": "burn", "times": 1, "rest": _REST}) for _ in range(_BURNS)]
    return {
        "ranks": pool.ranks,
        "wall_s": median(each),
        "cpu_s": median(a["awake_s"] for run in runs for a in run),
        "stretch": median(each) / cpu,
        "late": late,
        "woke_s": mean(max(a["woke_s"] for a in run) for run in slept),
    }


def fit_links(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """α and bytes/s of each network and number of ranks, from its all-reduces."""
    groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in rows:
        if row["op"] == "all_reduce":
            groups.setdefault((row["network"], row["ranks"]), []).append(row)
    found = []
    for (network, ranks), group in groups.items():
        group.sort(key=lambda r: r["bytes"])
        alpha, beta = line(
            np.array([wire_bytes("all_reduce", r["bytes"], ranks) for r in group]),
            np.array([r["seconds"] for r in group]),
        )
        found.append({"network": network, "ranks": ranks, "latency": alpha, "bandwidth": 1 / beta})
    return found


def wire_bytes(op: str, bytes: float, ranks: int) -> float:
    """Bytes that cross the busiest link of a ring; `bytes` of an all-gather are those of a rank."""
    many = {"all_reduce": 2 * (ranks - 1) / ranks, "all_gather": ranks - 1}
    return bytes * many.get(op, 1.0)


def line(x: Any, y: Any) -> tuple[float, float]:
    """α and β of y = α + β·x: β of the two largest, α of what the smallest leave over.

    A fit to all sizes would believe the token bucket, through which small messages pass for free.
    """
    beta = (y[-1] - y[-2]) / (x[-1] - x[-2])
    if beta <= 0:  # noise: the largest by itself
        beta = y[-1] / x[-1]
    alpha = np.median((y - beta * x)[: len(x) // 2])
    return max(0.0, float(alpha)), float(beta)


def this_machine() -> dict[str, Any]:
    """What was measured on."""
    return {"cpu": _processor(), "cores": os.cpu_count(), "system": platform.system(),
            "python": platform.python_version(), "load": round(os.getloadavg()[0], 2)}  # fmt: skip


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), "")
