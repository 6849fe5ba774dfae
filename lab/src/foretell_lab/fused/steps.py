"""Whole compiled training steps, measured under several fusion plans of the compiler.

    python -m foretell_lab.fused steps -o steps.jsonl

A line a model and plan: seconds the device needs for a step whose every kernel was issued before
(`s`), seconds the host takes to issue it (`host`), every kernel that ran with start and duration in
nanoseconds (`ran`), and the compiler's notes of its kernels (→ `kernels`), forward then backward.
Each step has a process of its own, which compiles beside the others, waits for its turn on the
device, and writes its line at once: what fails or takes too long costs that step alone (`why`).
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

from foretell_lab.bench.clock import device_kernels, profile
from foretell_lab.fused.clock import quicken, wake
from foretell_lab.fused.kernels import Note, noted
from foretell_lab.fused.measure import _first_line, my_turn, settle
from foretell_lab.fused.models import MODELS

# Models as (name, seed of its sizes, precision): steps of some milliseconds.
CASES = (
    ("gpt2", 3, "bf16"), ("llama", 2, "bf16"), ("swin", 0, "bf16"), ("resnet", 8, "bf16"),
    ("unet", 13, "amp"), ("convnext", 0, "bf16"), ("vit", 0, "bf16"), ("rnn", 5, "bf16"),
    ("t5", 0, "bf16"), ("transformer", 1, "amp"), ("mobilenet", 1, "fp32"), ("bert", 0, "bf16"),
)  # fmt: skip
# What each plan tells Inductor. `each` also keeps an op from being computed inside its reader.
PLANS: dict[str, dict[str, Any]] = {
    "default": {},
    "pairs": {"max_fusion_size": 2},
    "loops": {"max_fusion_size": 1},
    "each": {"max_fusion_size": 1},
}
_WARM, _TIMED, _SEEN = 4, 11, 3  # steps
_CYCLES = 2.0e9  # of the device's clock in a second, at least
_LEAST = 20.0  # seconds before the end after which no step is begun
_SHARE = 0.7  # of all the time: the most that one step may take


class Made(NamedTuple):
    """A step ready to run."""

    model: str
    plan: str
    run: Callable[[], Any]
    forget: Callable[[], None]
    notes: list[Note]


def steps(out: str, device: str, seconds: float, processes: int) -> None:
    """Compile and measure every model under every plan, whole models first."""
    context = multiprocessing.get_context("spawn")
    turn, ends = context.Lock(), time.time() + seconds
    left = [(case, plan) for case in CASES for plan in PLANS]
    running: list[tuple[Any, float]] = []
    while (left or running) and time.time() < ends:
        running = [(p, until) for p, until in running if _goes_on(p, until)]
        while left and len(running) < processes and time.time() < ends - _LEAST:
            worker = context.Process(target=_work, args=(*left.pop(0), out, device, turn))
            worker.start()
            running.append((worker, time.time() + _SHARE * seconds))
        left = left if time.time() < ends - _LEAST else []
        time.sleep(0.1)
    for worker, _ in running:
        _goes_on(worker, 0.0)


def _goes_on(worker: Any, until: float) -> bool:
    """Whether a process is still at work; one that is late is ended."""
    if worker.is_alive() and time.time() > until:
        worker.kill()
        worker.join()
    return bool(worker.is_alive())


def _work(case: tuple[str, int, str], plan: str, out: str, device: str, turn: Any) -> None:
    """One step: compile, wait for the device, measure, write a line."""
    settle(device)
    if device == "cuda":
        quicken(turn)
    row: dict[str, Any] = {"model": case[0], "plan": plan}
    try:
        begun = time.time()
        made = compiled_step(case, plan, device)
        row["compiling"] = time.time() - begun
        with my_turn(turn):
            row |= _on_gpu(made) if device == "cuda" else _on_host(made)
        row["notes"] = made.notes
    except Exception as why:  # a compiler fails in many ways; the step is left out, and said so
        row["why"] = _first_line(why) + str(why)[-300:]
    _append(out, row)


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


def _on_gpu(step: Made) -> dict[str, Any]:
    took, issued = [], [0.02]
    for _ in range(_WARM + _TIMED):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        step.forget()
        torch.cuda.synchronize()
        # The device waits until the host has issued the whole step.
        torch.cuda._sleep(int(_CYCLES * (0.005 + 1.5 * issued[-1])))
        start = time.perf_counter()
        begin.record()
        step.run()
        end.record()
        issued.append(time.perf_counter() - start)
        torch.cuda.synchronize()
        took.append(begin.elapsed_time(end) * 1e-3)
    return {
        "s": statistics.median(took[_WARM:]),
        "host": statistics.median(issued[1 + _WARM :]),
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
