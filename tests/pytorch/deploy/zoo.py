"""Models of many kinds, as small as they can be, with the batches they train on."""

import torch
from torch import nn
from torch.nn import functional as F

BATCH, WORDS, LONG, WIDE = 8, 12, 8, 8


def tokens(num=BATCH, step=0):
    made = torch.Generator().manual_seed(100 + step)
    x = torch.randint(0, WORDS, (num, LONG), generator=made)
    return (x,), torch.randint(0, 4, (num,), generator=made)


def next_tokens(num=BATCH, step=0):
    (x,), _ = tokens(num, step)
    return (x,), x.roll(-1, 1)


def vectors(num=BATCH, step=0):
    made = torch.Generator().manual_seed(100 + step)
    x = torch.randn(num, WIDE, generator=made)
    return (x,), torch.randint(0, 4, (num,), generator=made)


def pictures(num=BATCH, step=0):
    made = torch.Generator().manual_seed(100 + step)
    x = torch.randn(num, 3, 8, 8, generator=made)
    return (x,), torch.randint(0, 4, (num,), generator=made)


def masks(num=BATCH, step=0):
    (x,), _ = pictures(num, step)
    return (x,), x[:, :1].sign()


def clicks(num=BATCH, step=0):
    (ids,), y = tokens(num, step)
    (x,), _ = vectors(num, step)
    return (ids, x), y.float() / 4


def pairs(num=BATCH, step=0):
    (x,), _ = tokens(num, step)
    return (x, x.flip(1)), x.roll(1, 1)


def words_loss(output, target):
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


def mlp():
    return nn.Sequential(
        nn.Linear(WIDE, 16), nn.ReLU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 8), nn.Tanh(),
        nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4),
    )  # fmt: skip


class Block(nn.Module):
    def __init__(self, rate=0.0):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDE), nn.LayerNorm(WIDE)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDE, WIDE) for _ in range(4))
        self.up, self.down = nn.Linear(WIDE, 16), nn.Linear(16, WIDE)
        self.drop = nn.Dropout(rate)

    def forward(self, x):
        y = self.norm1(x)
        q, k, v = (f(y).unflatten(-1, (-1, 2)).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(mixed.transpose(1, 2).flatten(2)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


LAYOUT = {
    **{f"*blocks.*.{name}": "colwise" for name in ("q", "k", "v", "up")},
    **{f"*blocks.*.{name}": "rowwise" for name in ("out", "down")},
    **{f"*blocks.*.{name}": "sequence" for name in ("norm1", "norm2")},
}


class Gpt(nn.Module):
    """Tied, and not written for a pipeline."""

    tensor_layout = LAYOUT

    def __init__(self, rate=0.0, tied=True):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDE)
        self.place = nn.Embedding(LONG, WIDE)
        self.blocks = nn.ModuleList(Block(rate) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(WIDE), nn.Linear(WIDE, WORDS, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x):
        x = self.embed(x) + self.place(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def gpt():
    return Gpt()


def dropout():
    return Gpt(rate=0.3, tied=False)


class Unembed(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, x):
        return F.linear(x, self.weight)


def tied_sequential():
    embed = nn.Embedding(WORDS, WIDE)
    layers = [embed, nn.Linear(WIDE, 16), nn.ReLU(), nn.Linear(16, WIDE), nn.LayerNorm(WIDE)]
    head = nn.Linear(WIDE, WORDS, bias=False)
    head.weight = embed.weight
    return nn.Sequential(*layers, nn.Linear(WIDE, WIDE), nn.Tanh(), head)


def cnn():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
    )  # fmt: skip


class Lstm(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDE)
        self.lstm = nn.LSTM(WIDE, WIDE, num_layers=2, batch_first=True, dropout=0.2)
        self.head = nn.Linear(WIDE, 4)

    def forward(self, x):
        return self.head(self.lstm(self.embed(x))[0][:, -1])


class Experts(nn.Module):
    """Each token goes to its best expert; some experts get none."""

    def __init__(self, num=6):
        super().__init__()
        self.gate = nn.Linear(WIDE, num)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDE, 16), nn.ReLU(), nn.Linear(16, WIDE)) for _ in range(num)
        )

    def forward(self, x):
        flat = x.flatten(0, -2)
        weight, best = self.gate(flat).softmax(-1).max(-1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows = (best == number).nonzero().flatten()
            if len(rows):
                out = out.index_add(0, rows, expert(flat[rows]) * weight[rows, None])
        return x + out.view_as(x)


def moe():
    return nn.Sequential(
        nn.Linear(WIDE, WIDE), nn.Tanh(), Experts(), nn.LayerNorm(WIDE), Experts(),
        nn.Linear(WIDE, 4),
    )  # fmt: skip


class Vit(nn.Module):
    tensor_layout = LAYOUT

    def __init__(self):
        super().__init__()
        self.patch = nn.Conv2d(3, WIDE, 4, 4)
        self.cls = nn.Parameter(torch.randn(1, 1, WIDE))
        self.place = nn.Parameter(torch.randn(1, 4, WIDE))
        self.blocks = nn.Sequential(*(Block() for _ in range(3)))
        self.norm, self.head = nn.LayerNorm(WIDE), nn.Linear(WIDE, 4)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2) + self.place + self.cls
        return self.head(self.norm(self.blocks(x))[:, 0])


