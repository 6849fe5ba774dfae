"""Fused regions: which ops may share one, regions as columns, what a kernel must move and compute.

Ops have a kind, by what a compiler such as Inductor does with each (table `operators.toml`):

    kind        what it is                                   fuses
    pointwise   one result for one place                     with what loops over its places
    gather      reads at an index (embedding, select)        like pointwise
    random      draws numbers (dropout)                      like pointwise
    constant    writes a value, reads nothing                like pointwise
    view        another way to look at memory                with everything, free
    cat         several tensors one behind the other         like pointwise
    reduction   many places to one                           with what loops over its rows
    norm        reductions and what uses their results       like a reduction
    window      reads a neighbourhood (pooling)              like pointwise
    template    matmul or convolution                takes pointwise consumers where the
                                                             compiler writes it, else stays alone
    scatter     adds to places an index names                never: its order is a library's affair
    extern      a library's kernel                           never

Ops are named by their word: the name in torch's `aten` without `_`, `native_` and overload
(`aten::_softmax` is `softmax`, → `word_of`). Unknown words are `extern`: what is not known
to fuse is not fused.

Rules (→ `may_fuse`) follow what Inductor's scheduler allows for one producer and one consumer:
both loop over the same places, or the consumer loops over the rows of a reduction, or reads the
producer broadcast. A cycle through an op outside the region is the caller's to forbid.


A region is its nodes and edges. Nodes are the tensors that enter (`input`, or `fresh` where the
step wrote it just before and the cache may still hold it) and the ops inside; edges say which node
reads which.

    node    op         number of the op's word (→ `codes_of`)
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

Compiled walks know an op by its number; tables such as `WEIGHT` say what each counts for. What a
kernel must move and compute, found by walking its ops once.

Regions are lowered to kernels first (→ `fused_kernels`). The walk drops what nothing uses and
counts for every pass over the kernel's places which tensors are read again. Rows too long for
registers are visited twice, sums of columns make a pass of their own, and rows cannot change places
inside a kernel: what moves them begins another pass (Inductor, torch 2.11).

    read      bytes of entering tensors, each once
    fresh     those of them the step has just written
    reread    bytes read again in later passes, from memory or cache
    written   bytes that leave
    kernels   1; a region on a CPU may have more
    levels    1, likewise
    work      elementary operations over all places (→ `WEIGHT`)
    turned    bytes read in another order than they lie
    lone      the most places one result is reduced from, where few results leave the device idle
    product   matmuls' and convolutions' flop
    own       their own time where it is known
    places    places visited by the largest op
    random    places at which numbers are drawn
    operand   bytes the matmuls read and write
    odd       elements moved in rows no wide load fits, where rows matter
    halves    places visited in formats of two bytes

On a CPU Inductor C++ (torch 2.13) writes one function of several loop nests. Ops over the same
places share a nest, but what uses a reduction, a norm or a product waits for the next one: the
region falls into passes. What is not stored is recomputed in every pass that uses it; what is long
or holds an exponential is stored then (`should_realize_on_reuse` in torch/_inductor/ir.py). Nests
are vectorized along the rows that lie side by side; sums of columns keep one accumulator each and
run down the rows. The columns have a CPU's meaning where it differs, and there are seven more:

    reread    bytes read again by later passes
    kernels   loop nests expected
    levels    passes that wait for one another
    lone      rows begun: the start and the last, partial vector of each
    odd       places that partial vectors visit in vain
    columns   places visited by reductions that run down columns
    chained   places visited by reductions along rows: one accumulator, one after another
    mapped    bytes that leave in blocks larger than the allocator keeps: paged in anew
    asked     booleans read from memory: a mask of them is assembled one by one
    told      booleans written
    joined    places of concatenations that are not stored: what uses them asks which part it is in
    given     tensors that enter and leave: each is passed over by the interpreter
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from foretell.compiled import F1, F2, I1, compiled
from foretell.cost.kernel import SIZES
from foretell.errors import InputError, unknown
from foretell.operators import having

KINDS = (
    "input", "pointwise", "gather", "random", "constant", "view", "cat", "reduction", "norm",
    "window", "template", "scatter", "extern",
)  # fmt: skip

_RENAMED: dict[str, str] = having("word")

# Kinds that loop over places and may join others in one loop.
_LOOPS = frozenset({"pointwise", "gather", "random", "constant", "cat", "window"})
_ROWS = frozenset({"reduction", "norm"})


def word_of(name: str) -> str:
    """The word of an op: `aten::_softmax` and `aten._softmax.default` are both `softmax`."""
    plain = name.removeprefix("aten::").removeprefix("aten.").partition(".")[0]
    if plain in _RENAMED:
        return _RENAMED[plain]
    return plain.removeprefix("_").removeprefix("native_")


KIND_OF: dict[str, str] = {word_of(op): kind for op, kind in having("fusion", *KINDS).items()}
WORDS = tuple(KIND_OF)  # the order of the table of operators is the numbering of ops in a region


def kind_of(word: str) -> str:
    """What sort of op a word is; `extern` where it is unknown."""
    return KIND_OF.get(word, "extern")


def codes_of(words: Sequence[str]) -> npt.NDArray[np.int64]:
    """The numbers of words; unknown ones are `other`."""
    return np.array([_CODE.get(word, _CODE["other"]) for word in words], np.int64)


_ALONE = frozenset({"extern", "scatter", "input"})


def is_fusible(kind: str) -> bool:
    """Whether an op of this kind ever shares a kernel with another."""
    return kind not in _ALONE


def may_fuse(
    producer: str, consumer: str, *, made: float, looped: float, rows: float, template: bool = False
) -> bool:
    """Whether a consumer may join its producer in one kernel.

    `made` elements the producer gives, `looped` places the consumer visits, `rows` results the
    consumer gives (of a reduction) or the producer's places (where the producer reduces);
    `template` says whether the compiler writes matmuls itself and so can add to their end.
    """
    if producer in _ALONE or consumer in _ALONE:
        return False
    if "view" in (producer, consumer):
        return True
    if consumer == "template":
        return False
    if producer == "template":
        return template and consumer in _LOOPS and made == looped
    if producer in _ROWS:
        # a result a row: used again over the same places, row by row, or reduced further
        return looped in (made, rows)
    return made <= looped


_CODE = {word: number for number, word in enumerate(WORDS)}
KIND_CODE = np.array([KINDS.index(KIND_OF[word]) for word in WORDS], np.int64)


Array = npt.NDArray[np.float64]
Whole = npt.NDArray[np.int64]
Words = npt.NDArray[np.str_]
NODE = (
    "op", "dtype", "elements", "looped", "inner", "across", "last", "writes", "flops", "seconds",
)  # fmt: skip
DTYPES = tuple(SIZES)


RegionRow = tuple[list[tuple[Any, ...]], list[tuple[int, int, int]]]
_NUMBERS = ("elements", "looped", "inner", "last", "writes", "flops", "seconds")


def _by_word(trait: str) -> list[float]:
    """The value of each word in the operator table, 1 by default."""
    known = {word_of(op): value for op, value in having(trait).items()}
    return [known.get(word, 1) for word in WORDS]


WEIGHT = np.array(_by_word("work"), float)
SIZE = np.array([float(SIZES[d]) for d in DTYPES])  # bytes of an element by number of format
_SORT = {kind: number for number, kind in enumerate(KINDS)}
FRESH = WORDS.index("fresh")
COUNTS = np.array(_by_word("steps"))
LEVELS = 12  # more are counted as the last
WALKED = (
    "read", "fresh", "reread", "written", "kernels", "levels", "work", "turned", "lone", "product",
    "own", "places", "random", "operand", "odd", "halves",
)  # fmt: skip


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
    lowered: bool = False  # kernels predicted (→ `fused_kernels`), not as a compiler wrote them

    def __len__(self) -> int:
        return len(self.first) - 1

    @property
    def region(self) -> Whole:
        """The region of each node."""
        return np.repeat(np.arange(len(self.first) - 1), np.diff(self.first))

    @property
    def is_written(self) -> npt.NDArray[np.bool_]:
        """Whether each region is a kernel as the compiler wrote it."""
        return np.zeros(len(self), bool) if self.written is None else self.written

    def take(self, rows: npt.ArrayLike) -> Regions:
        """Some of the regions, in the given order."""
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


class Ops(NamedTuple):
    """The columns of all regions, as compiled walks take them."""

    start: I1  # first edge of each node
    source: I1
    pattern: I1
    kind: I1
    op: I1
    dtype: I1
    size: F1
    elements: F1
    looped: F1
    inner: F1
    across: I1
    last: F1
    writes: F1
    flops: F1
    seconds: F1


def columns_of(regions: Regions, read: npt.NDArray[np.bool_] | None = None) -> Ops:
    """The columns of regions, of all edges or of some; what leaves may be written to."""
    chosen = slice(None) if read is None else read
    start = np.searchsorted(regions.target[chosen], np.arange(len(regions.op) + 1))
    return Ops(
        start, regions.source[chosen], regions.pattern[chosen], KIND_CODE[regions.op], regions.op,
        regions.dtype, SIZE[regions.dtype], regions.elements, regions.looped, regions.inner,
        regions.across, regions.last, regions.writes.copy(), regions.flops, regions.seconds,
    )  # fmt: skip


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


def assembled(rows: Iterable[RegionRow]) -> Regions:
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
    return checked_regions(
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


def checked_regions(regions: Regions) -> Regions:
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


VIEW, CONSTANT, INPUT = _SORT["view"], _SORT["constant"], _SORT["input"]
REDUCTION, NORM, TEMPLATE = _SORT["reduction"], _SORT["norm"], _SORT["template"]
GATHER, RANDOM = _SORT["gather"], _SORT["random"]


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
# For loop nests (→ `fused_nests`): views by what they do, norms by how their sums are taken.
CAT, WINDOW, POINTWISE = _SORT["cat"], _SORT["window"], _SORT["pointwise"]
SCATTER, EXTERN = _SORT["scatter"], _SORT["extern"]
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


# A row of a kernel as written that is longer than this is not held in registers (`persistent`): it
# is visited once to reduce it and once more to use the result.
_HELD_INNER, _HELD_OUTER = 1024.0, 64.0


@compiled
def hand_writes_to_bases(o, low, high):  # type: ignore[no-untyped-def]
    """Hand what a view leaves to the node whose memory it looks at; entries lie there anyway."""
    for n in range(high - 1, low - 1, -1):
        if o.kind[n] == VIEW and o.writes[n] > 0 and o.start[n] < o.start[n + 1]:
            at = o.source[o.start[n]]
            if o.kind[at] != INPUT:
                o.writes[at] = max(o.writes[at], o.writes[n])
            o.writes[n] = 0.0


@compiled
def live(o, low, high):  # type: ignore[no-untyped-def]
    """Nodes something that leaves depends on; a constant needs only the shape of what it reads."""
    live = np.zeros(high - low, np.bool_)
    for n in range(high - 1, low - 1, -1):
        if o.writes[n] > 0:
            live[n - low] = True
        if live[n - low] and o.kind[n] != CONSTANT:
            for e in range(o.start[n], o.start[n + 1]):
                live[o.source[e] - low] = True
    return live


@compiled
def levels(o, low, high):  # type: ignore[no-untyped-def]
    """The level at which each node is computed."""
    level = np.zeros(high - low, np.int64)
    bound = np.zeros(high - low, np.bool_)
    for n in range(low, high):
        i = n - low
        if o.kind[n] != CONSTANT:
            for e in range(o.start[n], o.start[n + 1]):
                at = o.source[e] - low
                moves = o.kind[n] == GATHER and bound[at]  # rows of one kernel cannot change places
                level[i] = min(max(level[i], level[at] + (1 if moves else 0)), LEVELS - 1)
            for e in range(o.start[n], o.start[n + 1]):
                at = o.source[e] - low
                bound[i] |= bound[at] and level[at] == level[i] and o.kind[n] != GATHER
        bound[i] |= o.kind[n] == REDUCTION or o.kind[n] == NORM
    return level


@compiled
def needs(o, low, high, live, level):  # type: ignore[no-untyped-def]
    """For each node the passes, as bits, at which its value is computed or read."""
    need = np.zeros(high - low, np.int64)
    for n in range(high - 1, low - 1, -1):
        i = n - low
        if not live[i] or o.kind[n] == INPUT or o.kind[n] == CONSTANT:
            continue
        if o.writes[n] > 0:
            need[i] |= 1 << level[i]
        outer = o.across[n] == 2 or (o.across[n] == 1 and not BATCH[o.op[n]])
        outer |= o.inner[n] > (_HELD_OUTER if o.across[n] else _HELD_INNER)
        wanted = _passes_of_sources(
            o.kind[n], COLUMNS[o.op[n]], outer, o.writes[n], need[i], level[i]
        )
        for e in range(o.start[n], o.start[n + 1]):
            need[o.source[e] - low] |= wanted
    return need


@compiled
def _passes_of_sources(kind, columns, outer, writes, need, level):  # type: ignore[no-untyped-def]
    """The passes at which a node's sources are wanted; a sum of columns makes its own."""
    apart = 1 << (level + LEVELS if outer or columns else level)
    if kind == TEMPLATE:
        return 0  # its operands belong to the product's own time
    if kind == REDUCTION:
        return apart
    wanted = 1 << level if writes > 0 else need  # what lies in memory is read there later
    return wanted | apart if columns or (outer and kind == NORM) else wanted


