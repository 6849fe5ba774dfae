"""Shapes of kernels as text: `key=value,key=value`, read into one column a key.

    gemm       b,m,n,k and ta,tb (1 where A is stored k×m, B is stored n×k)
    conv       n,c,h,w,k,r,s and stride,pad,groups,nhwc,p,q (d,t: depth of image and filter in 3-D)
    attention  b,heads,sq,sk,d and causal,direction (fwd, bwd),dropout,math (1 where not fused),
               window (keys a query sees at most),flash2 (1: not the chip's own kernels)
    others     n (elements), rows, cols, uneven (1 where inputs are broadcast or strided)

Numbers may be written as words: yes, no, fwd, bwd. A key that a text lacks reads as nan.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from foretell.errors import InputError
from foretell.graph.columns import Array

Columns = Mapping[str, Array]

_WORDS = {"yes": 1.0, "no": 0.0, "true": 1.0, "false": 0.0, "fwd": 0.0, "bwd": 1.0}


def columns(shapes: Sequence[str] | Mapping[str, npt.ArrayLike], length: int) -> dict[str, Array]:
    """One column a key; columns already given are made floats of one length."""
    if isinstance(shapes, Mapping):
        return {k: _broadcast(v, length) for k, v in shapes.items()}
    found: dict[str, Array] = {}
    for i, text in enumerate(shapes):
        for key, value in parse(text):
            if key not in found:
                found[key] = np.full(length, np.nan)
            found[key][i] = value
    return found


def _broadcast(values: npt.ArrayLike, length: int) -> Array:
    return np.broadcast_to(np.asarray(values, float), (length,))


@lru_cache(maxsize=1 << 16)
def parse(text: str) -> tuple[tuple[str, float], ...]:
    """`b=1,m=64` → ((b, 1.0), (m, 64.0))."""
    return tuple(_pair(item, text) for item in text.split(",") if item.strip())


def _pair(item: str, text: str) -> tuple[str, float]:
    key, _, value = item.partition("=")
    value = value.strip()
    try:
        return key.strip(), _WORDS[value] if value in _WORDS else float(value)
    except ValueError:
        raise InputError(
            f"`{item}` in shape `{text}` is not `key=number`",
            hint="write a shape as `b=1,m=64,n=64,k=64`",
        ) from None


def write(shape: Mapping[str, float]) -> str:
    """The text of a shape: `parse` reads it back."""
    return ",".join(
        f"{k}={int(v) if float(v).is_integer() else float(v)!r}" for k, v in shape.items()
    )


def is_call(shape: str) -> bool:
    """Whether a shape speaks of an operator's inputs."""
    return shape.startswith("in=")
