"""The pieces of convolutional networks, and who exchanges what where they are split.

    net = Net(Image(3, 224, 224))
    net.conv(64, 7, 2)          convolution, batch norm, activation
    net.pool(3, 2)              net.at is what the next op is given
    net.cut("stem")             what was added since becomes a layer

Axes as ParaDL has them (Kahira et al., HPDC 2021): `height`, `width`, `depth` split images, with
halos exchanged before each window wider than 1; `filter` splits output channels (all-gather of y,
all-reduce of dx), `channel` input channels (all-reduce of y, all-gather of dx); grouped windows are
split by neither. Norms, activations
and pools are split with the image, and done by every rank under `filter` and `channel`.
What autograd keeps is counted where it is made: a norm keeps its input, an activation its output,
which is the input of the convolution behind it.

"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from foretell.errors import InputError
from foretell.workload.workload import Exchange, Layer, Op, Tensor, Workload, slid

SPATIAL = {"height": "h", "width": "w", "depth": "d"}  # axis → side of an image
_WINDOW = {"h": "r", "w": "s", "d": "t"}
Sides = int | tuple[int, ...]


class Image(NamedTuple):
    """Channels and sides of one sample; no depth where it is flat."""

    c: int
    h: int
    w: int
    d: int = 0

    def dims(self) -> dict[str, float]:
        """Its sizes by name."""
        return {k: float(v) for k, v in self._asdict().items() if v or k != "d"}

    def sides(self) -> dict[str, float]:
        """Its sizes without the channels."""
        return {k: v for k, v in self.dims().items() if k != "c"}


@dataclass(frozen=True)
class Window:
    """How a window goes over an image."""

    sides: tuple[int, ...]  # of the window: r, s, t
    stride: int
    pads: tuple[int, ...]
    groups: int
    first: bool
    whole: bool  # the image is not split
    turned: bool = False

    def out(self, image: Image, channels: int, *, up: bool = False) -> Image:
        """Output size of the window on an image; rounded up if `up`."""
        extra = self.stride - 1 if up else 0
        sides = [
            int(slid(size + extra, window, pad, self.stride))
            for size, window, pad in zip(image.sides().values(), self.sides, self.pads, strict=True)
        ]
        return Image(channels, *sides)


def window_of(
    image: Image,
    kernel: Sides,
    stride: int,
    pad: Sides | None,
    groups: int,
    *,
    first: bool = False,
    whole: bool = False,
) -> Window:
    sides = _each(kernel, image)
    pads = tuple(k // 2 for k in sides) if pad is None else _each(pad, image)
    return Window(sides, stride, pads, groups, first, whole)


def splits_of(image: Image) -> dict[str, str]:
    return {axis: side for axis, side in SPATIAL.items() if side in image.dims()}


def _each(value: Sides, image: Image) -> tuple[int, ...]:
    return value if isinstance(value, tuple) else (value,) * len(image.sides())


def convolution(
    name: str, image: Image, out: int, window: Window, *, bias: bool
) -> list[Op | Exchange]:
    """A convolution with its bias and the communication of its split."""
    windows = dict(zip("rst", map(float, window.sides), strict=False))
    dims = image.dims() | {"k": float(out)} | windows
    left = window.out(image, out)
    splits = {} if window.whole else splits_of(image)
    most = {axis: int(left.dims()[side]) for axis, side in splits.items() if left.dims()[side] > 1}
    if window.groups == 1:
        splits["filter"], most["filter"] = "k", out
    if window.groups == 1 and not window.first:
        splits["channel"], most["channel"] = "c", image.c
    if len(most) < len(splits):  # behind the mean there is nothing left of an image to split
        splits = {axis: side for axis, side in splits.items() if axis in most}
    weight = Tensor(f"{name}.weight", ("k", "c", *windows), times=1 / window.groups)
    options = _options(window)
    saved = (Tensor("input", ("batch", *image.dims())),) if window.first else ()
    op = Op(name, "conv", dims, splits, (weight,), saved, most, options=options)
    made = image if window.turned else left
    ways = _filter_ways(name, image, left, window) if window.groups == 1 else ([], [])
    added = _bias(name, made, window) if bias else []
    return [*halos(name, image, out, window), *ways[0], op, *ways[1], *added]


def _options(window: Window) -> dict[str, Any]:
    options: dict[str, Any] = {"stride": window.stride, "groups": window.groups}
    same = len(set(window.pads)) == 1
    options |= {"pad": window.pads[0]} if same else {"pads": window.pads}
    return options | {k: True for k in ("first", "turned") if getattr(window, k)}


def _bias(name: str, made: Image, window: Window) -> list[Op]:
    """A bias is a kernel of its own, and so is its gradient."""
    weights = (Tensor(f"{name}.bias", ("c",)),)
    options = {"passes": 2.0, "back": 1.0, "back_kernel": "reduce"}
    splits = {} if window.whole else splits_of(made)
    return [Op(f"{name}.bias", "pointwise", made.dims(), splits, weights, options=options)]


def _filter_ways(
    name: str, image: Image, left: Image, window: Window
) -> tuple[list[Exchange], list[Exchange]]:
    """Before and behind a convolution: what ranks that split filters or channels exchange."""
    x, y, splits = image.dims(), left.dims(), {} if window.whole else splits_of(image)
    behind = [Exchange(f"{name}.y", "filter", "all_gather", "", y, splits)]
    if window.first:
        return [], behind
    before = [Exchange(f"{name}.dx", "filter", "", "all_reduce", x, splits)]
    before += [Exchange(f"{name}.dx", "channel", "", "all_gather", x, splits)]
    return before, [*behind, Exchange(f"{name}.y", "channel", "all_reduce", "", y, splits)]


def halos(name: str, image: Image, out: int, window: Window) -> Iterator[Exchange]:
    """Rows of x forward and of dy backward that the neighbours' windows reach into."""
    left = window.out(image, out)
    for axis, side in SPATIAL.items():
        if window.whole or side not in image.dims() or image.dims()[side] == 1:
            continue
        width = window.sides["rst".index(_WINDOW[side])] // 2
        others = {a: s for a, s in SPATIAL.items() if s != side and s in image.dims()}
        if width and not window.turned:
            x = image.dims() | {side: float(width)}
            yield Exchange(f"{name}.halo", axis, "send", "", x, others)
            y = left.dims() | {side: float(width)}
            yield Exchange(f"{name}.halo", axis, "", "send", y, others)


