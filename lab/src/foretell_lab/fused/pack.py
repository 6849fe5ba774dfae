"""A data set of regions as a small file: what comes again and again is given once, all in xz.

A node (op, format, sizes) and the list of what it reads come many times, as regions of a model
share ops and kernels are parts of regions. So a file has each different one once, in the order
they are first met, and numbers; likewise the different values of long columns. Nothing is lost.
"""

from __future__ import annotations

import lzma
from collections.abc import Mapping
from io import BytesIO
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
_NODE = ("op", "dtype", "elements", "looped", "inner", "across", "last", "writes", "flops")
_LONG = ("seconds", "measured", "spread", "family")  # columns of few different values
_EDGE = ("source", "target", "pattern", "edges")
_PATTERNS = 4  # how a tensor is read: fewer ways than this
_MAGIC = b"\xfd7zXZ\x00"  # how a file of xz begins


def packed(arrays: Mapping[str, Array]) -> bytes:
    """The arrays of a data set as the bytes of a file."""
    count = len(arrays["op"])
    packed_names = (*_NODE, *_LONG, *_EDGE, "first")
    found: dict[str, Any] = {n: a for n, a in arrays.items() if n not in packed_names}
    found["first"] = _small(np.diff(arrays["first"]))
    for name in _LONG:
        found |= _coded(name, arrays[name])
    nodes = np.stack([arrays[name].astype(np.int64) for name in _NODE], 1)
    given, writes = nodes[:, 2], nodes[:, 7]
    nodes[:, 3] ^= given  # most ops loop over what they give
    whole = writes % np.maximum(given, 1) == 0  # and write all of it or nothing
    nodes[:, 7] = np.where(whole, writes // np.maximum(given, 1), -writes)
    found["nodes"], each = _distinct(nodes)
    for name, column in zip(_NODE, each.T, strict=True):
        found |= _coded(name, column)
    found |= _reads(arrays, count)
    made = BytesIO()
    np.savez(made, **found)
    return lzma.compress(made.getvalue(), preset=9 | lzma.PRESET_EXTREME)


def unpacked(raw: bytes) -> dict[str, Array]:
    """The arrays that `packed` was given; those of a plain npz as they are."""
    plain = not raw.startswith(_MAGIC)
    with np.load(BytesIO(raw if plain else lzma.decompress(raw))) as arrays:
        found = {name: arrays[name] for name in arrays.files}
    if plain:
        return found
    for name in (*_LONG, *_NODE):
        found[name] = found.pop(f"{name}.of")[found.pop(f"{name}.at")]
    given, writes = found["elements"], found["writes"]
    found["looped"] = found["looped"] ^ given
    found["writes"] = np.where(writes < 0, -writes, writes * np.maximum(given, 1))
    nodes = found.pop("nodes")
    found |= {name: found[name][nodes] for name in _NODE}
    found["first"] = np.concatenate([[0], np.cumsum(found["first"], dtype=np.int64)])
    return found | _edges(found)


def _small(values: Array) -> Array:
    """Whole numbers in the smallest format that holds them."""
    return values.astype(np.min_scalar_type(int(values.max(initial=0))))


def _coded(name: str, values: Array) -> dict[str, Array]:
    different, at = np.unique(values, return_inverse=True)
    return {f"{name}.of": different, f"{name}.at": _small(at)}


def _distinct(rows: Array) -> tuple[Array, Array]:
    """Which different row each is, and the different ones in the order they are met."""
    different, met, at = np.unique(rows, axis=0, return_index=True, return_inverse=True)
    order = np.argsort(met)
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    return _small(place[at.ravel()]), different[order]


def _reads(arrays: Mapping[str, Array], count: int) -> dict[str, Array]:
    """For each node, which of the different lists of reads is its own."""
    at = np.repeat(arrays["first"][:-1].astype(np.int64), arrays["edges"])
    target = arrays["target"] + at
    order = np.argsort(target, kind="stable")
    back = arrays["target"].astype(np.int64) - arrays["source"]
    reads = (back * _PATTERNS + arrays["pattern"])[order].astype(np.int32).tobytes()
    ends = 4 * np.cumsum(np.bincount(target, minlength=count))
    known: dict[bytes, int] = {}
    begins = [0, *ends[:-1].tolist()]
    mine = [
        known.setdefault(reads[a:b], len(known))
        for a, b in zip(begins, ends.tolist(), strict=True)
    ]  # fmt: skip
    return {
        "reads": _small(np.array(mine)),
        "reads.many": _small(np.array([len(k) // 4 for k in known])),
        "reads.told": _small(np.frombuffer(b"".join(known), np.int32)),
    }


def _edges(found: dict[str, Array]) -> dict[str, Array]:
    """Edges from the lists of reads, sources and targets counted from their region's first node."""
    mine, many = found.pop("reads"), found.pop("reads.many").astype(np.int64)
    begins = np.cumsum(many) - many
    counts = many[mine]
    before = np.cumsum(counts) - counts
    node = np.repeat(np.arange(len(mine)), counts)
    reads = found.pop("reads.told").astype(np.int64)[
        np.repeat(begins[mine] - before, counts) + np.arange(len(node))
    ]
    first = found["first"]
    total = np.concatenate([[0], np.cumsum(counts)])
    edges = np.diff(total[first])
    target = node - np.repeat(first[:-1], edges)
    return {
        "source": target - reads // _PATTERNS,
        "target": target,
        "pattern": reads % _PATTERNS,
        "edges": edges,
    }
