"""Fused regions as columns: what the price of a fused op is asked with, thousands at a time.

A region is its nodes and edges. Nodes are the tensors that enter (`input`, or `fresh` where the
step wrote it just before and the cache may still hold it) and the ops inside; edges say which node
reads which.

    node    op         number of the op's word (→ `foretell.cost.fusion_class.codes_of`)
            dtype      number format of its first result, as a word
            elements   of its first result; of the memory behind an entering tensor
            looped     places it visits: the most elements of anything it reads or gives
            inner      places that become one result: columns of a softmax, norm or sum; else 1
            across     0 those places lie side by side, 1 apart, 2 apart but whole rows at a time
            last       elements that lie side by side in the largest tensor it touches
            writes     bytes of its results that leave the region; 0 for what stays inside
            flops      of a matmul or convolution; 0 for all else
            seconds    its own time un-fused where measured; nan where not
    edge    source     node read (numbers count through all regions)
            target     node that reads
            pattern    0 in the order it is looped over, 1 broadcast, 2 in another order of memory

A region may be a kernel as the compiler wrote it (`written`): then its ops are those the compiler
breaks larger ones into, and nothing of it waits for another kernel.

Compiled walks know an op by its number; tables such as `WEIGHT` say what each counts for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from foretell.cost.fusion_class import KINDS, WORDS, codes_of
from foretell.cost.limits import SIZES
from foretell.errors import InputError, unknown

Array = npt.NDArray[np.float64]
Whole = npt.NDArray[np.int64]
Words = npt.NDArray[np.str_]

NODE = (
    "op",
    "dtype",
    "elements",
    "looped",
    "inner",
    "across",
    "last",
    "writes",
    "flops",
    "seconds",
)
EDGE = ("source", "target", "pattern")
DTYPES = tuple(SIZES)


@dataclass(frozen=True, eq=False)
class Regions:
    """Many regions as columns; region r has the nodes `first[r]` up to `first[r + 1]`."""

    first: Whole
    op: Whole
    dtype: Whole  # index into DTYPES
    elements: Array
    looped: Array
    inner: Array
    across: Whole
    last: Array
    writes: Array
    flops: Array
    seconds: Array
    source: Whole
    target: Whole
    pattern: Whole
    written: npt.NDArray[np.bool_] | None = None  # of each region; none where nothing is
    since: Array | None = None  # bytes touched since an entering tensor was, by kernels predicted
    lowered: bool = False  # kernels predicted (→ `fused_lower`), not as a compiler wrote them

    def __len__(self) -> int:
        return len(self.first) - 1

    @property
    def region(self) -> Whole:
        """The region of each node."""
        return np.repeat(np.arange(len(self)), np.diff(self.first))

    @property
    def is_written(self) -> npt.NDArray[np.bool_]:
        """Whether each region is a kernel as the compiler wrote it."""
        return np.zeros(len(self), bool) if self.written is None else self.written

    def take(self, rows: npt.ArrayLike) -> Regions:
        """Some of the regions, in the order asked for."""
        chosen = np.asarray(rows, np.int64)
        counts = np.diff(self.first)[chosen]
        first = np.concatenate([[0], np.cumsum(counts)])
        nodes = np.repeat(self.first[chosen] - first[:-1], counts) + np.arange(first[-1])
        columns = {name: getattr(self, name)[nodes] for name in NODE}
        made: dict[str, Any] = {**columns, **self._edges(chosen, first)}
        written = self.is_written[chosen]
        since = None if self.since is None else self.since[nodes]
        return Regions(first, **made, written=written, since=since, lowered=self.lowered)

    def _edges(self, chosen: Whole, first: Whole) -> dict[str, Whole]:
        """The edges of some regions, renumbered; they are kept sorted by region."""
        of = np.searchsorted(self.first, self.target, "right") - 1
        start = np.searchsorted(of, np.arange(len(self) + 1))
        counts = np.diff(start)[chosen]
        total = np.concatenate([[0], np.cumsum(counts)])
        edges = np.repeat(start[chosen] - total[:-1], counts) + np.arange(total[-1])
        shift = np.repeat(first[:-1] - self.first[chosen], counts)
        return {
            "source": self.source[edges] + shift,
            "target": self.target[edges] + shift,
            "pattern": self.pattern[edges],
        }


def distinct(regions: Regions) -> tuple[Whole, Whole]:
    """The first of each sort of region that looks alike, and which of those each region is."""
    nodes = np.stack([np.asarray(getattr(regions, name), float) for name in NODE], axis=1)
    at = regions.first[np.searchsorted(regions.first, regions.target, "right") - 1]
    edges = np.stack([regions.source - at, regions.target - at, regions.pattern], axis=1)
    begins = np.searchsorted(regions.target, regions.first)
    seen: dict[bytes, int] = {}
    first: list[int] = []
    which = np.zeros(len(regions), np.int64)
    for r in range(len(regions)):
        look = nodes[regions.first[r] : regions.first[r + 1]].tobytes()
        look += edges[begins[r] : begins[r + 1]].tobytes()
        if look not in seen:
            seen[look] = len(first)
            first.append(r)
        which[r] = seen[look]
    return np.array(first, np.int64), which


Row = tuple[list[tuple[Any, ...]], list[tuple[int, int, int]]]


def assembled(rows: Iterable[Row]) -> Regions:
    """Regions from one list of nodes and one of edges each; edges count from the region's first."""
    parts = list(rows)
    counts = [len(nodes) for nodes, _ in parts]
    first = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    columns = list(zip(*(node for nodes, _ in parts for node in nodes), strict=True))
    if not columns:
        raise InputError("a region without nodes", hint="give each region at least one op")
    edges = [
        (s + at, t + at, p)
        for (_, e), at in zip(parts, first[:-1].tolist(), strict=True)
        for s, t, p in e
    ]
    wired = np.array(edges, np.int64).reshape(-1, 3)
    node = dict(zip(NODE, columns, strict=True))
    numbers: dict[str, Any] = {name: np.asarray(node[name], float) for name in _NUMBERS}
    return checked(
        Regions(
            first=first,
            op=_op_codes(node["op"]),
            dtype=dtype_codes(node["dtype"]),
            across=np.asarray(node["across"], np.int64),
            source=wired[:, 0],
            target=wired[:, 1],
            pattern=wired[:, 2],
            **numbers,
        )
    )


