"""Models farther off of neither: crossed features, WaveNet, graphs, experts and losses.

They widen what is trained on by matmuls of features, filters with gaps, scores among all nodes,
shares of many layers and what stands at the end of models of many sorts. None of them is a model
kept out of training.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from foretell_lab.fused.models.far_text import Along
from foretell_lab.fused.models.image import _square
from foretell_lab.fused.models.parts import (
    BatchNorm,
    LayerNorm,
    Linear,
    dropout,
    half,
    noise,
    stored,
)
from foretell_lab.fused.models.text import Made

Tensor = Any


class Crossed(nn.Module):  # type: ignore[misc]
    """Deep and cross: features times their own mixtures, pairs as in factorization machines."""

    def __init__(self, fields: int, width: int, inner: int, precision: str) -> None:
        super().__init__()
        n = fields * width
        self.table = nn.Parameter(torch.empty(50000, width, dtype=stored(precision)))
        self.crosses = nn.ModuleList([Linear(n, n, precision) for _ in range(2)])
        self.deep, self.even = Linear(n, inner, precision), BatchNorm(inner, precision)
        self.slope = nn.Parameter(torch.zeros(inner, dtype=stored(precision)))
        self.end = Linear(n + inner + width, 1, precision)

    def forward(self, ids: Tensor, share: Tensor) -> Tensor:
        e = F.embedding(ids, self.table) * share.unsqueeze(-1)
        first = x = e.flatten(1)
        for cross in self.crosses:
            x = first * cross(x) + x
        pairs = 0.5 * (e.sum(1).square() - e.square().sum(1))
        y = self.deep(first)
        gate = torch.sigmoid(self.even(y))
        y = gate * y + (1 - gate) * self.slope * y
        return self.end(torch.cat((x, dropout(y, 0.2).to(x.dtype), pairs), -1))


def crossnet(chance: Random, precision: str) -> Made:
    """Crossed features of a recommendation model."""
    fields, width = chance.choice(((13, 16), (26, 10), (26, 16), (39, 16), (30, 32), (24, 40)))
    batch = chance.choice((256, 1000, 4096, 8192, 16384))
    ids = torch.zeros(batch, fields, dtype=torch.int64)
    share = noise(batch, fields, precision=precision, grad=True)
    model = Crossed(fields, width, chance.choice((80, 200, 400, 1000)), precision)
    return model, (ids, share), lambda y: (F.softplus(y.float()) - 0.3 * y.float()).mean()


class Dilated(nn.Module):  # type: ignore[misc]
    """WaveNet: causal filters with gaps, tanh times sigmoid under a condition, skips added up."""

    def __init__(self, c: int, skip: int, precision: str) -> None:
        super().__init__()
        gaps = (1, 4, 16)
        self.both = nn.ModuleList([Along(c, 2 * c, 2, precision, g, causal=True) for g in gaps])
        self.tells = nn.ModuleList([Along(40, 2 * c, 1, precision) for _ in gaps])
        self.ends = nn.ModuleList([Along(c, c + skip, 1, precision) for _ in gaps])
        self.last = nn.ModuleList([Along(skip, skip, 1, precision), Along(skip, 256, 1, precision)])
        self.sizes = (c, skip)

    def forward(self, x: Tensor, about: Tensor) -> Tensor:
        total: Any = 0.0
        for both, tell, end in zip(self.both, self.tells, self.ends, strict=True):
            left, right = (both(x) + tell(about)).chunk(2, 1)
            y, skip = end(torch.tanh(left) * torch.sigmoid(right)).split(self.sizes, 1)
            x, total = (x + y) * 0.7071, total + skip
        y = self.last[1](F.relu(self.last[0](F.relu(total)))).float()
        return -F.log_softmax(y, 1)[:, 0].mean()


def wavenet(chance: Random, precision: str) -> Made:
    """Three layers of WaveNet and its end."""
    c, skip = chance.choice(((32, 64), (64, 128), (80, 96), (120, 240), (128, 256), (256, 512)))
    batch, length = chance.choice((1, 2, 4, 8, 16)), chance.choice((1000, 2048, 4096, 8000))
    x = noise(batch, c, length, precision=precision, grad=True)
    model = Dilated(c, skip, precision)
    return model, (x, noise(batch, 40, length, precision=precision)), lambda y: y


class Graph(nn.Module):  # type: ignore[misc]
    """Graph attention over dense neighbours, then a graph convolution by both degrees."""

    def __init__(self, width: int, heads: int, precision: str) -> None:
        super().__init__()
        each = width // heads
        self.enter, self.out = (
            Linear(width, width, precision, False),
            Linear(width, width, precision),
        )
        self.lean = nn.Parameter(torch.empty(2, heads, 1, each, dtype=stored(precision)))
        self.norm, self.heads, self.precision = LayerNorm(width, precision), heads, precision

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        b, n, w = x.shape
        h = self.enter(dropout(x, 0.2)).view(b, n, self.heads, -1).transpose(1, 2)
        to, away = ((h * lean).sum(-1) for lean in self.lean)
        scores = F.leaky_relu(to.unsqueeze(-1) + away.unsqueeze(-2), 0.2)
        scores = scores.masked_fill((edges < 0.5).unsqueeze(1), -9e4).float()
        chosen = dropout(F.softmax(scores, -1), 0.2)
        y = torch.matmul(*half(self.precision, chosen.to(h.dtype), h))
        y = F.elu(y.transpose(1, 2).reshape(b, n, w))
        degree = torch.rsqrt(edges.sum(-1).clamp(1.0))
        even = edges * degree.unsqueeze(-1) * degree.unsqueeze(-2)
        z = torch.bmm(*half(self.precision, even, self.norm(y).to(even.dtype)))
        return self.out(F.relu(z)) + x


def graph(chance: Random, precision: str) -> Made:
    """A layer of graph attention and one of graph convolution."""
    width, heads = chance.choice(((64, 8), (96, 4), (128, 4), (256, 8), (320, 5), (512, 8)))
    batch, nodes = chance.choice((1, 4, 16, 64)), chance.choice((50, 128, 200, 500, 1000))
    batch = min(batch, max(1, (24 << 20) // (nodes * nodes * heads)))
    x = noise(batch, nodes, width, precision=precision, grad=True)
    return (
        Graph(width, heads, precision),
        (x, noise(batch, nodes, nodes, precision=precision)),
        _square,
    )


class Experts(nn.Module):  # type: ignore[misc]
    """A soft mixture of experts: noisy shares, all experts at once, their load held even."""

    def __init__(self, width: int, experts: int, inner: int, precision: str) -> None:
        super().__init__()
        kind = stored(precision)
        self.choose, self.loud = (Linear(width, experts, precision, False) for _ in range(2))
        self.up = nn.Parameter(torch.empty(experts, width, inner, dtype=kind))
        self.shift = nn.Parameter(torch.empty(experts, 1, inner, dtype=kind))
        self.down = nn.Parameter(torch.empty(experts, inner, width, dtype=kind))
        self.norm, self.precision = LayerNorm(width, precision), precision

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        clean = self.choose(h).float()
        loud = clean + torch.randn_like(clean) * F.softplus(self.loud(h).float())
        share = F.softmax(loud, -1)
        share = torch.where(share >= share.amax(-1, keepdim=True) * 0.5, share, 0.0)
        share = share / (share.sum(-1, keepdim=True) + 1e-9)
        count = self.up.shape[0]
        each = torch.bmm(*half(self.precision, h.expand(count, *h.shape), self.up))
        each = F.relu(each + self.shift).square()
        each = torch.bmm(*half(self.precision, each, self.down))
        y = (each * share.t().unsqueeze(-1).to(each.dtype)).sum(0)
        load, certain = share.mean(0), F.softmax(clean, -1).mean(0)
        even = (load * certain).sum() * count + torch.logsumexp(clean, -1).square().mean() * 1e-3
        return (x + y).float().square().mean() + even


def experts(chance: Random, precision: str) -> Made:
    """A layer of experts."""
    width, inner = chance.choice(((192, 384), (320, 640), (512, 1024), (768, 768), (1000, 2000)))
    tokens, count = chance.choice((100, 512, 1000, 2048)), chance.choice((4, 8, 12))
    x = noise(tokens, width, precision=precision, grad=True)
    return Experts(width, count, inner, precision), (x,), lambda y: y


class Ends(nn.Module):  # type: ignore[misc]
    """What models end with: told by a teacher, by pairs, by margins, by rarer classes."""

    def __init__(self, width: int, classes: int, how: str, precision: str) -> None:
        super().__init__()
        self.head, self.other = (Linear(width, classes, precision) for _ in range(2))
        self.warm = nn.Parameter(torch.zeros(()))
        self.how, self.precision = how, precision

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        a, b = self.head(F.gelu(x)), self.other(torch.tanh(y))
        return getattr(self, f"_{self.how}")(a.float(), b.float())

    def _teacher(self, a: Tensor, b: Tensor) -> Tensor:
        scores, wanted = F.log_softmax(a / 4.0, -1), F.softmax(b.detach() / 4.0, -1)
        apart = wanted * (torch.log(wanted + 1e-9) - scores)
        return 16.0 * apart.sum(-1).mean() + F.log_softmax(a, -1)[:, 0].mean() * -0.1

    def _pairs(self, a: Tensor, b: Tensor) -> Tensor:
        a, b = (
            t / torch.linalg.vector_norm(t, dim=-1, keepdim=True).clamp_min(1e-6) for t in (a, b)
        )
        near = torch.matmul(*half(self.precision, a, b.t())).float() * self.warm.exp().clamp_max(
            100.0
        )
        own = near.diagonal()
        return (torch.logsumexp(near, 0) + torch.logsumexp(near, 1) - 2 * own).mean() / 2

    def _margin(self, a: Tensor, b: Tensor) -> Tensor:
        apart = (a - b).square().sum(-1).clamp_min(1e-9).sqrt()
        wrong = (a - b.flip(0)).square().sum(-1).clamp_min(1e-9).sqrt()
        middle, spread = a.mean(0), a.std(0)
        even = F.relu(1 - spread).mean() + (middle - b.mean(0)).abs().mean()
        return F.relu(apart - wrong + 0.3).mean() + even

    def _rare(self, a: Tensor, b: Tensor) -> Tensor:
        wanted = (b.detach() > 0).float()
        p = torch.sigmoid(a)
        sure = F.relu(a) - a * wanted + torch.log1p(torch.exp(-a.abs()))
        p = p * wanted + (1 - p) * (1 - wanted)
        small = b.abs() < 1.0
        rough = torch.where(small, 0.5 * b.square(), b.abs() - 0.5)
        return (
            (0.25 * wanted + 0.75 * (1 - wanted)) * (1 - p).square() * sure
        ).mean() + rough.mean()


def ends(chance: Random, precision: str) -> Made:
    """A loss of one of four sorts with the layers before it."""
    width, how = (
        chance.choice((192, 384, 768)),
        chance.choice(("teacher", "pairs", "margin", "rare")),
    )
    batch = chance.choice((96, 256, 500, 1024, 4096, 8192))
    classes = chance.choice((80, 120, 256, 512, 1000, 5000, 32000))
    classes = min(classes, (64 << 20) // batch)
    x, y = (noise(batch, width, precision=precision, grad=True) for _ in range(2))
    return Ends(width, classes, how, precision), (x, y), lambda z: z


FAR_OTHER: dict[str, Callable[[Random, str], Made]] = {
    "crossnet": crossnet,
    "wavenet": wavenet,
    "graph": graph,
    "experts": experts,
    "ends": ends,
}