@compiled
def bits(mask):  # type: ignore[no-untyped-def]
    count = 0
    while mask:
        count += mask & 1
        mask >>= 1
    return count


@compiled
def odd(last):  # type: ignore[no-untyped-def]
    """How much narrower than sixteen elements the loads of a row must be: 0 to 1."""
    if last % 16 == 0 or last <= 1:
        return 0.0
    if last % 8 == 0:
        return 0.1
    if last % 4 == 0:
        return 0.25
    return 0.5 if last % 2 == 0 else 1.0


@compiled
def rows_matter(o, low, high, live):  # type: ignore[no-untyped-def]
    """Whether a region's loop knows rows: something is broadcast or reduced."""
    for n in range(low, high):
        if live[n - low] and o.kind[n] != CONSTANT:
            if o.kind[n] == REDUCTION or o.kind[n] == NORM:
                return True
            for e in range(o.start[n], o.start[n + 1]):
                if o.pattern[e] != 0:
                    return True
    return False


@compiled
def elements_read(o, low, high, live):  # type: ignore[no-untyped-def]
    """Elements of each node that what is live reads; through a view, what is read of the view."""
    found = np.zeros(high - low)
    for t in range(high - 1, low - 1, -1):
        i = t - low
        if not live[i] or o.kind[t] == CONSTANT:
            continue
        found[i] = min(found[i], o.elements[t])
        some = o.elements[t] if o.kind[t] == GATHER else o.looped[t]
        for e in range(o.start[t], o.start[t + 1]):
            found[o.source[e] - low] += found[i] if o.kind[t] == VIEW else some
    return found


