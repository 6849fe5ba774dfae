"""Measure how models really run on this GPU: the plain step, one change at a time, and a trace.

    python benchmarks/measure_variants.py OUT [MODEL…]

For every model it writes OUT/MODEL.base.json.gz and OUT/MODEL.amp_bf16.json.gz (Kineto traces of
one step) and, to OUT/truth.json, the un-profiled time and peak memory of each variant: what
`foretell validate --whatif` holds its answers against. Needs torch with CUDA, torchvision and
transformers; weights are random.
"""

import contextlib
import gc
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.checkpoint import checkpoint
from variant_models import MODELS

STEPS, WARM = 15, 4


@dataclass(frozen=True)
class Variant:
    """One way to run the step."""

    name: str
    amp: torch.dtype | None = None
    tf32: bool = False
    optimizer: str = "loop"  # loop, foreach, fused
    batch: float = 1.0
    checkpoint: bool = False
    graph: bool = False
    channels_last: bool = False
    compile: bool = False


BF16, FP16 = torch.bfloat16, torch.float16
VARIANTS = (
    Variant("base"),
    Variant("tf32", tf32=True),
    Variant("amp_bf16", amp=BF16),
    Variant("amp_fp16", amp=FP16),
    Variant("opt_foreach", optimizer="foreach"),
    Variant("opt_fused", optimizer="fused"),
    Variant("batch_x2", batch=2),
    Variant("batch_half", batch=0.5),
    Variant("amp_bf16+fused", amp=BF16, optimizer="fused"),
    Variant("checkpoint", checkpoint=True),
    Variant("cudagraph", graph=True),
    Variant("amp_bf16+cudagraph", amp=BF16, graph=True),
    Variant("nhwc", channels_last=True),
    Variant("amp_bf16+nhwc", amp=BF16, channels_last=True),
    Variant("compile", compile=True),
    Variant("amp_bf16+compile", amp=BF16, compile=True),
)


def batch_of(name: str, times: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Random samples of a model."""
    _, _, count, words = MODELS[name]
    count = int(count * times)
    if words < 0:
        x = torch.randn(count, -words, device="cuda")
        return x, torch.randint(0, 1000, (count,), device="cuda")
    if words:
        x = torch.randint(0, 30000, (count, words), device="cuda")
        return x, x.clone()
    return (
        torch.randn(count, 3, 224, 224, device="cuda"),
        torch.randint(0, 1000, (count,), device="cuda"),
    )


def optimizer_of(model: nn.Module, kind: str, variant: Variant) -> torch.optim.Optimizer:
    """The optimizer of a variant: a loop over parameters unless it says otherwise."""
    how: dict[str, Any] = {"foreach": variant.optimizer == "foreach"}
    if variant.optimizer == "fused":
        how = {"fused": True}
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, **how)
    return torch.optim.AdamW(model.parameters(), lr=1e-4, capturable=variant.graph, **how)


def step_of(name: str, variant: Variant) -> Callable[[], None]:
    """One training step as a function without arguments."""
    factory, kind, _, _ = MODELS[name]
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = variant.tf32
    model = factory().cuda().train()
    x, y = batch_of(name, variant.batch)
    if variant.channels_last:
        model, x = (
            model.to(memory_format=torch.channels_last),
            x.to(memory_format=torch.channels_last),
        )
    optimizer = optimizer_of(model, kind, variant)
    scaler = torch.amp.GradScaler("cuda", enabled=variant.amp == FP16)
    forward = torch.compile(model) if variant.compile else model
    call = (
        (lambda: checkpoint(forward, x, y, use_reentrant=False))
        if variant.checkpoint
        else (lambda: forward(x, y))
    )

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=variant.amp or BF16, enabled=variant.amp is not None):
            loss = call()
        scaler.scale(loss).backward()
        if variant.amp == FP16:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()

    return captured(step) if variant.graph else step


def captured(step: Callable[[], None]) -> Callable[[], None]:
    """The step as one CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def timed(step: Callable[[], None]) -> dict[str, float]:
    """Milliseconds of single steps by events, and of steps in a row by the clock."""
    for _ in range(WARM):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    singles = []
    for _ in range(STEPS):
        before, after = torch.cuda.Event(True), torch.cuda.Event(True)
        before.record()
        step()
        after.record()
        torch.cuda.synchronize()
        singles.append(before.elapsed_time(after))
    begin = time.perf_counter()
    for _ in range(STEPS):
        step()
    torch.cuda.synchronize()
    wall = (time.perf_counter() - begin) * 1e3 / STEPS
    median = statistics.median(singles)
    quarters = statistics.quantiles(singles, n=4)
    peak = torch.cuda.max_memory_allocated() / 2**20
    return {
        "median_ms": median, "q1_ms": quarters[0], "q3_ms": quarters[2], "wall_ms": wall,
        "low_ms": min(median, wall), "high_ms": max(median, wall), "n": STEPS, "peak_mib": peak,
    }  # fmt: skip


def traced(step: Callable[[], None], path: Path) -> None:
    """A Kineto trace of one step after warm ones."""
    for _ in range(WARM):
        step()
    torch.cuda.synchronize()
    kinds = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    plan = schedule(wait=0, warmup=2, active=1, repeat=1)
    with profile(activities=kinds, schedule=plan, record_shapes=True) as found:
        for _ in range(3):
            step()
            torch.cuda.synchronize()
            found.step()
    found.export_chrome_trace(str(path))


@contextlib.contextmanager
def fresh() -> Iterator[None]:
    """Nothing of one variant is left for the next."""
    torch._dynamo.reset()
    yield
    gc.collect()
    torch.cuda.empty_cache()


def warm(name: str) -> None:
    """Fill the compiler's cache."""
    for variant in VARIANTS:
        if variant.compile:
            with fresh(), contextlib.suppress(Exception):
                step_of(name, variant)()
                torch.cuda.synchronize()


def measure(name: str, save: Callable[[dict[str, Any]], None]) -> None:
    """Every variant of one model."""
    _, kind, count, words = MODELS[name]
    for variant in VARIANTS:
        if variant.channels_last and words:
            continue
        row: dict[str, Any] = {"model": name, "variant": variant.name, "optimizer": kind}
        row["batch"] = int(count * variant.batch)
        try:
            with fresh():
                row |= timed(step_of(name, variant))
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {error}"[:200]
        save(row)


def trace(name: str, out: Path) -> None:
    """A trace of the plain step and one under autocast."""
    for variant in VARIANTS:
        if variant.name in ("base", "amp_bf16"):
            with fresh():
                traced(step_of(name, replace(variant)), out / f"{name}.{variant.name}.json.gz")


def main() -> None:
    out, names = Path(sys.argv[1]), sys.argv[2:] or list(MODELS)
    out.mkdir(parents=True, exist_ok=True)
    begin = time.time()
    pool = multiprocessing.get_context("spawn").Pool(len(names))
    with pool, contextlib.suppress(multiprocessing.TimeoutError):
        pool.map_async(warm, names, 1).get(timeout=60)
    print(f"compiled after {time.time() - begin:.0f} s", flush=True)
    machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    rows: list[dict[str, Any]] = []

    def save(row: dict[str, Any]) -> None:
        rows.append(row)
        print(f"{time.time() - begin:4.0f} s {row}", flush=True)
        (out / "truth.json").write_text(json.dumps(machine | {"rows": rows}, indent=1))

    for name in names:
        measure(name, save)
    for name in names:  # last: a process that was profiled launches more slowly from then on
        trace(name, out)


if __name__ == "__main__":
    main()
