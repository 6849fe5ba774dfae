"""ViT-B/16 (Dosovitskiy et al. 2020): an image as a row of patches."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from foretell_lab.samples.sample import Sample, images

_WIDTH, _HEADS, _LAYERS, _PATCH, _IMAGE = 768, 12, 12, 16, 224


def vit_b_16(batch: int = 64) -> Sample:
    """ViT-B/16 on 224×224 images."""
    return images(Vit, batch, "adamw")


class Block(nn.Module):  # type: ignore[misc]
    """Normalise, attend, add; normalise, think, add."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)
        self.qkv, self.proj = nn.Linear(_WIDTH, 3 * _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.up, self.down = nn.Linear(_WIDTH, 4 * _WIDTH), nn.Linear(4 * _WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows, words, _ = x.shape
        qkv = self.qkv(self.norm1(x)).view(rows, words, 3, _HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*qkv.unbind(0))
        x = x + self.proj(mixed.transpose(1, 2).reshape(rows, words, _WIDTH))
        found: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm2(x))))
        return found


class Vit(nn.Module):  # type: ignore[misc]
    """ViT-B/16."""

    def __init__(self) -> None:
        super().__init__()
        words = (_IMAGE // _PATCH) ** 2 + 1
        self.patches = nn.Conv2d(3, _WIDTH, _PATCH, _PATCH)
        self.label = nn.Parameter(torch.zeros(1, 1, _WIDTH))
        self.places = nn.Parameter(torch.empty(1, words, _WIDTH))
        self.blocks = nn.ModuleList([Block() for _ in range(_LAYERS)])
        self.norm, self.head = nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, 1000)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.label.expand(len(x), -1, -1), patches], 1) + self.places
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.head(self.norm(x)[:, 0])
        return found