_KERNELS, _LEVELS = WALKED.index("kernels"), WALKED.index("levels")


class Walk(NamedTuple):
    """What a walk found: `WALKED` of each kernel; visits, level and being split of each node.

    Nothing of one kernel is split: that column is a CPU's.
    """

    region: Array
    node: Array


def walked(regions: Regions, units: float, weight: Array | None = None) -> Walk:
    """Walk all kernels, on a device of so many units; `weight` counts operations by op."""
    out, node = np.zeros((len(regions), len(WALKED))), np.zeros((len(regions.op), 3))
    _walk(columns_of(regions, edges_read(regions)), regions.first, units, out, node)
    out[:, [_KERNELS, _LEVELS]] = 1.0
    add_work(regions, node, WEIGHT if weight is None else weight, out)
    return Walk(out, node)


def edges_read(regions: Regions) -> npt.NDArray[np.bool_]:
    """The edges along which something is read: of a pooled tensor only the shape is used."""
    place = np.arange(len(regions.target)) - np.searchsorted(regions.target, regions.target)
    return np.asarray(~(UNPOOLS[regions.op[regions.target]] & (place == 1)))


def is_busy(regions: Regions) -> npt.NDArray[np.bool_]:
    """Nodes that compute something inside a kernel."""
    return np.asarray(~np.isin(KIND_CODE[regions.op], (VIEW, CONSTANT, INPUT, TEMPLATE)))


