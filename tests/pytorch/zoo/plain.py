"""Models written in plain PyTorch: images, sequences, graphs, recommenders, agents, generators."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.pytorch.zoo.case import Case

B = 4
CASES: list[Case] = []


def entry(batch: Callable[[], Any], loss: Callable[..., Any] | None = None, **options: Any) -> Any:
    """A class of the zoo, by its own name."""

    def add(kind: type) -> type:
        CASES.append(Case(kind.__name__, partial(kind, **options), batch, loss))
        return kind

    return add


def labelled(*shape: int, classes: int = 10) -> Callable[[], Any]:
    return lambda: (torch.randn(B, *shape), torch.randint(0, classes, (B,)))


def words(length: int = 32, vocab: int = 200) -> Callable[[], Any]:
    return lambda: (
        torch.randint(0, vocab, (B, length)), torch.randint(0, vocab, (B, length)),
    )  # fmt: skip


def by_word(out: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), target.flatten())


def own(model: nn.Module, batch: Any) -> Tensor:
    """Models that give their own loss."""
    found: Tensor = model(*batch)
    return found


CE = F.cross_entropy


def conv(i: int, o: int, k: int = 3, s: int = 1, **more: Any) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(i, o, k, s, k // 2, bias=False, **more), nn.BatchNorm2d(o), nn.ReLU(inplace=True)
    )


@entry(labelled(64), CE)
class Perceptron(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 10))


@entry(labelled(1, 28, 28), CE)
class LeNet(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 6, 5, padding=2), nn.Tanh(), nn.AvgPool2d(2), nn.Conv2d(6, 16, 5),
            nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(400, 120), nn.Tanh(),
            nn.Linear(120, 10),
        )  # fmt: skip


@entry(labelled(3, 64, 64), CE)
class Vgg(nn.Sequential):
    def __init__(self) -> None:
        parts: list[nn.Module] = []
        for i, o in ((3, 32), (32, 64), (64, 128)):
            parts += [nn.Conv2d(i, o, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        super().__init__(*parts, nn.Flatten(), nn.Linear(128 * 64, 256), nn.Linear(256, 10))


class Bottleneck(nn.Module):
    def __init__(self, i: int, o: int, s: int, groups: int = 1, squeeze: bool = False) -> None:
        super().__init__()
        mid = o // 2
        self.body = nn.Sequential(
            conv(i, mid, 1), conv(mid, mid, 3, s, groups=groups), nn.Conv2d(mid, o, 1),
            nn.BatchNorm2d(o),
        )  # fmt: skip
        self.short = nn.Conv2d(i, o, 1, s) if i != o or s > 1 else nn.Identity()
        self.gate = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(o, o // 4, 1), nn.SiLU(), nn.Conv2d(o // 4, o, 1),
            nn.Sigmoid(),
        ) if squeeze else None  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        y = y * self.gate(y) if self.gate is not None else y
        return F.relu(y + self.short(x))


@entry(labelled(3, 64, 64), CE)
class ResNet(nn.Sequential):
    def __init__(self, groups: int = 1, squeeze: bool = False) -> None:
        more = {"groups": groups, "squeeze": squeeze}
        super().__init__(
            conv(3, 32, 7, 2), nn.MaxPool2d(3, 2, 1), Bottleneck(32, 64, 1, **more),
            Bottleneck(64, 64, 1, **more), Bottleneck(64, 128, 2, **more), nn.AdaptiveAvgPool2d(1),
            nn.Flatten(), nn.Linear(128, 10),
        )  # fmt: skip


@entry(labelled(3, 64, 64), CE, groups=8)
class ResNeXt(ResNet):
    pass


@entry(labelled(3, 64, 64), CE, groups=4, squeeze=True)
class EfficientNet(ResNet):
    pass


@entry(labelled(3, 32, 32), CE)
class MobileNet(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            conv(3, 32), conv(32, 32, groups=32), conv(32, 64, 1), conv(64, 64, 3, 2, groups=64),
            conv(64, 128, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10),
        )  # fmt: skip


@entry(labelled(3, 32, 32), CE)
class DenseNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(conv(16 * (i + 1), 16) for i in range(4))
        self.first, self.head = conv(3, 16), nn.Linear(80, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = torch.cat([x, layer(x)], 1)
        return self.head(x.mean((2, 3)))


@entry(labelled(3, 32, 32), CE)
class ConvNeXt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 48, 4, 4)
        self.depth = nn.Conv2d(48, 48, 7, padding=3, groups=48)
        self.norm, self.up, self.down = nn.LayerNorm(48), nn.Linear(48, 192), nn.Linear(192, 48)
        self.scale, self.head = nn.Parameter(torch.ones(48)), nn.Linear(48, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.norm(self.depth(x).permute(0, 2, 3, 1))
        y = self.scale * self.down(F.gelu(self.up(y)))
        return self.head((x + y.permute(0, 3, 1, 2)).mean((2, 3)))


def images(channels: int = 3, side: int = 32) -> Callable[[], Any]:
    return lambda: (torch.randn(B, channels, side, side), torch.randn(B, channels, side, side))


@entry(images(), F.mse_loss)
class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = conv(3, 16), conv(16, 32), conv(32, 64)
        self.up1, self.up2 = nn.ConvTranspose2d(64, 32, 2, 2), nn.ConvTranspose2d(32, 16, 2, 2)
        self.d, self.e, self.out = conv(64, 32), conv(32, 16), nn.Conv2d(16, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.a(x)
        b = self.b(F.max_pool2d(a, 2))
        y = self.up1(self.c(F.max_pool2d(b, 2)))
        y = self.up2(self.d(torch.cat([y, b], 1)))
        return self.out(self.e(torch.cat([y, a], 1)))


@entry(lambda: (torch.randn(2, 1, 16, 16, 16), torch.randn(2, 1, 16, 16, 16)), F.mse_loss)
class UNet3d(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv3d(1, 8, 3, padding=1), nn.Conv3d(8, 16, 3, 2, 1)
        self.up, self.out = nn.ConvTranspose3d(16, 8, 2, 2), nn.Conv3d(16, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = F.relu(self.a(x))
        return self.out(torch.cat([a, self.up(F.relu(self.b(a)))], 1))


class Block(nn.Module):
    """A transformer block, pre-norm."""

    def __init__(self, wide: int = 64, heads: int = 4, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.n1, self.n2 = nn.LayerNorm(wide), nn.LayerNorm(wide)
        self.qkv, self.out = nn.Linear(wide, 3 * wide), nn.Linear(wide, wide)
        self.mlp = nn.Sequential(nn.Linear(wide, 4 * wide), nn.GELU(), nn.Linear(4 * wide, wide))

    def forward(self, x: Tensor) -> Tensor:
        b, s, w = x.shape
        q, k, v = (
            t.view(b, s, self.heads, -1).transpose(1, 2) for t in self.qkv(self.n1(x)).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(y.transpose(1, 2).reshape(b, s, w))
        return x + self.mlp(self.n2(x))


@entry(words(), by_word)
class NanoGpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(200, 64), nn.Embedding(32, 64)
        self.blocks = nn.ModuleList(Block(causal=True) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(64), nn.Linear(64, 200, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.words(x) + self.places(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            y = block(y)
        return self.head(self.norm(y))


@entry(words(), by_word)
class LayerDrop(NanoGpt):
    """Blocks left out at random, as a number that is drawn says."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.words(x)
        for block in self.blocks:
            if torch.rand([]).item() > 1e-4:
                y = block(y)
        return self.head(self.norm(y))


