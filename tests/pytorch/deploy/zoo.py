"""Models of many kinds, as small as they can be, with the batches they train on."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.pytorch.deploy.unedited_models import routed

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


class TiedTransposed(nn.Module):
    """A weight used as it is and transposed, and a bias used at both ends."""

    def __init__(self):
        super().__init__()
        self.first, self.mid = nn.Linear(WIDE, 16), nn.Linear(16, 16)
        self.last = nn.Linear(WIDE, 4)

    def forward(self, x):
        x = torch.tanh(self.mid(torch.relu(self.first(x))) + self.first.bias)
        return self.last(F.linear(x, self.first.weight.t()))


def twice():
    """Modules in several places of a sequence, with parameters and without."""
    shared, relu, norm = nn.Linear(16, 16), nn.ReLU(inplace=True), nn.LayerNorm(16)
    return nn.Sequential(
        nn.Linear(WIDE, 16), relu, shared, relu, nn.Linear(16, 16), norm, nn.Linear(16, 16), relu,
        shared, norm, nn.Linear(16, 16), relu, nn.Linear(16, 4),
    )  # fmt: skip


class Averaged(nn.Module):
    """A buffer that does not change, one that counts steps, and a constant that is not saved."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDE))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("shift", torch.linspace(-1, 1, WIDE), persistent=False)

    def forward(self, x):
        if self.training:
            self.count += 1
        return x * self.scale + self.shift


def buffered():
    return nn.Sequential(
        Averaged(), nn.Linear(WIDE, 16), nn.ReLU(), nn.Linear(16, WIDE), Averaged(),
        nn.Linear(WIDE, 16), nn.ReLU(), nn.Linear(16, 4),
    )  # fmt: skip


def doubles(num=BATCH, step=0):
    (x,), y = vectors(num, step)
    return (x.double(),), y


def batch_norms():
    """In double precision: statistics of a micro-batch of two make much of a rounding."""
    return nn.Sequential(
        nn.Linear(WIDE, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16),
        nn.BatchNorm1d(16, affine=False), nn.ReLU(), nn.Linear(16, 16),
        nn.BatchNorm1d(16, momentum=None), nn.ReLU(), nn.Linear(16, 4),
    ).double()  # fmt: skip


class Scalar(nn.Module):
    """Parameters without dimensions, and one of a single number."""

    def __init__(self):
        super().__init__()
        self.temperature, self.bias = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.zeros(1))
        self.up, self.down = nn.Linear(WIDE, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)) + self.bias) * self.temperature.exp()


class TwoHeads(nn.Module):
    """Several outputs."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDE, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU())
        self.classes, self.value = nn.Linear(16, 4), nn.Linear(16, 1)

    def forward(self, x):
        x = self.body(x)
        return self.classes(x), self.value(x)


def two_losses(output, target):
    classes, value = output
    return F.cross_entropy(classes, target) + F.mse_loss(value[:, 0], target.float())


class Named(nn.Module):
    """A dict of outputs."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(WIDE, 16), nn.Linear(16, 4)

    def forward(self, x):
        hidden = torch.relu(self.body(x))
        return {"hidden": hidden, "logits": self.head(hidden)}


def named_loss(output, target):
    return F.cross_entropy(output["logits"], target) + 0.1 * output["hidden"].square().mean()


class LossInside(nn.Module):
    """Gives its loss itself."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDE)
        self.blocks = nn.Sequential(*(Block() for _ in range(2)))
        self.head = nn.Linear(WIDE, WORDS)

    def forward(self, x, labels):
        return words_loss(self.head(self.blocks(self.embed(x))), labels)


def with_labels(num=BATCH, step=0):
    (x,), y = next_tokens(num, step)
    return (x, y), None


class Auxiliary(nn.Module):
    """A loss of its own beside the outputs: the squares of gate weights, a mean over samples."""

    def __init__(self):
        super().__init__()
        self.first, self.experts, self.last = nn.Linear(WIDE, WIDE), Experts(4), nn.Linear(WIDE, 4)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        self.balance = self.experts.gate(x).softmax(-1).square().sum(-1).mean()
        return self.last(self.experts(x)), self.balance


def auxiliary_loss(output, target):
    return F.cross_entropy(output[0], target) + 0.5 * output[1]


def weight_normed():
    wrapped = nn.utils.parametrizations.weight_norm
    return nn.Sequential(
        wrapped(nn.Linear(WIDE, 16)), nn.ReLU(), wrapped(nn.Linear(16, 16)), nn.ReLU(),
        nn.Linear(16, 4),
    )  # fmt: skip


class Attention(nn.Module):
    """torch's own attention layers, with a mask made in forward and a padding word."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDE, padding_idx=0)
        self.layers = nn.ModuleList(nn.MultiheadAttention(WIDE, 2, batch_first=True) for _ in "ab")
        self.norm, self.head = nn.RMSNorm(WIDE), nn.Linear(WIDE, WORDS)

    def forward(self, x):
        hides = torch.ones(x.shape[1], x.shape[1], device=x.device).triu(1).bool()
        y = self.embed(x)
        for layer in self.layers:
            y = y + layer(y, y, y, attn_mask=hides, need_weights=False)[0]
        return self.head(self.norm(y))


