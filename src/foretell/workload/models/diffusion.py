"""Diffusion models: transformers over patches of a latent image (DiT) and U-Nets with attention.

A sample is one noised latent with its step and its condition. What makes latents (the autoencoder)
and conditions (the text encoder) is not trained and not counted.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import ClassVar

from foretell.spec import Spec
from foretell.workload.models import transformer
from foretell.workload.models.cnn import Image, Net, patched, patches_of
from foretell.workload.models.transformer import Piece
from foretell.workload.models.transformer import linear_op as dense
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
        seq = patches_of(self.image, self.patch)
        layers = (self._patches(seq), self._block(seq), self._last(seq))
        return Workload(str(self), layers, self.batch, self.dtype, tokens=seq)

    def _patches(self, seq: int) -> Layer:
        """Patches, and the embedding of step and class that every block reads."""
        table = {"tokens": 1.0, "hidden": float(self.hidden), "vocab": float(self.classes + 1)}
        words = (Tensor("classes", ("vocab", "hidden")),)
        pieces: list[Piece] = [
            *patched(self.channels, self.image, self.patch, self.hidden),
            dense("step.in", 256, self.hidden, 1, keeps=True),
            dense("step.out", self.hidden, self.hidden, 1, keeps=True),
            Op("classes", "embedding", table, {}, words),
        ]
        return transformer.block_of("patches", pieces, seq, self.hidden, is_block=False)

    def _block(self, seq: int) -> Layer:
        hidden, heads, inner = self.hidden, self.heads, self.inner or 4 * self.hidden
        depth = transformer.head_width(hidden, heads)
        options = {"bias": True, "causal": False, "dropout": False}
        pieces: list[Piece] = [
            dense("modulation", hidden, 6 * hidden, 1, keeps=True),
            *_modulated("norm.attention", seq, hidden),
            *transformer.attention(seq, hidden, heads, heads, depth, **options),
            *transformer.residual("residual.attention", seq, hidden, bias=True),
        ]
        if self.context:
            pieces += crossed(seq, hidden, heads, self.context, self.width)
            pieces += transformer.residual("residual.cross", seq, hidden, bias=True)
        pieces += [
            *_modulated("norm.mlp", seq, hidden),
            *transformer.feed_forward(seq, hidden, inner, bias=True),
            *transformer.residual("residual.mlp", seq, hidden, bias=True),
        ]
        return transformer.block_of("block", pieces, seq, hidden, self.layers)

    def _last(self, seq: int) -> Layer:
        out = self.patch**2 * self.channels * (2 if self.sigma else 1)
        rows = {"tokens": float(seq), "cols": float(out)}
        pieces: list[Piece] = [
            dense("modulation", self.hidden, 2 * self.hidden, 1, keeps=True),
            *_modulated("norm", seq, self.hidden),
            dense("pixels", self.hidden, out, seq, keeps=True),
            Op("loss", "pointwise", rows, options={"passes": 3.0, "back": 3.0}),
        ]
        return transformer.block_of("head", pieces, seq, self.hidden, is_block=False)


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
        net.ops += [dense("step.in", self.width, step, 1, keeps=True)]
        net.ops += [dense("step.out", step, step, 1, keeps=True)]
        net.plain(self.width, 3)
        net.cut("stem", is_block=False)
        kept = self._down(net)
        self._residual(net, net.at.c)
        self._attention(net)
        self._residual(net, net.at.c)
        net.cut("middle")
        self._up(net, kept)
        self._normed(net, "out")
        net.plain(self.channels, 3)
        net.point("loss", (), passes=3.0, back=3.0)
        net.cut("head", is_block=False)
        seen: Counter[str] = Counter()
        layers = []
        for layer in net.layers:  # a name that comes again is counted
            seen[layer.name] += 1
            many = seen[layer.name]
            layers.append(replace(layer, name=f"{layer.name}.{many}") if many > 1 else layer)
        return Workload(str(self), tuple(layers), self.batch, self.dtype)

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
                net.plain(net.at.c, 3, 2)
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
                net.plain(net.at.c, 3)
                net.cut(f"grow{level}")

    def _residual(self, net: Net, out: int) -> None:
        """Two convolutions behind group norms, the step between them, a shortcut where it grows."""
        c = net.at.c
        self._normed(net, "first")
        net.plain(out, 3)
        net.ops.append(dense(f"step{len(net.ops)}", 4 * self.width, out, 1, keeps=True))
        self._normed(net, "second")
        net.plain(out, 3)
        if c != out:
            here, net.at = net.at, net.at._replace(c=c)
            net.plain(out)
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
        depth, options = transformer.head_width(c, heads), {"causal": False, "dropout": False}
        net.norm(f"norm{len(net.ops)}")
        own = transformer.attention(
            seq, c, heads, heads, depth, bias=False, out_bias=True, **options
        )
        pieces: list[Piece] = [
            dense("enter", c, c, seq, keeps=True),
            transformer.norm_op("norm.attention", seq, c),
            *own,
            *transformer.residual("residual.attention", seq, c),
            transformer.norm_op("norm.cross", seq, c),
            *crossed(seq, c, heads, self.context, self.text, bias=False),
            *transformer.residual("residual.cross", seq, c),
            transformer.norm_op("norm.mlp", seq, c),
            *transformer.feed_forward(seq, c, 4 * c, bias=True, gated=True, kernel="gelu"),
            *transformer.residual("residual.mlp", seq, c),
            dense("leave", c, c, seq, keeps=True),
        ]
        net.ops += [transformer.renamed(piece, f"text{len(net.ops)}") for piece in pieces]
        net.add()


def crossed(
    seq: int, hidden: int, heads: int, context: int, width: int, *, bias: bool = True
) -> list[Piece]:
    """Attention to words of a text that another model has made."""
    depth = transformer.head_width(hidden, heads)
    dims = {"heads": heads, "queries": seq, "keys": context, "depth": depth}
    rows = ("batch", "heads", "queries", "depth")
    saved = (Tensor("query", rows), Tensor("key and value", rows, times=2 * context / seq))
    options = {"causal": False, "dropout": False}
    split = {"tp": "heads", "cp": "queries"}
    core = Op("cross.attention", "attention", dims, split, saved=saved, options=options)
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
    plain = replace(transformer.norm_op(name, seq, hidden), weights=())
    rows = {"tokens": float(seq), "cols": float(hidden)}
    options = {"passes": 2.0, "back": 3.0}
    return [plain, Op(f"{name}.scale", "pointwise", rows, transformer.ROWS, options=options)]