@entry(labelled(3, 32, 32), CE)
class Vit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch, self.token = nn.Conv2d(3, 64, 8, 8), nn.Parameter(torch.zeros(1, 1, 64))
        self.place = nn.Parameter(torch.zeros(1, 17, 64))
        self.blocks, self.head = nn.Sequential(Block(), Block()), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        y = self.patch(x).flatten(2).transpose(1, 2)
        y = torch.cat([self.token.expand(len(y), -1, -1), y], 1) + self.place
        return self.head(self.blocks(y)[:, 0])


@entry(labelled(16, 64), CE)
class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n1, self.n2, self.head = nn.LayerNorm(64), nn.LayerNorm(64), nn.Linear(64, 10)
        self.across = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.along = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.across(self.n1(x).transpose(1, 2)).transpose(1, 2)
        return self.head((x + self.along(self.n2(x))).mean(1))


@entry(lambda: (torch.randn(B, 16, 64), torch.rand(B), torch.randn(B, 16, 64)), own)
class Dit(nn.Module):
    """A diffusion transformer: blocks scaled and shifted by the time step."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 128))
        self.block, self.out = Block(), nn.Linear(64, 64)
        self.norm = nn.LayerNorm(64, elementwise_affine=False)

    def forward(self, x: Tensor, t: Tensor, target: Tensor) -> Tensor:
        rates = torch.exp(torch.linspace(0, 4, 16, device=x.device))
        angles = t[:, None] * rates
        shift, scale = self.time(torch.cat([angles.sin(), angles.cos()], -1)).chunk(2, -1)
        y = self.norm(x) * (1 + scale[:, None]) + shift[:, None]
        return F.mse_loss(self.out(self.block(y)), target)


@entry(lambda: (torch.randn(B, 3, 16, 16), torch.randint(0, 100, (B,)), torch.randn(B, 3, 16, 16)),
       own)  # fmt: skip
class DiffusionUNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Embedding(100, 32)
        self.a, self.down = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 64, 3, 2, 1)
        self.norm, self.attend = nn.GroupNorm(8, 64), Block(64)
        self.up, self.out = nn.Conv2d(96, 32, 3, padding=1), nn.Conv2d(32, 3, 3, padding=1)

    def forward(self, x: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        a = F.silu(self.a(x) + self.time(t)[:, :, None, None])
        y = F.silu(self.norm(self.down(a)))
        y = self.attend(y.flatten(2).transpose(1, 2)).transpose(1, 2).view_as(y)
        y = torch.cat([F.interpolate(y, scale_factor=2.0), a], 1)
        return F.mse_loss(self.out(F.silu(self.up(y))), noise)


@entry(lambda: (torch.randn(B, 32), torch.randn(B, 3, 16, 16)), own)
class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.make = nn.Sequential(
            nn.Linear(32, 512), nn.Unflatten(1, (32, 4, 4)), nn.ConvTranspose2d(32, 16, 4, 2, 1),
            nn.BatchNorm2d(16), nn.ReLU(), nn.ConvTranspose2d(16, 3, 4, 2, 1), nn.Tanh(),
        )  # fmt: skip
        self.judge = nn.Sequential(
            nn.utils.spectral_norm(nn.Conv2d(3, 16, 4, 2, 1)), nn.LeakyReLU(0.2), nn.Flatten(),
            nn.Linear(1024, 1),
        )  # fmt: skip

    def forward(self, z: Tensor, real: Tensor) -> Tensor:
        return F.softplus(self.judge(self.make(z))).mean() + F.softplus(-self.judge(real)).mean()


@entry(lambda: (torch.randn(B, 64),), own)
class Vae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.mean, self.log = nn.Linear(64, 32), nn.Linear(32, 8), nn.Linear(32, 8)
        self.back = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 64))

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.inner(x))
        mean, log = self.mean(h), self.log(h)
        z = mean + torch.randn_like(mean) * (log / 2).exp()
        return F.mse_loss(self.back(z), x) - 0.5 * (1 + log - mean**2 - log.exp()).mean()


@entry(labelled(3, 128), CE)
class PointNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(3, 64, 1), nn.BatchNorm1d(64), nn.ReLU(), nn.Conv1d(64, 128, 1)
        )
        self.head = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).max(-1).values)


@entry(lambda: (torch.rand(256, 3), torch.rand(256, 4)), F.mse_loss)
class Nerf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(63, 128), nn.Linear(191, 128)
        self.out = nn.Linear(128, 4)

    def forward(self, x: Tensor) -> Tensor:
        waves = [f(2**i * x) for i in range(10) for f in (torch.sin, torch.cos)]
        y = torch.cat([x, *waves], -1)
        return self.out(F.relu(self.b(torch.cat([F.relu(self.a(y)), y], -1))))


@entry(lambda: (torch.randn(B, 13), torch.randint(0, 50, (B, 3, 4)), torch.rand(B, 1)), own)
class Dlrm(nn.Module):
    """Bags of embeddings, and dot products of all pairs of features."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(50, 16, mode="sum") for _ in range(3))
        self.low = nn.Sequential(nn.Linear(13, 32), nn.ReLU(), nn.Linear(32, 16))
        self.top = nn.Sequential(nn.Linear(22, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x: Tensor, ids: Tensor, target: Tensor) -> Tensor:
        dense = self.low(x)
        rows = torch.stack([dense, *(bag(ids[:, i]) for i, bag in enumerate(self.bags))], 1)
        pairs = torch.bmm(rows, rows.transpose(1, 2))
        i, j = torch.tril_indices(4, 4, -1, device=x.device)
        found = self.top(torch.cat([dense, pairs[:, i, j]], 1))
        return F.binary_cross_entropy_with_logits(found, target)


@entry(lambda: (torch.randint(0, 50, (B,)), torch.randint(0, 50, (B,)), torch.rand(B)), own)
class Ncf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user, self.item, self.top = (
            nn.Embedding(50, 16),
            nn.Embedding(50, 16),
            nn.Linear(48, 1),
        )

    def forward(self, u: Tensor, i: Tensor, y: Tensor) -> Tensor:
        a, b = self.user(u), self.item(i)
        return F.mse_loss(self.top(torch.cat([a, b, a * b], -1)).squeeze(-1), y)


class Recurrent(nn.Module):
    def __init__(self, kind: str = "LSTM", both: bool = False, layers: int = 2) -> None:
        super().__init__()
        self.words = nn.Embedding(200, 32)
        self.rnn = getattr(nn, kind)(32, 48, layers, batch_first=True, bidirectional=both)
        self.head = nn.Linear(96 if both else 48, 200)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(self.words(x))[0])