class InPlace(nn.Module):
    """Attention beside outputs that are changed in place."""

    def __init__(self):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(WORDS, WIDE), nn.ModuleList(Block() for _ in "ab")
        self.more = nn.ModuleList(nn.Linear(WIDE, WIDE) for _ in "ab")
        self.head = nn.Linear(WIDE, WORDS)

    def forward(self, x):
        x = self.embed(x)
        for block, more in zip(self.blocks, self.more, strict=True):
            x = more(block(x)).relu_()
        return self.head(x)


class ChangingBlock(Block):
    """A block that changes a matmul's output in place."""

    def forward(self, x):
        y = self.down(self.up(super().forward(x)).relu_())
        y += x
        return y


def changing():
    blocks = [ChangingBlock() for _ in range(3)]
    return nn.Sequential(nn.Embedding(WORDS, WIDE), *blocks, nn.Linear(WIDE, WORDS))


class Recurrent(nn.Module):
    """A cell called once a token, and state kept in a list."""

    def __init__(self):
        super().__init__()
        self.embed, self.cell = nn.Embedding(WORDS, WIDE), nn.GRUCell(WIDE, WIDE)
        self.head = nn.Linear(WIDE, 4)

    def forward(self, x):
        h, made = torch.zeros(len(x), WIDE, device=x.device), []
        for token in self.embed(x).unbind(1):
            h = self.cell(token, h)
            made.append(h)
        return self.head(torch.stack(made).mean(0))


class Skips(nn.Module):
    """A skip from the first layer to the last, an in-place op, and a frozen branch."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDE, WIDE) for _ in range(4))
        self.fixed, self.head = nn.Linear(WIDE, WIDE).requires_grad_(False), nn.Linear(WIDE, 4)

    def forward(self, x):
        first = y = self.layers[0](x)
        for layer in self.layers[1:]:
            y = layer(y).relu_()
        y = y + first + self.fixed(x)
        return self.head(y)


class Lists(nn.Module):
    """Weights in a ParameterList and a ParameterDict, and layers applied by index."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(WIDE, WIDE) / 3 for _ in range(3))
        self.more = nn.ParameterDict({"gain": torch.ones(WIDE), "never": torch.ones(3)})
        self.head = nn.Linear(WIDE, 4)

    def forward(self, x):
        for weight in self.weights:
            x = torch.tanh(x @ weight) * self.more["gain"]
        return self.head(x)


class Reshaped(nn.Module):
    """Samples folded into another dimension inside, as windows are."""

    def __init__(self):
        super().__init__()
        self.conv, self.mix = nn.Conv1d(1, 4, 3, padding=1), nn.Linear(4, 4)
        self.norm, self.head = nn.InstanceNorm1d(4, affine=True), nn.Linear(4 * WIDE, 4)

    def forward(self, x):
        y = self.norm(self.conv(x[:, None]))
        y = F.gelu(self.mix(y.transpose(1, 2).reshape(-1, 4)))
        return self.head(y.reshape(len(x), -1))


UNUSUAL = {
    "transposed": (TiedTransposed, vectors, None),
    "twice": (twice, vectors, None),
    "buffered": (buffered, vectors, None),
    "norms": (batch_norms, doubles, None),
    "scalar": (Scalar, vectors, None),
    "heads": (TwoHeads, vectors, two_losses),
    "named": (Named, vectors, named_loss),
    "lossin": (LossInside, with_labels, None),
    "auxloss": (Auxiliary, vectors, auxiliary_loss),
    "wnorm": (weight_normed, vectors, None),
    "mha": (Attention, next_tokens, words_loss),
    "inplace": (InPlace, next_tokens, words_loss),
    "changing": (changing, next_tokens, words_loss),
    "grucell": (Recurrent, tokens, None),
    "skips": (Skips, vectors, None),
    "lists": (Lists, vectors, None),
    "reshaped": (Reshaped, vectors, None),
}

MODELS = {
    "mlp": (mlp, vectors, None),
    "gpt": (gpt, next_tokens, words_loss),
    "cnn": (cnn, pictures, None),
    "lstm": (Lstm, tokens, None),
    "moe": (moe, vectors, None),
    "routed": (routed, next_tokens, words_loss),
    "vit": (Vit, pictures, None),
    "tied": (tied_sequential, next_tokens, words_loss),
    "frozen": (frozen, vectors, None),
    "unused": (Unused, vectors, None),
    "dropout": (dropout, next_tokens, words_loss),
    "dlrm": (Dlrm, clicks, None),
    "seq2seq": (Seq2Seq, pairs, words_loss),
    "unet": (Unet, masks, None),
}


EVERY = MODELS | UNUSUAL


def make(name):
    torch.manual_seed(0)
    return EVERY[name][0]()


def parts(name, shares, step):
    """The batch of a step, cut for data-parallel ranks."""
    inputs, target = EVERY[name][1](sum(shares), step)
    wanted = [None] * len(shares) if target is None else target.split(shares)
    cut = zip(*(x.split(shares) for x in inputs), wanted, strict=True)
    return [(tuple(each[:-1]), each[-1]) for each in cut]