def add_work(regions: Regions, node: Array, weight: Array, out: Array) -> None:
    """Operations over all places, and those in formats of two bytes."""
    places = regions.looped * node[:, 0] * is_busy(regions)
    half = SIZE[regions.dtype] == 2
    out[:, WALKED.index("work")] = np.bincount(
        regions.region, places * weight[regions.op], len(out)
    )
    out[:, WALKED.index("halves")] = np.bincount(regions.region, places * half, len(out))


@compiled
def _walk(o: Ops, first: I1, units: float, out: F2, node: F2) -> None:
    for r in range(len(first) - 1):
        low, high = first[r], first[r + 1]
        hand_writes_to_bases(o, low, high)
        alive = live(o, low, high)
        level = levels(o, low, high)
        need = needs(o, low, high, alive, level)
        _count(o, low, high, units, alive, level, need, out[r])
        for i in range(high - low):
            node[low + i, 0] = max(1, bits(need[i])) if alive[i] else 0
            node[low + i, 1] = level[i]


@compiled
def _count(o, low, high, units, live, level, need, row):  # type: ignore[no-untyped-def]
    read = elements_read(o, low, high, live)
    has_rows = rows_matter(o, low, high, live)
    for n in range(low, high):
        i = n - low
        if not live[i]:
            continue
        if o.kind[n] == INPUT:
            moved = read[i] * o.size[n]
            times = bits(need[i])
            if times > 0:
                row[0] += moved
                row[1] += moved if o.op[n] == FRESH else 0.0
                row[2] += moved * (times - 1)
                row[14] += moved / o.size[n] * times * odd(o.last[n]) if has_rows else 0.0
            continue
        _count_op(o, n, units, level[i], need[i], row)
        if has_rows and o.writes[n] > 0:
            row[14] += o.elements[n] * odd(o.last[n])


