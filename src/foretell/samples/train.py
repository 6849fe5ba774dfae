"""A small script that `foretell run` can run: a model, its batch, its loss.

The protocol is all there is: `model()`, `batch(rank, size)` and, where the usual ones do not fit,
`loss(output, target)` and `optimizer(parameters)`.
"""

from __future__ import annotations

from typing import Any

WIDTH, LAYERS, SAMPLES, CLASSES = 256, 4, 64, 10


def model() -> Any:
    """A stack of linear layers."""
    from importlib import import_module

    nn = import_module("torch.nn")
    layers = [part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))


def batch(rank: int, size: int) -> Any:
    """The rank-th of `size` parts of a step's samples."""
    from importlib import import_module

    torch = import_module("torch")
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, WIDTH, generator=draw)
    y = torch.randint(0, CLASSES, (SAMPLES,), generator=draw)
    share = SAMPLES // size
    return (x[rank * share : (rank + 1) * share],), y[rank * share : (rank + 1) * share]
