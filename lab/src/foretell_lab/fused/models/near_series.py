"""Models of sound and series near those known: filters over time, energies, gates, tags.

They widen what is trained on by norms over time, choices with noise, energies of one query, weighed
variables, residuals of series, sums over all paths of tags. None is a model kept out of training.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from foretell_lab.fused.models.near_other import widths
from foretell_lab.fused.models.parts import (
    LayerNorm,
    Linear,
    dropout,
    half,
    noise,
    stored,
    wide,
)
from foretell_lab.fused.models.text import Made

Tensor = Any


class Heard(nn.Module):  # type: ignore[misc]
    """wav2vec 2: filters over sound, channels made even over time, codes chosen with noise."""

    def __init__(self, c: int, codes: int, precision: str) -> None:
        super().__init__()
        kind = stored(precision)
        self.first = nn.Parameter(torch.empty(c, 1, 10, dtype=kind))
        self.second = nn.Parameter(torch.empty(c, c, 3, dtype=kind))
        self.scale, self.shift = (nn.Parameter(torch.ones(c, dtype=kind)) for _ in range(2))
        self.norm, self.codes = LayerNorm(c, precision), Linear(c, 2 * codes, precision)
        self.table = nn.Parameter(torch.empty(2 * codes, c, dtype=kind))
        self.precision = precision

    def _along(self, x: Tensor, weight: Tensor, stride: int) -> Tensor:
        return F.conv1d(*half(self.precision, x, weight), stride=stride)

    def forward(self, x: Tensor, luck: Tensor) -> tuple[Tensor, Tensor]:
        y = wide(self.precision, self._along(x, self.first, 5))
        y = F.gelu(F.group_norm(y, y.shape[1], self.scale, self.shift))
        y = self.norm(F.gelu(self._along(y, self.second, 2)).transpose(1, 2))
        scores = self.codes(y).float().view(*y.shape[:2], 2, -1)
        bumps = -torch.log(-torch.log(luck.abs().clamp(1e-6, 0.999)))
        chosen = F.softmax((scores + bumps) / 2.0, -1).flatten(2)
        shares = F.softmax(scores, -1).mean((0, 1))
        even = torch.exp(-(shares * torch.log(shares + 1e-7)).sum(-1)).sum()
        code = torch.matmul(*half(self.precision, chosen.to(self.table.dtype), self.table))
        near = (y * code).sum(-1) / (y.norm(dim=-1) * code.norm(dim=-1)).clamp_min(1e-6)
        return near.float() / 0.1, even


def wav2vec(chance: Random, precision: str) -> Made:
    """The first filters of wav2vec 2 and its codes."""
    c, codes = chance.choice((96, 192, 384, 512)), chance.choice((40, 160, 320))
    batch, length = chance.choice((1, 2, 4, 8)), chance.choice((1605, 4005, 8005, 16005))
    x = noise(batch, 1, length, precision=precision, grad=True)
    steps = (((length - 10) // 5 + 1) - 3) // 2 + 1
    luck = noise(batch, steps, 2, codes, precision="fp32")
    return Heard(c, codes, precision), (x, luck), lambda t: F.softplus(-t[0]).mean() - 0.1 * t[1]


class Speaking(nn.Module):  # type: ignore[misc]
    """Tacotron: one query's energies over all places and where it looked before, three times."""

    def __init__(self, width: int, inner: int, precision: str) -> None:
        super().__init__()
        self.query, self.keys = Linear(width, inner, precision), Linear(width, inner, precision)
        self.looked, self.energy = Linear(2, inner, precision), Linear(inner, 1, precision)
        self.before, self.next = (
            Linear(80, width, precision),
            Linear(2 * width, 2 * width, precision),
        )
        self.end, self.precision = Linear(width, 80, precision), precision

    def forward(self, memory: Tensor, h: Tensor, frame: Tensor) -> Tensor:
        keys, mixed, last, made = self.keys(memory), None, None, []
        hidden = memory[..., 0] > 2.5
        for _ in range(3):
            seen = torch.zeros_like(hidden, dtype=h.dtype) if mixed is None else mixed.to(h.dtype)
            both = torch.stack((seen, seen if last is None else last), -1)
            scores = torch.tanh(self.query(h)[:, None] + keys + self.looked(both))
            energy = wide(self.precision, self.energy(scores).squeeze(-1)).masked_fill(hidden, -1e4)
            now, last = F.softmax(energy, -1), seen
            mixed = now if mixed is None else mixed + now
            context = (now[..., None] * memory).sum(1).to(h.dtype)
            entry = dropout(F.relu(self.before(frame)), 0.5)
            keep, new = self.next(torch.cat((context, (h + entry).to(h.dtype)), -1)).chunk(2, -1)
            h = torch.lerp(torch.tanh(new), h.to(new.dtype), torch.sigmoid(keep)).to(h.dtype)
            frame = self.end(h)
            made.append(frame)
        return torch.stack(made, 1)


