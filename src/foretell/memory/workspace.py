"""Memory that cuDNN asks for while a convolution runs, told from the kernels that ran.

    fft        input, filter and output as spectra: a tile of T×T numbers becomes T×(T/2+1) complex
               ones; of each image two tiles at a time. Forward the filter is turned round first,
               and kept in both ways                                           → `_fft`
    winograd   4×4 tiles of input and output become 6×6 numbers                → `_winograd`
    copies     tensor cores want channels last: input, output and filter once more where the
               tensors are channels first                                      → `copied`

Each engine gives its workspace back before the next asks: the largest counts. Other engines ask
for next to nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import ceil, prod

from foretell.memory.call import ITEMS, Call, Dims, Key
from foretell.memory.outputs import convolution

_FFT = re.compile(r"fft2d_r2c_(\d+)x")
_FLIP = re.compile(r"flip_filter")
_WINOGRAD = re.compile(r"winograd_nonfused|winogradForward\w*4x4")
_COPY = re.compile(r"nchwToNhwc|nhwcToNchw")
_AT_ONCE = 2  # tiles of one image
_TILE, _GROWN = 4, 36  # numbers a side of a Winograd tile, and numbers it becomes


def workspace(call: Call) -> tuple[float, str]:
    """Bytes, and what another batch or another choice of kernels would need to know.

    That is: numbers in input, output and filter, the bytes that are the filter's, and for forward
    spectra the flop of the convolution.
    """
    sides = _sides(call)
    if sides is None:
        return 0.0, ""
    x, y, w, dtype = sides
    kernels = [name for c in call.walk() for name in c.kernels]
    item = ITEMS.get(dtype, 4)
    found = [(0.0, 0.0)]
    is_turned = any(map(_FLIP.search, kernels))
    for tile in {int(m[1]) for name in kernels if (m := _FFT.search(name))}:
        found.append(_fft(x, y, w, tile, is_turned))
    if any(map(_WINOGRAD.search, kernels)):
        found.append(_winograd(x, y, w))
    numbers = [prod(x), prod(y), prod(w)]
    if any(map(_COPY.search, kernels)):
        found.append((copied(numbers[:2], item), copied(numbers[2:], item)))
    is_deep = len(w) > 1 and w[1] > 1  # one filter a channel has kernels of its own
    data, filters = max(found, key=sum)
    work = [2.0 * prod(y) * prod(w[1:])] if is_turned else []
    told = ":".join(f"{n:.0f}" for n in [*numbers, filters, *work])
    return data + filters, told if is_deep else ""


def copied(numbers: Sequence[float], item: int) -> float:
    """Bytes of copies in another layout of input, output and filter."""
    return float(sum(numbers) * item)


def _sides(call: Call) -> tuple[Dims, Dims, Dims, str] | None:
    """Sizes of input, output and filter of a convolution or of its backward."""
    if call.name == "convolution":
        x, y, w = call.tensor(0), next(iter(convolution(call)), None), call.tensor(1)
    elif call.name == "convolution_backward":
        x, y, w = call.tensor(1), call.tensor(0), call.tensor(2)
    else:
        return None
    if x is None or y is None or w is None or len(x[0]) != 4:
        return None
    return _plain(x), _plain(y), _plain(w), x[1]


def _plain(key: Key) -> Dims:
    return key[0]


def _fft(x: Dims, y: Dims, w: Dims, tile: int, is_turned: bool) -> tuple[float, float]:
    """Bytes of the spectra of tensors and of filters, 8 a complex number.

    Of 211 convolutions of VGG-16, ResNet-18 and a detector (H200, cuDNN 9.19, traced with
    `profile_memory`) 183 ask for what is worked out here to within 0.15 MiB, 207 to within 2.
    """
    is_whole = max(x[2] + w[2] - 1, x[3] + w[3] - 1) <= tile
    at_once = x[0] * (1 if is_whole else _AT_ONCE)
    spectrum = tile * (tile // 2 + 1) * 8.0
    filters = spectrum * w[0] * w[1]
    if is_turned:
        return spectrum * at_once * 2 * x[1], 2 * filters + 4.0 * prod(w)
    return spectrum * at_once * (x[1] + y[1]), filters


def _winograd(x: Dims, y: Dims, w: Dims) -> tuple[float, float]:
    tiles = ceil(y[2] / _TILE) * ceil(y[3] / _TILE)
    return 4.0 * _GROWN * x[0] * tiles * (x[1] + y[1]), 4.0 * _GROWN * w[0] * w[1]
