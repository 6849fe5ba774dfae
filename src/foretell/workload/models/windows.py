"""A window over images, and what ranks exchange where the images or the channels are split.

`height`, `width` and `depth` split images: halos of x go to both neighbours before a window wider
than 1, those of dy behind it. `filter` splits output channels: y is gathered, dx summed up;
`channel` splits input channels: y is summed up, dx gathered. Grouped windows are split by neither.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from foretell.workload.kernels import slid
from foretell.workload.workload import Exchange, Op, Tensor

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
    name: str, image: Image, out: int, asked: Window, *, bias: bool
) -> list[Op | Exchange]:
    """A convolution with its bias and the communication of its split."""
    windows = dict(zip("rst", map(float, asked.sides), strict=False))
    dims = image.dims() | {"k": float(out)} | windows
    left = asked.out(image, out)
    splits = {} if asked.whole else splits_of(image)
    most = {axis: int(left.dims()[side]) for axis, side in splits.items() if left.dims()[side] > 1}
    if asked.groups == 1:
        splits["filter"], most["filter"] = "k", out
    if asked.groups == 1 and not asked.first:
        splits["channel"], most["channel"] = "c", image.c
    if len(most) < len(splits):  # behind the mean there is nothing left of an image to split
        splits = {axis: side for axis, side in splits.items() if axis in most}
    weight = Tensor(f"{name}.weight", ("k", "c", *windows), times=1 / asked.groups)
    options = _options(asked)
    saved = (Tensor("input", ("batch", *image.dims())),) if asked.first else ()
    op = Op(name, "conv", dims, splits, (weight,), saved, most, options=options)
    made = image if asked.turned else left
    ways = _filter_ways(name, image, left, asked) if asked.groups == 1 else ([], [])
    added = _bias(name, made, asked) if bias else []
    return [*halos(name, image, out, asked), *ways[0], op, *ways[1], *added]


def _options(asked: Window) -> dict[str, Any]:
    options: dict[str, Any] = {"stride": asked.stride, "groups": asked.groups}
    same = len(set(asked.pads)) == 1
    options |= {"pad": asked.pads[0]} if same else {"pads": asked.pads}
    return options | {k: True for k in ("first", "turned") if getattr(asked, k)}


def _bias(name: str, made: Image, asked: Window) -> list[Op]:
    """A bias is a kernel of its own, and so is its gradient."""
    weights = (Tensor(f"{name}.bias", ("c",)),)
    options = {"passes": 2.0, "back": 1.0, "back_kernel": "reduce"}
    splits = {} if asked.whole else splits_of(made)
    return [Op(f"{name}.bias", "pointwise", made.dims(), splits, weights, options=options)]


def _filter_ways(
    name: str, image: Image, left: Image, asked: Window
) -> tuple[list[Exchange], list[Exchange]]:
    """Before and behind a convolution: what ranks that split filters or channels exchange."""
    x, y, splits = image.dims(), left.dims(), {} if asked.whole else splits_of(image)
    behind = [Exchange(f"{name}.y", "filter", "all_gather", "", y, splits)]
    if asked.first:
        return [], behind
    before = [Exchange(f"{name}.dx", "filter", "", "all_reduce", x, splits)]
    before += [Exchange(f"{name}.dx", "channel", "", "all_gather", x, splits)]
    return before, [*behind, Exchange(f"{name}.y", "channel", "all_reduce", "", y, splits)]


def halos(name: str, image: Image, out: int, asked: Window) -> Iterator[Exchange]:
    """Rows of x forward and of dy backward that the neighbours' windows reach into."""
    left = asked.out(image, out)
    for axis, side in SPATIAL.items():
        if asked.whole or side not in image.dims() or image.dims()[side] == 1:
            continue
        width = asked.sides["rst".index(_WINDOW[side])] // 2
        others = {a: s for a, s in SPATIAL.items() if s != side and s in image.dims()}
        if width and not asked.turned:
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
    out = 1.0
    for size in image.dims().values():
        out *= size
    return out
