"""Kernels as the compiler wrote them, as columns for `foretell.cost.fused`.

    for part in parts(notes, seconds, first):     # → `kernels`, `clock`
        part.nodes, part.edges, part.seconds

A tensor a kernel reads is `fresh` where an earlier kernel of the same run touched it and no more
than a cache's worth was touched since. Ops are those Inductor breaks larger ones into; each
loop nest visits `n · r` places, and its last op reduces `r` of them to one.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

from foretell.cost.fused_regions import kind_of, word_of
from foretell.cost.kernel import SIZES
from foretell_lab.fused.kernels import Note

NAMES = {
    "float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64", "uint8": "int8",
    "uint32": "int32", "int16": "int8", "": "fp32",
}  # fmt: skip
# Inductor's own ops, by the word whose work is the same.
_WORDS = {
    "convert_element_type": "cast", "inductor_random": "rand",
    "prepare_softmax_online": "logsumexp", "fma": "addcmul",
    "low_memory_max_pool_with_offsets": "max_pool2d_with_indices",
    "low_memory_max_pool_offsets_to_indices": "where", "select_scatter": "select_backward",
    "unsafe_index": "index", "iota": "arange", "scatter": "where", "inductor_lookup_seed": "full",
    "inductor_seeds": "full",
}  # fmt: skip
CACHE = 50 * 2**20  # bytes of the H200's second-level cache: what a kernel may still find there


class Part(NamedTuple):
    """One kernel: its columns, and what it took."""

    nodes: list[tuple[Any, ...]]
    edges: list[tuple[int, int, int]]
    seconds: float
    note: Note


def parts(notes: Sequence[Note], seconds: Sequence[float], first: str, alone: float) -> list[Part]:
    """The kernels of one run; `first` was written just before, `alone` is a product's own time."""
    touched: OrderedDict[str, float] = OrderedDict()
    if first:
        touched[first] = 0.0
    found, at = [], 0
    for note in notes:
        if note["kind"] in ("loops", "template"):
            nodes, edges = _row(note, touched, alone)
            found.append(Part(nodes, edges, seconds[at], note))
            at += 1
        _touch(note, touched)
    return found


def _touch(note: Note, touched: OrderedDict[str, float]) -> None:
    """Remember what a kernel read and wrote, the latest last."""
    for access in _accesses(note):
        size = _moved(access) if len(access) > 3 else access[2]
        touched.pop(access[0], None)
        touched[access[0]] = size * _bytes(access[1])


def _accesses(note: Note) -> Iterator[list[Any]]:
    for way in ("reads", "writes"):
        yield from note.get(way, ())
        for loop in note.get("loops", ()):
            yield from (a for a in loop[way] if way == "reads" or a[-1])


def _bytes(dtype: str) -> float:
    return float(SIZES[NAMES.get(dtype, dtype)])


def _moved(access: Sequence[Any]) -> int:
    """Elements of memory that one access touches."""
    steps, odd = access[3], access[4]
    visited = prod(n for n, stride in steps if stride or odd)
    return int(min(visited, access[2]))


def _side(access: Sequence[Any], inner: int) -> tuple[int, int]:
    """Elements that lie side by side in an access, and which of its loops walks along them."""
    steps = access[3]
    if access[4]:
        return max(1, inner), len(steps) - 1
    at = next((i for i, (n, stride) in enumerate(steps) if stride == 1 and n > 1), -1)
    run = steps[at][0] if at >= 0 else 1
    for _ in steps:
        run *= next((n for i, (n, stride) in enumerate(steps) if stride == run and n > 1), 1)
    return run, at


class _Kernel:
    """A kernel's nodes and edges while they are gathered."""

    def __init__(self, touched: OrderedDict[str, float]) -> None:
        self.nodes: list[list[Any]] = []
        self.edges: list[tuple[int, int, int]] = []
        self.made: dict[str, int] = {}  # the node that holds each tensor
        self.known: dict[tuple[Any, ...], int] = {}  # ops by what they compute: done once
        self.touched = touched

    def enter(self, access: Sequence[Any], size: int, last: int) -> int:
        """The node of a tensor that enters; its size is the most any loop touches."""
        at = self.made.get(access[0])
        if at is None:
            word = "fresh" if self._near(access[0]) else "input"
            dtype = NAMES.get(access[1], access[1])
            self.nodes.append([word, dtype, 0.0, 0.0, 1.0, 0, 1.0, 0.0, 0.0, math.nan])
            at = self.made[access[0]] = len(self.nodes) - 1
        node = self.nodes[at]
        if node[0] in ("fresh", "input") and size >= node[2]:
            node[2], node[3], node[6] = float(size), float(size), float(last)
        return at

    def compute(self, row: tuple[Any, ...], sources: list[tuple[int, int]]) -> int:
        """The node of an op; what was computed before from the same is not recomputed."""
        key = (*row, *sorted(sources))
        if key not in self.known:
            self.nodes.append([*row, 0.0, 0.0, math.nan])
            self.known[key] = len(self.nodes) - 1
            self.edges += [(s, self.known[key], pattern) for s, pattern in sources]
        return self.known[key]

    def _near(self, name: str) -> bool:
        since = 0.0
        for other in reversed(self.touched):
            if other == name:
                return True
            since += self.touched[other]
            if since > CACHE:
                return False
        return False


