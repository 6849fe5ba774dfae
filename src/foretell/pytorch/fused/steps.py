"""Whole compiled training steps, measured under several fusion plans of the compiler.

    python -m foretell.pytorch.fused steps -o steps.jsonl

A line a model and plan: seconds the device needs for a step whose every kernel was issued before
(`s`), seconds the host takes to issue it (`host`), every kernel that ran with start and duration in
nanoseconds (`ran`), and the compiler's notes of its kernels (→ `kernels`), forward then backward.
Processes compile side by side; when all are done they measure one after the other.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any, NamedTuple

import torch

from foretell.pytorch.bench.clock import device_kernels, profile
from foretell.pytorch.fused.clock import quicken, wake
from foretell.pytorch.fused.kernels import Note, noted
from foretell.pytorch.fused.measure import _first_line, settle
from foretell.pytorch.fused.models import MODELS

# Models as (name, seed of its sizes, precision): steps of some milliseconds, longer than the host
# needs to issue them.
CASES = (
    ("gpt2", 3, "bf16"), ("bert", 0, "amp"), ("vit", 0, "bf16"), ("resnet", 8, "bf16"),
    ("convnext", 0, "bf16"), ("t5", 0, "bf16"), ("llama", 2, "bf16"), ("swin", 0, "bf16"),
    ("unet", 13, "amp"), ("mobilenet", 1, "fp32"),
)  # fmt: skip
# What each plan tells Inductor. `each` also keeps an op from being computed inside its reader.
PLANS: dict[str, dict[str, Any]] = {
    "default": {},
    "pairs": {"max_fusion_size": 2},
    "loops": {"max_fusion_size": 1},
    "each": {"max_fusion_size": 1},
    "whole": {"split_reductions": False},
}
_WARM, _TIMED, _SEEN = 5, 15, 3  # steps
_RESERVE = 60.0  # seconds before the end at which what is compiled is measured
_AHEAD = 60_000_000  # cycles, some 30 ms: the host issues a whole step while the device waits


class Made(NamedTuple):
    """A step ready to run."""

    model: str
    plan: str
    run: Callable[[], Any]
    forget: Callable[[], None]
    notes: list[Note]


def steps(out: str, device: str, seconds: float, processes: int) -> None:
    """Compile every model under every plan, then measure them one by one."""
    context = multiprocessing.get_context("spawn")
    shared = context.Lock(), context.Value("i", 0), context.Value("i", processes)
    ends = time.time() + seconds
    workers = [
        context.Process(target=_work, args=(out, device, ends, *shared)) for _ in range(processes)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(max(1.0, ends - time.time()))
        if worker.is_alive():
            worker.terminate()


def _work(out: str, device: str, ends: float, turn: Any, following: Any, busy: Any) -> None:
    settle(device)
    if device == "cuda":
        quicken(turn)
    try:
        made = list(_made(device, following, out, turn))
    finally:
        with busy.get_lock():
            busy.value -= 1
    while busy.value > 0 and time.time() < ends - _RESERVE:
        time.sleep(0.2)
    with turn:
        for step in made:
            _append(out, _measured(step, device))


def _made(device: str, following: Any, out: str, turn: Any) -> Iterator[Made]:
    tasks = [(case, plan) for case in CASES for plan in PLANS]
    while True:
        with following.get_lock():
            at = following.value
            following.value += 1
        if at >= len(tasks):
            return
        case, plan = tasks[at]
        try:
            yield compiled_step(case, plan, device)
        except Exception as why:  # a compiler fails in many ways; the step is left out, and said so
            with turn:
                _append(out, {"model": case[0], "plan": plan, "why": _first_line(why)})
            if "CUDA error" in str(why):
                return  # the device is lost to this process


def _append(out: str, row: dict[str, Any]) -> None:
    with open(out, "a") as file:
        file.write(json.dumps(row) + "\n")


def compiled_step(case: tuple[str, int, str], plan: str, device: str) -> Made:
    """One training step, compiled under a plan and run once."""
    import torch._inductor.config as inductor

    name, seed, precision = case
    torch._dynamo.reset()
    torch.manual_seed(0)
    with torch.device(device), torch.no_grad():
        model, inputs, loss = MODELS[name](Random(seed), precision)
        for p in model.parameters():
            p.normal_(0.0, 0.02)
    wanted = [*model.parameters(), *(t for t in inputs if t.requires_grad)]

    @torch.compile(dynamic=False)
    def forward(*given: Any) -> Any:
        return loss(model(*given))

    def forget() -> None:
        for p in wanted:
            p.grad = None

    def run() -> None:
        forward(*inputs).backward()

    with inductor.patch(PLANS[plan]), _apart(plan == "each"), noted() as notes:
        run()
    forget()
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    return Made(name, plan, run, forget, notes)


@contextmanager
def _apart(wanted: bool) -> Iterator[None]:
    """Let every op's result be stored, instead of computed inside what reads it."""
    from torch._inductor.graph import GraphLowering
    from torch._inductor.ir import TensorBox

    plain = GraphLowering.call_function

    def stored(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = plain(self, *args, **kwargs)
        for part in made if isinstance(made, (list, tuple)) else [made]:
            if isinstance(part, TensorBox):
                part.realize()
        return made

    if wanted:
        GraphLowering.call_function = stored
    try:
        yield
    finally:
        GraphLowering.call_function = plain


def _measured(step: Made, device: str) -> dict[str, Any]:
    row: dict[str, Any] = {"model": step.model, "plan": step.plan}
    try:
        row |= _on_gpu(step) if device == "cuda" else _on_host(step)
    except RuntimeError as why:
        row["why"] = _first_line(why)
    return row | {"notes": step.notes}


def _on_gpu(step: Made) -> dict[str, Any]:
    took, issued = [], []
    for _ in range(_WARM + _TIMED):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        step.forget()
        torch.cuda.synchronize()
        torch.cuda._sleep(_AHEAD)
        start = time.perf_counter()
        begin.record()
        step.run()
        end.record()
        issued.append(time.perf_counter() - start)
        torch.cuda.synchronize()
        took.append(begin.elapsed_time(end) * 1e-3)
    return {
        "s": statistics.median(took[_WARM:]),
        "host": statistics.median(issued[_WARM:]),
        "ran": _seen(step),
    }


def _seen(step: Made) -> list[list[Any]]:
    """Every kernel of a step under the profiler: name, start after the first, duration."""
    wake()
    steps = []
    for _ in range(_SEEN):
        step.forget()
        torch.cuda.synchronize()
        with profile() as profiler:
            step.run()
            torch.cuda.synchronize()
        steps.append(sorted(device_kernels(profiler), key=lambda k: k.start))
    few = [s for s in steps if len(s) == len(steps[-1])]
    spans = [statistics.median(k.end - k.start for k in same) for same in zip(*few, strict=True)]
    begin = few[-1][0].start
    return [
        [k.name[:60], k.start - begin, int(span)] for k, span in zip(few[-1], spans, strict=True)
    ]


def _on_host(step: Made) -> dict[str, Any]:
    took = []
    for _ in range(_SEEN):
        step.forget()
        start = time.perf_counter()
        step.run()
        took.append(time.perf_counter() - start)
    return {"s": min(took), "host": 0.0, "ran": []}