def gathers(name: str, image: Image) -> Iterator[Exchange]:
    """Every rank gets the whole image, one axis after the other; gradients are cut, not sent."""
    axes = [a for a, s in SPATIAL.items() if s in image.dims()]
    for i, axis in enumerate(axes):
        later = {a: SPATIAL[a] for a in axes[i + 1 :]}
        yield Exchange(name, axis, "all_gather", "", image.dims(), later)


def product(name: str, inner: int, out: int, *, bias: bool, last: bool) -> list[Op | Exchange]:
    """A fully connected layer: filters are outputs, channels inputs."""
    weights: tuple[Tensor, ...] = (Tensor(f"{name}.weight", ("in", "out")),)
    weights += (Tensor(f"{name}.bias", ("out",)),) if bias else ()
    splits = {"filter": "out", "channel": "in"}
    dims = {"in": float(inner), "out": float(out)}
    op = Op(name, "matmul", dims, splits, weights, most={"filter": out, "channel": inner})
    x, y = {"c": float(inner)}, {"c": float(out)}
    ops: list[Op | Exchange] = [
        Exchange(f"{name}.dx", "filter", "", "all_reduce", x),
        Exchange(f"{name}.dx", "channel", "", "all_gather", x),
        op,
        Exchange(f"{name}.y", "channel", "all_reduce", "", y),
    ]
    return ops if last else [*ops, Exchange(f"{name}.y", "filter", "all_gather", "", y)]


