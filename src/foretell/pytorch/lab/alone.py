"""One rank by itself: what each piece of a step costs, in seconds of its core.

Pieces are those that a plan can set apart: forward, the backward up to each parameter's gradient,
what follows the last, the update. Times are of the thread's processor clock, so a busy machine
makes them hardly longer; medians over steps.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import torch

from foretell.pytorch.lab import models

Job = dict[str, Any]


def profile(job: Job) -> dict[str, Any]:
    """The pieces of a model's step for each number of samples."""
    torch.set_num_threads(1)
    kind = models.model(job["model"])
    torch.manual_seed(0)
    made, optimizer = models.trained(kind.make())
    sizes = job["samples"]
    steps = {str(n): _pieces(made, optimizer, kind.batch(n), job["steps"]) for n in sizes}
    parameters = {n: p.numel() * p.element_size() for n, p in made.named_parameters()}
    return {
        "model": job["model"],
        "samples": kind.samples,
        "parameters": parameters,
        "linear": _linear(made, kind),
        "steps": steps,
    }


def _pieces(made: Any, optimizer: Any, batch: Any, steps: int) -> dict[str, Any]:
    rows = [_step(made, optimizer, *batch) for _ in range(steps + 3)][3:]  # caches are warm then
    order = [name for name, _ in rows[0]]
    middle = [median(row[k][1] for row in rows) for k in range(len(order))]
    known = dict(zip(order, middle, strict=True))
    pieces = {k: known.pop(k) for k in ("forward", "rest", "update", "wall")}
    return {**pieces, "backward": [[name, s] for name, s in known.items()]}


def _step(made: Any, optimizer: Any, x: Any, y: Any) -> list[tuple[str, float]]:
    """One step as (piece, seconds of the core), and the wall's seconds last."""
    stamps: list[tuple[str, float]] = []
    hooks = [
        p.register_post_accumulate_grad_hook(lambda _, n=n: stamps.append((n, time.thread_time())))
        for n, p in made.named_parameters()
    ]
    begun, wall = time.thread_time(), time.perf_counter()
    optimizer.zero_grad()
    value = models.loss(made(x), y)
    stamps.append(("forward", time.thread_time()))
    value.backward()
    stamps.append(("rest", time.thread_time()))
    optimizer.step()
    stamps.append(("update", time.thread_time()))
    took = time.perf_counter() - wall
    for hook in hooks:
        hook.remove()
    before = [begun, *(at for _, at in stamps)]
    pieces = [(name, at - b) for (name, at), b in zip(stamps, before, strict=False)]
    return [*pieces, ("wall", took)]


def _linear(made: Any, kind: models.Model) -> dict[str, list[float]]:
    """Of each linear layer that is called alone: numbers in, numbers out, rows a sample."""
    found: dict[str, list[float]] = {}

    def note(name: str, rows: int, module: Any) -> None:
        found[name] = [module.in_features, module.out_features, rows / kind.samples]

    hooks = [
        m.register_forward_hook(
            lambda m, args, _, n=name: note(n, args[0].numel() // m.in_features, m)
        )
        for name, m in made.named_modules()
        if type(m) is torch.nn.Linear
    ]
    made(kind.batch(kind.samples)[0])
    for hook in hooks:
        hook.remove()
    return found
