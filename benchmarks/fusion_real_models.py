"""Models that `benchmarks/fusion_real.py` trains; the environment's FUSION_MODEL names one.

Small enough for two ranks on two cores, with gradients of 3 to 25 MB: a slow link decides.
"""

from __future__ import annotations

import os
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from foretell_lab.emulation import models as lab

NAME = os.environ.get("FUSION_MODEL", "mlp")


class Block(nn.Module):
    """Two convolutions and a way around them (He et al., 2016)."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip
        same = stride == 1 and before == width
        self.around = nn.Identity() if same else nn.Conv2d(before, width, 1, stride, bias=False)

    def forward(self, x: Any) -> Any:
        return torch.relu(self.body(x) + self.around(x))


def resnet() -> nn.Module:
    """ResNet-18's blocks at half their width."""
    widths = (32, 32, 32, 64, 64, 128, 128, 256, 256)
    blocks = [Block(a, b, 1 + (a != b)) for a, b in pairwise(widths)]
    first = [nn.Conv2d(3, 32, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*first, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10))


class Gpt(nn.Module):
    """Decoder blocks with their mask, words in and words out (Radford et al., 2019)."""

    def __init__(self, words: int = 3000, width: int = 256, layers: int = 4, length: int = 32):
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        layer = [
            nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, "gelu", batch_first=True)
            for _ in range(layers)
        ]
        self.blocks, self.head = nn.ModuleList(layer), nn.Linear(width, words)
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: Any) -> Any:
        y = self.words(x) + self.places.weight
        for block in self.blocks:
            y = block(y, src_mask=self.mask, is_causal=True)
        return self.head(y).flatten(0, 1)


def mlp() -> nn.Module:
    """Twelve layers, each as large as the first bucket of DDP."""
    hidden = [m for _ in range(12) for m in (nn.Linear(512, 512), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(512, 10))


MODELS = {"mlp": mlp, "resnet": resnet, "gpt": Gpt}
SAMPLES = {"mlp": 64, "resnet": 8, "gpt": 4}


def model() -> Any:
    return MODELS[NAME]() if NAME in MODELS else lab.model(NAME).make()


def batch(rank: int, size: int) -> Any:
    torch.manual_seed(rank)
    if NAME not in MODELS:
        kind = lab.model(NAME)
        return kind.batch(kind.samples)
    n = SAMPLES[NAME]
    if NAME == "gpt":
        words = torch.randint(0, 3000, (n, 33))
        return words[:, :-1].contiguous(), words[:, 1:].flatten()
    shape = (3, 32, 32) if NAME == "resnet" else (512,)
    return torch.randn(n, *shape), torch.randint(0, 10, (n,))


loss = nn.functional.cross_entropy
