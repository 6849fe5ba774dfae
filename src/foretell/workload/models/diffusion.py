"""Diffusion models: transformers over patches of a latent image (DiT) and U-Nets with attention.

A sample is one noised latent with its step and its condition. What makes latents (the autoencoder)
and conditions (the text encoder) is not trained and not counted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from foretell.errors import InputError
from foretell.spec import Spec
from foretell.workload.models import transformer
from foretell.workload.models.cnn import Image, Net
from foretell.workload.models.transformer import Piece
from foretell.workload.workload import Layer, Op, Tensor, Workload


@dataclass(frozen=True)
class Dit(Spec):
    """DiT (Peebles and Xie 2022): blocks shifted and scaled by the step; as it stands, DiT-XL/2."""

    name: ClassVar[str] = "dit"
    layers: int = 28
    hidden: int = 1152
    heads: int = 16
    inner: int = 0  # width of the feed-forward; 4 × hidden where 0
    image: int = 32  # side of the latent image
    channels: int = 4
    patch: int = 2
    classes: int = 1000
    context: int = 0  # words of a text that blocks also look at; none where 0
    width: int = 4096  # of such a word
    sigma: bool = True  # the noise's variance is predicted too
    batch: int = 32
    dtype: str = "bf16"

    def workload(self) -> Workload:
        """The model's layers."""
        if self.image % self.patch:
            raise InputError(f"an image of {self.image} has no whole patches of {self.patch}")
        seq = (self.image // self.patch) ** 2
        layers = (self._patches(seq), self._block(seq), self._last(seq))
        return Workload(str(self), layers, self.batch, self.dtype, tokens=seq)

    def _patches(self, seq: int) -> Layer:
        """Patches, and the embedding of step and class that every block reads."""
        net = Net(Image(self.channels, self.image, self.image))
        net.conv(self.hidden, self.patch, self.patch, pad=0, bias=True, norm=False, act="")
        table = {"tokens": 1.0, "hidden": float(self.hidden), "vocab": float(self.classes + 1)}
        words = (Tensor("classes", ("vocab", "hidden")),)
        pieces: list[Piece] = [
            *net.ops,
            _linear("step.in", 1, 256, self.hidden),
            _linear("step.out", 1, self.hidden, self.hidden),
            Op("classes", "embedding", table, {}, words),
        ]
        made = transformer.block("patches", pieces, seq, self.hidden, 1)
        return replace(made, is_block=False)

    def _block(self, seq: int) -> Layer:
        hidden, heads, inner = self.hidden, self.heads, self.inner or 4 * self.hidden
        depth = transformer.depth(hidden, heads)
        options = {"bias": True, "causal": False, "dropout": False}
        pieces: list[Piece] = [
            _linear("modulation", 1, hidden, 6 * hidden),
            *_modulated("norm.attention", seq, hidden),
            *transformer.attention(seq, hidden, heads, heads, depth, **options),
            *transformer.residual("residual.attention", seq, hidden, bias=True, dropout=False),
            *(self._cross(seq) if self.context else []),
            *_modulated("norm.mlp", seq, hidden),
            *transformer.feed_forward(seq, hidden, inner, bias=True),
            *transformer.residual("residual.mlp", seq, hidden, bias=True, dropout=False),
        ]
        return transformer.block("block", pieces, seq, hidden, self.layers)

    def _cross(self, seq: int) -> list[Piece]:
        found = crossed(seq, self.hidden, self.heads, self.context, self.width)
        added = transformer.residual("residual.cross", seq, self.hidden, bias=True, dropout=False)
        return [*found, *added]

    def _last(self, seq: int) -> Layer:
        out = self.patch**2 * self.channels * (2 if self.sigma else 1)
        rows = {"tokens": float(seq), "cols": float(out)}
        pieces: list[Piece] = [
            _linear("modulation", 1, self.hidden, 2 * self.hidden),
            *_modulated("norm", seq, self.hidden),
            _linear("pixels", seq, self.hidden, out),
            Op("loss", "pointwise", rows, options={"passes": 3.0, "back": 3.0}),
        ]
        made = transformer.block("head", pieces, seq, self.hidden, 1)
        return replace(made, is_block=False)


@dataclass(frozen=True)
class Unet(Spec):
    """A U-Net of residual blocks and attention to a text (Rombach et al. 2022).

    As it stands, that of Stable Diffusion 1.
    """

    name: ClassVar[str] = "unet"
    image: int = 64  # side of the latent image
    channels: int = 4
    width: int = 320
    levels: tuple[int, ...] = (1, 2, 4, 4)  # width of each level
    blocks: int = 2  # residual blocks of a level
    attended: int = 3  # levels with attention, from the first
    heads: int = 8
    depth: int = 0  # width of one head instead of their number (Stable Diffusion 2: 64)
    context: int = 77
    text: int = 768
    batch: int = 8
    dtype: str = "bf16"

    def workload(self) -> Workload:
        """Down the levels, through the middle, and up again past what was kept on the way."""
        net = Net(Image(self.channels, self.image, self.image), whole=True)
        step = 4 * self.width
        net.ops += [_linear("step.in", 1, self.width, step), _linear("step.out", 1, step, step)]
        net.conv(self.width, 3, bias=True, norm=False, act="")
        net.cut("stem", is_block=False)
        kept = self._down(net)
        self._residual(net, net.at.c)
        self._attention(net)
        self._residual(net, net.at.c)
        net.cut("middle")
        self._up(net, kept)
        self._normed(net, "out")
        net.conv(self.channels, 3, bias=True, norm=False, act="")
        net._point("loss", (), passes=3.0, back=3.0)
        net.cut("head", is_block=False)
        return Workload(str(self), tuple(_numbered(net.layers)), self.batch, self.dtype)

    def _down(self, net: Net) -> list[int]:
        kept = [net.at.c]
        for level, times in enumerate(self.levels):
            for _ in range(self.blocks):
                self._residual(net, times * self.width)
                if level < self.attended:
                    self._attention(net)
                kept.append(net.at.c)
                net.cut(f"down{level}")
            if level < len(self.levels) - 1:
                net.conv(net.at.c, 3, 2, pad=1, bias=True, norm=False, act="")
                kept.append(net.at.c)
                net.cut(f"shrink{level}")
        return kept

    def _up(self, net: Net, kept: list[int]) -> None:
        for level, times in reversed(list(enumerate(self.levels))):
            for _ in range(self.blocks + 1):
                net.join([net.at, net.at._replace(c=kept.pop())])
                self._residual(net, times * self.width)
                if level < self.attended:
                    self._attention(net)
                net.cut(f"up{level}")
            if level:
                net.at = net.at._replace(h=2 * net.at.h, w=2 * net.at.w)
                net.conv(net.at.c, 3, bias=True, norm=False, act="")
                net.cut(f"grow{level}")

    def _residual(self, net: Net, out: int) -> None:
        """Two convolutions behind group norms, the step between them, a shortcut where it grows."""
        c = net.at.c
        self._normed(net, "first")
        net.conv(out, 3, bias=True, norm=False, act="")
        net.ops.append(_linear(f"step{len(net.ops)}", 1, 4 * self.width, out))
        self._normed(net, "second")
        net.conv(out, 3, bias=True, norm=False, act="")
        if c != out:
            here, net.at = net.at, net.at._replace(c=c)
            net.conv(out, 1, bias=True, norm=False, act="")
            net.at = here
        net.add()

    def _normed(self, net: Net, name: str) -> None:
        """A group norm and SiLU."""
        net.norm(f"{name}.norm{len(net.ops)}")
        net.act("silu")

    def _attention(self, net: Net) -> None:
        """A transformer block over the pixels: themselves, the text, and a gated feed-forward."""
        seq, c = net.at.h * net.at.w, net.at.c
        heads = c // self.depth if self.depth else self.heads
        depth, options = transformer.depth(c, heads), {"causal": False, "dropout": False}
        net.norm(f"norm{len(net.ops)}")
        own = transformer.attention(
            seq, c, heads, heads, depth, bias=False, out_bias=True, **options
        )
        pieces: list[Piece] = [
            _linear("enter", seq, c, c),
            transformer.norm("norm.attention", seq, c),
            *own,
            *transformer.residual("residual.attention", seq, c, bias=False, dropout=False),
            transformer.norm("norm.cross", seq, c),
            *crossed(seq, c, heads, self.context, self.text, bias=False),
            *transformer.residual("residual.cross", seq, c, bias=False, dropout=False),
            transformer.norm("norm.mlp", seq, c),
            *transformer.feed_forward(seq, c, 4 * c, bias=True, gated=True, kernel="gelu"),
            *transformer.residual("residual.mlp", seq, c, bias=False, dropout=False),
            _linear("leave", seq, c, c),
        ]
        net.ops += [transformer.renamed(piece, f"text{len(net.ops)}") for piece in pieces]
        net.add()


def crossed(
    seq: int, hidden: int, heads: int, context: int, width: int, *, bias: bool = True
) -> list[Piece]:
    """Attention to words of a text that another model has made."""
    depth = transformer.depth(hidden, heads)
    dims = {"heads": heads, "queries": seq, "keys": context, "depth": depth}
    rows = ("batch", "heads", "queries", "depth")
    core = Op(
        "cross.attention",
        "attention",
        dims,
        {"tp": "heads", "cp": "queries"},
        saved=(Tensor("query", rows), Tensor("key and value", rows, times=2 * context / seq)),
        options={"causal": False, "dropout": False},
    )
    keys = transformer.column("cross.keys", context, width, 2 * hidden, bias=bias, most=heads)
    return [
        *transformer.enter("enter.cross", seq, hidden),
        transformer.column("cross.query", seq, hidden, hidden, bias=bias, most=heads),
        replace(keys, splits={"tp": "out"}),
        core,
        transformer.row("cross.projection", seq, hidden, hidden, bias=True, most=heads),
        *transformer.leave("leave.cross", seq, hidden),
    ]


def _modulated(name: str, seq: int, hidden: int) -> list[Piece]:
    """A norm without weights, shifted and scaled by what the block made of the step."""
    plain = replace(transformer.norm(name, seq, hidden), weights=())
    rows = {"tokens": float(seq), "cols": float(hidden)}
    options = {"passes": 2.0, "back": 3.0}
    return [plain, Op(f"{name}.scale", "pointwise", rows, transformer.ROWS, options=options)]


def _linear(name: str, tokens: int, inner: int, out: int) -> Op:
    weights = (Tensor(f"{name}.weight", ("in", "out")), Tensor(f"{name}.bias", ("out",)))
    dims = {"tokens": float(tokens), "in": float(inner), "out": float(out)}
    kept = (Tensor("input", ("batch", "tokens", "in")),)
    return Op(name, "matmul", dims, weights=weights, saved=kept)


def _numbered(layers: list[Layer]) -> list[Layer]:
    """Layers under names of their own: one that comes again is counted."""
    seen: dict[str, int] = {}
    out = []
    for layer in layers:
        seen[layer.name] = seen.get(layer.name, 0) + 1
        many = seen[layer.name]
        out.append(replace(layer, name=f"{layer.name}.{many}") if many > 1 else layer)
    return out