@compiled
def _count_op(o, n, units, level, need, row):  # type: ignore[no-untyped-def]
    row[3] += o.writes[n]
    if o.kind[n] == TEMPLATE:
        row[9] += o.flops[n]
        row[10] += o.seconds[n] if o.seconds[n] == o.seconds[n] else 0.0
        for e in range(o.start[n], o.start[n + 1]):
            row[13] += o.elements[o.source[e]] * o.size[o.source[e]]
        row[13] += o.elements[n] * o.size[n]
        return
    if o.writes[n] > 0 or o.kind[n] == REDUCTION:  # it lies in memory for later passes
        row[2] += o.elements[n] * o.size[n] * bits(need & ~(1 << level))
    if o.kind[n] == VIEW or o.kind[n] == CONSTANT:
        return
    row[12] += o.looped[n] * max(1, bits(need)) if o.kind[n] == RANDOM else 0.0
    row[11] = max(row[11], o.looped[n])
    for e in range(o.start[n], o.start[n + 1]):
        row[7] += o.elements[o.source[e]] * o.size[o.source[e]] if o.pattern[e] == 2 else 0.0
    if o.inner[n] > 1:
        rows = o.looped[n] / max(o.inner[n], 1.0)
        row[8] = max(row[8], o.inner[n] * min(1.0, units / max(rows, 1.0)))


NESTED = (
    "read", "fresh", "reread", "written", "kernels", "levels", "work", "turned", "lone", "product",
    "own", "places", "random", "operand", "odd", "halves", "columns", "chained", "mapped", "asked",
    "told", "joined", "given",
)  # fmt: skip
_PASSES = 12  # more are counted as the last
_LONG = 30.0  # operations beyond which what several passes use is stored (`has_large_inner_fn`)
# Ops whose value is stored where several passes use it, however short it is.
_STORED = np.isin(
    np.array(WORDS),
    ("exp", "log", "log1p", "sigmoid", "tanh", "silu", "silu_backward", "mish", "softplus"),
)
_NESTS = 16  # of a region; more are counted as the last
_BOOL = DTYPES.index("bool")
_VECTOR = 16.0  # of fp32 in a vector of 512 bits
_MAPPED = 32.0 * 2**20  # bytes: glibc maps larger blocks anew (mallopt(3), M_MMAP_THRESHOLD)
# Elementary operations of one place where a CPU's differ from those of a GPU: random numbers
# and indices go lane by lane.
_LANE_BY_LANE = {
    "dropout": 300.0, "rand": 300.0, "rand_like": 300.0, "bernoulli": 300.0, "randn": 300.0,
    "embedding": 8.0, "index": 30.0, "layer_norm": 6.0, "layer_norm_backward": 6.0,
    "batch_norm": 6.0, "batch_norm_backward": 6.0,
}  # fmt: skip
HOST_WEIGHT = np.array([_LANE_BY_LANE.get(w, g) for w, g in zip(WORDS, WEIGHT, strict=True)])


