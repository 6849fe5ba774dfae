"""One rank by itself: what each piece of a step costs, in seconds of its core.

Pieces are those that a plan can set apart: forward, the backward up to each parameter's gradient,
what follows the last, the update. Times are of the thread's processor clock, so a busy machine
makes them hardly longer; medians over steps, after as many as it takes until a core is awake.
"""

from __future__ import annotations

import time
from functools import partial
from statistics import median
from typing import Any

import torch

from foretell.errors import InputError
from foretell.pytorch.deploy.sync import add_gradient
from foretell.pytorch.deploy.units import layers
from foretell.pytorch.ranks.worker import core_seconds, worked
from foretell_lab.emulation import models

Job = dict[str, Any]
_WARM, _FIRST = 0.1, 3  # seconds and steps before any counts, at least


def profile(job: Job) -> dict[str, Any]:
    """The pieces of a model's step for each number of samples; again with the threads asked for."""
    torch.set_num_threads(1)
    kind = models.model(job["model"])
    torch.manual_seed(0)
    made, optimizer = models.trained(kind.make())
    sizes = job["samples"]
    before = probe()
    clocked = partial(_steps, made, optimizer, kind, job)
    steps, threads = clocked(1), {str(n): clocked(n) for n in job.get("threads", ())}
    parameters = {n: p.numel() * p.element_size() for n, p in made.named_parameters()}
    return {
        "model": job["model"],
        "samples": kind.samples,
        "parameters": parameters,
        "linear": _linear(made, kind),
        "handed": _handed(made, kind),
        "factors": _factors(made, kind, max(sizes, default=0), job["steps"]),
        "steps": steps,
        "threads": threads,
        "probe_s": (before + probe()) / 2,
    }


def _steps(made: Any, optimizer: Any, kind: models.Model, job: Job, threads: int) -> dict[str, Any]:
    """The pieces for each number of samples, on so many threads."""
    torch.set_num_threads(threads)
    try:
        return {
            str(n): _pieces(made, optimizer, kind.batch(n), job["steps"]) for n in job["samples"]
        }
    finally:
        torch.set_num_threads(1)


def probe() -> float:
    """Core seconds of the fixed piece of work, which say how quick a core is at the moment."""
    return median(worked()[1] for _ in range(5))


def _pieces(made: Any, optimizer: Any, batch: Any, steps: int) -> dict[str, Any]:
    ends = time.perf_counter() + _WARM
    for _ in range(_FIRST):
        _step(made, optimizer, *batch)
    while time.perf_counter() < ends:
        _step(made, optimizer, *batch)
    rows = [_step(made, optimizer, *batch) for _ in range(steps)]
    order = [name for name, _ in rows[0]]
    middle = [median(row[k][1] for row in rows) for k in range(len(order))]
    known = dict(zip(order, middle, strict=True))
    pieces = {k: known.pop(k) for k in ("forward", "rest", "update", "wall")}
    each = [_forward(made, batch[0]) for _ in range(steps)]
    layers = [[name, median(row[name] for row in each)] for name in each[0]]
    return {**pieces, "backward": [[name, s] for name, s in known.items()], "layers": layers}


def _layers(made: Any) -> dict[str, Any]:
    """The layers a plan may put on ranks of their own; none where the model cannot be cut."""
    try:
        return layers(made)
    except InputError:
        return {}


def _forward(made: Any, x: Any) -> dict[str, float]:
    """Core seconds of each layer's forward, one after another."""
    found: dict[str, float] = {}
    for name, layer in _layers(made).items():
        begun = time.thread_time()
        x = layer(x)
        found[name] = time.thread_time() - begun
    return found


def _handed(made: Any, kind: models.Model) -> dict[str, float]:
    """Bytes a sample that each layer hands to the next."""
    x, found = kind.batch(kind.samples)[0], {}
    for name, layer in _layers(made).items():
        x = layer(x)
        found[name] = x.numel() * x.element_size() / kind.samples
    return found


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


def _factors(made: Any, kind: models.Model, samples: int, steps: int) -> dict[str, list[float]]:
    """Core seconds a row of each linear layer's factors: to pack them, to multiply them."""
    found = {}
    for name, (_, _, each) in _linear(made, kind).items() if samples else ():
        module = made.get_submodule(name)
        x = torch.randn(max(1, round(samples * each)), module.in_features)
        g = torch.randn(len(x), module.out_features)
        packing = [
            core_seconds(lambda x=x, g=g: (torch.cat([x]), torch.cat([g * 0.5])))
            for _ in range(steps)
        ]
        multiplying = []
        for _ in range(steps):
            made.zero_grad()  # there is no gradient yet that it would be added to
            multiplying.append(core_seconds(lambda m=module, x=x, g=g: add_gradient(m, x, g)))
        found[name] = [median(packing) / len(x), median(multiplying) / len(x)]
    made.zero_grad()
    return found


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
