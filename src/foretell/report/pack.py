"""Values and columns in one block of text: a JSON head, the arrays behind it, deflated, base64.

A page of a hundred thousand tasks stays small and opens quickly: columns are as narrow as their
values allow and a browser reads them without parsing numbers.
"""

from __future__ import annotations

import base64
import json
import zlib
from typing import Any

import numpy as np

from foretell.graph.columns import Array

_WHOLE = (np.uint8, np.uint16, np.uint32, np.int32)
_LEVEL = 6  # of deflate: 9 takes four times as long for one per cent


def packed(values: Any) -> str:
    """Plain values, in which numpy arrays may stand anywhere, as text for a page."""
    parts: list[bytes] = []
    head = json.dumps(_placed(values, parts), allow_nan=False, separators=(",", ":")).encode()
    start = 4 + len(head)
    block = len(head).to_bytes(4, "little") + head + bytes(-start % 8) + b"".join(parts)
    return base64.b64encode(zlib.compress(block, _LEVEL)).decode()


def _placed(value: Any, parts: list[bytes]) -> Any:
    """The value with every array put into `parts` and a pointer in its place."""
    if isinstance(value, np.ndarray):
        return _column(narrow(value), parts)
    if isinstance(value, dict):
        return {str(key): _placed(item, parts) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_placed(item, parts) for item in value]
    return value.item() if isinstance(value, np.generic) else value


def _column(array: Array, parts: list[bytes]) -> dict[str, list[Any]]:
    offset = sum(map(len, parts))
    raw = array.astype(array.dtype.newbyteorder("<")).tobytes()
    parts.append(raw + bytes(-len(raw) % 8))
    return {"column": [f"{array.dtype.kind}{array.dtype.itemsize}", offset, len(array)]}


def narrow(array: Array) -> Array:
    """The same numbers in the narrowest type a browser has for them."""
    if array.dtype.kind == "f":
        return array.astype(np.float64)
    low, high = (int(array.min()), int(array.max())) if len(array) else (0, 0)
    for kind in _WHOLE:
        if np.iinfo(kind).min <= low and high <= np.iinfo(kind).max:
            return array.astype(kind)
    return array.astype(np.float64)