CASES += [
    Case("Lstm", Recurrent, words(), by_word),
    Case("Gru", partial(Recurrent, "GRU"), words(), by_word),
    Case("Rnn", partial(Recurrent, "RNN"), words(), by_word),
    Case("BiLstm", partial(Recurrent, both=True), words(), by_word),
]


@entry(lambda: (torch.randint(1, 200, (B, 16)), torch.tensor([16, 12, 9, 4]),
                torch.randint(0, 5, (B,))), own)  # fmt: skip
class PackedLstm(nn.Module):
    """Sequences of different lengths, packed."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.rnn = nn.Embedding(200, 32), nn.LSTM(32, 48, batch_first=True)
        self.head = nn.Linear(48, 5)

    def forward(self, x: Tensor, lengths: Tensor, y: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.words(x), lengths.cpu(), batch_first=True)
        out, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        return CE(self.head(out.mean(1)), y)


@entry(lambda: (torch.randint(0, 200, (B, 12)), torch.randint(0, 200, (B, 8))), own)
class Seq2Seq(nn.Module):
    """A recurrent decoder that attends, word by word."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.encode = nn.Embedding(200, 32), nn.GRU(32, 32, batch_first=True)
        self.cell, self.head = nn.GRUCell(64, 32), nn.Linear(32, 200)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        seen, state = self.encode(self.words(x))
        h, loss = state[0], torch.zeros((), device=x.device)
        for t in range(y.shape[1] - 1):
            scores = torch.einsum("bsd,bd->bs", seen, h).softmax(-1)
            read = torch.einsum("bs,bsd->bd", scores, seen)
            h = self.cell(torch.cat([self.words(y[:, t]), read], -1), h)
            loss = loss + CE(self.head(h), y[:, t + 1])
        return loss


