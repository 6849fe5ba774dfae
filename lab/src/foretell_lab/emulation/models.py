"""Small models of six kinds, each a step of some ten milliseconds: what the laboratory trains.

Sizes are such that gradients of 0.5 to 5 MB cross a 100 Mbit/s link in tenths of a second, and a
step without a network takes 10 to 100 ms of one core.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from foretell.errors import unknown

Tensor = Any


@dataclass(frozen=True)
class Model:
    """A model, the samples of one rank's step, and how to make some."""

    make: Callable[[], Any]
    samples: int
    batch: Callable[[int], tuple[Tensor, Tensor]]


class Encoder(nn.Module):  # type: ignore[misc]
    """A transformer encoder over vectors."""

    def __init__(self, width: int = 128, layers: int = 3) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x).mean(1))


class Recurrent(nn.Module):  # type: ignore[misc]
    """Two layers of LSTM."""

    def __init__(self, width: int = 64, hidden: int = 160) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, hidden, 2, batch_first=True)
        self.head = nn.Linear(hidden, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class Embedded(nn.Module):  # type: ignore[misc]
    """Large tables, little else."""

    def __init__(self, rows: int = 12000, width: int = 64) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, width)
        self.body = nn.Sequential(nn.Linear(width, 256), nn.ReLU(), nn.Linear(256, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.table(x).mean(1))


def _mlp() -> Any:
    sizes = (512, 512, 512, 512)
    hidden = [m for a, b in pairwise(sizes) for m in (nn.Linear(a, b), _act())]
    return nn.Sequential(*hidden, nn.Linear(sizes[-1], 10))


def _wide() -> Any:
    return nn.Sequential(nn.Linear(1024, 1024), _act(), nn.Linear(1024, 10))


def _cnn() -> Any:
    widths = (3, 32, 64, 128, 128)
    found: list[Any] = []
    for a, b in pairwise(widths):
        found += [nn.Conv2d(a, b, 3, padding=1), _act()]
        found += [nn.MaxPool2d(2)] if b > 32 else []
    return nn.Sequential(*found, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


def _vgg() -> Any:
    """Convolutions that compute, then a linear layer that holds nearly all parameters."""
    body = [nn.Conv2d(3, 16, 3, padding=1), _act(), nn.MaxPool2d(2)]
    body += [nn.Conv2d(16, 32, 3, padding=1), _act(), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(*body, nn.Linear(2048, 384), _act(), nn.Linear(384, 10))


def _bert() -> Any:
    """Words, two layers of an encoder, a head."""
    layer = [nn.TransformerEncoderLayer(192, 4, 768, 0.0, batch_first=True) for _ in range(2)]
    return nn.Sequential(nn.Embedding(1000, 192), *layer, nn.Flatten(), nn.Linear(16 * 192, 10))


def _act() -> Any:
    return nn.ReLU()


def _rows(*shape: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    return lambda n: (torch.randn(n, *shape), torch.randint(0, 10, (n,)))


def _words(rows: int, length: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    return lambda n: (torch.randint(0, rows, (n, length)), torch.randint(0, 10, (n,)))


MODELS = {
    "mlp": Model(_mlp, 128, _rows(512)),
    "wide": Model(_wide, 64, _rows(1024)),
    "cnn": Model(_cnn, 8, _rows(3, 32, 32)),
    "encoder": Model(Encoder, 8, _rows(32, 128)),
    "rnn": Model(Recurrent, 16, _rows(24, 64)),
    "vgg": Model(_vgg, 16, _rows(3, 32, 32)),
    "bert": Model(_bert, 4, _words(1000, 16)),
    "embedding": Model(Embedded, 256, _words(12000, 32)),
}


def model(name: str) -> Model:
    """A model by its name."""
    if name not in MODELS:
        raise unknown("model of the lab", name, MODELS)
    return MODELS[name]


def loss(output: Tensor, target: Tensor) -> Tensor:
    """The same for all."""
    return nn.functional.cross_entropy(output, target)


def trained(made: Any) -> tuple[Any, Any]:
    """A model and the optimizer that goes with it."""
    return made, torch.optim.SGD(made.parameters(), lr=0.01)