def size_of(image: Image) -> float:
    return math.prod(image.dims().values())


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
        window = window_of(self.at, kernel, stride, pad, groups, first=first, whole=self.whole)
        name = self._name("conv")
        self.ops += convolution(name, self.at, out, window, bias=bias)
        self.at = window.out(self.at, out)
        if norm:
            self.norm(f"{name}.norm")
        return self.act(act) if act else self.at

    def plain(self, out: int, kernel: Sides = 1, stride: int = 1, act: str = "") -> Image:
        """A convolution with a bias, no norm behind it."""
        return self.conv(out, kernel, stride, bias=True, norm=False, act=act)

    def up(self, out: int, stride: int = 2) -> Image:
        """A transposed convolution whose windows do not overlap: sides grow by `stride`."""
        name, c = self._name("up"), self.at.c
        grown = Image(out, *(int(stride * v) for v in self.at.sides().values()))
        window = replace(window_of(grown, stride, stride, 0, 1, whole=self.whole), turned=True)
        self.ops += convolution(name, grown, c, window, bias=False)
        self.at = grown
        return self.at

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
        self.point(self._name(kind), saved, kernel=kernel, passes=2.0, back=3.0)
        return self.at

    def add(self, act: str = "") -> Image:
        """The sum with a residual; its gradient is the sum of two."""
        self.point(self._name("add"), (), passes=3.0, back=3.0)
        return self.act(act) if act else self.keep()

    def keep(self) -> Image:
        """Save the last op's output: the convolution behind it needs its input."""
        last = self.ops[-1]
        assert isinstance(last, Op)
        self.ops[-1] = replace(last, saved=(*last.saved, self._whole("output")))
        return self.at

    def squeeze(self, width: int, act: str = "relu", gate: str = "hardsigmoid") -> Image:
        """Squeeze and excite: the mean of each channel, two matmuls, a factor a channel.

        The gradient of the product is two and a sum.
        """
        whole = self.at
        self.mean(gathers=False)
        self.plain(width, act=act)
        self.plain(whole.c, act=gate)
        self.at = whole
        saved = (self._whole("output"),)
        self.point(self._name("scale"), saved, passes=2.0, back=6.0, many=3)
        return self.at

    def pool(
        self, window: int, stride: int = 1, pad: int = 0, *, kind: str = "max", up: bool = False
    ) -> Image:
        """A pool; `up` rounds sides up. A maximum keeps where it was found."""
        name = self._name("pool")
        pooling = window_of(self.at, window, stride, pad, 1, whole=self.whole)
        self.ops += list(halos(name, self.at, self.at.c, pooling))
        out = pooling.out(self.at, self.at.c, up=up)
        share = size_of(out) / size_of(self.at)
        dims = ("batch", *self.at.dims())
        saved = [Tensor("output", dims, times=share)]
        if kind == "max":
            saved.append(Tensor("indices", dims, "int64", times=share))
        sides, splits, options = self.at.dims(), self._splits(), {"of": kind}
        self.ops.append(Op(name, "pool", sides, splits, saved=tuple(saved), options=options))
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
        self.point(self._name("dropout"), saved, kernel="dropout", passes=2.25, back=2.25)
        return self.at

    def join(self, parts: Sequence[Image], *, sums: int = 0) -> Image:
        """Channels of several images behind one another: a copy, and another for the gradient.

        Where others use the same images, their gradients are slices that are added up one by one:
        `sums` of them.
        """
        self.at = self.at._replace(c=sum(part.c for part in parts))
        saved = (self._whole("output"),)
        back = {"back": 3.0, "back_kernel": "elementwise", "many": sums} if sums else {}
        options = {"kernel": "copy", "passes": 2.0, "back": 2.0} | back
        self.point(self._name("cat"), saved, **options)
        return self.at

    def loss(self, classes: int) -> None:
        """Cross entropy over classes."""
        kept = Tensor("probabilities", ("batch", "vocab"), "fp32")
        self.ops.append(Op("loss", "loss", {"vocab": float(classes)}, saved=(kept,)))

    def classified(self, model: Any) -> Workload:
        """The workload of all layers, the last of them over the model's classes, with its loss."""
        self.linear(model.classes, last=True)
        self.loss(model.classes)
        return self.headed(model)

    def headed(self, model: Any) -> Workload:
        """The workload of all layers; the last of them is what was added since."""
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
        made = Layer(name, ops, carries, self.at.dims(), 1, self._splits(), is_block=is_block)
        self.layers.append(made)

    def _name(self, kind: str) -> str:
        """A name of its own within the layer."""
        return f"{kind}{len(self.ops)}"

    def _whole(self, name: str) -> Tensor:
        return Tensor(name, ("batch", *self.at.dims()))

    def _splits(self) -> dict[str, str]:
        return {} if self.whole else splits_of(self.at)

    def point(self, name: str, saved: tuple[Tensor, ...], **options: Any) -> None:
        """Work on every element of the image."""
        dims, splits = self.at.dims(), self._splits()
        self.ops.append(Op(name, "pointwise", dims, splits, saved=saved, options=options))


def patches_of(image: int, patch: int) -> int:
    """How many square patches an image has."""
    if image % patch:
        raise InputError(f"an image of {image} has no whole patches of {patch}")
    return (image // patch) ** 2


def patched(channels: int, image: int, patch: int, hidden: int) -> list[Op | Exchange]:
    """A convolution that makes one word of each patch of an image."""
    net = Net(Image(channels, image, image))
    net.conv(hidden, patch, patch, pad=0, bias=True, norm=False, act="")
    return net.ops
