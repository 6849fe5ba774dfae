"""Ten more models chosen before any of their errors was seen, for `measure_variants.py`.

Speech by recurrent layers of both directions and sound made from spectra, video by volumes of one
channel a filter, patches hidden and guessed, images segmented by a U-Net, noise found by blocks
without attention, a graph with sums of messages, experts run one by one, an agent with a memory,
series forecast. None of them is fitted to.
"""

import torch
import torch.nn.functional as F
from torch import nn
from variant_models import Model, noised, numbers, perceptron, words


class BothWays(nn.Module):
    """Speech by two convolutions and four LSTM layers of both directions, letters found by CTC."""

    def __init__(self, bands: int = 128, hidden: int = 512, layers: int = 4) -> None:
        super().__init__()
        self.shrink = nn.Sequential(
            nn.Conv2d(1, 32, (11, 5), (2, 2), (5, 2)), nn.BatchNorm2d(32), nn.Hardtanh(0, 20),
            nn.Conv2d(32, 32, (11, 5), (1, 2), (5, 2)), nn.BatchNorm2d(32), nn.Hardtanh(0, 20),
        )  # fmt: skip
        self.memory = nn.LSTM(8 * bands, hidden, layers, batch_first=True, bidirectional=True)
        self.out = nn.Linear(2 * hidden, 32)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.memory(self.shrink(x[:, None]).transpose(1, 2).flatten(2))[0]
        odds = F.log_softmax(self.out(h).float(), -1).transpose(0, 1)
        n = x.shape[0]
        frames = torch.full((n,), odds.shape[0], dtype=torch.int64)
        letters = torch.full((n,), y.shape[1], dtype=torch.int64)
        return F.ctc_loss(odds, y + 1, frames, letters)


