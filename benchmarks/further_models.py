"""Models of kinds that nothing was fitted to, each with its loss, that `measure_variants.py` runs.

Volumes, long texts, a state-space layer, radiance fields, dilated sound, detection, two networks
against each other, messages on a graph, an actor with two critics.
"""

import torch
import torch.nn.functional as F
from torch import nn
from variant_models import Model, Words, numbers, words


class Volume(nn.Module):
    """Two 3-D convolutions, each behind it an instance norm and a leaky ReLU."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv3d(inside, outside, 3, padding=1), nn.InstanceNorm3d(outside, affine=True),
            nn.LeakyReLU(0.01), nn.Conv3d(outside, outside, 3, padding=1),
            nn.InstanceNorm3d(outside, affine=True), nn.LeakyReLU(0.01),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class VolumeNet(nn.Module):
    """A U-Net over volumes of 64³: segmentation of scans."""

    def __init__(self, widths: tuple[int, ...] = (32, 64, 128, 256), classes: int = 4) -> None:
        super().__init__()
        ends = (1, *widths[:-1])
        self.down = nn.ModuleList(Volume(a, b) for a, b in zip(ends, widths, strict=True))
        pairs = list(zip(widths[1:], widths[:-1], strict=True))[::-1]
        self.grow = nn.ModuleList(nn.ConvTranspose3d(a, b, 2, 2) for a, b in pairs)
        self.up = nn.ModuleList(Volume(2 * b, b) for _, b in pairs)
        self.out = nn.Conv3d(widths[0], classes, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        kept = []
        for k, down in enumerate(self.down):
            x = down(F.max_pool3d(x, 2) if k else x)
            kept.append(x)
        kept.pop()
        for grow, up in zip(self.grow, self.up, strict=True):
            x = up(torch.cat([grow(x), kept.pop()], 1))
        return F.cross_entropy(self.out(x), y)


def long_bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return Words(BertForMaskedLM(BertConfig(num_hidden_layers=6, max_position_embeddings=2048)))


class StateSpace(nn.Module):
    """A selective state-space layer, its scan in chunks as plain matmuls."""

    def __init__(self, width: int, heads: int = 16, state: int = 64, chunk: int = 64) -> None:
        super().__init__()
        inside = 2 * width
        self.sizes, self.heads, self.state, self.chunk = (inside, inside, state, state, heads), heads, state, chunk  # noqa: E501  # fmt: skip
        self.norm, self.last = nn.LayerNorm(width), nn.LayerNorm(inside)
        self.into, self.out = nn.Linear(width, sum(self.sizes)), nn.Linear(inside, width)
        self.mix = nn.Conv1d(inside, inside, 4, padding=3, groups=inside)
        self.rate = nn.Parameter(torch.zeros(heads))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z, v, b, c, dt = self.into(self.norm(x)).split(self.sizes, -1)
        v = F.silu(self.mix(v.transpose(1, 2))[..., : v.shape[1]].transpose(1, 2))
        v = v.unflatten(2, (self.heads, -1))
        dt = F.softplus(dt)
        decay = -torch.exp(self.rate) * dt
        v, b, c, decay = (
            t.unflatten(1, (-1, self.chunk)) for t in (v * dt[..., None], b, c, decay)
        )
        total = decay.cumsum(2)
        ahead = total[:, :, :, None] - total[:, :, None]
        mask = torch.ones(self.chunk, self.chunk, device=x.device, dtype=torch.bool).tril()
        share = ahead.masked_fill(~mask[..., None], float("-inf")).exp()
        inner = torch.einsum("gnls,gnlsh,gnshp->gnlhp", c @ b.transpose(2, 3), share, v)
        ends = torch.einsum("gnls,gnlh,gnlhp->gnhps", b, (total[:, :, -1:] - total).exp(), v)
        state, states = torch.zeros_like(ends[:, 0]), []
        for k in range(ends.shape[1]):
            states.append(state)
            state = state * total[:, k, -1].exp()[..., None, None] + ends[:, k]
        before = torch.stack(states, 1)
        outer = torch.einsum("gnls,gnhps,gnlh->gnlhp", c, before, total.exp())
        y = (inner + outer).flatten(1, 2).flatten(2)
        return x + self.out(self.last(y) * F.silu(z))


class StateSpaceWords(nn.Module):
    """A language model of state-space layers."""

    def __init__(self, vocabulary: int = 32000, width: int = 512, layers: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(StateSpace(width) for _ in range(layers))
        self.out = nn.Linear(width, vocabulary)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.embedding(x)
        for layer in self.layers:
            h = layer(h)
        return F.cross_entropy(self.out(h).flatten(0, 1), y.flatten())


class Radiance(nn.Module):
    """A radiance field: points on rays, sines of their places, eight layers, colours added up."""

    def __init__(self, width: int = 256, octaves: int = 10, points: int = 64) -> None:
        super().__init__()
        self.octaves, self.points = octaves, points
        size = 3 + 6 * octaves
        self.first = nn.ModuleList([nn.Linear(size, width), *(nn.Linear(width, width) for _ in range(4))])  # noqa: E501  # fmt: skip
        self.second = nn.ModuleList([nn.Linear(size + width, width), *(nn.Linear(width, width) for _ in range(2))])  # noqa: E501  # fmt: skip
        self.colour, self.density = nn.Linear(width, 3), nn.Linear(width, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        depth = torch.linspace(2.0, 6.0, self.points, device=x.device)
        places = x[:, None, :3] + depth[None, :, None] * F.normalize(x[:, None, 3:6], dim=-1)
        angles = places[..., None] * 2.0 ** torch.arange(self.octaves, device=x.device)
        seen = torch.cat([places, angles.sin().flatten(2), angles.cos().flatten(2)], -1)
        h = seen
        for layer in self.first:
            h = F.relu(layer(h))
        h = torch.cat([h, seen], -1)
        for layer in self.second:
            h = F.relu(layer(h))
        alpha = 1 - torch.exp(-F.relu(self.density(h)).squeeze(-1) * (4.0 / self.points))
        free = torch.cumprod(1 - alpha + 1e-10, 1) / (1 - alpha + 1e-10)
        picture = ((alpha * free)[..., None] * torch.sigmoid(self.colour(h))).sum(1)
        return F.mse_loss(picture, x[:, 6:9])


class Dilated(nn.Module):
    """WaveNet: gated 1-D convolutions of growing dilation, their skips added up."""

    def __init__(self, width: int = 64, skip: int = 256, blocks: int = 3, layers: int = 10) -> None:
        super().__init__()
        self.steps = [2**k for _ in range(blocks) for k in range(layers)]
        self.first = nn.Conv1d(1, width, 1)
        self.gates = nn.ModuleList(nn.Conv1d(width, 2 * width, 2, dilation=d) for d in self.steps)
        self.skips = nn.ModuleList(nn.Conv1d(width, skip, 1) for _ in self.steps)
        self.rest = nn.ModuleList(nn.Conv1d(width, width, 1) for _ in self.steps)
        self.out = nn.Sequential(nn.ReLU(), nn.Conv1d(skip, skip, 1), nn.ReLU(), nn.Conv1d(skip, 256, 1))  # noqa: E501  # fmt: skip

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x, total = self.first(x), 0.0
        for step, gate, skip, rest in zip(
            self.steps, self.gates, self.skips, self.rest, strict=True
        ):
            a, b = gate(F.pad(x, (step, 0))).chunk(2, 1)
            h = torch.tanh(a) * torch.sigmoid(b)
            total, x = total + skip(h), x + rest(h)
        return F.cross_entropy(self.out(total), y)


class Detection(nn.Module):
    """Detection by a transformer: ResNet features, an encoder, a decoder of 100 queries."""

    def __init__(self, width: int = 256, queries: int = 100, classes: int = 91) -> None:
        super().__init__()
        import torchvision

        net = torchvision.models.resnet50(weights=None, norm_layer=torchvision.ops.FrozenBatchNorm2d)  # noqa: E501  # fmt: skip
        self.features = nn.Sequential(*list(net.children())[:-2])
        self.narrow = nn.Conv2d(2048, width, 1)
        self.transformer = nn.Transformer(width, 8, 3, 3, 1024, dropout=0.1, batch_first=True)
        self.queries = nn.Parameter(torch.randn(queries, width))
        self.rows, self.columns = (nn.Parameter(torch.randn(50, width // 2)) for _ in range(2))
        self.classes, self.boxes = nn.Linear(width, classes), nn.Linear(width, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.narrow(self.features(x))
        n, _, rows, columns = h.shape
        place = torch.cat(
            [
                self.columns[:columns][None].expand(rows, -1, -1),
                self.rows[:rows][:, None].expand(-1, columns, -1),
            ],
            -1,
        )
        seen = h.flatten(2).transpose(1, 2) + place.flatten(0, 1)
        found = self.transformer(seen, self.queries.expand(n, -1, -1))
        boxes = self.boxes(found).sigmoid()
        wanted = x[:, :, :100, :4].mean(1).abs()
        return F.cross_entropy(self.classes(found).flatten(0, 1), y.flatten()) + F.l1_loss(boxes, wanted)  # noqa: E501  # fmt: skip


class Adversaries(nn.Module):
    """A generator of images of 64 × 64 and its discriminator, both losses in one step."""

    def __init__(self, width: int = 64, code: int = 128) -> None:
        super().__init__()
        self.code = code
        sizes = [code, 8 * width, 4 * width, 2 * width, width]
        layers: list[nn.Module] = []
        for k in range(4):
            layers += [
                nn.ConvTranspose2d(sizes[k], sizes[k + 1], 4, 2 if k else 1, 1 if k else 0, bias=False),  # noqa: E501
                nn.BatchNorm2d(sizes[k + 1]), nn.ReLU(True),
            ]  # fmt: skip
        self.generator = nn.Sequential(*layers, nn.ConvTranspose2d(width, 3, 4, 2, 1), nn.Tanh())
        sizes, layers = [3, width, 2 * width, 4 * width, 8 * width], []
        for k in range(4):
            norm = [nn.BatchNorm2d(sizes[k + 1])] if k else []
            layers += [nn.Conv2d(sizes[k], sizes[k + 1], 4, 2, 1, bias=False), *norm, nn.LeakyReLU(0.2, True)]  # noqa: E501  # fmt: skip
        self.discriminator = nn.Sequential(*layers, nn.Conv2d(8 * width, 1, 4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        made = self.generator(torch.randn(x.shape[0], self.code, 1, 1, device=x.device))
        real, fake = self.discriminator(x), self.discriminator(made.detach())
        fooled = self.discriminator(made)
        return F.softplus(-real).mean() + F.softplus(fake).mean() + F.softplus(-fooled).mean()


class Messages(nn.Module):
    """GraphSAGE by the largest message of each node's edges, four layers with layer norms."""

    def __init__(self, width: int = 256, edges: int = 8, layers: int = 4) -> None:
        super().__init__()
        self.edges = edges
        self.into = nn.Linear(96, width)
        self.send, self.keep = (nn.ModuleList(nn.Linear(width, width) for _ in range(layers)) for _ in range(2))  # noqa: E501  # fmt: skip
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.out = nn.Linear(width, 47)
        self.register_buffer("ends", torch.zeros(0, dtype=torch.int64), persistent=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        start, end = self._edges(x.shape[0], x.device)
        h = F.relu(self.into(x))
        for send, keep, norm in zip(self.send, self.keep, self.norms, strict=True):
            sent = F.relu(send(h))[start]
            where = end[:, None].expand_as(sent)
            most = torch.zeros_like(h, dtype=sent.dtype).scatter_reduce(0, where, sent, "amax")
            h = norm(F.relu(keep(h) + most))
        return F.cross_entropy(self.out(h), y)

    def _edges(self, nodes: int, device: torch.device) -> torch.Tensor:
        if self.ends.shape[-1] != nodes * self.edges:
            torch.manual_seed(0)
            self.ends = torch.randint(0, nodes, (2, nodes * self.edges)).to(device)
        return self.ends


class ActorCritics(nn.Module):
    """Soft actor-critic: a squashed normal policy and two critics, both losses in one step."""

    def __init__(self, seen: int = 48, moves: int = 12, width: int = 512) -> None:
        super().__init__()
        self.seen, self.moves = seen, moves

        def net(a: int, b: int) -> nn.Module:
            return nn.Sequential(
                nn.Linear(a, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
                nn.Linear(width, b),
            )  # fmt: skip

        self.actor = net(seen, 2 * moves)
        self.critics = nn.ModuleList(net(seen + moves, 1) for _ in range(2))

    def _act(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean, log = self.actor(x).chunk(2, 1)
        log = log.clamp(-20, 2)
        noise = torch.randn_like(mean)
        move = torch.tanh(mean + noise * log.exp())
        odds = (-0.5 * noise.square() - log - torch.log(1 - move.square() + 1e-6)).sum(1)
        return move, odds

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        now, done, later = x.split((self.seen, self.moves, self.seen), 1)
        with torch.no_grad():
            move, odds = self._act(later)
            value = torch.minimum(
                *(c(torch.cat([later, move], 1)).squeeze(1) for c in self.critics)
            )
            goal = 0.99 * (value - 0.2 * odds)
        judged = sum(
            F.mse_loss(c(torch.cat([now, done], 1)).squeeze(1).float(), goal.float())
            for c in self.critics
        )
        move, odds = self._act(now)
        worth = torch.minimum(*(c(torch.cat([now, move], 1)).squeeze(1) for c in self.critics))
        return judged + (0.2 * odds - worth).mean()


FURTHER: dict[str, Model] = {
    "unet3d": Model(VolumeNet, "adamw", 2, numbers(1, 64, 64, 64, of=4, scores=(64, 64, 64))),
    "bert_long": Model(long_bert, "adamw", 4, words(2048)),
    "state_space": Model(StateSpaceWords, "adamw", 8, words(512)),
    "radiance": Model(Radiance, "adamw", 2048, numbers(9)),
    "wavenet": Model(Dilated, "adamw", 4, numbers(1, 8000, of=256, scores=(8000,))),
    "detection": Model(Detection, "adamw", 4, numbers(3, 512, 512, of=91, scores=(100,)), is_image=True),  # noqa: E501
    "gan": Model(Adversaries, "adamw", 128, numbers(3, 64, 64), is_image=True),
    "sage": Model(Messages, "adamw", 60000, numbers(96, of=47)),
    "sac": Model(ActorCritics, "adamw", 1024, numbers(108)),
}  # fmt: skip
