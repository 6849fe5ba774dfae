"""Models of images farther off: MLP-Mixer, PVT, attention along stripes, YOLO and RCAN.

They widen what is trained on by layers across tokens, positions looked up in a table, stripes,
pools side by side, boxes and gated channels. None of them is a model kept out of training.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from foretell_lab.fused.models.far_image import Excite, unfolded
from foretell_lab.fused.models.image import _image, _square
from foretell_lab.fused.models.parts import (
    BatchNorm,
    Conv,
    LayerNorm,
    Linear,
    noise,
    stored,
)
from foretell_lab.fused.models.text import Made, heads_of, merged, softmax_attention

Tensor = Any


class Across(nn.Module):  # type: ignore[misc]
    """MLP-Mixer: a layer across tokens, then one across channels."""

    def __init__(self, tokens: int, width: int, inner: int, precision: str) -> None:
        super().__init__()
        self.norms = nn.ModuleList([LayerNorm(width, precision) for _ in range(2)])
        sizes = ((tokens, inner), (inner, tokens), (width, 4 * width), (4 * width, width))
        self.layers = nn.ModuleList([Linear(a, b, precision) for a, b in sizes])

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x).transpose(1, 2)
        x = x + self.layers[1](F.gelu(self.layers[0](y))).transpose(1, 2)
        return x + self.layers[3](F.gelu(self.layers[2](self.norms[1](x))))


class Mixed(nn.Module):  # type: ignore[misc]
    """Patches, two blocks, the mean of all tokens and a loss with softened labels."""

    def __init__(self, sizes: tuple[int, int, int, int], precision: str) -> None:
        super().__init__()
        side, patch, width, inner = sizes
        self.patch = Conv(3, width, patch, precision, patch, bias=True)
        self.patch.pad = 0
        tokens = (side // patch) ** 2
        self.blocks = nn.Sequential(*(Across(tokens, width, inner, precision) for _ in range(2)))
        self.norm, self.head = LayerNorm(width, precision), Linear(width, 1000, precision)

    def forward(self, x: Tensor) -> Tensor:
        y = self.blocks(self.patch(x).flatten(2).transpose(1, 2))
        return self.head(self.norm(y).mean(1))


def _softened(y: Tensor) -> Tensor:
    """Cross entropy where a tenth of the certainty is spread over all classes."""
    scores = F.log_softmax(y.float(), -1)
    return -(0.9 * scores[:, 0] + 0.1 * scores.mean(-1)).mean()


def mlpmixer(chance: Random, precision: str) -> Made:
    """Two blocks of an MLP-Mixer with both ends."""
    sizes = chance.choice(
        ((224, 16, 512, 256), (224, 32, 768, 384), (224, 16, 768, 384), (256, 16, 320, 200),
         (192, 16, 1000, 320), (224, 14, 384, 96), (160, 32, 576, 120))
    )  # fmt: skip
    x = _image(chance, precision, 3, sizes[0]).detach()[:96].requires_grad_(True)
    return Mixed(sizes, precision), (x,), _softened


class Pooled(nn.Module):  # type: ignore[misc]
    """PVT: keys of a pooled image, positions from a table, a depthwise filter between layers."""

    def __init__(self, c: int, heads: int, side: int, ratio: int, precision: str) -> None:
        super().__init__()
        self.q, self.kv, self.out = (Linear(c, n * c, precision) for n in (1, 2, 1))
        self.norms = nn.ModuleList([LayerNorm(c, precision) for _ in range(3)])
        self.up, self.down = Linear(c, 4 * c, precision), Linear(4 * c, c, precision)
        self.deep = Conv(4 * c, 4 * c, 3, precision, groups=4 * c, bias=True)
        self.table = nn.Parameter(torch.empty((2 * side) ** 2, heads, dtype=stored(precision)))
        self.heads, self.side, self.ratio, self.precision = heads, side, ratio, precision

    def _mixed(self, x: Tensor, at: Tensor) -> Tensor:
        b, _, c = x.shape
        y = self.norms[0](x)
        image = y.transpose(1, 2).reshape(b, c, self.side, self.side)
        small = F.avg_pool2d(image, self.ratio).flatten(2).transpose(1, 2)
        small = F.gelu(self.norms[1](small))
        k, v = (heads_of(t, self.heads) for t in self.kv(small).chunk(2, -1))
        bias = self.table[at].permute(2, 0, 1)
        q = heads_of(self.q(y), self.heads)
        return self.out(merged(softmax_attention(q, k, v, self.precision, bias=bias)))

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        x = x + self._mixed(x, at)
        y = self.up(self.norms[2](x))
        b, _, n = y.shape
        image = self.deep(y.transpose(1, 2).reshape(b, n, self.side, self.side))
        return x + self.down(F.gelu(image.flatten(2).transpose(1, 2)))


def pvt(chance: Random, precision: str) -> Made:
    """A block of a pyramid vision transformer."""
    c, heads, side, ratio = chance.choice(
        ((64, 1, 56, 8), (32, 1, 56, 8), (128, 2, 28, 4), (160, 5, 28, 4), (320, 5, 14, 2),
         (256, 8, 16, 2), (512, 8, 14, 2), (96, 3, 32, 4))
    )  # fmt: skip
    x = noise(chance.choice((2, 4, 8, 16, 32, 64)), side * side, c, precision=precision, grad=True)
    at = torch.zeros(side * side, (side // ratio) ** 2, dtype=torch.int64)
    return Pooled(c, heads, side, ratio, precision), (x, at), _square


class Stripes(nn.Module):  # type: ignore[misc]
    """CSWin: half the heads look along rows, half along columns; a filter tells the places."""

    def __init__(self, c: int, heads: int, stripe: int, precision: str) -> None:
        super().__init__()
        self.norms = nn.ModuleList([LayerNorm(c, precision) for _ in range(2)])
        self.qkv, self.out = Linear(c, 3 * c, precision, False), Linear(c, c, precision)
        self.up, self.down = Linear(c, 4 * c, precision), Linear(4 * c, c, precision)
        self.near = nn.ModuleList(
            [Conv(c // 2, c // 2, 3, precision, groups=c // 2, bias=True) for _ in range(2)]
        )
        self.heads, self.stripe, self.precision = heads, stripe, precision

    def _along(self, qkv: Tensor, flat: bool, near: nn.Module) -> Tensor:
        _, b, h, w, c = qkv.shape
        n = self.stripe
        m, k = (n, w) if flat else (h, n)  # a stripe's rows and columns
        cut = qkv.reshape(3, b, h // m, m, w // k, k, c).permute(0, 1, 2, 4, 3, 5, 6)
        q, k_, v = cut.reshape(3, -1, m * k, c).unbind(0)
        image = v.view(-1, m, k, c).permute(0, 3, 1, 2)
        places = near(image).flatten(2).transpose(1, 2)
        q, k_, heads = (heads_of(t, self.heads // 2) for t in (q, k_, v))
        y = merged(softmax_attention(q, k_, heads, self.precision)) + places
        y = y.view(b, h // m, w // k, m, k, c).transpose(2, 3)
        return y.reshape(b, h, w, c)

    def forward(self, x: Tensor) -> Tensor:
        b, h, w, c = x.shape
        qkv = self.qkv(self.norms[0](x)).view(b, h, w, 3, c).permute(3, 0, 1, 2, 4)
        parts = [self._along(qkv[..., i * c // 2 :][..., : c // 2], i == 0, near)
                 for i, near in enumerate(self.near)]  # fmt: skip
        x = x + self.out(torch.cat(parts, -1))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


def cswin(chance: Random, precision: str) -> Made:
    """A block of attention along stripes; a stripe of one is axial attention."""
    c, heads, side, stripe = chance.choice(
        ((64, 2, 56, 1), (64, 4, 28, 2), (96, 4, 28, 2), (128, 4, 28, 7), (192, 8, 24, 1),
         (256, 8, 14, 7), (384, 12, 16, 2), (80, 2, 32, 1))
    )  # fmt: skip
    x = noise(chance.choice((2, 4, 8, 16, 32)), side, side, c, precision=precision, grad=True)
    return Stripes(c, heads, stripe, precision), (x,), _square


class Partial(nn.Module):  # type: ignore[misc]
    """YOLO: half the channels go round, Mish, pools of three sizes side by side, boxes."""

    def __init__(self, c: int, precision: str) -> None:
        super().__init__()
        n = c // 2
        sizes = ((c, n, 1), (c, n, 1), (n, n, 1), (n, n, 3), (c, c, 1), (4 * c, c, 1))
        self.convs = nn.ModuleList([Conv(a, b, k, precision) for a, b, k in sizes])
        self.norms = nn.ModuleList([BatchNorm(b, precision) for _, b, _ in sizes])
        self.end = Conv(c, 3 * 25, 1, precision, bias=True)

    def _next(self, i: int, x: Tensor) -> Tensor:
        return F.mish(self.norms[i](self.convs[i](x)))

    def forward(self, x: Tensor) -> Tensor:
        a, b = self._next(0, x), self._next(1, x)
        b = b + self._next(3, self._next(2, b))
        y = self._next(4, torch.cat((a, b), 1))
        pools = [F.max_pool2d(y, k, 1, k // 2) for k in (5, 9, 13)]
        y = self.end(self._next(5, torch.cat((y, *pools), 1)))
        return y.view(len(y), 3, 25, *y.shape[2:]).permute(0, 1, 3, 4, 2)


def _boxes(y: Tensor) -> Tensor:
    """Overlap of boxes with unit ones, and a focal loss over classes."""
    y = y.float()
    middle, size = torch.sigmoid(y[..., :2]) * 2 - 0.5, (torch.sigmoid(y[..., 2:4]) * 2).square()
    low, high = torch.maximum(middle - size / 2, -size), torch.minimum(middle + size / 2, size)
    width, height = (high - low).clamp_min(0).unbind(-1)
    both = width * height
    overlap = both / (size[..., 0] * size[..., 1] + 1 - both + 1e-7)
    p, wanted = torch.sigmoid(y[..., 5:]), overlap.detach().unsqueeze(-1)
    surely = p * wanted + (1 - p) * (1 - wanted)
    focal = -((1 - surely) ** 1.5) * torch.log(surely + 1e-9)
    return (1 - overlap).mean() + focal.mean() + F.softplus(-y[..., 4]).mean()


def yolo(chance: Random, precision: str) -> Made:
    """A stage of YOLO with its boxes."""
    c, side = chance.choice(((64, 40), (128, 40), (128, 20), (256, 20), (320, 16), (512, 13)))
    x = _image(chance, precision, c, side).detach()[:64].requires_grad_(True)
    return Partial(c, precision), (x,), _boxes


class Sharper(nn.Module):  # type: ignore[misc]
    """RCAN: residual blocks with gated channels, then an image unfolded from channels."""

    def __init__(self, c: int, precision: str) -> None:
        super().__init__()
        self.convs = nn.ModuleList([Conv(c, c, 3, precision, bias=True) for _ in range(4)])
        self.gates = nn.ModuleList([Excite(c, max(4, c // 16), precision, F.relu) for _ in "ab"])
        self.up, self.end = Conv(c, 4 * c, 3, precision, bias=True), Conv(c, 3, 3, precision)
        self.slope = nn.Parameter(torch.full((c, 1, 1), 0.25, dtype=stored(precision)))

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for i, gate in enumerate(self.gates):
            z = self.convs[2 * i](y)
            z = self.convs[2 * i + 1](F.relu(z) - self.slope * F.relu(-z))
            y = y + 0.1 * gate(z)
        return self.end(unfolded(self.up(y + x))) * 127.5 + 114.4


def _charbonnier(y: Tensor) -> Tensor:
    """A smooth distance, and how rough the image is along rows and columns."""
    y = y.float()
    rough = (y[..., 1:] - y[..., :-1]).abs().mean() + (y[..., 1:, :] - y[..., :-1, :]).abs().mean()
    return torch.sqrt((y - 127.0).square() + 1e-6).mean() + 1e-3 * rough


def rcan(chance: Random, precision: str) -> Made:
    """Two blocks of a network that sharpens images."""
    c, side = chance.choice(
        ((32, 96), (64, 48), (64, 64), (96, 40), (48, 72), (128, 24), (180, 32))
    )
    x = _image(chance, precision, c, side).detach()[:32].requires_grad_(True)
    return Sharper(c, precision), (x,), _charbonnier


FAR_MIXED: dict[str, Callable[[Random, str], Made]] = {
    "mlpmixer": mlpmixer,
    "pvt": pvt,
    "cswin": cswin,
    "yolo": yolo,
    "rcan": rcan,
}