@entry(words(), by_word)
class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        self.words, self.body = nn.Embedding(200, 64), nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(64, 200)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.words(x), src_key_padding_mask=x == 0))


@entry(lambda: (torch.randn(B, 12, 64), torch.randn(B, 8, 64)), own)
class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Transformer(64, 4, 1, 1, 128, batch_first=True)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(y.shape[1], device=y.device)
        return self.body(x, y, tgt_mask=mask).pow(2).mean()


@entry(labelled(8, 64), CE)
class Tcn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv1d(8, 32, 3, dilation=1), nn.Conv1d(32, 32, 3, dilation=4)
        self.head = nn.utils.parametrizations.weight_norm(nn.Linear(32, 10))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.a(F.pad(x, (2, 0))))
        return self.head(F.relu(self.b(F.pad(x, (8, 0))))[..., -1])


@entry(lambda: (torch.randn(B, 1, 40, 64), torch.randint(1, 20, (B, 6))), own)
class Speech(nn.Module):
    """Convolutions, a recurrent layer both ways and CTC."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.rnn = nn.Conv2d(1, 8, (11, 5), (2, 2), (5, 2)), nn.GRU(160, 32, 1, True)
        self.head = nn.Linear(32, 20)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = F.relu(self.conv(x)).flatten(1, 2).permute(2, 0, 1)
        found = self.head(self.rnn(h)[0]).log_softmax(-1)
        sizes = torch.full((len(y),), found.shape[0]), torch.full((len(y),), y.shape[1])
        return F.ctc_loss(found, y, *sizes)


@entry(lambda: (torch.randn(B, 16), torch.randint(0, 4, (B,)), torch.randn(B)), own)
class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.act, self.value = nn.Linear(16, 64), nn.Linear(64, 4), nn.Linear(64, 1)

    def forward(self, x: Tensor, action: Tensor, reward: Tensor) -> Tensor:
        h = torch.tanh(self.body(x))
        chance = torch.distributions.Categorical(logits=self.act(h))
        gain = reward - self.value(h).squeeze(-1)
        return (gain**2).mean() - (chance.log_prob(action) * gain.detach()).mean()


def graph_batch() -> Any:
    return torch.randn(40, 16), torch.randint(0, 40, (2, 120)), torch.randint(0, 5, (40,))


@entry(graph_batch, own)
class Gcn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 5)

    def spread(self, x: Tensor, edges: Tensor) -> Tensor:
        return torch.zeros_like(x).index_add(0, edges[1], x[edges[0]])

    def forward(self, x: Tensor, edges: Tensor, y: Tensor) -> Tensor:
        h = F.relu(self.spread(self.a(x), edges))
        return CE(self.spread(self.b(h), edges), y)


@entry(graph_batch, own)
class Gat(nn.Module):
    """Attention over edges, without those from a node to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.score, self.head = nn.Linear(16, 32), nn.Linear(64, 1), nn.Linear(32, 5)

    def forward(self, x: Tensor, edges: Tensor, y: Tensor) -> Tensor:
        edges = edges[:, edges[0] != edges[1]]
        h = self.a(x)
        e = F.leaky_relu(self.score(torch.cat([h[edges[0]], h[edges[1]]], -1))).exp()
        total = torch.zeros(len(x), 1, device=x.device).index_add(0, edges[1], e)
        made = torch.zeros_like(h).index_add(0, edges[1], h[edges[0]] * e / total[edges[1]])
        return CE(self.head(made), y)