class Vocoder(nn.Module):
    """Sound from spectra: transposed 1-D convolutions, dilated ones in between (HiFi-GAN)."""

    def __init__(self, width: int = 256, rates: tuple[int, ...] = (8, 8, 2, 2)) -> None:
        super().__init__()
        self.into = nn.Conv1d(80, width, 7, padding=3)
        self.grow, self.mix = nn.ModuleList(), nn.ModuleList()
        for k, rate in enumerate(rates):
            now = width >> (k + 1)
            self.grow.append(nn.ConvTranspose1d(2 * now, now, 2 * rate, rate, rate // 2))
            self.mix.append(nn.ModuleList(
                nn.ModuleList(nn.Conv1d(now, now, taps, padding=taps // 2 * d, dilation=d) for d in (1, 3, 5))  # noqa: E501
                for taps in (3, 7, 11)
            ))  # fmt: skip
        self.out = nn.Conv1d(width >> len(rates), 1, 7, padding=3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.into(x)
        for grow, mix in zip(self.grow, self.mix, strict=True):
            h = grow(F.leaky_relu(h, 0.1))
            found = 0.0
            for chain in mix:
                part = h
                for layer in chain:
                    part = part + layer(F.leaky_relu(part, 0.1))
                found = found + part
            h = found / len(mix)
        wave = torch.tanh(self.out(F.leaky_relu(h))).squeeze(1)
        return F.l1_loss(wave, torch.sin(y[:, :1].float() + wave.detach()))


class Squeezed(nn.Module):
    """A block of a video net: wide, one volume filter a channel, squeezed, narrow again (X3D)."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        wide = int(2.25 * outside) // 8 * 8
        self.wide = nn.Sequential(nn.Conv3d(inside, wide, 1, bias=False), nn.BatchNorm3d(wide), nn.ReLU(True))  # noqa: E501  # fmt: skip
        self.mix = nn.Conv3d(wide, wide, 3, (1, stride, stride), 1, groups=wide, bias=False)
        self.norm = nn.BatchNorm3d(wide)
        self.gate = nn.Sequential(nn.AdaptiveAvgPool3d(1), nn.Conv3d(wide, wide // 16 * 2, 1), nn.ReLU(), nn.Conv3d(wide // 16 * 2, wide, 1), nn.Sigmoid())  # noqa: E501  # fmt: skip
        self.narrow = nn.Sequential(nn.Conv3d(wide, outside, 1, bias=False), nn.BatchNorm3d(outside))  # noqa: E501  # fmt: skip
        self.skip: nn.Module = nn.Identity()
        if inside != outside or stride > 1:
            skip = nn.Conv3d(inside, outside, 1, (1, stride, stride), bias=False)
            self.skip = nn.Sequential(skip, nn.BatchNorm3d(outside))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.mix(self.wide(x)))
        return F.relu(self.narrow(F.silu(h * self.gate(h))) + self.skip(x))


class ThinVideo(nn.Module):
    """X3D: a video net of thin volumes."""

    def __init__(self, widths: tuple[int, ...] = (24, 48, 96, 192)) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv3d(3, 24, (1, 3, 3), (1, 2, 2), (0, 1, 1), bias=False),
            nn.Conv3d(24, 24, (5, 1, 1), padding=(2, 0, 0), groups=24, bias=False),
            nn.BatchNorm3d(24), nn.ReLU(True),
        )  # fmt: skip
        blocks, now = [], 24
        for w, count in zip(widths, (2, 3, 5, 3), strict=True):
            blocks += [Squeezed(now if k == 0 else w, w, 2 if k == 0 else 1) for k in range(count)]
            now = w
        self.blocks, self.out = nn.Sequential(*blocks), nn.Linear(now, 400)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.out(self.blocks(self.stem(x)).mean((2, 3, 4))), y)


class Hidden(nn.Module):
    """A masked autoencoder: a quarter of the patches seen, the others guessed."""

    def __init__(self, width: int = 384, layers: int = 12, narrow: int = 256) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 16, 16)
        self.places = nn.Parameter(0.02 * torch.randn(1, 196, width))
        self.encode = self._layers(width, layers, 6)
        self.into, self.mask = nn.Linear(width, narrow), nn.Parameter(torch.zeros(1, 1, narrow))
        self.later = nn.Parameter(0.02 * torch.randn(1, 196, narrow))
        self.decode, self.out = self._layers(narrow, 4, 8), nn.Linear(narrow, 768)

    @staticmethod
    def _layers(width: int, layers: int, heads: int) -> nn.Module:
        return nn.Sequential(*(
            nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)  # noqa: E501
            for _ in range(layers)
        ))  # fmt: skip

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        n = x.shape[0]
        h = self.patch(x).flatten(2).transpose(1, 2) + self.places
        order = torch.rand(n, 196, device=x.device).argsort(1)
        back, seen = order.argsort(1), order[:, :49]
        kept = h.gather(1, seen[:, :, None].expand(-1, -1, h.shape[2]))
        kept = self.into(self.encode(kept))
        whole = torch.cat([kept, self.mask.to(kept.dtype).expand(n, 147, -1)], 1)
        whole = whole.gather(1, back[:, :, None].expand(-1, -1, whole.shape[2]))
        guess = self.out(self.decode(whole + self.later))
        target = F.unfold(x, 16, stride=16).transpose(1, 2)
        off = (guess.float() - target).pow(2).mean(2)
        is_hidden = (back >= 49).float()
        return (off * is_hidden).sum() / is_hidden.sum()


class Pair(nn.Module):
    """Two convolutions with batch norms."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(inside, outside, 3, padding=1), nn.BatchNorm2d(outside), nn.ReLU(True),
            nn.Conv2d(outside, outside, 3, padding=1), nn.BatchNorm2d(outside), nn.ReLU(True),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class UNet(nn.Module):
    """Images segmented by a U-Net, with what is common to both maps counted into the loss."""

    def __init__(self, width: int = 48, depth: int = 4, classes: int = 3) -> None:
        super().__init__()
        widths = [width << k for k in range(depth + 1)]
        self.down = nn.ModuleList(Pair(a, b) for a, b in zip([1, *widths], widths, strict=False))
        self.grow = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, 2) for w in reversed(widths[:-1]))
        self.up = nn.ModuleList(Pair(2 * w, w) for w in reversed(widths[:-1]))
        self.out = nn.Conv2d(width, classes, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        kept = []
        for k, pair in enumerate(self.down):
            x = pair(F.max_pool2d(x, 2) if k else x)
            kept.append(x)
        x = kept.pop()
        for grow, pair in zip(self.grow, self.up, strict=True):
            x = pair(torch.cat([kept.pop(), grow(x)], 1))
        scores = self.out(x)
        odds = scores.float().softmax(1)
        hot = F.one_hot(y, odds.shape[1]).permute(0, 3, 1, 2)
        both = (odds * hot).sum((2, 3)) / (odds + hot).sum((2, 3)).clamp(min=1)
        return F.cross_entropy(scores, y) + 1 - 2 * both.mean()


class Gated(nn.Module):
    """A block of convolutions, gates and channel attention, no activations (NAFNet)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.GroupNorm(1, width) for _ in range(2))
        self.wide, self.mix = nn.Conv2d(width, 2 * width, 1), nn.Conv2d(2 * width, 2 * width, 3, padding=1, groups=2 * width)  # noqa: E501  # fmt: skip
        self.weigh, self.narrow = nn.Conv2d(width, width, 1), nn.Conv2d(width, width, 1)
        self.second, self.last = nn.Conv2d(width, 2 * width, 1), nn.Conv2d(width, width, 1)
        self.time = nn.Linear(256, 2 * width)
        self.shares = nn.ParameterList(torch.zeros(1, width, 1, 1) for _ in range(2))

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        shift, scale = self.time(time)[:, :, None, None].chunk(2, 1)
        h = self.norms[0](x) * (1 + scale) + shift
        a, b = self.mix(self.wide(h)).chunk(2, 1)
        h = a * b
        h = h * self.weigh(F.adaptive_avg_pool2d(h, 1))
        x = x + self.shares[0] * self.narrow(h)
        a, b = self.second(self.norms[1](x)).chunk(2, 1)
        return x + self.shares[1] * self.last(a * b)


class Denoiser(nn.Module):
    """Noise found in images of 64 × 64 at three sizes, by gated blocks."""

    def __init__(self, width: int = 64, blocks: tuple[int, ...] = (2, 3, 6)) -> None:
        super().__init__()
        widths = [width << k for k in range(len(blocks))]
        self.time = nn.Sequential(nn.Linear(128, 256), nn.SiLU(), nn.Linear(256, 256))
        self.first, self.last = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 3, padding=1)
        self.down, self.up = (nn.ModuleList(nn.ModuleList(Gated(w) for _ in range(n)) for w, n in zip(widths, counts, strict=True)) for counts in (blocks, (2, 2, 2)))  # noqa: E501  # fmt: skip
        self.shrink = nn.ModuleList(nn.Conv2d(w, 2 * w, 2, 2) for w in widths[:-1])
        self.grow = nn.ModuleList(nn.Conv2d(2 * w, 4 * w, 1, bias=False) for w in widths[:-1])

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        noise, x, sines = noised(x, y)
        time, kept, x = self.time(sines), [], self.first(x)
        for k, blocks in enumerate(self.down):
            for block in blocks:
                x = block(x, time)
            if k < len(self.shrink):
                kept.append(x)
                x = self.shrink[k](x)
        for k in reversed(range(len(self.up))):
            if k < len(self.grow):
                x = F.pixel_shuffle(self.grow[k](x), 2) + kept[k]
            for block in self.up[k]:
                x = block(x, time)
        return F.mse_loss(self.last(x).float(), noise)


class Sums(nn.Module):
    """A graph isomorphism net: sums of messages, perceptrons with batch norms, five layers."""

    def __init__(self, width: int = 192, layers: int = 5, edges: int = 12) -> None:
        super().__init__()
        self.edges, self.into = edges, nn.Linear(64, width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.BatchNorm1d(2 * width), nn.ReLU(), nn.Linear(2 * width, width), nn.BatchNorm1d(width))  # noqa: E501
            for _ in range(layers)
        )  # fmt: skip
        self.weigh = nn.ModuleList(nn.Linear(8, width) for _ in range(layers))
        self.out = nn.Linear(width, 112)
        self.register_buffer("ends", torch.zeros(0, dtype=torch.int64), persistent=False)
        self.register_buffer("kinds", torch.zeros(0), persistent=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        count = x.shape[0] * self.edges
        if self.ends.shape[-1] != count:
            torch.manual_seed(0)
            self.ends = torch.randint(0, x.shape[0], (2, count)).to(x.device)
            self.kinds = torch.randn(count, 8).to(x.device)
        start, end = self.ends
        h = self.into(x)
        for layer, weigh in zip(self.layers, self.weigh, strict=True):
            sent = F.relu(h[start] + weigh(self.kinds))
            h = h + F.relu(layer(torch.zeros_like(h).index_add(0, end, sent.to(h.dtype)) + h))
        return F.cross_entropy(self.out(h), y)


class Chosen(nn.Module):
    """Two of eight experts and one for all; each is run on the tokens that chose it."""

    def __init__(self, width: int, inside: int, experts: int = 8) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(perceptron(width, inside, nn.SiLU()) for _ in range(experts))
        self.common = perceptron(width, inside, nn.SiLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x.flatten(0, 1)
        odds, chosen = self.gate(h).float().softmax(-1).topk(2, -1)
        odds = (odds / odds.sum(-1, keepdim=True)).to(h.dtype)
        found = self.common(h)
        for k, expert in enumerate(self.experts):
            token, place = torch.where(chosen == k)
            made = expert(h[token]) * odds[token, place, None]
            found = found.index_add(0, token, made.to(found.dtype))
        return found.view_as(x)


class ExpertWords(nn.Module):
    """A causal language model, every perceptron of it chosen from experts."""

    def __init__(self, vocabulary: int = 32000, width: int = 640, layers: int = 6) -> None:
        super().__init__()
        self.heads, self.embedding = 10, nn.Embedding(vocabulary, width)
        self.place = nn.Parameter(0.02 * torch.randn(1024, width))
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2 * layers + 1))
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width, bias=False) for _ in range(layers))
        self.mix = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))
        self.mlps = nn.ModuleList(Chosen(width, 2 * width) for _ in range(layers))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.embedding(x) + self.place[: x.shape[1]]
        for k, (qkv, mix, mlp) in enumerate(zip(self.qkv, self.mix, self.mlps, strict=True)):
            parts = qkv(self.norms[2 * k](h)).unflatten(2, (3, self.heads, -1))
            mixed = F.scaled_dot_product_attention(
                *parts.permute(2, 0, 3, 1, 4).unbind(0), is_causal=True
            )
            h = h + mix(mixed.transpose(1, 2).flatten(2))
            h = h + mlp(self.norms[2 * k + 1](h))
        scores = F.linear(self.norms[-1](h), self.embedding.weight)
        return F.cross_entropy(scores[:, :-1].flatten(0, 1), y[:, 1:].flatten())


class Remembering(nn.Module):
    """An agent: frames seen by a residual net, an LSTM, a policy and its values (IMPALA)."""

    def __init__(self, hidden: int = 256, actions: int = 15, steps: int = 20) -> None:
        super().__init__()
        self.steps, now = steps, 3
        self.stages = nn.ModuleList()
        for w in (16, 32, 32):
            pairs = nn.ModuleList(nn.Sequential(nn.ReLU(), nn.Conv2d(w, w, 3, padding=1), nn.ReLU(), nn.Conv2d(w, w, 3, padding=1)) for _ in range(2))  # noqa: E501  # fmt: skip
            self.stages.append(nn.ModuleList([nn.Conv2d(now, w, 3, padding=1), pairs]))
            now = w
        self.into = nn.Linear(32 * 8 * 8, hidden)
        self.memory = nn.LSTM(hidden, hidden)
        self.policy, self.value = nn.Linear(hidden, actions), nn.Linear(hidden, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = x
        for first, pairs in self.stages:
            h = F.max_pool2d(first(h), 3, 2, 1)
            for pair in pairs:
                h = h + pair(h)
        h = F.relu(self.into(F.relu(h).flatten(1)))
        h = self.memory(h.unflatten(0, (self.steps, -1)))[0]
        odds, values = F.log_softmax(self.policy(h).float(), -1), self.value(h).float().squeeze(-1)
        rewards = torch.tanh(y.float()).unflatten(0, (self.steps, -1))
        returns, total = [], values[-1].detach()
        for k in reversed(range(self.steps)):
            total = rewards[k] + 0.99 * total
            returns.append(total)
        gain = torch.stack(returns[::-1]) - values
        taken = odds.gather(-1, (y % odds.shape[-1]).unflatten(0, (self.steps, -1))[..., None])
        chaos = -(odds.exp() * odds).sum(-1).mean()
        return -(taken.squeeze(-1) * gain.detach()).mean() + 0.5 * gain.pow(2).mean() - 0.01 * chaos


class Forecast(nn.Module):
    """Series cut into patches, normalised each, seen by a transformer, told ahead (PatchTST)."""

    def __init__(self, length: int = 336, patch: int = 16, width: int = 128) -> None:
        super().__init__()
        self.patch = patch
        self.into = nn.Linear(patch, width)
        self.place = nn.Parameter(0.02 * torch.randn(1, (length - patch) // 8 + 1, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 8, 2 * width, 0.2, "gelu", batch_first=True)
            for _ in range(3)
        )
        self.out = nn.Linear(width * self.place.shape[1], 96)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        mean, wide = x.mean(-1, keepdim=True), x.std(-1, keepdim=True) + 1e-5
        h = self.into(((x - mean) / wide).flatten(0, 1).unfold(-1, self.patch, 8)) + self.place
        for layer in self.layers:
            h = layer(h)
        ahead = self.out(F.dropout(h.flatten(1), 0.1, self.training))
        ahead = ahead.unflatten(0, x.shape[:2]).float() * wide + mean
        return F.mse_loss(ahead, torch.cos(x[..., :96]))


FRESH: dict[str, Model] = {
    "both_ways": Model(BothWays, "adamw", 16, numbers(400, 128, of=30, scores=(60,))),
    "vocoder": Model(Vocoder, "adamw", 16, numbers(80, 64, scores=(1,))),
    "thin_video": Model(ThinVideo, "sgd", 16, numbers(3, 13, 160, 160, of=400)),
    "hidden_patches": Model(Hidden, "adamw", 128, numbers(3, 224, 224), is_image=True),
    "unet": Model(UNet, "adamw", 8, numbers(1, 256, 256, of=3, scores=(256, 256)), is_image=True),
    "denoiser": Model(Denoiser, "adamw", 32, numbers(3, 64, 64), is_image=True),
    "graph_sums": Model(Sums, "adamw", 30000, numbers(64, of=112)),
    "chosen_experts": Model(ExpertWords, "adamw", 8, words(512)),
    "remembering": Model(Remembering, "adamw", 640, numbers(3, 64, 64), is_image=True),
    "forecast": Model(Forecast, "adamw", 128, numbers(21, 336)),
}
