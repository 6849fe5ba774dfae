"""Models near those known of neither images nor text: rays, interests, graphs, mixtures, angles.

They widen what is trained on by waves of coordinates, light summed along rays, features beside
their differences, neighbours gathered, mixtures of bells, angles with a margin. None is a model
kept out of training.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from foretell_lab.fused.models.image import _square
from foretell_lab.fused.models.parts import LayerNorm, Linear, half, noise, stored, wide
from foretell_lab.fused.models.text import Made

Tensor = Any


def widths(*sizes: int, precision: str) -> nn.ModuleList:
    """Linear layers one behind the other."""
    return nn.ModuleList([Linear(a, b, precision) for a, b in pairwise(sizes)])


class Rays(nn.Module):  # type: ignore[misc]
    """NeRF: waves of places, layers with the waves again halfway, light summed along rays."""

    def __init__(self, width: int, octaves: int, sine: bool, precision: str) -> None:
        super().__init__()
        n = 6 * octaves + 3
        self.layers = widths(n, width, width, precision=precision)
        self.again, self.thick = Linear(width + n, width, precision), Linear(width, 1, precision)
        self.colour, self.octaves = Linear(width, 3, precision), octaves
        self.act: Any = (lambda y: torch.sin(30.0 * y)) if sine else F.relu

    def forward(self, x: Tensor, steps: Tensor) -> Tensor:
        powers = 2.0 ** torch.arange(self.octaves, device=x.device)
        angles = (x[..., None] * powers).flatten(-2)
        waves = torch.cat((x, torch.sin(angles).to(x.dtype), torch.cos(angles).to(x.dtype)), -1)
        y = self.act(self.layers[1](self.act(self.layers[0](waves))))
        y = self.act(self.again(torch.cat((y, waves.to(y.dtype)), -1)))
        thick = F.softplus(self.thick(y).squeeze(-1).float() - 1.0) * steps
        n = steps.shape[-1]
        before = torch.ones(n, n, device=x.device).triu(1)
        light = torch.exp(-torch.matmul(thick, before)) * (1 - torch.exp(-thick))
        return (light[..., None] * torch.sigmoid(self.colour(y).float())).sum(-2)


def nerf(chance: Random, precision: str) -> Made:
    """Rays through a field of light; with sines for ReLU, a SIREN."""
    width, count = chance.choice((64, 120, 192, 256, 384)), chance.choice((96, 500, 1024, 4096))
    n = chance.choice((32, 64, 96))
    x = noise(count, n, 3, precision=precision, grad=True)
    model = Rays(width, chance.choice((4, 6, 10)), chance.random() < 0.4, precision)
    return model, (x, noise(count, n, precision="fp32")), _square


class Interest(nn.Module):  # type: ignore[misc]
    """DIN: what was looked at beside what is offered, and features attending to features."""

    def __init__(self, width: int, fields: int, precision: str) -> None:
        super().__init__()
        self.weigh = widths(4 * width, 80, 1, precision=precision)
        self.qk, self.end = (
            Linear(width, 3 * width, precision),
            Linear(fields * width, 1, precision),
        )
        self.slope = nn.Parameter(torch.zeros(80, dtype=stored(precision)))
        self.precision = precision

    def forward(self, offered: Tensor, seen: Tensor, rest: Tensor) -> Tensor:
        q = offered[:, None].expand(seen.shape)
        scores = self.weigh[0](torch.cat((q, seen, q - seen, q * seen), -1)).float()
        spread, middle = torch.var_mean(scores, (0, 1), correction=0, keepdim=True)
        p = torch.sigmoid((scores - middle) * torch.rsqrt(spread + 1e-8))
        scores = (p * scores + (1 - p) * self.slope * scores).to(seen.dtype)
        weight = self.weigh[1](scores).masked_fill(seen[..., :1] > 2.0, 0.0)
        taken = (weight * seen).sum(1, keepdim=True)
        x = torch.cat((offered[:, None], taken.to(rest.dtype), rest), 1)
        q, k, v = self.qk(x).chunk(3, -1)
        near = torch.matmul(*half(self.precision, q, k.transpose(1, 2)))
        near = F.softmax(wide(self.precision, near), -1)
        y = F.relu(x + torch.matmul(*half(self.precision, near, v)))
        pairs = 0.5 * (x.sum(1).square() - x.square().sum(1)).sum(-1, keepdim=True)
        return self.end(y.flatten(1)) + pairs


def interest(chance: Random, precision: str) -> Made:
    """A model of interests: DIN, AutoInt and pairs."""
    width, fields = chance.choice((16, 24, 40, 64, 96)), chance.choice((10, 26, 39))
    batch, seen = chance.choice((128, 500, 2048, 4096)), chance.choice((20, 50, 100))
    batch = min(batch, (12 << 20) // (seen * width))
    sizes = ((batch, width), (batch, seen, width), (batch, fields - 2, width))
    given = [noise(*s, precision=precision, grad=True) for s in sizes]
    return Interest(width, fields, precision), tuple(given), lambda y: F.softplus(y.float()).mean()


class Sampled(nn.Module):  # type: ignore[misc]
    """GraphSAGE and GIN: neighbours gathered from a table, their mean or most or sum, made even."""

    def __init__(self, c: int, width: int, how: str, precision: str) -> None:
        super().__init__()
        self.pool, self.join = Linear(c, c, precision), Linear(2 * c, width, precision)
        self.layers, self.norm = (
            widths(c, width, width, precision=precision),
            LayerNorm(width, precision),
        )
        self.small, self.how = nn.Parameter(torch.zeros((), dtype=stored(precision))), how

    def forward(self, table: Tensor, own: Tensor, near: Tensor) -> Tensor:
        x, around = table[own], table[near]
        if self.how == "sum":
            y = (1 + self.small) * x + around.sum(1)
            y = self.norm(self.layers[1](F.relu(self.layers[0](y))))
        else:
            around = F.relu(self.pool(around)).amax(1) if self.how == "most" else around.mean(1)
            y = F.relu(self.join(torch.cat((x, around.to(x.dtype)), -1)))
        return y / y.norm(dim=-1, keepdim=True).clamp_min(1e-6)


def _apart(y: Tensor) -> Tensor:
    one, other = y.float().chunk(2)
    near, far = (one * other).sum(-1), (one * other.roll(1, 0)).sum(-1)
    return (F.softplus(-near) + F.softplus(far)).mean()


def sage(chance: Random, precision: str) -> Made:
    """A layer over sampled neighbours."""
    c, width = chance.choice((50, 100, 128, 192, 602)), chance.choice((96, 256, 320))
    count, near = chance.choice((256, 1000, 4096, 10000)), chance.choice((5, 10, 15, 25))
    table = noise(20000, c, precision=precision, grad=True)
    ids = torch.zeros(count, dtype=torch.int64), torch.zeros(count, near, dtype=torch.int64)
    how = chance.choice(("sum", "mean", "most"))
    return Sampled(c, width, how, precision), (table, *ids), _apart


class Bells(nn.Module):  # type: ignore[misc]
    """A variational encoder whose decoder tells a mixture of bells for every feature."""

    def __init__(self, c: int, hidden: int, count: int, precision: str) -> None:
        super().__init__()
        self.enter = widths(c, 256, 2 * hidden, precision=precision)
        self.end = widths(hidden, 256, 3 * count * c, precision=precision)
        self.count = count

    def forward(self, x: Tensor, luck: Tensor) -> Tensor:
        middle, spread = self.enter[1](torch.tanh(self.enter[0](x))).float().chunk(2, -1)
        z = middle + torch.exp(0.5 * spread) * luck
        scores = self.end[1](torch.tanh(self.end[0](z.to(x.dtype)))).float()
        share, at, wide_ = scores.view(len(x), -1, 3, self.count).unbind(2)
        off = (x.float()[..., None] - at) * torch.exp(-wide_.clamp(-5.0, 5.0))
        each = F.log_softmax(share, -1) - 0.5 * off.square() - wide_ - 0.9189
        likely = torch.logsumexp(each, -1).sum(-1)
        apart = -0.5 * (1 + spread - middle.square() - spread.exp()).sum(-1)
        return (apart - likely).mean()


def bells(chance: Random, precision: str) -> Made:
    """A variational encoder with mixture densities."""
    c, hidden, count = chance.choice((24, 80, 144, 320)), chance.choice((16, 32, 96)), 5
    batch = chance.choice((64, 128, 500, 2048, 6000))
    x, luck = (
        noise(batch, c, precision=precision, grad=True),
        noise(batch, hidden, precision="fp32"),
    )
    return Bells(c, hidden, chance.choice((3, count, 10)), precision), (x, luck), lambda y: y


class Angles(nn.Module):  # type: ignore[misc]
    """ArcFace: angles between features and classes, the right one widened by a margin."""

    def __init__(self, width: int, classes: int, precision: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(classes, width, dtype=stored(precision)))
        self.enter, self.precision = Linear(width, width, precision), precision

    def forward(self, x: Tensor, right: Tensor) -> Tensor:
        x = F.leaky_relu(self.enter(x), 0.25)
        x, weight = (
            t * torch.rsqrt(t.float().square().sum(-1, keepdim=True) + 1e-12).to(t.dtype)
            for t in (x, self.weight)
        )
        cos = F.linear(*half(self.precision, x, weight)).float().clamp(-1 + 1e-6, 1 - 1e-6)
        sin = torch.sqrt(1 - cos.square())
        wider = torch.where(cos > -0.8776, cos * 0.8776 - sin * 0.4794, cos - 0.2397)
        scores = F.log_softmax(64.0 * torch.where(right, wider, cos), -1)
        smooth = torch.where(right, 0.9, 0.1 / scores.shape[-1])
        return -(scores * smooth).sum(-1).mean()


def arcface(chance: Random, precision: str) -> Made:
    """A head of faces with its margin."""
    width, classes = chance.choice((96, 192, 512)), chance.choice((320, 1000, 5000, 10575, 40000))
    batch = chance.choice((24, 64, 128, 320))
    x = noise(batch, width, precision=precision, grad=True)
    return (
        Angles(width, classes, precision),
        (x, torch.zeros(batch, classes, dtype=torch.bool)),
        lambda y: y,
    )


NEAR_OTHER: dict[str, Callable[[Random, str], Made]] = {
    "nerf": nerf,
    "interest": interest,
    "sage": sage,
    "bells": bells,
    "arcface": arcface,
}
