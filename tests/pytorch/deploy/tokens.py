"""Small models of blocks over tokens, which say how they split."""

import torch
from torch import nn


class Block(nn.Module):
    """Norms before what they are for, as in most language models; says how it splits."""

    def __init__(self, width=8):
        super().__init__()
        self.norm, self.then = nn.LayerNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        y = self.norm(x)
        q, k, v = (f(y).unflatten(-1, (-1, 2)).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.then(x))))


class Words(nn.Module):
    """Tokens through blocks, and a norm behind them."""

    tensor_layout = {  # noqa: RUF012
        **{f"blocks.*.{name}": "colwise" for name in ("q", "k", "v", "up")},
        **{f"blocks.*.{name}": "rowwise" for name in ("out", "down")},
        **{f"blocks.*.{name}": "sequence" for name in ("norm", "then")},
    }

    tokens = 6

    def __init__(self, box=nn.ModuleList):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = (
            box([Block() for _ in range(3)])
            if box is nn.ModuleList
            else box(*(Block() for _ in range(3)))
        )
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, x):
        x = x.unsqueeze(1) * torch.linspace(0.5, 2.0, self.tokens).view(1, -1, 1)
        if isinstance(self.blocks, nn.Sequential):
            x = self.blocks(x)
        else:
            for block in self.blocks:
                x = block(x)
        return self.head(self.norm(x).mean(1))


def in_a_row():
    return Words(nn.Sequential)


def encoder():
    torch.manual_seed(0)
    layers = [
        nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True, norm_first=first)
        for first in (True, False, False)
    ]
    front = [nn.Unflatten(1, (4, 2)), nn.Linear(2, 8)]
    return nn.Sequential(*front, *layers, nn.Flatten(), nn.Linear(32, 4))