_NUMBERS = ("elements", "looped", "inner", "last", "writes", "flops", "seconds")


def _op_codes(ops: Sequence[int | str]) -> Whole:
    """Numbers of ops given as words or numbers."""
    words = sorted({op for op in ops if isinstance(op, str)})
    known = dict(zip(words, codes_of(words).tolist(), strict=True))
    return np.array([known[op] if isinstance(op, str) else op for op in ops], np.int64)


def dtype_codes(words: Sequence[str]) -> Whole:
    """Numbers of formats."""
    for word in sorted(set(words) - set(DTYPES)):
        raise unknown("number format", word, DTYPES)
    return np.array([DTYPES.index(w) for w in words], np.int64)


def checked(regions: Regions) -> Regions:
    """The same regions, after a look at sizes and edges."""
    nodes = len(regions.op)
    if len(regions.source) and (
        regions.source.min() < 0 or max(regions.source.max(), regions.target.max()) >= nodes
    ):
        raise InputError(f"an edge names a node outside 0..{nodes - 1}")
    of = regions.region
    if np.any(of[regions.source] != of[regions.target]):
        at = int(np.flatnonzero(of[regions.source] != of[regions.target])[0])
        raise InputError(f"edge {at} joins two regions", hint="an edge stays inside its region")
    if np.any(regions.elements < 0) or np.any(regions.looped < 0):
        raise InputError("a node has a negative size")
    return regions