def tacotron(chance: Random, precision: str) -> Made:
    """Three steps of a speaking network."""
    width, inner = chance.choice(((256, 128), (384, 96), (512, 128), (640, 144)))
    batch, length = chance.choice((8, 24, 48, 64)), chance.choice((60, 96, 192, 320, 500))
    sizes = ((batch, length, width), (batch, width), (batch, 80))
    given = [noise(*s, precision=precision, grad=True) for s in sizes]
    return (
        Speaking(width, inner, precision),
        tuple(given),
        lambda y: (y.float().abs() + 1e-3).mean(),
    )


class Chosen(nn.Module):  # type: ignore[misc]
    """A temporal fusion network: gated layers weigh every variable of a series."""

    def __init__(self, count: int, width: int, precision: str) -> None:
        super().__init__()
        self.enter, self.mid = Linear(width, width, precision), Linear(width, 2 * width, precision)
        self.norm, self.end = LayerNorm(width, precision), Linear(width, 3, precision)
        self.weigh = widths(count * width, width, count, precision=precision)
        self.precision = precision

    def forward(self, x: Tensor) -> Tensor:
        scores = self.weigh[1](F.elu(self.weigh[0](x.flatten(2))))
        shares = F.softmax(wide(self.precision, scores), -1)
        value, gate = dropout(self.mid(F.elu(self.enter(x))), 0.1).chunk(2, -1)
        y = self.norm(x + value * torch.sigmoid(gate))
        return self.end((y * shares[..., None]).sum(2).to(x.dtype))


def _quantiles(y: Tensor) -> Tensor:
    missed = y[:, :1].detach().float() - y.float()
    at = torch.tensor([0.1, 0.5, 0.9], device=y.device)
    return torch.maximum(at * missed, (at - 1) * missed).sum(-1).mean()


def fusion(chance: Random, precision: str) -> Made:
    """Variables of a series weighed, and quantiles told."""
    count, width = chance.choice((5, 8, 12, 20)), chance.choice((40, 80, 160, 240))
    batch, length = chance.choice((4, 16, 64, 128)), chance.choice((32, 96, 168, 192))
    batch = max(1, min(batch, (16 << 20) // (length * count * width)))
    x = noise(batch, length, count, width, precision=precision, grad=True)
    return Chosen(count, width, precision), (x,), _quantiles


class Explained(nn.Module):  # type: ignore[misc]
    """N-BEATS: blocks take what they explain from the past and add it to the future."""

    def __init__(self, past: int, future: int, width: int, precision: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [widths(past, width, width, past + future, precision=precision) for _ in range(3)]
        )
        self.waves, self.past = Linear(past + future, past + future, precision), past

    def forward(self, x: Tensor) -> Tensor:
        spread = x.abs().amax(-1, keepdim=True) + 1e-3
        left, sum_ = x / spread, None
        for first, second, end in self.blocks:
            scores = end(F.relu(second(F.relu(first(left)))))
            scores = scores + torch.cos(self.waves(scores))
            left = left - scores[:, : self.past]
            ahead = scores[:, self.past :]
            sum_ = ahead if sum_ is None else sum_ + ahead
        return sum_ * spread


def _percent(y: Tensor) -> Tensor:
    wanted = y.detach().float().roll(1, 0)
    apart = (y.float() - wanted).abs()
    return (2.0 * apart / (y.float().abs() + wanted.abs()).clamp_min(1e-5)).mean()


def nbeats(chance: Random, precision: str) -> Made:
    """Three blocks of N-BEATS."""
    past, future = chance.choice(((60, 12), (96, 24), (336, 96), (720, 192), (35, 7)))
    x = noise(chance.choice((128, 500, 1024, 4096, 20000)), past, precision=precision, grad=True)
    return Explained(past, future, chance.choice((120, 320, 512)), precision), (x,), _percent


class Tags(nn.Module):  # type: ignore[misc]
    """A conditional random field: sums over all ways to tag, and the best way, step by step."""

    def __init__(self, width: int, tags: int, precision: str) -> None:
        super().__init__()
        self.tell, self.follows = (
            Linear(width, tags, precision),
            nn.Parameter(torch.zeros(tags, tags)),
        )

    def forward(self, x: Tensor) -> Tensor:
        scores = self.tell(dropout(torch.tanh(x), 0.3)).float()
        counts = (x[..., 0].detach() > -2.5)[..., None]
        sums = scores[:, 0]
        best = sums
        for t in range(1, 4):
            paths = sums[:, :, None] + self.follows + scores[:, t, None]
            sums = torch.where(counts[:, t], torch.logsumexp(paths, 1), sums)
            best = (best[:, :, None] + self.follows).amax(1) + scores[:, t]
        return (
            torch.logsumexp(sums, -1) - best.amax(-1) + 0.01 * scores.square().mean((1, 2))
        ).mean()


def crf(chance: Random, precision: str) -> Made:
    """Four places of a tagger."""
    width, tags = chance.choice((192, 384, 768)), chance.choice((9, 18, 48, 80, 120))
    x = noise(chance.choice((12, 64, 320, 1024)), 4, width, precision=precision, grad=True)
    return Tags(width, tags, precision), (x,), lambda y: y


NEAR_SERIES: dict[str, Callable[[Random, str], Made]] = {
    "wav2vec": wav2vec,
    "tacotron": tacotron,
    "fusion": fusion,
    "nbeats": nbeats,
    "crf": crf,
}
