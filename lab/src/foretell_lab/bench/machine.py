"""What was measured on: the device, the host, the software, and the ceilings both reach.

Host costs depend on the processor and its clock, device times on driver and library versions, so
a table without its machine is worth little.
"""

from __future__ import annotations

import os
import platform
import shutil
import statistics
import subprocess
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from foretell_lab.bench.call import Place, use_precision
from foretell_lab.bench.clock import UNSUPPORTED, synchronize

_SMI = (
    "driver_version,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.limit,temperature.gpu"
)


def describe(place: Place) -> dict[str, Any]:
    """The machine, its software and settings."""
    return {
        "device": device(place),
        "host": {
            "cpu": _processor(),
            "cores": os.cpu_count(),
            "system": f"{platform.system()} {platform.machine()}",
            "python": platform.python_version(),
        },
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if place.is_cuda else None,
        "settings": {
            "cudnn.benchmark": torch.backends.cudnn.benchmark,
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "fp32": "tf32 off for matmuls and convolutions",
            "tf32": "tf32 on for matmuls and convolutions",
        },
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def device(place: Place) -> dict[str, Any]:
    """The device that was measured."""
    if not place.is_cuda:
        return {"name": _processor(), "kind": "cpu", "threads": torch.get_num_threads()}
    has = torch.cuda.get_device_properties(place.device)
    return {
        "name": has.name,
        "kind": "cuda",
        "capability": f"{has.major}.{has.minor}",
        "memory": has.total_memory,
        "units": has.multi_processor_count,
        "l2": has.L2_cache_size,
        "nvidia_smi": smi(),
    }


def smi() -> dict[str, str]:
    """Driver, clocks, power limit and temperature, as nvidia-smi tells them now."""
    if not shutil.which("nvidia-smi"):
        return {}
    command = ["nvidia-smi", f"--query-gpu={_SMI}", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    values = done.stdout.splitlines()[0].split(", ") if done.returncode == 0 and done.stdout else []
    return dict(zip(_SMI.split(","), values, strict=False))


def ceilings(place: Place) -> dict[str, float]:
    """The best rates seen here: flop/s of a large square product by format, bytes/s of a copy."""
    side, count = (8192, 2**28) if place.is_cuda else (512, 2**22)
    rates = {}
    for dtype in ("fp32", "tf32", "bf16", "fp16"):
        use_precision(dtype)
        n = side // 2 if dtype == "fp32" else side
        try:
            a, b = (place.randn(n, n, dtype=dtype) for _ in range(2))
            rates[dtype] = 2.0 * n**3 / _seconds(lambda a=a, b=b: torch.mm(a, b), place)
        except UNSUPPORTED:
            continue
    source, sink = place.randn(count), place.randn(count)
    rates["bytes"] = 8.0 * count / _seconds(lambda: sink.copy_(source), place)
    return {name: float(f"{rate:.4g}") for name, rate in rates.items()}


def _seconds(run: Any, place: Place) -> float:
    """Median of five calls, each waited for."""
    took = []
    for _ in range(7):
        synchronize(place)
        start = time.perf_counter()
        run()
        synchronize(place)
        took.append(time.perf_counter() - start)
    return statistics.median(took[2:])


def _processor() -> str:
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