def frozen():
    model = mlp()
    model[0].requires_grad_(False)
    model[2].requires_grad_(False)
    model[6].bias.requires_grad_(False)
    return model


class Unused(nn.Module):
    """Layers that nothing calls, and one that only some samples reach."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDE, 16), nn.ReLU(), nn.Linear(16, WIDE))
        self.never, self.seldom = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)
        self.head = nn.Linear(WIDE, 4)

    def forward(self, x):
        x = self.layers(x)
        rows = (x[:, 0] > 0.35).nonzero().flatten()
        if len(rows):
            x = x.index_add(0, rows, self.seldom(x[rows]))
        return self.head(x)


class Dlrm(nn.Module):
    def __init__(self):
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(WORDS, WIDE, mode="sum") for _ in range(2))
        self.bottom = nn.Sequential(nn.Linear(WIDE, 16), nn.ReLU(), nn.Linear(16, WIDE))
        self.top = nn.Sequential(nn.Linear(3 * WIDE, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, ids, x):
        found = [bag(ids) for bag in self.bags]
        return self.top(torch.cat([*found, self.bottom(x)], 1)).squeeze(-1)


class Seq2Seq(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDE)
        self.encoder = nn.TransformerEncoderLayer(WIDE, 2, 16, 0.1, batch_first=True)
        self.decoder = nn.TransformerDecoderLayer(WIDE, 2, 16, 0.1, batch_first=True)
        self.head = nn.Linear(WIDE, WORDS)

    def forward(self, source, target):
        memory = self.encoder(self.embed(source))
        return self.head(self.decoder(self.embed(target), memory))


class Unet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, 2, 1)
        self.norm = nn.GroupNorm(2, 8)
        self.middle = nn.Conv2d(8, 8, 3, padding=1)
        self.up = nn.ConvTranspose2d(8, 8, 2, 2)
        self.last = nn.Conv2d(16, 1, 3, padding=1)

    def forward(self, x):
        first = F.relu(self.norm(self.down1(x)))
        second = F.relu(self.middle(F.relu(self.down2(first))))
        return self.last(torch.cat([first, self.up(second)], 1))


MODELS = {
    "mlp": (mlp, vectors, None),
    "gpt": (gpt, next_tokens, words_loss),
    "cnn": (cnn, pictures, None),
    "lstm": (Lstm, tokens, None),
    "moe": (moe, vectors, None),
    "vit": (Vit, pictures, None),
    "tied": (tied_sequential, next_tokens, words_loss),
    "frozen": (frozen, vectors, None),
    "unused": (Unused, vectors, None),
    "dropout": (dropout, next_tokens, words_loss),
    "dlrm": (Dlrm, clicks, None),
    "seq2seq": (Seq2Seq, pairs, words_loss),
    "unet": (Unet, masks, None),
}


def make(name):
    torch.manual_seed(0)
    return MODELS[name][0]()


def parts(name, shares, step):
    """The batch of a step, cut for data-parallel ranks."""
    inputs, target = MODELS[name][1](sum(shares), step)
    cut = zip(*(x.split(shares) for x in inputs), target.split(shares), strict=True)
    return [(tuple(each[:-1]), each[-1]) for each in cut]
