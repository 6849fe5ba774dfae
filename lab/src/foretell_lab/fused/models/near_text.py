"""Models of tokens near those known: other scores and masks, talking heads, shared layers.

They widen what is trained on by scores looked up by distance, masks that decay, capped scores, a
few places that read many, heads mixed before and after they choose. None is a model kept out of
training.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from foretell_lab.fused.models.image import _square
from foretell_lab.fused.models.parts import (
    LayerNorm,
    Linear,
    RmsNorm,
    dropout,
    entropy,
    half,
    noise,
    stored,
    wide,
)
from foretell_lab.fused.models.text import Layer, Made, heads_of, merged, softmax_attention

Tensor = Any


def rows(chance: Random, width: int, squared: int = 0) -> tuple[int, int]:
    """Batch and length, from few tokens to many; `squared` heads have scores of every pair."""
    length = chance.choice((32, 49, 77, 96, 128, 192, 320, 384, 512, 1000, 1024, 2048, 4096))
    length = min(length, 1024) if squared else length
    most = chance.choice((1 << 19, 3 << 20, 12 << 20, 40 << 20))
    fits = max(1, most // (length * max(width, squared * length)))
    return max(1, min(fits, chance.choice((1, 2, 3, 5, 8, 12, 20, 32, 64, 128)))), length


def words(chance: Random, precision: str, width: int, squared: int = 0) -> Tensor:
    """A batch of tokens."""
    return noise(*rows(chance, width, squared), width, precision=precision, grad=True)


class Disentangled(nn.Module):  # type: ignore[misc]
    """DeBERTa: scores of contents, of content and distance, of distance and content, added."""

    def __init__(self, width: int, heads: int, span: int, precision: str) -> None:
        super().__init__()
        self.qkv, self.out = Linear(width, 3 * width, precision), Linear(width, width, precision)
        self.far = Linear(width, 2 * width, precision)
        self.places = nn.Parameter(torch.empty(1, 2 * span, width, dtype=stored(precision)))
        self.norm, self.heads, self.precision = LayerNorm(width, precision), heads, precision

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        q, k, v = (heads_of(t, self.heads) for t in self.qkv(x).chunk(3, -1))
        far_q, far_k = (heads_of(t, self.heads) for t in self.far(self.places).chunk(2, -1))
        at = at.expand(*q.shape[:3], -1)
        one = torch.matmul(*half(self.precision, q, k.transpose(-1, -2)))
        two = torch.matmul(*half(self.precision, q, far_k.transpose(-1, -2))).gather(-1, at)
        three = torch.matmul(*half(self.precision, k, far_q.transpose(-1, -2))).gather(-1, at)
        scores = (one + two + three.transpose(-1, -2)) * (3 * q.shape[-1]) ** -0.5
        chosen = dropout(F.softmax(wide(self.precision, scores), -1), 0.1)
        y = self.out(merged(torch.matmul(*half(self.precision, chosen, v))))
        return self.norm(x + dropout(y, 0.1))


def deberta(chance: Random, precision: str) -> Made:
    """Disentangled attention of DeBERTa."""
    width, heads = chance.choice(((384, 6), (768, 12), (1024, 16), (192, 3), (576, 9)))
    x = words(chance, precision, width, heads)
    at = torch.zeros(x.shape[1], x.shape[1], dtype=torch.int64)
    return Disentangled(width, heads, chance.choice((32, 64, 256)), precision), (x, at), _square


class Retained(nn.Module):  # type: ignore[misc]
    """RetNet: no softmax; scores fade with distance, heads are made even, a gate follows."""

    def __init__(self, width: int, heads: int, precision: str) -> None:
        super().__init__()
        self.qkvg = Linear(width, 4 * width, precision, False)
        self.out, self.heads, self.precision = Linear(width, width, precision), heads, precision
        self.norm = RmsNorm(width, precision)

    def forward(self, x: Tensor, fades: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        *qkv, gate = self.qkvg(self.norm(x)).chunk(4, -1)
        q, k, v = (heads_of(t, self.heads) for t in qkv)
        left, right = k.chunk(2, -1)
        k = torch.cat((left * cos - right * sin, left * sin + right * cos), -1)
        i = torch.arange(x.shape[1], device=x.device)
        apart = (i[:, None] - i).float()
        fade = torch.where(apart >= 0, torch.exp(apart * fades), 0.0)
        scores = torch.matmul(*half(self.precision, q, k.transpose(-1, -2))) * fade
        scores = scores / scores.detach().abs().sum(-1, keepdim=True).clamp(1.0, 5e4)
        y = torch.matmul(*half(self.precision, scores.to(v.dtype), v)).float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5)
        return x + self.out(F.silu(gate) * merged(y).to(gate.dtype))


def retnet(chance: Random, precision: str) -> Made:
    """A layer of RetNet."""
    width, heads = chance.choice(((384, 4), (768, 6), (1024, 8), (640, 10), (1152, 12)))
    x = words(chance, precision, width, heads)
    fades = noise(heads, 1, 1, precision="fp32")
    turns = [noise(x.shape[1], width // heads // 2, precision=precision) for _ in range(2)]
    return Retained(width, heads, precision), (x, fades, *turns), _square


class Capped(nn.Module):  # type: ignore[misc]
    """Queries and keys made even, scores capped, norms before and after, half GELU gates half."""

    def __init__(self, width: int, heads: int, groups: int, precision: str) -> None:
        super().__init__()
        self.each, self.heads, self.groups = width // heads, heads, groups
        self.sizes = [width, groups * self.each, groups * self.each]
        self.qkv, self.out = (
            Linear(width, sum(self.sizes), precision),
            Linear(width, width, precision),
        )
        self.norms = nn.ModuleList([RmsNorm(width, precision) for _ in range(4)])
        self.even = nn.ModuleList([RmsNorm(self.each, precision) for _ in range(2)])
        self.up, self.down = (
            Linear(width, 6 * width, precision),
            Linear(3 * width, width, precision),
        )
        self.precision = precision

    def _mixed(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).split(self.sizes, -1)
        q = self.even[0](heads_of(q, self.heads))
        k, v = self.even[1](heads_of(k, self.groups)), heads_of(v, self.groups)
        b, g, t, d = k.shape
        k, v = (s[:, :, None].expand(b, g, self.heads // g, t, d).flatten(1, 2) for s in (k, v))
        scores = torch.matmul(*half(self.precision, q, k.transpose(-1, -2))) * d**-0.5
        scores = torch.tanh(scores / 50.0) * 50.0
        i = torch.arange(t, device=x.device)
        seen = (i <= i[:, None]) & (i > i[:, None] - t // 2)
        chosen = F.softmax(scores.float().masked_fill(~seen, -1e30), -1).to(v.dtype)
        return self.out(merged(torch.matmul(*half(self.precision, chosen, v))))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.norms[1](self._mixed(self.norms[0](x)))
        gate, up = self.up(self.norms[2](x)).chunk(2, -1)
        return x + self.norms[3](self.down(F.gelu(gate, approximate="tanh") * up))


def capped(chance: Random, precision: str) -> Made:
    """A layer with capped scores and norms on both sides."""
    width, heads, groups = chance.choice(
        ((576, 9, 3), (768, 12, 4), (1024, 8, 4), (1152, 4, 1), (640, 10, 2), (2304, 8, 4))
    )
    return (
        Capped(width, heads, groups, precision),
        (words(chance, precision, width, heads),),
        _square,
    )


class Perceiver(nn.Module):  # type: ignore[misc]
    """Perceiver: a few learned places read many tokens, then one another."""

    def __init__(self, enters: int, width: int, count: int, precision: str) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.empty(1, count, width, dtype=stored(precision)))
        self.norms = nn.ModuleList([LayerNorm(n, precision) for n in (enters, width, width)])
        self.kv, self.q = Linear(enters, 2 * width, precision), Linear(width, width, precision)
        self.up, self.down = Linear(width, width, precision), Linear(width, width, precision)
        self.own = Layer(width, width // 48, precision, "gelu", before=True)
        self.precision, self.heads = precision, width // 48

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        y = self.places.expand(b, -1, -1)
        kv = self.kv(self.norms[0](x)).view(b, t, 2, self.heads, -1)
        k, v = kv.permute(2, 0, 3, 1, 4)
        q = heads_of(self.q(self.norms[1](y)), self.heads)
        y = y + merged(softmax_attention(q, k, v, self.precision))
        return self.own(y + self.down(F.gelu(self.up(self.norms[2](y)))))


def perceiver(chance: Random, precision: str) -> Made:
    """A reading layer of a Perceiver."""
    width, enters = chance.choice((96, 192, 384, 768)), chance.choice((80, 144, 261, 640))
    batch, length = chance.choice((1, 2, 6, 16)), chance.choice((196, 784, 2048, 4096))
    x = noise(batch, length, enters, precision=precision, grad=True)
    return Perceiver(enters, width, chance.choice((32, 96, 256)), precision), (x,), _square


class Talking(nn.Module):  # type: ignore[misc]
    """Talking heads, mixed before and after they choose; some by sigmoid; branches are scaled."""

    def __init__(self, width: int, heads: int, smooth: bool, precision: str) -> None:
        super().__init__()
        kind = stored(precision)
        self.qkv, self.out = Linear(width, 3 * width, precision), Linear(width, width, precision)
        self.before, self.after = (Linear(heads, heads, precision) for _ in range(2))
        self.norm, self.small = (
            LayerNorm(width, precision),
            nn.Parameter(torch.ones(width, dtype=kind)),
        )
        self.heads, self.smooth, self.precision = heads, smooth, precision

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = torch.matmul(*half(self.precision, q * q.shape[-1] ** -0.5, k.transpose(-1, -2)))
        scores = self.before(scores.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        scores = wide(self.precision, scores)
        chosen = torch.sigmoid(scores - 5.0) if self.smooth else F.softmax(scores, -1)
        chosen = self.after(chosen.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        y = torch.matmul(*half(self.precision, dropout(chosen, 0.05), v))
        return x + self.small * self.out(y.transpose(1, 2).reshape(b, t, c))


def talking(chance: Random, precision: str) -> Made:
    """Two layers of talking heads."""
    width, heads = chance.choice(((192, 4), (288, 6), (384, 8), (768, 16), (120, 3)))
    smooth = chance.random() < 0.4
    x = words(chance, precision, width, heads)
    layers = (Talking(width, heads, smooth, precision) for _ in range(2))
    return nn.Sequential(*layers), (x,), _square


class Electra(nn.Module):  # type: ignore[misc]
    """ELECTRA over ALBERT: narrow embeddings widened, one layer used twice, tokens told forged."""

    def __init__(self, narrow: int, width: int, length: int, precision: str) -> None:
        super().__init__()
        kind = stored(precision)
        sizes = (30522, length, 2)
        tables = [nn.Parameter(torch.empty(n, narrow, dtype=kind)) for n in sizes]
        self.tables, self.norm = nn.ParameterList(tables), LayerNorm(narrow, precision)
        self.widen, self.dense = Linear(narrow, width, precision), Linear(width, width, precision)
        heads = width // 64
        self.layer = Layer(width, heads, precision, "gelu_new", before=False, rate=0.1, apart=True)
        self.end, self.back = Linear(width, 1, precision), Linear(width, narrow, precision)

    def forward(self, ids: Tensor, types: Tensor) -> tuple[Tensor, Tensor]:
        places = torch.arange(ids.shape[1], device=ids.device)
        words, at, sort = self.tables
        x = F.embedding(ids, words) + F.embedding(types, sort) + F.embedding(places, at)
        x = self.widen(dropout(self.norm(x), 0.1))
        x = self.layer(self.layer(x))
        forged = self.end(F.gelu(self.dense(x))).squeeze(-1).float()
        return forged, self.norm(F.gelu(self.back(x[:, ::8])))


def electra(chance: Random, precision: str) -> Made:
    """A shared layer with both heads of ELECTRA."""
    narrow, width = chance.choice(((128, 256), (128, 768), (96, 384), (144, 576)))
    batch, length = rows(chance, width, width // 64)
    ids, types = (torch.zeros(batch, length, dtype=torch.int64) for _ in range(2))

    def loss(scores: tuple[Tensor, Tensor]) -> Tensor:
        forged, guess = scores
        sure = forged.clamp_min(0) - forged * 0.15 + torch.log1p(torch.exp(-forged.abs()))
        seen = (forged.detach() > -4.0).float()
        return 50.0 * (sure * seen).sum() / seen.sum().clamp_min(1.0) + entropy(precision, guess)

    return Electra(narrow, width, length, precision), (ids, types), loss


NEAR_TEXT: dict[str, Callable[[Random, str], Made]] = {
    "deberta": deberta,
    "retnet": retnet,
    "capped": capped,
    "perceiver": perceiver,
    "talking": talking,
    "electra": electra,
}
