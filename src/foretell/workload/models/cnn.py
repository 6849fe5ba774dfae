"""The pieces of convolutional networks, and who exchanges what where they are split.

    net = Net(Image(3, 224, 224))
    net.conv(64, 7, 2)          convolution, batch norm, activation
    net.pool(3, 2)              net.at is what the next op is given
    net.cut("stem")             what was added since becomes a layer

Axes as ParaDL has them (Kahira et al., HPDC 2021): `height`, `width`, `depth` split images, with
halos exchanged before each window wider than 1; `filter` splits output channels (all-gather of y,
all-reduce of dx), `channel` input channels (all-reduce of y, all-gather of dx). Norms, activations
and pools are split with the image, and done by every rank under `filter` and `channel`.
What autograd keeps is counted where it is made: a norm keeps its input, an activation its output,
which is the input of the convolution behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from foretell.workload.models.windows import (
    Image,
    Sides,
    convolution,
    gathers,
    halos,
    product,
    size_of,
    splits_of,
    window_of,
)
from foretell.workload.workload import Exchange, Layer, Op, Tensor, Workload

__all__ = ["Image", "Net", "Sides"]
# Kernel class of an activation, and whether its gradient needs its input besides its output.
ACTIVATIONS = {
    "relu": ("relu", False),
    "relu6": ("relu", False),
    "hardswish": ("relu", True),
    "hardsigmoid": ("relu", True),
    "sigmoid": ("sigmoid", False),
    "silu": ("silu", True),
    "gelu": ("gelu", True),
    "leaky": ("relu", False),
}


@dataclass
class Net:
    """Collects ops into layers; layers that are alike in a row become one, repeated."""

    at: Image
    layers: list[Layer] = field(default_factory=list)
    ops: list[Op | Exchange] = field(default_factory=list)
    whole: bool = False  # images are no longer split from here on

    def conv(
        self,
        out: int,
        kernel: Sides = 1,
        stride: int = 1,
        *,
        pad: Sides | None = None,
        groups: int = 1,
        bias: bool = False,
        norm: bool = True,
        act: str = "relu",
    ) -> Image:
        """A convolution, padded to keep its size by default, then norm and activation."""
        first = not self.layers and not self.ops
        asked = window_of(self.at, kernel, stride, pad, groups, first=first, whole=self.whole)
        name = self._name("conv")
        self.ops += convolution(name, self.at, out, asked, bias=bias)
        self.at = asked.out(self.at, out)
        return self._finished(name, norm, act)

    def up(self, out: int, stride: int = 2, *, bias: bool = True) -> Image:
        """A transposed convolution whose windows do not overlap: sides grow by `stride`."""
        name, c = self._name("up"), self.at.c
        sides = [int(stride * v) for v in self.at.sides().values()]
        grown = Image(out, *sides)
        asked = window_of(grown, stride, stride, 0, 1, whole=self.whole)
        asked = replace(asked, turned=True)
        self.ops += convolution(name, grown, c, asked, bias=bias)
        self.at = grown
        return self._finished(name, False, "")

    def norm(self, name: str = "", *, kept: bool = True, affine: bool = True) -> Image:
        """A batch norm; it keeps its input."""
        name = name or self._name("norm")
        parts = ("weight", "bias") if affine else ()
        weights = tuple(Tensor(f"{name}.{part}", ("c",)) for part in parts)
        saved = (self._whole("input"),) if kept else ()
        self.ops.append(Op(name, "batch_norm", self.at.dims(), self._splits(), weights, saved))
        return self.at

    def act(self, kind: str) -> Image:
        """An activation in place; what its gradient needs is kept."""
        kernel, twice = ACTIVATIONS[kind]
        saved = (self._whole("output"),) + ((self._whole("input"),) if twice else ())
        self._point(self._name(kind), saved, kernel=kernel, passes=2.0, back=3.0)
        return self.at

    def add(self, act: str = "") -> Image:
        """The sum with a residual; its gradient is the sum of two."""
        self._point(self._name("add"), (), passes=3.0, back=3.0)
        return self.act(act) if act else self.keep()

    def keep(self) -> Image:
        """Save the last op's output: the convolution behind it needs its input."""
        last = self.ops[-1]
        assert isinstance(last, Op)
        self.ops[-1] = replace(last, saved=(*last.saved, self._whole("output")))
        return self.at

    def scale(self, *, kept: bool = True) -> Image:
        """A product with one number a channel (squeeze and excite): two gradients and a sum."""
        saved = (self._whole("output"),) if kept else ()
        self._point(self._name("scale"), saved, passes=2.0, back=6.0, many=3)
        return self.at

    def squeeze(self, width: int, act: str = "relu", gate: str = "hardsigmoid") -> Image:
        """Squeeze and excite: the mean of each channel, two matmuls, a factor a channel."""
        whole = self.at
        self.mean(gathers=False)
        self.conv(width, bias=True, norm=False, act=act)
        self.conv(whole.c, bias=True, norm=False, act=gate)
        self.at = whole
        return self.scale()

    def pool(
        self, window: int, stride: int = 1, pad: int = 0, *, kind: str = "max", up: bool = False
    ) -> Image:
        """A pool; `up` rounds sides up. A maximum keeps where it was found."""
        name = self._name("pool")
        asked = window_of(self.at, window, stride, pad, 1, whole=self.whole)
        self.ops += list(halos(name, self.at, self.at.c, asked))
        out = asked.out(self.at, self.at.c, up=up)
        share = size_of(out) / size_of(self.at)
        dims = ("batch", *self.at.dims())
        saved = [Tensor("output", dims, times=share)]
        if kind == "max":
            saved.append(Tensor("indices", dims, "int64", times=share))
        self.ops.append(
            Op(
                name,
                "pool",
                self.at.dims(),
                self._splits(),
                saved=tuple(saved),
                options={"of": kind},
            )
        )
        self.at = out
        return out

    def gather(self) -> None:
        """Images that are split are gathered, and stay whole."""
        if not self.whole:
            self.ops += list(gathers(self._name("gather"), self.at))
        self.whole = True

    def mean(self, *, gathers: bool = True) -> Image:
        """The mean over all pixels; images that are split are gathered before."""
        if gathers:
            self.gather()
        splits = {} if gathers else self._splits()
        self.ops.append(Op(self._name("mean"), "mean", self.at.dims(), splits))
        self.at = Image(self.at.c, 1, 1, 1 if self.at.d else 0)
        return self.at

    def flat(self) -> Image:
        """All pixels as channels of one; images that are split are gathered before."""
        if size_of(self.at) > self.at.c:
            self.gather()
        self.at = Image(int(size_of(self.at)), 1, 1)
        return self.at

    def linear(
        self,
        out: int,
        *,
        bias: bool = True,
        act: str = "",
        dropout: bool = False,
        last: bool = False,
    ) -> Image:
        """A fully connected layer over channels, then activation and dropout."""
        name, c = self._name("fc"), self.at.c
        self.ops += product(name, c, out, bias=bias, last=last)
        self.at = Image(out, 1, 1)
        if act:
            self.act(act)
        return self.dropout() if dropout else self.at

    def dropout(self) -> Image:
        """Dropout; it keeps a mask and its output."""
        dims = ("batch", *self.at.dims())
        saved = (Tensor("mask", dims, "bool"), Tensor("output", dims))
        self._point(self._name("dropout"), saved, kernel="dropout", passes=2.25, back=2.25)
        return self.at

    def join(self, parts: Sequence[Image], *, copied: float = 1.0, sums: int = 0) -> Image:
        """Channels of several images behind one another: a copy, and another for the gradient.

        Where others use the same images, their gradients are slices that are added up one by one:
        `sums` of them.
        """
        self.at = self.at._replace(c=sum(part.c for part in parts))
        saved = (self._whole("output"),)
        back = {"back": 3.0, "back_kernel": "elementwise", "many": sums} if sums else {}
        options = {"kernel": "copy", "passes": 2 * copied, "back": 2 * copied} | back
        self._point(self._name("cat"), saved, **options)
        return self.at

    def loss(self, classes: int) -> None:
        """Cross entropy over classes."""
        kept = Tensor("probabilities", ("batch", "vocab"), "fp32")
        self.ops.append(Op("loss", "loss", {"vocab": float(classes)}, saved=(kept,)))

    def classified(self, model: Any) -> Workload:
        """The workload of all layers, the last of them over the model's classes, with its loss."""
        self.linear(model.classes, last=True)
        self.loss(model.classes)
        self.cut("head", is_block=False)
        return Workload(str(model), tuple(self.layers), model.batch, model.dtype)

    def cut(self, name: str, *, is_block: bool = True) -> None:
        """Make a layer of what was added since the last; one like the one before repeats it."""
        ops, self.ops = tuple(self.ops), []
        last = self.layers[-1] if self.layers else None
        if last and last.ops == ops and last.sizes == self.at.dims():
            self.layers[-1] = replace(last, times=last.times + 1)
            return
        carries = Tensor("image", ("batch", *self.at.dims()))
        self.layers.append(
            Layer(name, ops, carries, self.at.dims(), 1, self._splits(), is_block=is_block)
        )

    def _finished(self, name: str, norm: bool, act: str) -> Image:
        if norm:
            self.norm(f"{name}.norm")
        return self.act(act) if act else self.at

    def _name(self, kind: str) -> str:
        """A name of its own within the layer."""
        return f"{kind}{len(self.ops)}"

    def _whole(self, name: str) -> Tensor:
        return Tensor(name, ("batch", *self.at.dims()))

    def _splits(self) -> dict[str, str]:
        return {} if self.whole else splits_of(self.at)

    def _point(self, name: str, saved: tuple[Tensor, ...], **options: Any) -> None:
        dims, splits = self.at.dims(), self._splits()
        self.ops.append(Op(name, "pointwise", dims, splits, saved=saved, options=options))
