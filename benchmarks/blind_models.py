"""Models chosen before any of their errors was seen, each with its loss, for `measure_variants.py`.

Speech by convolutions beside attention, video at two rates, segmentation by a transformer, latents
denoised under a text, molecules, routed experts, Q-learning from frames, a recommender of two
towers. None of them is fitted to.
"""

import torch
import torch.nn.functional as F
from torch import nn
from variant_models import Model, Residual, noised, numbers, perceptron, words


class RelativeAttention(nn.Module):
    """Attention with a learned score for every distance, as in Transformer-XL."""

    def __init__(self, width: int, heads: int, longest: int = 512) -> None:
        super().__init__()
        self.heads, self.longest = heads, longest
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.places = nn.Parameter(0.02 * torch.randn(2 * longest - 1, width // heads))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        n = x.shape[1]
        near = q @ self.places[self.longest - n : self.longest + n - 1].transpose(0, 1)
        shifted = F.pad(near, (1, 0)).flatten(2)[..., n:].unflatten(2, (n, -1))[..., :n]
        weights = ((q @ k.transpose(2, 3) + shifted) * q.shape[-1] ** -0.5).softmax(-1)
        mixed = F.dropout(weights, 0.1, self.training) @ v
        return self.out(mixed.transpose(1, 2).flatten(2))


class ConformerBlock(nn.Module):
    """Half a perceptron, attention, a gated depthwise convolution, half a perceptron."""

    def __init__(self, width: int, heads: int, kernel: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(5))
        self.first, self.second = (perceptron(width, 4 * width, nn.SiLU()) for _ in range(2))
        self.attend = RelativeAttention(width, heads)
        self.gate = nn.Conv1d(width, 2 * width, 1)
        self.mix = nn.Conv1d(width, width, kernel, padding=kernel // 2, groups=width)
        self.batch, self.back = nn.BatchNorm1d(width), nn.Conv1d(width, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + 0.5 * F.dropout(self.first(self.norms[0](x)), 0.1, self.training)
        x = x + F.dropout(self.attend(self.norms[1](x)), 0.1, self.training)
        h = F.glu(self.gate(self.norms[2](x).transpose(1, 2)), 1)
        h = self.back(F.silu(self.batch(self.mix(h)))).transpose(1, 2)
        x = x + F.dropout(h, 0.1, self.training)
        x = x + 0.5 * F.dropout(self.second(self.norms[3](x)), 0.1, self.training)
        return self.norms[4](x)


class Conformer(nn.Module):
    """A Conformer over spectrograms, a quarter as many frames, letters found by CTC."""

    def __init__(self, width: int = 256, layers: int = 12, bands: int = 80) -> None:
        super().__init__()
        self.shrink = nn.Sequential(
            nn.Conv2d(1, width, 3, 2), nn.ReLU(), nn.Conv2d(width, width, 3, 2), nn.ReLU()
        )
        self.into = nn.Linear(width * (((bands - 1) // 2 - 1) // 2), width)
        self.layers = nn.ModuleList(ConformerBlock(width, 4, 31) for _ in range(layers))
        self.out = nn.Linear(width, 129)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.into(self.shrink(x[:, None]).transpose(1, 2).flatten(2))
        for layer in self.layers:
            h = layer(h)
        odds = F.log_softmax(self.out(h).float(), -1).transpose(0, 1)
        n = x.shape[0]
        frames = torch.full((n,), odds.shape[0], dtype=torch.int64)
        letters = torch.full((n,), y.shape[1], dtype=torch.int64)
        return F.ctc_loss(odds, y + 1, frames, letters)


class Clip(nn.Module):
    """A bottleneck of a video net: a convolution along time, one over space, one back."""

    def __init__(self, inside: int, width: int, time: int, stride: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv3d(inside, width, (time, 1, 1), padding=(time // 2, 0, 0), bias=False),
            nn.BatchNorm3d(width), nn.ReLU(True),
            nn.Conv3d(width, width, (1, 3, 3), (1, stride, stride), (0, 1, 1), bias=False),
            nn.BatchNorm3d(width), nn.ReLU(True),
            nn.Conv3d(width, 4 * width, 1, bias=False), nn.BatchNorm3d(4 * width),
        )  # fmt: skip
        self.skip: nn.Module = nn.Identity()
        if inside != 4 * width or stride > 1:
            skip = nn.Conv3d(inside, 4 * width, 1, (1, stride, stride), bias=False)
            self.skip = nn.Sequential(skip, nn.BatchNorm3d(4 * width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.layers(x) + self.skip(x))


class SlowFast(nn.Module):
    """Two nets over one clip: few frames and many channels, many frames and few channels."""

    def __init__(self, rate: int = 8, width: int = 64, blocks: tuple[int, ...] = (2, 2, 3, 2)) -> None:  # noqa: E501  # fmt: skip
        super().__init__()
        self.rate, thin = rate, width // 8
        self.slow = nn.ModuleList([self._stem(width, 1)])
        self.fast = nn.ModuleList([self._stem(thin, 5)])
        self.across = nn.ModuleList()
        a, b = width, thin
        for k, count in enumerate(blocks):
            self.across.append(nn.Conv3d(b, 2 * b, (5, 1, 1), (rate, 1, 1), (2, 0, 0), bias=False))
            stride, wide, narrow = (2 if k else 1), width * 2**k, thin * 2**k
            self.slow.append(self._stage(a + 2 * b, wide, 3 if k > 1 else 1, stride, count))
            self.fast.append(self._stage(b, narrow, 3, stride, count))
            a, b = 4 * wide, 4 * narrow
        self.out = nn.Linear(a + b, 400)

    @staticmethod
    def _stem(width: int, time: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv3d(3, width, (time, 7, 7), (1, 2, 2), (time // 2, 3, 3), bias=False),
            nn.BatchNorm3d(width), nn.ReLU(True), nn.MaxPool3d((1, 3, 3), (1, 2, 2), (0, 1, 1)),
        )  # fmt: skip

    @staticmethod
    def _stage(inside: int, width: int, time: int, stride: int, count: int) -> nn.Module:
        rest = (Clip(4 * width, width, time, 1) for _ in range(count - 1))
        return nn.Sequential(Clip(inside, width, time, stride), *rest)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        slow, fast = self.slow[0](x[:, :, :: self.rate]), self.fast[0](x)
        for across, a, b in zip(self.across, self.slow[1:], self.fast[1:], strict=True):
            slow, fast = a(torch.cat([slow, across(fast)], 1)), b(fast)
        pooled = torch.cat([slow.mean((2, 3, 4)), fast.mean((2, 3, 4))], 1)
        return F.cross_entropy(self.out(F.dropout(pooled, 0.5, self.training)), y)


class ReducedAttention(nn.Module):
    """Attention of every pixel to a map so many times smaller, then a perceptron that convolves."""

    def __init__(self, width: int, heads: int, reduce: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.reduce = nn.Conv2d(width, width, reduce, reduce) if reduce > 1 else nn.Identity()
        self.query, self.pair = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.out, self.wide = nn.Linear(width, width), nn.Linear(width, 4 * width)
        self.mix = nn.Conv2d(4 * width, 4 * width, 3, padding=1, groups=4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor, rows: int) -> torch.Tensor:
        h = self.norms[0](x)
        q = self.query(h).unflatten(2, (self.heads, -1)).transpose(1, 2)
        small = self.reduce(h.transpose(1, 2).unflatten(2, (rows, -1)))
        small = self.norms[1](small.flatten(2).transpose(1, 2))
        k, v = self.pair(small).unflatten(2, (2, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        h = self.wide(self.norms[2](x)).transpose(1, 2).unflatten(2, (rows, -1))
        return x + self.narrow(F.gelu(self.mix(h).flatten(2).transpose(1, 2)))


class SegmentingTransformer(nn.Module):
    """SegFormer: four scales of overlapping patches, each mapped to one width, every pixel scored."""  # noqa: E501

    def __init__(self, widths: tuple[int, ...] = (64, 128, 320, 512), classes: int = 21) -> None:
        super().__init__()
        ends = (3, *widths[:-1])
        self.patches = nn.ModuleList(
            nn.Conv2d(a, b, 3 if k else 7, 2 if k else 4, 1 if k else 3)
            for k, (a, b) in enumerate(zip(ends, widths, strict=True))
        )
        self.layers = nn.ModuleList(
            nn.ModuleList(ReducedAttention(w, max(w // 64, 1), 8 >> k) for _ in range(2))
            for k, w in enumerate(widths)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(w) for w in widths)
        self.maps = nn.ModuleList(nn.Linear(w, 256) for w in widths)
        self.fuse = nn.Sequential(nn.Conv2d(1024, 256, 1, bias=False), nn.BatchNorm2d(256), nn.ReLU())  # noqa: E501  # fmt: skip
        self.out = nn.Conv2d(256, classes, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        found: list[torch.Tensor] = []
        for patch, layers, norm, to in zip(
            self.patches, self.layers, self.norms, self.maps, strict=True
        ):
            x = patch(x)
            rows = x.shape[2]
            h = x.flatten(2).transpose(1, 2)
            for layer in layers:
                h = layer(h, rows)
            h = norm(h)
            x = h.transpose(1, 2).unflatten(2, (rows, -1))
            found.append(to(h).transpose(1, 2).unflatten(2, (rows, -1)))
        size = found[0].shape[2:]
        same = [F.interpolate(f, size=size, mode="bilinear") for f in found]
        scores = self.out(self.fuse(torch.cat(same, 1)))
        return F.cross_entropy(F.interpolate(scores, size=y.shape[1:], mode="bilinear"), y)


class CrossAttend(nn.Module):
    """Attention of pixels to pixels, then to words, then a gated perceptron."""

    def __init__(self, width: int, text: int, heads: int = 8) -> None:
        super().__init__()
        self.heads, self.group = heads, nn.GroupNorm(32, width)
        self.into, self.back = nn.Conv2d(width, width, 1), nn.Conv2d(width, width, 1)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.queries = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(2))
        self.pairs = nn.ModuleList(nn.Linear(k, 2 * width, bias=False) for k in (width, text))
        self.outs = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.wide, self.narrow = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        h = self.into(self.group(x)).flatten(2).transpose(1, 2)
        for k in range(2):
            seen = self.norms[k](h)
            q = self.queries[k](seen).unflatten(2, (self.heads, -1)).transpose(1, 2)
            pair = self.pairs[k](text if k else seen).unflatten(2, (2, self.heads, -1))
            key, value = pair.permute(2, 0, 3, 1, 4).unbind(0)
            mixed = F.scaled_dot_product_attention(q, key, value)
            h = h + self.outs[k](mixed.transpose(1, 2).flatten(2))
        a, b = self.wide(self.norms[2](h)).chunk(2, -1)
        h = h + self.narrow(a * F.gelu(b))
        return x + self.back(h.transpose(1, 2).unflatten(2, x.shape[2:]))


class LatentDiffusion(nn.Module):
    """A U-Net that finds the noise in latents of 32 × 32, every scale attending to a text."""

    def __init__(self, width: int = 192, times: tuple[int, ...] = (1, 2, 4), text: int = 768) -> None:  # noqa: E501  # fmt: skip
        super().__init__()
        widths, time = [width * t for t in times], 4 * width
        self.words = nn.Embedding(1100, text)
        self.time = nn.Sequential(nn.Linear(128, time), nn.SiLU(), nn.Linear(time, time))
        self.first = nn.Conv2d(4, width, 3, padding=1)
        self.down, self.up, self.shrink, self.grow = (nn.ModuleList() for _ in range(4))
        now = width
        for k, w in enumerate(widths):
            self.down.append(nn.ModuleList([Residual(now, w, time), CrossAttend(w, text)]))
            self.shrink.append(nn.Conv2d(w, w, 3, 2, 1) if k < len(widths) - 1 else nn.Identity())
            now = w
        self.middle = nn.ModuleList([Residual(now, now, time), CrossAttend(now, text)])
        for k, w in reversed(list(enumerate(widths))):
            self.up.append(nn.ModuleList([Residual(now + w, w, time), CrossAttend(w, text)]))
            self.grow.append(nn.Conv2d(w, w, 3, padding=1) if k else nn.Identity())
            now = w
        self.last = nn.Sequential(nn.GroupNorm(32, now), nn.SiLU(), nn.Conv2d(now, 4, 3, padding=1))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        noise, x, sines = noised(x, y)
        text = self.words(y[:, None] + torch.arange(77, device=y.device))
        time, kept = self.time(sines), []
        x = self.first(x)
        for (block, attend), shrink in zip(self.down, self.shrink, strict=True):
            x = attend(block(x, time), text)
            kept.append(x)
            x = shrink(x)
        x = self.middle[1](self.middle[0](x, time), text)
        for k, ((block, attend), grow) in enumerate(zip(self.up, self.grow, strict=True)):
            x = attend(block(torch.cat([x, kept.pop()], 1), time), text)
            if k < len(self.up) - 1:
                x = grow(F.interpolate(x, scale_factor=2.0, mode="nearest"))
        return F.mse_loss(self.last(x), noise)


class Molecules(nn.Module):
    """Isomorphism networks on graphs of 32 atoms: bonds add up, batch norms, a node for all."""

    def __init__(self, width: int = 304, layers: int = 5, atoms: int = 32, bonds: int = 72) -> None:
        super().__init__()
        self.atoms, self.into = atoms, nn.Linear(16, width)
        self.kinds = nn.ModuleList(nn.Embedding(8, width) for _ in range(layers))
        self.mlps = nn.ModuleList(self._mlp(width) for _ in range(layers))
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for _ in range(layers))
        self.alls = nn.ModuleList(self._mlp(width) for _ in range(layers - 1))
        self.out = nn.Linear(width, 128)
        chosen = torch.Generator().manual_seed(0)
        self.register_buffer("bonds", torch.randint(0, atoms, (2, bonds), generator=chosen))
        self.register_buffer("kind", torch.randint(0, 8, (bonds,), generator=chosen))

    @staticmethod
    def _mlp(width: int) -> nn.Module:
        return nn.Sequential(
            nn.Linear(width, 2 * width), nn.BatchNorm1d(2 * width), nn.ReLU(),
            nn.Linear(2 * width, width),
        )  # fmt: skip

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        graphs = torch.arange(x.shape[0], device=x.device)
        start, end = (self.bonds[:, None] + self.atoms * graphs[None, :, None]).flatten(1)
        kind, owner = self.kind.repeat(x.shape[0]), graphs.repeat_interleave(self.atoms)
        h = self.into(x.flatten(0, 1))
        total = h.new_zeros(x.shape[0], h.shape[1])
        for k, (kinds, mlp, norm) in enumerate(zip(self.kinds, self.mlps, self.norms, strict=True)):
            h = h + total[owner]
            sent = F.relu(h[start] + kinds(kind).to(h.dtype))
            h = norm(mlp(h + torch.zeros_like(h).index_add(0, end, sent)))
            if k < len(self.alls):
                h = F.dropout(F.relu(h), 0.5, self.training)
                total = self.alls[k](total.index_add(0, owner, h.to(total.dtype)))
        pooled = h.new_zeros(x.shape[0], h.shape[1]).index_add(0, owner, h) / self.atoms
        return F.binary_cross_entropy_with_logits(self.out(pooled).float(), y.float())


class Switch(nn.Module):
    """Experts of which one sees a token, no more tokens each than its capacity."""

    def __init__(self, width: int, experts: int = 16, inside: int = 2048) -> None:
        super().__init__()
        self.experts, self.gate = experts, nn.Linear(width, experts, bias=False)
        self.wide = nn.Parameter(0.02 * torch.randn(experts, width, inside))
        self.narrow = nn.Parameter(0.02 * torch.randn(experts, inside, width))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = x.flatten(0, 1)
        odds = self.gate(h).float().softmax(-1)
        share, chosen = odds.max(-1)
        hot = F.one_hot(chosen, self.experts)
        place = (hot.cumsum(0) * hot).sum(-1) - 1
        most = (5 * h.shape[0]) // (4 * self.experts)
        slot = torch.where(place < most, chosen * most + place, self.experts * most)
        kept = h.new_zeros(self.experts * most + 1, h.shape[1]).index_copy(0, slot, h)
        sent = kept[:-1].unflatten(0, (self.experts, most))
        made = torch.bmm(F.gelu(torch.bmm(sent, self.wide)), self.narrow).flatten(0, 1)
        back = F.pad(made, (0, 0, 0, 1))[slot] * share[:, None].to(made.dtype)
        even = (hot.float().mean(0) * odds.mean(0)).sum() * self.experts
        return back.view_as(x), even


class SwitchWords(nn.Module):
    """A causal language model, every other perceptron of it routed to experts."""

    def __init__(self, vocabulary: int = 32000, width: int = 512, layers: int = 8) -> None:
        super().__init__()
        self.heads, self.embedding = 8, nn.Embedding(vocabulary, width)
        self.place = nn.Parameter(0.02 * torch.randn(1024, width))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * layers + 1))
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
        self.mix = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.mlps = nn.ModuleList(
            Switch(width) if k % 2 else perceptron(width, 4 * width) for k in range(layers)
        )
        self.out = nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.embedding(x) + self.place[: x.shape[1]]
        uneven = 0.0
        for k, (qkv, mix, mlp) in enumerate(zip(self.qkv, self.mix, self.mlps, strict=True)):
            parts = qkv(self.norms[2 * k](h)).unflatten(2, (3, self.heads, -1))
            mixed = F.scaled_dot_product_attention(
                *parts.permute(2, 0, 3, 1, 4).unbind(0), is_causal=True
            )
            h = h + mix(mixed.transpose(1, 2).flatten(2))
            seen = self.norms[2 * k + 1](h)
            if k % 2:
                made, even = mlp(seen)
                h, uneven = h + made, uneven + even
            else:
                h = h + mlp(seen)
        scores = self.out(self.norms[-1](h))
        return F.cross_entropy(scores[:, :-1].flatten(0, 1), y[:, 1:].flatten()) + 0.01 * uneven


class QFrames(nn.Module):
    """Double Q-learning from four frames, a duelling head, a copy of the net that stays."""

    def __init__(self, moves: int = 18) -> None:
        super().__init__()
        self.moves = moves
        self.now, self.later = (nn.ModuleList(self._net(moves)) for _ in range(2))
        self.later.requires_grad_(requires_grad=False)

    @staticmethod
    def _net(moves: int) -> list[nn.Module]:
        seen = nn.Sequential(
            nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(),
            nn.Conv2d(64, 64, 3), nn.ReLU(), nn.Flatten(),
        )  # fmt: skip
        ends = (nn.Sequential(nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, n)) for n in (moves, 1))  # noqa: E501  # fmt: skip
        return [seen, *ends]

    @staticmethod
    def _worth(net: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        seen = net[0](x)
        gain, value = net[1](seen), net[2](seen)
        return value + gain - gain.mean(1, keepdim=True)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        frames = x / 255
        first, second = frames[:, :4], frames[:, 4:]
        worth = self._worth(self.now, first).gather(1, y[:, None]).squeeze(1)
        with torch.no_grad():
            best = self._worth(self.now, second).argmax(1)
            ahead = self._worth(self.later, second).gather(1, best[:, None]).squeeze(1)
            goal = x[:, 0, 0, 0].sign() + 0.99 * ahead
        return F.smooth_l1_loss(worth.float(), goal.float())


class TwoTowers(nn.Module):
    """A recommender: bags of embeddings on either side, every pair of a batch against all others."""  # noqa: E501

    def __init__(self, bags: int = 8, rows: int = 30000, width: int = 128) -> None:
        super().__init__()
        self.bags = bags
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="mean") for _ in range(2 * bags))  # noqa: E501  # fmt: skip
        self.towers = nn.ModuleList(
            nn.Sequential(
                nn.Linear(bags * width, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(),
                nn.Linear(512, 128),
            ) for _ in range(2)
        )  # fmt: skip

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        ids = x.unflatten(1, (2 * self.bags, -1)).unbind(1)
        found = [table(i) for table, i in zip(self.tables, ids, strict=True)]
        sides = torch.cat(found[: self.bags], 1), torch.cat(found[self.bags :], 1)
        user, item = (
            F.normalize(tower(side), dim=1) for tower, side in zip(self.towers, sides, strict=True)
        )
        scores = user @ item.transpose(0, 1) * 20
        return F.cross_entropy(scores, torch.arange(x.shape[0], device=x.device))


BLIND: dict[str, Model] = {
    "conformer": Model(Conformer, "adamw", 16, numbers(800, 80, of=128, scores=(40,))),
    "slowfast": Model(SlowFast, "sgd", 8, numbers(3, 32, 112, 112, of=400)),
    "segformer": Model(SegmentingTransformer, "adamw", 8, numbers(3, 256, 256, of=21, scores=(256, 256)), is_image=True),  # noqa: E501
    "latent_diffusion": Model(LatentDiffusion, "adamw", 16, numbers(4, 32, 32), is_image=True),
    "molecules": Model(Molecules, "adamw", 1024, numbers(32, 16, of=2, scores=(128,))),
    "switch": Model(SwitchWords, "adamw", 8, words(512)),
    "dqn": Model(QFrames, "adamw", 512, numbers(8, 84, 84, of=18), is_image=True),
    "two_tower": Model(TwoTowers, "adamw", 4096, words(160)),
}  # fmt: skip