def _row(note: Note, touched: OrderedDict[str, float], alone: float) -> Any:
    kernel = _Kernel(touched)
    if note["kind"] == "template":
        _product(kernel, note, alone)
    for loop in note["loops"]:
        _loop(kernel, loop)
    return [tuple(n) for n in kernel.nodes], sorted(set(kernel.edges), key=lambda e: (e[1], e[0]))


def _product(kernel: _Kernel, note: Note, alone: float) -> None:
    """A matmul or convolution that the compiler wrote."""
    op: list[Any] = note["ops"][-1] if note["ops"] else ["mm", "bfloat16", [], [1]]
    word = word_of(f"aten.{op[0]}")
    enters = [kernel.enter(a, a[2], 1) for a in note["reads"]]
    made = note["writes"][0]
    size, dtype = float(made[2]), NAMES.get(made[1], made[1])
    flops = _flops(word, [a[2] for a in note["reads"]], size, op[3])
    width = float(op[3][-1] if op[3] else 1)
    leaves = 0.0 if note["loops"] else size * _bytes(made[1])
    word = word if kind_of(word) == "template" else "mm"
    kernel.nodes.append([word, dtype, size, size, 1.0, 0, width, leaves, flops, alone])
    at = kernel.made[made[0]] = len(kernel.nodes) - 1
    kernel.edges += [(e, at, 0) for e in enters]


def _flops(word: str, reads: Sequence[float], made: float, shape: Sequence[int]) -> float:
    large = sorted(reads)[-2:]
    if len(large) < 2 or made <= 0:
        return 0.0
    if word == "convolution":
        return 2 * made * large[0] / max(shape[1] if len(shape) > 1 else 1, 1)
    batch = shape[0] if len(shape) == 3 else 1
    return 2 * made * math.sqrt(large[0] * large[1] / (made * batch))


def _ops_of(loop: Note, places: float) -> list[list[Any]]:
    """A nest's ops; where it only finishes what another kernel has begun, the last alone."""
    ops: list[list[Any]] = loop["ops"] or [["copy", "float32", []]]
    finishes = loop["how"] and all(
        not a[5] and a[0].startswith("buf") and a[2] == places for a in loop["reads"]
    )
    return [[*ops[-1][:2], []]] if finishes else ops


def _loop(kernel: _Kernel, loop: Note) -> None:
    """One loop nest: its ops, what they read, what leaves."""
    places, results = float(loop["n"] * loop["r"]), float(loop["n"])
    inner = loop["r"] if loop["hint"] == "INNER" else (loop["sizes"][0] or [1])[-1]
    along = [_side(a, inner) for a in loop["reads"]]
    full = [k for k, a in enumerate(loop["reads"]) if _moved(a) >= places]
    main = full[0] if full else -1
    across = int(bool(loop["how"]) and _is_across(loop, along, main))
    last = float(along[main][0] if main >= 0 else inner)
    enters = [kernel.enter(a, _moved(a), along[k][0]) for k, a in enumerate(loop["reads"])]
    way = along[main][1] if main >= 0 else -1
    ops = _ops_of(loop, places)
    reads: dict[int, list[tuple[int, int]]] = {}
    for k, access in enumerate(loop["reads"]):
        pattern = _pattern(access, places, along[k][1], way)
        for reader in [r for r in access[5] if r < len(ops)][:2] or [0]:
            reads.setdefault(reader, []).append((enters[k], pattern))
    at = -1
    numbers: list[int] = []
    for i, op in enumerate(ops):
        reduces = bool(loop["how"]) and i == len(ops) - 1
        size = results if reduces else places
        shape = (size, places, float(loop["r"]) if reduces else 1.0, across if reduces else 0, last)
        sources = [(numbers[k], 0) for k in op[2] if k < i] + reads.get(i, [])
        at = kernel.compute((_word(op[0], reduces), NAMES.get(op[1], op[1]), *shape), sources)
        numbers.append(at)
    for access in loop["writes"]:
        kernel.made[access[0]] = at
        if access[-1]:
            kernel.nodes[at][7] += float(_moved(access)) * _bytes(access[1])


def _word(name: str, reduces: bool) -> str:
    word = word_of(f"aten.{name}")
    word = _WORDS.get(word, word)
    if reduces and kind_of(word) != "reduction":
        return "sum"
    if kind_of(word) == "template":
        return "add"  # what a loop does of a library's product is to add its bias
    # what is left of an op that a loop of its own has reduced: a sum's quotient, a variance's root
    return "mul" if not reduces and kind_of(word) in ("reduction", "norm", "extern") else word


def _is_across(loop: Note, along: list[tuple[int, int]], main: int) -> bool:
    if main < 0 or loop["reads"][main][4]:
        return bool(loop["hint"] != "INNER")
    return along[main][1] < len(loop["reads"][main][3]) - len(loop["sizes"][1])


def _pattern(access: Sequence[Any], places: float, at: int, main: int) -> int:
    if _moved(access) < places:
        return 1
    return 2 if at < 0 or (not access[4] and at != main and at != len(access[3]) - 1) else 0