def nested(regions: Regions, weight: Array) -> Walk:
    """Walk all regions; `weight` counts operations by op."""
    out, node = np.zeros((len(regions), len(NESTED))), np.zeros((len(regions.op), 3))
    _walk_nests(columns_of(regions, edges_read(regions)), regions.first, out, node)
    add_work(regions, node, weight, out)
    return Walk(out, node)


@compiled
def _walk_nests(o: Ops, first: I1, out: F2, node: F2) -> None:
    for r in range(len(first) - 1):
        low, high = first[r], first[r + 1]
        hand_writes_to_bases(o, low, high)
        alive = live(o, low, high)
        level, done = _passes(o, low, high, alive)
        long = _lengths(o, low, high)
        need, again = _nest_needs(o, low, high, alive, level, done, long)
        rows = rows_matter(o, low, high, alive)
        row = out[r]
        _count_inputs(o, low, high, alive, need, row)
        _count_ops(o, low, high, alive, level, done, need, again, rows, row)
        row[4], row[5] = max(row[4], 1.0), max(row[5], 1.0)
        for i in range(high - low):
            node[low + i, 0] = max(1, bits(need[i]) - again[i]) if alive[i] else 0
            node[low + i, 1] = level[i]
            node[low + i, 2] = done[i] - level[i]


@compiled
def _passes(o, low, high, alive):  # type: ignore[no-untyped-def]
    """The pass in which each node is begun, and the one in which its result is there."""
    level = np.zeros(high - low, np.int64)
    done = np.zeros(high - low, np.int64)
    for n in range(low, high):
        i = n - low
        if o.kind[n] != CONSTANT:
            for e in range(o.start[n], o.start[n + 1]):
                level[i] = max(level[i], done[o.source[e] - low])
        waits = o.kind[n] == REDUCTION or o.kind[n] == NORM or o.kind[n] == TEMPLATE
        done[i] = min(level[i] + (1 if waits else 0), _PASSES - 1)
    return level, done


@compiled
def _lengths(o, low, high):  # type: ignore[no-untyped-def]
    """Operations behind each value since the last stored ones; endless behind an exponential."""
    found = np.zeros(high - low)
    for n in range(low, high):
        if o.kind[n] != INPUT and o.kind[n] != CONSTANT:
            found[n - low] = 0.0 if o.kind[n] == VIEW else min(WEIGHT[o.op[n]], 10.0)
            found[n - low] += 1e9 if _STORED[o.op[n]] else 0.0
            for e in range(o.start[n], o.start[n + 1]):
                at = o.source[e]
                lies = o.writes[at] > 0 or o.kind[at] == REDUCTION or o.kind[at] == TEMPLATE
                found[n - low] += 0.0 if lies else found[at - low]
    return found


@compiled
def _nest_needs(o, low, high, alive, level, done, long):  # type: ignore[no-untyped-def]
    """For each node the passes, as bits, in which its value is wanted; in how many it is read."""
    need = np.zeros(high - low, np.int64)
    again = np.zeros(high - low, np.int64)
    for n in range(high - 1, low - 1, -1):
        i = n - low
        if not alive[i] or o.kind[n] == INPUT or o.kind[n] == CONSTANT:
            continue
        if o.writes[n] > 0:
            need[i] |= 1 << done[i]
        wanted = need[i]
        if o.kind[n] == TEMPLATE:
            wanted = 0
        elif o.kind[n] == REDUCTION:
            wanted = 1 << level[i]
        elif o.kind[n] == NORM:
            wanted |= 1 << level[i]
        elif o.writes[n] > 0 or (o.kind[n] != VIEW and long[i] > _LONG and bits(wanted) > 1):
            again[i] = bits(wanted) - 1
            wanted = 1 << level[i]
        if COLUMNS[o.op[n]] or (BATCH[o.op[n]] and o.kind[n] == NORM):
            # sums of columns, or a second pass for the variance
            wanted |= 1 << (level[i] + _PASSES)
        for e in range(o.start[n], o.start[n + 1]):
            need[o.source[e] - low] |= wanted
    return need, again


