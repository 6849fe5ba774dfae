"""Models for the tests of captures: small ones of each kind that people write."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

CLASSES = 5


def labelled(*dims: int):
    """A batch of numbers and their classes."""
    return lambda: (torch.randn(*dims), torch.randint(0, CLASSES, (dims[0],)))


def perceptron(*widths: int):
    """Linear layers with a ReLU between them."""
    layers = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())]
    return lambda: nn.Sequential(*layers[:-1])


class Convolutional(nn.Module):
    """Convolution, normalisation with running statistics, a way around, in-place functions."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.body = nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False)
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x):
        x = F.relu_(self.norm(self.stem(x)))
        x = self.body(x).add_(x)
        return self.head(self.pool(x).mean((2, 3)))


class Tied(nn.Module):
    """An embedding that is also the output layer, and attention between them."""

    def __init__(self, width: int = 32, heads: int = 4, vocabulary: int = 96) -> None:
        super().__init__()
        self.heads = heads
        self.embed = nn.Embedding(vocabulary, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.norm = nn.LayerNorm(width)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids, labels=None):
        x = self.embed(ids)
        split = self.qkv(x).view(*x.shape[:2], 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*split, is_causal=True)
        x = x + self.drop(mixed.transpose(1, 2).reshape(x.shape))
        logits = self.head(self.norm(x))
        if labels is None:
            return logits
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def tokens():
    ids = torch.randint(0, 96, (2, 16))
    return {"ids": ids, "labels": ids.clone()}


class Checkpointed(nn.Module):
    """A block whose forward pass runs again in the backward pass."""

    def __init__(self, *, is_on: bool = True) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16), nn.GELU())
        self.head = nn.Linear(16, CLASSES)
        self.is_on = is_on

    def forward(self, x):
        x = checkpoint(self.block, x, use_reentrant=False) if self.is_on else self.block(x)
        return self.head(x)


class Routed(nn.Module):
    """A mixture of experts that sends each token where the data says."""

    def __init__(self, width: int = 16, experts: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x):
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            place = (chosen == number).nonzero().squeeze(-1)
            if place.numel():
                out = out.index_add(0, place, expert(x[place]) * weight[place].unsqueeze(-1))
        return self.head(out)


class Branching(nn.Module):
    """Control flow that Python decides: a loop by a setting, a branch by a shape."""

    def __init__(self, rounds: int) -> None:
        super().__init__()
        self.rounds, self.cell, self.head = rounds, nn.Linear(16, 16), nn.Linear(16, CLASSES)

    def forward(self, x):
        for _ in range(self.rounds):
            x = torch.tanh(self.cell(x)) if x.shape[0] > 4 else self.cell(x)
        return self.head(x)


class Square(torch.autograd.Function):
    """A function with a gradient of its own."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * x * 2


class Squared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(16, 16), nn.Linear(16, CLASSES)

    def forward(self, x):
        return self.head(Square.apply(self.inner(x)))


class Asking(nn.Module):
    """Asks for a GPU the way training scripts do."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x):
        device = "cuda" if torch.cuda.is_available() else "cpu"
        shift = torch.arange(16, device=device).to(x.device).float()
        assert x.is_cuda
        with torch.autocast("cuda", dtype=torch.float16):
            return self.head(x.cuda().to(device) + shift)
