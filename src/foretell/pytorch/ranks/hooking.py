"""What it costs a rank's own thread that gradients leave: steps in buckets less plain steps.

Chains of linear layers, one bucket each, plain and in buckets by turns on every rank. Of a short
and a long chain of small layers comes what a parameter and what a step costs, of large layers what
a byte does: in the backward, which copies it, and in the update, which finds it in no cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from foretell.pytorch.deploy.buckets import Buckets, Layout

_FEW, _MANY, _SMALL = 8, 40, 16  # layers, and numbers in and out of each
_LARGE, _WIDE = 4, 256  # a megabyte: seconds on the slowest of links
_TURN = 4  # steps of one kind in a row; the first of them is warm-up

Extra = tuple[float, float]  # core seconds of a step's backward and of its update


def hooks(job: dict[str, Any]) -> dict[str, float]:
    """Core seconds of a parameter, of a step, of a byte in the backward and in the update."""
    few, many, large = (
        _extra(layers, width, job["repeats"])
        for layers, width in ((_FEW, _SMALL), (_MANY, _SMALL), (_LARGE, _WIDE))
    )
    hook = max(0.0, (sum(many) - sum(few)) / (_MANY - _FEW))
    wait = max(0.0, sum(few) - _FEW * hook)
    size = 4.0 * _LARGE * _WIDE**2
    back = large[0] - _LARGE * hook - (few[0] - _FEW * hook)
    return {
        "hook_s": hook,
        "wait_s": wait,
        "copy_s": max(0.0, back) / size,
        "cold_s": max(0.0, large[1] - few[1]) / size,
    }


def _extra(layers: int, width: int, repeats: int) -> Extra:
    """What a chain's step takes longer when its gradients leave, medians over turns."""
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(layers)))
    names = dict(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    sync = Buckets(names, Layout((tuple(reversed(names)),)), weight=1.0 / dist.get_world_size())
    x = torch.randn(32, width)

    def plain() -> None:
        sync.is_syncing = False
        model(x).sum().backward()
        sync.is_syncing = True

    def sent() -> None:
        model(x).sum().backward()
        sync.finish()

    rows = [(_took(optimizer, plain), _took(optimizer, sent)) for _ in range(repeats)]
    sync.remove()
    back, update = (median(b[k] - a[k] for a, b in rows) for k in (0, 1))
    return back, update


def _took(optimizer: Any, there_and_back: Callable[[], None]) -> Extra:
    """Core seconds of a step up to its update, and of that; medians of some in a row."""
    rows = []
    dist.barrier()
    for _ in range(_TURN):
        optimizer.zero_grad()
        begun = time.thread_time()
        there_and_back()
        middle = time.thread_time()
        optimizer.step()
        rows.append((middle - begun, time.thread_time() - middle))
    back, update = (median(column) for column in zip(*rows[1:], strict=True))
    return back, update
