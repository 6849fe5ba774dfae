"""Linear layers in fp8 beside bf16 on a GPU: what casts and matmuls take, and what is predicted.

    python benchmarks/fp8_layers.py OUT.json

Each row is the forward and backward of one layer inside autocast, device seconds by the profiler
(kernels alone, the queue never empty) and wall seconds: in bf16; in fp8 with casts that
torch.compile made (what `dtype=fp8` runs); in fp8 with the same casts operator by operator. And by
how much fp8 is predicted to be shorter, which decides whether a layer runs in it.
"""

import json
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from foretell.cluster.read import load, titled
from foretell.cost.eight_bits import saved
from foretell.pytorch.deploy import precision

SIZES = [  # rows, in, out
    (8192, 768, 768), (8192, 768, 3072), (8192, 768, 50304), (8192, 4096, 4096),
    (16384, 4096, 4096), (16384, 4096, 16384), (16384, 16384, 4096), (16384, 8192, 8192),
]  # fmt: skip
TIMES = 20
KINDS = {"matmul": ("gemm", "cutlass", "nvjet", "scaled", "sm90_xmma"), "cast": ("triton",)}


def layer(wide: int, out: int, way: str) -> nn.Linear:
    made = nn.Linear(wide, out, device="cuda")
    if way != "bf16":
        made.forward = precision._Forward(made, None)  # whatever it gains
    return made


def step(made: nn.Linear, x: torch.Tensor, g: torch.Tensor) -> None:
    made.weight.grad = made.bias.grad = x.grad = None
    with torch.autocast("cuda", dtype=torch.bfloat16):
        y = made(x)
    y.backward(g)


def kernels(made: nn.Linear, x: torch.Tensor, g: torch.Tensor) -> dict[str, dict[str, float]]:
    """Device seconds and launches of one step, by kind of kernel."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(TIMES):
            step(made, x, g)
        torch.cuda.synchronize()
    found: dict[str, dict[str, float]] = defaultdict(lambda: {"seconds": 0.0, "launches": 0.0})
    for event in profiler.key_averages():
        name = event.key.lower()
        kind = next((k for k, words in KINDS.items() if any(w in name for w in words)), "other")
        found[kind]["seconds"] += 1e-6 * event.device_time_total / TIMES
        found[kind]["launches"] += event.count / TIMES
    return dict(found)


def wall(made: nn.Linear, x: torch.Tensor, g: torch.Tensor) -> float:
    took = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(TIMES):
            step(made, x, g)
        torch.cuda.synchronize()
        took.append((time.perf_counter() - start) / TIMES)
    return statistics.median(took)


def main() -> None:
    name, rows = torch.cuda.get_device_name(), []
    known = titled(name)
    device = None if known is None else load(f"{known.name}:gpus=1").devices[0]
    compiled = precision._compiled
    for size in SIZES:
        n, wide, out = size
        x = torch.randn(n, wide, device="cuda").to(torch.bfloat16).requires_grad_()
        g = torch.randn(n, out, device="cuda").to(torch.bfloat16)
        row = {"rows": n, "in": wide, "out": out}
        row["predicted_saved_s"] = None if device is None else float(saved(device, *size)[0])
        for way in ("bf16", "fp8", "fp8 by operator"):
            is_eager = way.endswith("operator")
            precision._compiled = (lambda: precision._in_eight_bits) if is_eager else compiled
            made = layer(wide, out, way)
            for _ in range(3):
                step(made, x, g)
            row[way] = {"wall_s": wall(made, x, g), "kernels": kernels(made, x, g)}
        rows.append(row)
        print(json.dumps(row), flush=True)
        about = {"device": name, "torch": torch.__version__, "source": "benchmarks/fp8_layers.py"}
        Path(sys.argv[1]).write_text(json.dumps(about | {"rows": rows}))


if __name__ == "__main__":
    main()