@compiled
def _count_inputs(o, low, high, alive, need, row):  # type: ignore[no-untyped-def]
    """Bytes of entering tensors: as much of each as is read, and again in later passes."""
    needed = np.zeros(high - low)
    for n in range(high - 1, low - 1, -1):
        i = n - low
        if not alive[i] or o.kind[n] == CONSTANT:
            continue
        needed[i] = min(needed[i], o.elements[n])
        for e in range(o.start[n], o.start[n + 1]):
            needed[o.source[e] - low] += needed[i] if o.kind[n] == VIEW else o.looped[n]
        if o.kind[n] == INPUT and need[i] > 0:
            moved = needed[i] * o.size[n]
            row[0] += moved
            row[1] += moved if o.op[n] == FRESH else 0.0
            row[2] += moved * (bits(need[i]) - 1)
            row[19] += needed[i] * bits(need[i]) if o.dtype[n] == _BOOL else 0.0
            row[22] += 1.0


@compiled
def _count_ops(o, low, high, alive, level, done, need, again, rows, row):  # type: ignore[no-untyped-def]
    seen = np.zeros((_NESTS, 3))
    for n in range(low, high):
        i = n - low
        if not alive[i] or o.kind[n] == INPUT:
            continue
        stored = o.writes[n] > 0 or o.kind[n] == REDUCTION or o.kind[n] == TEMPLATE
        row[3] += o.writes[n]
        row[18] += o.writes[n] if o.writes[n] > _MAPPED else 0.0
        row[20] += o.writes[n] if o.dtype[n] == _BOOL else 0.0
        row[22] += 1.0 if o.writes[n] > 0 else 0.0
        if stored or again[i] > 0:  # later passes read what was stored
            row[2] += o.elements[n] * o.size[n] * bits(need[i] & ~(1 << done[i]))
            row[2] += 0.0 if stored else o.elements[n] * o.size[n]
        if o.kind[n] == TEMPLATE:
            row[9] += o.flops[n]
            row[10] += o.seconds[n] if o.seconds[n] == o.seconds[n] else 0.0
            row[13] += o.elements[n] * o.size[n]
            for e in range(o.start[n], o.start[n + 1]):
                row[13] += o.elements[o.source[e]] * o.size[o.source[e]]
            row[2] += o.elements[n] * o.size[n] if need[i] >> done[i] & 1 else 0.0
        if o.kind[n] == TEMPLATE or o.kind[n] == VIEW or o.kind[n] == CONSTANT:
            continue
        times = max(1, bits(need[i]) - again[i])
        row[11] = max(row[11], o.looped[n])
        row[12] += o.looped[n] * times if o.kind[n] == RANDOM else 0.0
        row[21] += o.looped[n] * times if o.kind[n] == CAT and o.writes[n] == 0 else 0.0
        for e in range(o.start[n], o.start[n + 1]):
            row[7] += o.elements[o.source[e]] * o.size[o.source[e]] if o.pattern[e] == 2 else 0.0
        if o.kind[n] == REDUCTION or o.kind[n] == NORM:
            along = o.across[n] == 0
            row[17 if along else 16] += o.looped[n]
            row[4] += 1.0 if o.kind[n] == NORM else 0.0  # what is made of the sums of a norm
            length = o.inner[n] if along else o.last[n]
            _nest(level[i], o.looped[n], o.across[n], length, rows, seen, row)
        if o.writes[n] > 0 and o.kind[n] != REDUCTION:
            _nest(done[i], o.looped[n], 0, o.last[n], rows, seen, row)
        row[5] = max(row[5], done[i] + (0.0 if o.kind[n] == REDUCTION else 1.0))


@compiled
def _nest(level, places, across, length, rows, seen, row):  # type: ignore[no-untyped-def]
    """Note a loop nest: once for all that visit the same places in the same pass."""
    for k in range(_NESTS):
        if seen[k, 0] == level + 1 and seen[k, 1] == places and seen[k, 2] == across:
            return
        if seen[k, 0] == 0:
            seen[k, 0], seen[k, 1], seen[k, 2] = level + 1, places, across
            break
    row[4] += 1.0
    if rows and length > 0:
        count = places / length
        row[8] += count
        row[14] += count * (np.ceil(length / _VECTOR) * _VECTOR - length)