class Experts(nn.Module):
    """Four experts, the best one for each word: one after another, or all in grouped products."""

    def __init__(self, grouped: bool = False) -> None:
        super().__init__()
        self.grouped, self.gate, self.head = grouped, nn.Linear(32, 4), nn.Linear(32, 10)
        self.up = nn.Parameter(torch.randn(4, 32, 64) * 0.1)
        self.down = nn.Parameter(torch.randn(4, 64, 32) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        weight, best = self.gate(x).softmax(-1).max(-1)
        made = self._all(x, best) if self.grouped else self._each(x, best)
        return self.head(x + made * weight[:, None])

    def _each(self, x: Tensor, best: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in range(4):
            rows = (best == e).nonzero().squeeze(-1)
            if rows.numel():
                out = out.index_add(0, rows, F.gelu(x[rows] @ self.up[e]) @ self.down[e])
        return out

    def _all(self, x: Tensor, best: Tensor) -> Tensor:
        order = best.argsort()
        ends = torch.bincount(best, minlength=4).cumsum(0).to(torch.int32)
        h = F.gelu(F.grouped_mm(x[order], self.up, offs=ends))
        return F.grouped_mm(h, self.down, offs=ends)[order.argsort()]


CASES += [
    Case("ExpertLoop", Experts, lambda: (torch.randn(64, 32), torch.randint(0, 10, (64,))), CE),
    Case(
        "ExpertGroups", partial(Experts, grouped=True),
        lambda: (torch.randn(64, 32), torch.randint(0, 10, (64,))), CE,
    ),
]  # fmt: skip


@entry(lambda: (torch.randn(B, 32), torch.randn(B, 32)), own)
class Contrast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        a, b = (F.normalize(self.body(t), dim=-1) for t in (a, b))
        return CE(a @ b.t() / 0.1, torch.arange(len(a), device=a.device))


@entry(lambda: (torch.randn(B, 3, 32, 32), torch.rand(B, 8, 8) > 0.8, torch.rand(B, 8, 8, 4)), own)
class Detector(nn.Module):
    """Boxes where there is something, picked by a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.box = nn.Sequential(conv(3, 32, 3, 2), conv(32, 64, 3, 2)), nn.Linear(64, 5)

    def forward(self, x: Tensor, there: Tensor, boxes: Tensor) -> Tensor:
        found = self.box(self.body(x).permute(0, 2, 3, 1))
        seen = F.binary_cross_entropy_with_logits(found[..., 0], there.float())
        return seen + F.smooth_l1_loss(found[there][:, 1:], boxes[there])


@entry(images(2, 16), F.mse_loss)
class Fourier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.randn(16, 16, 4, 4, dtype=torch.complex64) * 0.1)
        self.up, self.down = nn.Conv2d(2, 16, 1), nn.Conv2d(16, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        f = torch.fft.rfft2(h)
        out = torch.zeros_like(f)
        out[:, :, :4, :4] = torch.einsum("bihw,iohw->bohw", f[:, :, :4, :4], self.mix)
        return self.down(F.gelu(h + torch.fft.irfft2(out, s=x.shape[-2:])))


@entry(labelled(32), CE)
class EarlyExit(nn.Module):
    """Leaves when it is sure enough."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
            if self.head(x).softmax(-1).max().item() > 0.9:
                break
        return self.head(x)


@entry(labelled(32), CE)
class ReadInit(nn.Module):
    """Weights that are looked at while they are made."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.head = nn.Linear(32, 64), nn.Linear(64, 10)
        with torch.no_grad():
            self.a.weight.mul_(1.0 / self.a.weight.std().item())

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.a(x)))
