"""Swin-T (Liu et al. 2021): attention inside 7×7 windows that shift from block to block."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretell_lab.samples.sample import Sample, images

_DEPTHS, _HEADS, _WIDTH, _WINDOW = (2, 2, 6, 2), (3, 6, 12, 24), 96, 7
_DROP = 0.2  # the rate at which the last block is left out; it grows from nothing


def swin_t(batch: int = 64) -> Sample:
    """Swin-T on 224×224 images."""
    return images(Swin, batch, "adam")


class WindowAttention(nn.Module):  # type: ignore[misc]
    """Attention inside windows, with a bias by relative position and a mask where shifted."""

    def __init__(self, width: int, heads: int, shift: int) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads, self.shift = heads, shift
        self.table = nn.Parameter(torch.empty((2 * _WINDOW - 1) ** 2, heads))
        self.register_buffer("index", torch.zeros(_WINDOW**4, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        b, h, w, c = x.shape
        shift = 0 if h <= _WINDOW else self.shift
        if shift:
            x = torch.roll(x, (-shift, -shift), (1, 2))
        across = h // _WINDOW
        x = x.view(b, across, _WINDOW, across, _WINDOW, c)
        x = x.permute(0, 1, 3, 2, 4, 5).reshape(b * across**2, _WINDOW**2, c)
        x = self._attend(x, _mask(x, h, shift) if shift else None)
        x = x.view(b, across, across, _WINDOW, _WINDOW, c)
        x = x.permute(0, 1, 3, 2, 4, 5).reshape(b, h, w, c)
        return torch.roll(x, (shift, shift), (1, 2)) if shift else x

    def _attend(self, x: Tensor, mask: Tensor | None) -> Tensor:
        n, t, c = x.shape
        qkv = self.qkv(x).reshape(n, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0] * (c // self.heads) ** -0.5, qkv[1], qkv[2]
        scores = q.matmul(k.transpose(-2, -1)) + self._bias()
        if mask is not None:
            windows = mask.shape[0]
            scores = scores.view(n // windows, windows, self.heads, t, t)
            scores = scores + mask.unsqueeze(1).unsqueeze(0)
            scores = scores.view(-1, self.heads, t, t)
        out = F.softmax(scores, -1).matmul(v).transpose(1, 2).reshape(n, t, c)
        found: Tensor = self.proj(out)
        return found

    def _bias(self) -> Tensor:
        bias = self.table[self.index].view(_WINDOW**2, _WINDOW**2, -1)
        return bias.permute(2, 0, 1).contiguous().unsqueeze(0)


def _mask(x: Tensor, side: int, shift: int) -> Tensor:
    """Keeps apart what only the shift brought into one window."""
    mask = x.new_zeros((side, side))
    cuts = ((0, -_WINDOW), (-_WINDOW, -shift), (-shift, None))
    for number, (rows, cols) in enumerate((r, c) for r in cuts for c in cuts):
        mask[rows[0] : rows[1], cols[0] : cols[1]] = number
    across = side // _WINDOW
    mask = mask.view(across, _WINDOW, across, _WINDOW).permute(0, 2, 1, 3)
    mask = mask.reshape(across**2, _WINDOW**2)
    mask = mask.unsqueeze(1) - mask.unsqueeze(2)
    return mask.masked_fill(mask != 0, -100.0).masked_fill(mask == 0, 0.0)


class DropPath(nn.Module):  # type: ignore[misc]
    """Leaves a branch out for some samples."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.rate:
            return x
        kept = 1.0 - self.rate
        noise = torch.empty(
            (x.shape[0], *[1] * (x.dim() - 1)), dtype=x.dtype, device=x.device
        ).bernoulli_(kept)
        return x * noise.div_(kept)


class Block(nn.Module):  # type: ignore[misc]
    """Attention and a perceptron, each with a way around."""

    def __init__(self, width: int, heads: int, shift: int, drop: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = WindowAttention(width, heads, shift)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.drop = DropPath(drop)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attn(self.norm1(x)))
        found: Tensor = x + self.drop(self.mlp(self.norm2(x)))
        return found


class Merge(nn.Module):  # type: ignore[misc]
    """Four neighbours become one token of twice the width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4 * width)
        self.reduction = nn.Linear(4 * width, 2 * width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        corners = [x[:, i::2, j::2, :] for j in (0, 1) for i in (0, 1)]
        found: Tensor = self.reduction(self.norm(torch.cat(corners, -1)))
        return found


class Swin(nn.Module):  # type: ignore[misc]
    """Swin-T."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.embed_norm = nn.Conv2d(3, _WIDTH, 4, 4), nn.LayerNorm(_WIDTH)
        layers: list[nn.Module] = []
        total, done = sum(_DEPTHS) - 1, 0
        for stage, (depth, heads) in enumerate(zip(_DEPTHS, _HEADS, strict=True)):
            width = _WIDTH * 2**stage
            layers += [Merge(width // 2)] if stage else []
            for k in range(depth):
                shift = _WINDOW // 2 if k % 2 else 0
                layers.append(Block(width, heads, shift, _DROP * done / total))
                done += 1
        self.layers = nn.Sequential(*layers)
        self.norm = nn.LayerNorm(8 * _WIDTH)
        self.head = nn.Linear(8 * _WIDTH, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed_norm(self.embed(x).permute(0, 2, 3, 1))
        x = self.norm(self.layers(x)).permute(0, 3, 1, 2)
        found: Tensor = self.head(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))
        return found
