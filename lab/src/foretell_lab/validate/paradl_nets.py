"""The networks behind ParaDL's logs, as its tables of layers must have had them.

Images are 226 × 226; ResNet-50 is version 1 without the convolutions of its shortcuts, pools of
VGG-16 round up and leave 8 × 8. With these, weights and the sums of |x| and |y| come out to the
number: 22 734 016, 14 971 596, 14 819 368 and 169 801 408, 15 705 164, 15 552 936.
"""

from __future__ import annotations

from collections.abc import Callable

from foretell_lab.validate.paradl_formulas import Net, Part

SIDE = 226


def conv(c: int, k: int, window: int, side: int, out: int) -> Part:
    """A convolution; images are split along their width, the whole height is exchanged."""
    weights, flops = c * k * window**2, 2.0 * c * k * window**2 * out**2
    halo = c * (window // 2) * side
    return Part("conv", c * side**2, k * out**2, weights, flops, halo, is_split=True)


def pool(c: int, window: int, side: int, out: int, *, strides: bool) -> Part:
    """A pool; the oracle counts C·F·K² operations a pixel of it."""
    flops = float(c * c * window**2 * out**2)
    return Part("pool", c * side**2, c * out**2, flops=flops, strides=strides)


def fc(inner: int, out: int) -> Part:
    """A fully connected layer."""
    return Part("fc", inner, out, inner * out, inner * out)


def point(kind: str, c: int, side: int, each: float = 1.0) -> Part:
    """A layer on every element."""
    n = float(c * side**2)
    return Part(kind, n, n, flops=each * n)


def resnet50() -> Net:
    """Forty-nine convolutions, sixteen sums; 3.1195 ms a sample at batch 64, as measured."""
    parts = [*_normed(conv(3, 64, 7, SIDE, 113), 64, 113), pool(64, 3, 113, 56, strides=False)]
    c, side = 64, 56
    for stage, many in enumerate((3, 4, 6, 3)):
        for i in range(many):
            out = side // 2 if stage and not i else side
            parts += _bottleneck(c, 64 << stage, side, out)
            c, side = 256 << stage, out
    return Net((*parts, pool(2048, 7, 7, 1, strides=True), fc(2048, 1000)), 3.1195e-3)


def _bottleneck(c: int, width: int, side: int, out: int) -> list[Part]:
    last = [conv(width, 4 * width, 1, out, out), point("norm", 4 * width, out, 4.0)]
    return [
        *_normed(conv(c, width, 1, side, out), width, out),
        *_normed(conv(width, width, 3, out, out), width, out),
        *last,
        point("add", 4 * width, out),
        point("relu", 4 * width, out),
    ]


def _normed(part: Part, c: int, side: int) -> list[Part]:
    return [part, point("norm", c, side, 4.0), point("relu", c, side)]


def vgg16() -> Net:
    """Thirteen convolutions and three matmuls; 8.2456 ms a sample at batch 32, as measured."""
    parts: list[Part] = []
    c, side = 3, SIDE
    for many, width in ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512)):
        for _ in range(many):
            parts += [conv(c, width, 3, side, side), point("relu", width, side)]
            c = width
        parts.append(pool(width, 2, side, -(-side // 2), strides=True))
        side = -(-side // 2)
    return Net((*parts, *_head(512 * side**2)), 8.24558900e-3)


def alexnet() -> Net:
    """Five convolutions and three matmuls; 0.61 ms a sample at batch 512, as its logs imply."""
    shapes = (  # channels, filters, window, side, side behind it, side behind its pool
        (3, 96, 11, SIDE, 54, 27),
        (96, 256, 5, 27, 27, 13),
        (256, 384, 3, 13, 13, 0),
        (384, 384, 3, 13, 13, 0),
        (384, 256, 3, 13, 13, 6),
    )
    parts: list[Part] = []
    for c, width, window, side, out, pooled in shapes:
        parts += [conv(c, width, window, side, out), point("relu", width, out)]
        if pooled:
            parts.append(pool(width, 3, out, pooled, strides=False))
    return Net((*parts, *_head(9216)), 782.00064 / 1.28e6)


def _head(inner: int) -> list[Part]:
    wide = [point("relu", 4096, 1), point("dropout", 4096, 1)]
    return [fc(inner, 4096), *wide, fc(4096, 4096), *wide, fc(4096, 1000)]


NETS: dict[str, Callable[[], Net]] = {
    "RESNET50": resnet50,
    "VGG": vgg16,
    "ALEXNET": alexnet,
}
