"""FLAVA (Singh et al. 2022, arXiv 2112.04482): an encoder for images, one for words, one for both.

The two encoders do not wait for each other; the third reads what both made, side by side.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from foretell.errors import InputError
from foretell.spec import Spec
from foretell.workload.models import transformer
from foretell.workload.models.cnn import Image, Net
from foretell.workload.workload import Layer, Op, Tensor, Workload


@dataclass(frozen=True)
class Flava(Spec):
    """As it stands, the published model (section 4 of the paper)."""

    name: ClassVar[str] = "flava"
    layers: int = 12  # of the encoder of images, and as many of words
    joint: int = 0  # of the encoder of both; half of `layers` where 0
    hidden: int = 768
    heads: int = 12
    inner: int = 0  # width of the feed-forward; 4 × hidden where 0
    image: int = 224
    patch: int = 16
    seq: int = 77
    vocab: int = 30522
    batch: int = 64
    dtype: str = "fp16"

    def workload(self) -> Workload:
        """The model's layers: images first, then words, then both."""
        if self.image % self.patch:
            raise InputError(f"an image of {self.image} has no whole patches of {self.patch}")
        patches, both = (self.image // self.patch) ** 2 + 1, self.joint or max(self.layers // 2, 1)
        seq = patches + self.seq + 1
        words = transformer.embedding(
            self.seq, self.hidden, self.vocab, positions=self.seq, dropout=False
        )
        layers = (
            self._patches(patches),
            self._encoder("image", patches, self.layers, ("patches",)),
            replace(words, name="words", after=("",)),
            self._encoder("text", self.seq, self.layers, ("words",)),
            self._encoder("joint", seq, both, ("image", "text")),
            self._head(seq),
        )
        return Workload(str(self), layers, self.batch, self.dtype, tokens=seq)

    def _patches(self, seq: int) -> Layer:
        net = Net(Image(3, self.image, self.image))
        net.conv(self.hidden, self.patch, self.patch, pad=0, bias=True, norm=False, act="")
        dims = {"tokens": float(seq), "hidden": float(self.hidden)}
        place = Op("positions", "embedding", dims, {}, (Tensor("positions", tuple(dims)),))
        made = transformer.block("patches", [*net.ops, place], seq, self.hidden, 1)
        return replace(made, is_block=False, after=("",))

    def _encoder(self, name: str, seq: int, times: int, after: tuple[str, ...]) -> Layer:
        hidden, heads = self.hidden, self.heads
        options = {"bias": True, "causal": False, "dropout": False}
        pieces = [
            transformer.norm("norm.attention", seq, hidden),
            *transformer.attention(
                seq, hidden, heads, heads, transformer.depth(hidden, heads), **options
            ),
            *transformer.residual("residual.attention", seq, hidden, bias=True, dropout=False),
            transformer.norm("norm.mlp", seq, hidden),
            *transformer.feed_forward(seq, hidden, self.inner or 4 * hidden, bias=True),
            *transformer.residual("residual.mlp", seq, hidden, bias=True, dropout=False),
        ]
        return replace(transformer.block(name, pieces, seq, hidden, times), after=after)

    def _head(self, seq: int) -> Layer:
        """Whether image and text belong together: one product from the first word."""
        dims = {"in": float(self.hidden), "out": 2.0}
        weights = (Tensor("match.weight", ("in", "out")), Tensor("match.bias", ("out",)))
        pieces: list[transformer.Piece] = [
            transformer.norm("norm", seq, self.hidden),
            Op("match", "matmul", dims, weights=weights),
            Op("loss", "loss", {"vocab": 2.0}),
        ]
        made = transformer.block("head", pieces, seq, self.hidden, 1)
        return replace(made, is_block=False, after=("joint",))
