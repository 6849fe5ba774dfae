"""Measure how models really run on this GPU: the plain step, one change at a time, and a trace.

    python benchmarks/measure_variants.py OUT [MODEL…] [--only VARIANT,…] [--traced VARIANT,…]

For every model it writes OUT/MODEL.base.json.gz and OUT/MODEL.amp_bf16.json.gz (Kineto traces of
one step; `--traced` names other variants) and, to OUT/truth.json, the un-profiled time and peak
memory of each variant: what `foretell validate --whatif` holds its answers against. Every variant
runs in a process of its own, so that its peak is its own and no profiler has been near it; one at a
time is on the GPU. Processes that get ready meanwhile (`--ahead`) save time and cost the host of
the one that is timed or traced some of its speed. Needs torch with CUDA, torchvision and
transformers; weights are random.
"""

import argparse
import contextlib
import importlib
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from blind_models import BLIND
from fresh_models import FRESH
from further_models import FURTHER
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.checkpoint import checkpoint
from variant_models import KINDS, MODELS

STEPS, WARM = 12, 4
COMPILERS = 16  # that compile at once
ALL = MODELS | KINDS | FURTHER | BLIND | FRESH


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
    made = ALL[name]
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = variant.tf32
    model = made.factory().cuda().train()
    x, y = (t.cuda() for t in made.batch(int(made.samples * variant.batch)))
    if variant.channels_last:
        model, x = (
            model.to(memory_format=torch.channels_last),
            x.to(memory_format=torch.channels_last),
        )
    optimizer = optimizer_of(model, made.optimizer, variant)
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

    return step


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


def run(name: str, variant: Variant, gpu: Any, go: Any, row: Path, trace: Path | None) -> None:
    """Measure or trace one variant of one model; the whole life of one process."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {"model": name, "variant": variant.name}
    found |= {"optimizer": ALL[name].optimizer, "batch": int(ALL[name].samples * variant.batch)}
    try:
        step = step_of(name, variant)
        if variant.compile:
            for _ in range(2):
                step()
            torch.cuda.synchronize()
            row.with_suffix(".ready").touch()
            go.wait()
        with gpu:
            step = captured(step) if variant.graph else step
            if trace is None:
                found |= timed(step)
            else:
                traced(step, trace)
        found["gpu"] = torch.cuda.get_device_name()
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {error}"[:200]
    row.write_text(json.dumps(found))


class Crew:
    """Processes that share a GPU, each measuring one variant."""

    def __init__(self, out: Path, limit: float) -> None:
        self.limit = limit  # seconds after which no further variant starts
        way = "spawn" if torch.cuda.is_initialized() else "fork"
        print(f"processes by {way}", flush=True)
        self.out, self.context = out, multiprocessing.get_context(way)
        self.gpu, self.go = self.context.Lock(), self.context.Event()
        self.rows, self.live = out / "rows", []
        self.rows.mkdir(parents=True, exist_ok=True)
        self.begin = time.time()

    def start(self, name: str, variant: Variant, *, is_trace: bool = False) -> None:
        """Begin one variant, or the trace of it."""
        label = f"{name}.{variant.name}"
        trace = self.out / f"{label}.json.gz" if is_trace else None
        row = self.rows / (f"trace.{label}.json" if is_trace else f"{label}.json")
        child = self.context.Process(
            target=run, args=(name, variant, self.gpu, self.go, row, trace)
        )
        child.start()
        self.live.append(child)

    def wait(self, most: int) -> None:
        """Until no more than so many are at work, or time is up."""
        while len(self.live) > most:
            self.live = [child for child in self.live if child.is_alive()]
            if time.time() - self.begin > self.limit + 20:
                for child in self.live:
                    child.kill()
            time.sleep(0.02)

    def left(self) -> float:
        return self.limit - (time.time() - self.begin)

    def compiled(self, names: list[str], variants: list[Variant]) -> None:
        """Everything that compiles: all compile at once, then one after another is timed."""
        jobs = [(name, v) for v in variants for name in names]
        for name, variant in jobs:
            while self._compiling() >= COMPILERS:
                time.sleep(0.05)
            self.start(name, variant)
        while self._compiling() and self.left() > 0.7 * self.limit:
            time.sleep(0.05)
        print(
            f"compiled after {time.time() - self.begin:.0f} s, {self._compiling()} late", flush=True
        )
        self.go.set()
        self.wait(0)

    def _compiling(self) -> int:
        ready = len(list(self.rows.glob("*.ready")))
        return sum(child.is_alive() for child in self.live) - ready


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("models", nargs="*", default=list(ALL))
    parser.add_argument("--only", default="")
    parser.add_argument("--traced", default="base,amp_bf16")
    parser.add_argument("--ahead", type=int, default=0)
    parser.add_argument("--limit", type=float, default=540.0)
    given = parser.parse_args()
    out, names = given.out, given.models
    only = set(filter(None, given.only.split(","))) or {v.name for v in VARIANTS}
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    for module in ("torchvision", "transformers"):
        with contextlib.suppress(ImportError):  # some models do without
            importlib.import_module(module)
    crew = Crew(out, given.limit)
    crew.compiled(names, [v for v in VARIANTS if v.compile and v.name in only])
    plain = [v for v in VARIANTS if not v.compile and v.name in only]
    traced = given.traced.split(",")
    traces = [(name, v, True) for v in VARIANTS if v.name in traced for name in names]
    jobs = traces + [(name, v, False) for v in plain for name in names]
    for name, variant, is_trace in jobs:
        if (variant.channels_last and not ALL[name].is_image) or crew.left() < 0:
            continue
        crew.wait(given.ahead)
        crew.start(name, variant, is_trace=is_trace)
    crew.wait(0)
    rows = [json.loads(path.read_text()) for path in sorted(crew.rows.glob("*.json"))]
    rows = [r for r in rows if "median_ms" in r or "error" in r]
    machine = {"gpu": next((r["gpu"] for r in rows if "gpu" in r), ""), "torch": torch.__version__}
    (out / "truth.json").write_text(json.dumps(machine | {"rows": rows}, indent=1))
    print(f"{len(rows)} rows after {time.time() - crew.begin:.0f} s")


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
