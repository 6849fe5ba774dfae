"""Models of neither: recurrent language models, gated convolutions, recommendation, optimizers."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from foretell_lab.fused.models.parts import Linear, dropout, entropy, noise, stored
from foretell_lab.fused.models.text import Made

Tensor = Any


class Rnn(nn.Module):  # type: ignore[misc]
    """A language model of LSTM cells, written out over a few steps."""

    def __init__(self, vocabulary: int, width: int, precision: str) -> None:
        super().__init__()
        self.tokens = nn.Parameter(torch.empty(vocabulary, width, dtype=stored(precision)))
        self.enter, self.again = (Linear(width, 4 * width, precision) for _ in range(2))
        self.head = Linear(width, vocabulary, precision)

    def forward(self, ids: Tensor, h: Tensor, c: Tensor) -> Tensor:
        x = dropout(F.embedding(ids, self.tokens), 0.5)
        outs = []
        for t in range(x.shape[1]):
            gates = self.enter(x[:, t]) + self.again(h)
            i, f, g, o = gates.chunk(4, 1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            outs.append(h)
        return self.head(dropout(torch.stack(outs, 1), 0.5))


def rnn(chance: Random, precision: str) -> Made:
    """Three steps of an LSTM language model."""
    width = chance.choice((650, 1024, 1500, 2048))
    batch = chance.choice((20, 64, 128, 256, 512, 2048))
    ids = torch.zeros(batch, 3, dtype=torch.int64)
    h, c = (noise(batch, width, precision=precision) for _ in range(2))
    model = Rnn(chance.choice((10000, 33278)), width, precision)
    return model, (ids, h, c), lambda y: entropy(precision, y)


class Gated(nn.Module):  # type: ignore[misc]
    """WaveNet's gate over a sequence: tanh times sigmoid, a residual and a skip."""

    def __init__(self, width: int, precision: str) -> None:
        super().__init__()
        self.both, self.out = Linear(width, 2 * width, precision), Linear(width, width, precision)
        self.skip = Linear(width, width, precision)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.both(x).chunk(2, -1)
        z = torch.tanh(a) * torch.sigmoid(b)
        return (x + self.out(z)) * 0.7071 + F.elu(self.skip(z))


def gated(chance: Random, precision: str) -> Made:
    """Two gated layers."""
    width = chance.choice((64, 128, 256, 512))
    x = noise(
        chance.choice((4, 16, 64)),
        chance.choice((500, 1024, 4000)),
        width,
        precision=precision,
        grad=True,
    )
    model = nn.Sequential(Gated(width, precision), Gated(width, precision))
    return model, (x,), lambda y: (y.float() ** 2).mean()


class Mixer(nn.Module):  # type: ignore[misc]
    """A recommendation model: embeddings, matmuls between them, a click's probability."""

    def __init__(self, width: int, precision: str) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(100000, width, dtype=stored(precision)))
        self.low, self.top = Linear(256, width, precision), Linear(27 * width, 512, precision)
        self.end = Linear(512, 1, precision)

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        x = F.relu(self.low(torch.log1p(F.relu(dense))))
        e = F.embedding(ids, self.table)
        z = torch.cat((x.unsqueeze(1).to(e.dtype), e), 1).flatten(1)
        return self.end(F.relu(self.top(z)))


def recommend(chance: Random, precision: str) -> Made:
    """Embeddings and layers of a recommendation model."""
    batch, width = chance.choice((512, 2048, 8192, 16384)), chance.choice((16, 32, 64, 128))
    dense = noise(batch, 256, precision=precision)
    ids = torch.zeros(batch, 26, dtype=torch.int64)

    def loss(y: Tensor) -> Tensor:
        target = torch.ones_like(y)
        return F.binary_cross_entropy_with_logits(y.float(), target.float())

    return Mixer(width, precision), (dense, ids), loss


OTHER: dict[str, Callable[[Random, str], Made]] = {
    "rnn": rnn,
    "gated": gated,
    "recommend": recommend,
}
