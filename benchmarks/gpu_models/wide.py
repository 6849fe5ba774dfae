"""A GPT whose matmuls are large: six blocks as wide as those of a model of 7 B; described."""

import torch
from torch import nn
from torch.nn import functional as F

LAYERS, WIDE, HEADS, LONG, WORDS = 6, 4096, 32, 2048, 32000


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDE), nn.LayerNorm(WIDE)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDE, WIDE) for _ in range(4))
        self.up, self.down = nn.Linear(WIDE, 4 * WIDE), nn.Linear(4 * WIDE, WIDE)

    def forward(self, x):
        y = self.norm1(x)
        size = WIDE // HEADS
        q, k, v = (f(y).unflatten(-1, (-1, size)).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.place = nn.Embedding(WORDS, WIDE), nn.Embedding(LONG, WIDE)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDE), nn.Linear(WIDE, WORDS, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, x):
        x = self.embed(x) + self.place(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def model():
    return Gpt()


def batch(rank=0, size=1, step=0, batch=8):
    made = torch.Generator().manual_seed(100 + step)
    x = torch.randint(0, WORDS, (batch, LONG), generator=made).chunk(size)[rank]
    return x, x.roll(-1, 1)


def loss(output, target):
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=1e-4)