# Elementary operations of one place, against an addition: polynomials, divisions and the counter
# of a random draw are what they are made of. First guesses; `tables/fused.toml` has fitted ones.
_HEAVY = {
    "div": 4.0, "reciprocal": 4.0, "sqrt": 4.0, "rsqrt": 3.0, "pow": 3.0, "exp": 6.0, "log": 8.0,
    "log1p": 14.0, "expm1": 10.0, "sin": 20.0, "cos": 20.0, "tanh": 12.0, "sigmoid": 9.0,
    "erf": 16.0, "gelu": 18.0, "gelu_backward": 26.0, "silu": 10.0, "silu_backward": 16.0,
    "elu": 9.0, "mish": 24.0, "elu_backward": 9.0, "softplus": 14.0, "hardswish": 4.0,
    "hardswish_backward": 5.0, "hardsigmoid": 3.0, "dropout": 34.0, "rand": 30.0,
    "bernoulli": 30.0, "rand_like": 30.0, "randn": 40.0, "softmax": 12.0, "log_softmax": 12.0,
    "softmax_backward_data": 6.0, "log_softmax_backward_data": 10.0, "layer_norm": 8.0,
    "layer_norm_backward": 14.0, "batch_norm": 8.0, "batch_norm_backward": 14.0,
    "group_norm": 8.0, "group_norm_backward": 14.0, "embedding": 4.0, "index": 5.0, "roll": 6.0,
    "cat": 4.0, "constant_pad_nd": 4.0, "upsample_nearest2d": 6.0, "avg_pool2d": 6.0,
    "var_mean": 5.0, "max_pool2d_with_indices": 24.0, "max_pool2d_with_indices_backward": 40.0,
    "avg_pool2d_backward": 10.0, "adaptive_avg_pool2d": 8.0, "adaptive_avg_pool2d_backward": 8.0,
    "slice_backward": 4.0, "select_backward": 4.0, "nll_loss_forward": 4.0,
    "nll_loss_backward": 4.0, "sigmoid_backward": 3.0, "tanh_backward": 3.0,
}  # fmt: skip
WEIGHT = np.array([_HEAVY.get(word, 1.0) for word in WORDS])
SIZE = np.array([float(SIZES[d]) for d in DTYPES])  # bytes of an element by number of format

_CODE = {kind: number for number, kind in enumerate(KINDS)}
VIEW, CONSTANT, INPUT = _CODE["view"], _CODE["constant"], _CODE["input"]
REDUCTION, NORM, TEMPLATE = _CODE["reduction"], _CODE["norm"], _CODE["template"]
GATHER, RANDOM = _CODE["gather"], _CODE["random"]
FRESH = WORDS.index("fresh")


def _are(*words: str) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    return np.array([word in words for word in WORDS])


BATCH = _are("batch_norm", "batch_norm_backward")
COLUMNS = _are("layer_norm_backward", "group_norm_backward")  # sum columns beside their rows
# An unpooled gradient: the second tensor such an op is given tells its shape and is not read.
UNPOOLS = _are(
    "max_pool2d_with_indices_backward", "avg_pool2d_backward", "adaptive_avg_pool2d_backward"
)  # fmt: skip
PARTS = _are("split", "split_with_sizes", "unbind", "chunk")
SLICES = _are("slice", "select")

# For loop nests (→ `fused_realization`): views by what they do, norms by how their sums are taken.
CAT, WINDOW, POINTWISE = _CODE["cat"], _CODE["window"], _CODE["pointwise"]
SCATTER, EXTERN = _CODE["scatter"], _CODE["extern"]
PREPARED = _are("adaptive_avg_pool2d_backward")  # torch's own: zeros, then sums into them
TURNS, EXPANDS = _are("t", "transpose", "permute"), _are("expand")
CONVOLVES = _are("convolution")
RESHAPES = _are("view", "unsafe_view", "reshape")
PIECES = SLICES | PARTS | _are("as_strided")
GROUPS = _are("group_norm", "group_norm_backward")
WELFORD = _are("var_mean", "var", "std", "layer_norm", "batch_norm", "group_norm")
NEVER_SPLIT = _are("argmax", "argmin", "max", "min")
SOFT = _are("softmax", "log_softmax")
LOSS, LOSS_BACK = _are("nll_loss_forward"), _are("nll_loss_backward")
LAYER_BACK = _are("layer_norm_backward")
BATCH_BACK, GROUP_BACK = _are("batch_norm_backward"), _are("group_norm_backward")
# Operations Inductor counts of an op that it breaks into several; of others one.
_BROKEN = {
    "gelu": 8, "gelu_backward": 20, "silu": 4, "silu_backward": 10, "mish": 8, "mish_backward": 14,
    "hardswish": 5, "hardswish_backward": 9, "elu": 6, "elu_backward": 7, "dropout": 5,
    "softplus": 5, "threshold_backward": 3, "max_pool2d_with_indices": 40,
    "max_pool2d_with_indices_backward": 60, "avg_pool2d": 20, "avg_pool2d_backward": 30,
    "layer_norm": 5, "batch_norm": 6, "group_norm": 6, "layer_norm_backward": 10,
    "batch_norm_backward": 10, "constant_pad_nd": 3, "slice_backward": 3, "select_backward": 3,
    "cat": 4, "roll": 3,
}  # fmt: skip
COUNTS = np.array([_BROKEN.get(word, 1) for word in WORDS])
