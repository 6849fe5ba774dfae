"""How a recorded step can be split over tensor-parallel ranks, from its dataflow alone.

Matmuls, attentions, norms and look-ups are followed through the pointwise work between them; names
of modules play no part. What is found are pairs of linear layers:

    attention     the linear layers that feed it are column-parallel, the one it feeds row-parallel
    feed-forward  linear layers that together feed one other, as wide as that takes in
    experts       the same with a matrix for each expert (batched or grouped matmuls)
    vocabulary    tables of words that the batch indexes, and the logits before the loss

Attention is a fused call, or product · softmax · product. What else reaches it (masks, position
biases, rotary angles, keys shared by all heads) is replicated. Norms of single heads leave heads
apart, so they are followed like pointwise work. What fits nothing stays whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from foretell.cost.aten import kernels
from foretell.cost.fused_regions import kind_of, word_of
from foretell.cost.kernel import parse_shape as parse
from foretell.graph import Phase
from foretell.workload.captured.rows import PRODUCTS, ForwardCall

# Kinds of op (→ `foretell.cost.fused_regions`) whose result can be split as what they are given.
_THROUGH = ("pointwise", "random", "cat", "view")
_MOVES = ("roll", "flip", "constant_pad_nd", "slice", "nan_to_num", "rot90", "diff", "exp2")
_BY_ROW = ("mean", "sum", "var", "linalg_vector_norm", "native_layer_norm", "_fused_rms_norm")
_SOFTMAX = ("_softmax", "_safe_softmax")
_BATCHED = ("bmm", "baddbmm")
_CPU_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
LITTLE = 0.1  # of what a matmul reads: offsets and the like, next to its factor


@dataclass
class Core:
    """One attention: its rows, sizes of all heads of one sample, and what feeds it."""

    rows: tuple[int, ...]  # one fused, or product, softmax, product
    heads: int  # of one sequence
    many: float  # heads of one sample: windows have many sequences
    queries: int
    keys: int
    depth: int
    feeds: frozenset[int]
    fused: bool
    causal: bool = False
    dropout: bool = False
    groups: int = 0  # heads of keys and values
    out: int = 0  # width of a value

    @property
    def last(self) -> int:
        return self.rows[-1]


@dataclass
class Roles:
    """Which row is what."""

    cores: dict[int, Core] = field(default_factory=dict)  # by each of its rows
    column: dict[int, int] = field(default_factory=dict)  # row → most ranks
    row: dict[int, int] = field(default_factory=dict)
    inside: set[int] = field(default_factory=set)  # pointwise work between column and row
    enters: set[int] = field(default_factory=set)  # the first column of each input that is split
    words: set[int] = field(default_factory=set)  # tables of words, matmuls with all of them


def is_through(row: ForwardCall) -> bool:
    """Pointwise work, copies and concatenations: split as what they are given."""
    plain = word_of(row.op.rstrip("_"))
    return kind_of(plain) in _THROUGH or plain in _MOVES


def is_linear(row: ForwardCall) -> bool:
    return row.op in ("mm", "addmm") and bool(row.weights or row.tied)


def is_expert(row: ForwardCall) -> bool:
    """A product of every expert at once: one factor is a parameter with a matrix for each."""
    is_many = row.op in ("bmm", "_grouped_mm") and len(row.call.dims[1]) == 3
    return is_many and bool(row.weights or row.tied)


def wide(row: ForwardCall) -> tuple[int, int]:
    """Inputs and outputs of a linear layer."""
    first = PRODUCTS[row.op]
    return row.call.dims[first + 1][-2], row.call.dims[first + 1][-1]


def roles_of(rows: Sequence[ForwardCall], batch: int) -> Roles:
    """The pairs of a step."""
    _trace_sources(rows)
    users = _users(rows)
    found = Roles()
    for core in _cores(rows, batch):
        found.cores |= dict.fromkeys(core.rows, core)
        _around(core, rows, users, found)
    _pairs(rows, users, found)
    _words(rows, users, found)
    return found


def _trace_sources(rows: Sequence[ForwardCall]) -> None:
    """For each row the last ones before it that are more than pointwise."""
    for row in rows:
        found: set[int] = set()
        for i in row.after:
            if rows[i].live:
                found |= rows[i].sources if rows[i].through else {i}
        row.sources = frozenset(found)
        row.through = is_through(row) or _is_per_head(row, rows)


def _is_per_head(row: ForwardCall, rows: Sequence[ForwardCall]) -> bool:
    """A norm over less than the linear layers before it make: that of one head."""
    if row.op not in _BY_ROW or not row.call.dims[0] or not row.sources:
        return False
    last, dims = row.call.dims[0][-1], row.call.numbers(1)
    if row.op in ("mean", "sum", "var") and {i % len(row.call.dims[0]) for i in dims} != {
        len(row.call.dims[0]) - 1
    }:
        return False
    made = [wide(rows[i])[1] if is_linear(rows[i]) else 0 for i in row.sources]
    return all(width > last and width % last == 0 for width in made)


def _users(rows: Sequence[ForwardCall]) -> dict[int, set[int]]:
    """For each row that is more than pointwise, those that use what it makes."""
    found: dict[int, set[int]] = {}
    for at, row in enumerate(rows):
        if not row.through:
            for i in row.sources:
                found.setdefault(i, set()).add(at)
    return found


def _cores(rows: Sequence[ForwardCall], batch: int) -> list[Core]:
    found = []
    for at, row in enumerate(rows):
        if row.op.endswith("_attention_forward") or row.op == _CPU_ATTENTION:
            found.append(_fused(at, row, batch))
        elif row.op in _SOFTMAX and row.phase != Phase.LOSS:
            core = _spelled(at, rows, batch)
            found += [core] if core else []
    return found


def _fused(at: int, row: ForwardCall, batch: int) -> Core:
    call = row.call
    q, k, v = call.dims[:3]
    turned = row.op.startswith(("_cudnn", "_scaled"))  # heads before tokens
    seq, head = (2, 1) if turned else (1, 2)
    shape = dict(parse(kernels(row.op, _text(row))[0].shape))
    causal, dropout = (bool(shape.get(name, 0.0)) for name in ("causal", "dropout"))
    return Core(
        (at,), q[head], q[0] * q[head] / batch, q[seq], k[seq], q[-1], row.sources, True,
        causal, dropout, k[head], v[-1],
    )  # fmt: skip


def _text(row: ForwardCall) -> str:
    """The call as its shape was written."""
    dims = "+".join("x".join(map(str, d)) or "-" for d in row.call.dims)
    return f"in={dims},types={'+'.join(row.call.types)},args={'+'.join(row.call.values)}"


def _spelled(at: int, rows: Sequence[ForwardCall], batch: int) -> Core | None:
    """A product before and behind a softmax; what is added to the scores is replicated."""
    soft = rows[at]
    first = [i for i in soft.sources if rows[i].op in _BATCHED]
    behind = [i for i in range(at + 1, len(rows)) if at in rows[i].sources and not rows[i].through]
    if len(first) != 1 or len(behind) != 1 or rows[behind[0]].op not in _BATCHED:
        return None
    a, b = rows[first[0]].call, rows[behind[0]].call
    one, two = a.dims[PRODUCTS[a.op]], b.dims[PRODUCTS[b.op] + 1]
    many = one[0] / batch
    heads = soft.call.dims[0][-3] if len(soft.call.dims[0]) >= 4 else math.ceil(many)
    feeds = soft.sources - {first[0]} | rows[first[0]].sources | rows[behind[0]].sources - {at}
    core = (first[0], at, behind[0])
    return Core(core, heads, many, one[1], two[1], one[2], feeds, False, out=two[2])


def _around(
    core: Core, rows: Sequence[ForwardCall], users: dict[int, set[int]], found: Roles
) -> None:
    """The linear layers that feed a core alone, and the one it alone feeds."""
    mine, behind = set(core.rows), users.get(core.last, set())
    norms = {i for i in core.feeds if _is_norm_of_heads(rows[i], rows) and users[i] <= mine}
    feeds = core.feeds.union(*(rows[i].sources for i in norms))
    alone = mine | norms
    columns = [i for i in sorted(feeds) if is_linear(rows[i]) and users.get(i, set()) <= alone]
    last = next(iter(behind)) if len(behind) == 1 else -1
    if not columns or last < 0 or not is_linear(rows[last]):
        return
    if wide(rows[last])[0] != core.heads * (core.out or core.depth):
        return
    gates = [i for i in rows[last].sources - mine if _is_gate(i, last, rows, users)]
    most = min(core.heads, _groups(core, rows, columns))
    if most < 2:  # keys and values of a single head: nothing to split
        return
    _split([*columns, *gates], last, most, rows, found)
    _mark_inside(rows, {*columns, *gates, *core.rows}, {*core.rows, last}, feeds, found)


def _is_norm_of_heads(row: ForwardCall, rows: Sequence[ForwardCall]) -> bool:
    """A norm over all heads of queries or keys: ranks sum their squares, a number a word."""
    return row.op in _BY_ROW and bool(row.sources) and all(is_linear(rows[i]) for i in row.sources)


def _is_gate(at: int, last: int, rows: Sequence[ForwardCall], users: dict[int, set[int]]) -> bool:
    """A linear layer whose result is multiplied with what attention made."""
    one = rows[at]
    return is_linear(one) and users.get(at) == {last} and wide(one)[1] == wide(rows[last])[0]


def _groups(core: Core, rows: Sequence[ForwardCall], columns: list[int]) -> int:
    """Heads of keys and values: of a fused call, else from the widths of what makes them."""
    if core.groups:
        return core.groups
    heads = [wide(rows[i])[1] // core.depth for i in columns]
    if len(heads) == 1 and heads[0] > core.heads:  # queries, keys and values in one product
        return max((heads[0] - core.heads) // 2, 1)
    return max(min(heads), 1)


def _split(
    columns: Iterable[int], last: int, most: int, rows: Sequence[ForwardCall], found: Roles
) -> None:
    """A pair: every input that column-parallel layers share is entered once."""
    entered: set[tuple[int, ...]] = set()
    for i in sorted(columns):
        found.column[i] = most
        if rows[i].after not in entered:
            found.enters.add(i)
            entered.add(rows[i].after)
    found.row[last] = most


def _pairs(rows: Sequence[ForwardCall], users: dict[int, set[int]], found: Roles) -> None:
    """Linear layers that together feed one other: out to a width and back."""
    for at, row in enumerate(rows):
        alike = is_expert if is_expert(row) else is_linear
        if not alike(row) or at in found.row or at in found.column:
            continue
        size = row.size / wide(row)[1] * wide(row)[0]
        ups = sorted(i for i in row.sources if rows[i].size > LITTLE * size)
        if not ups or any(i in found.column or i in found.row for i in ups):
            continue
        if not all(alike(rows[i]) and users.get(i) == {at} for i in ups):
            continue
        inner, sizes = wide(row)[0], [wide(rows[i]) for i in ups]
        gated = len(ups) == 1 and sizes[0][1] == 2 * inner
        if len({n for n, _ in sizes}) > 1 or not (gated or all(o == inner for _, o in sizes)):
            continue
        if max(sizes[0][0], wide(row)[1]) > inner:  # it narrows: nothing to be had by splitting
            continue
        _split(ups, at, inner, rows, found)
        _mark_inside(rows, set(ups), {at}, row.sources, found)


def _mark_inside(
    rows: Sequence[ForwardCall], first: set[int], last: set[int], feeds: Iterable[int], found: Roles
) -> None:
    """Pointwise rows between the columns and the row; replicated feeds may join them."""
    low, high, known = min(first), max(last), first | set(feeds)
    for at in range(low + 1, high):
        row = rows[at]
        if row.live and row.through and row.sources & first and row.sources <= known:
            found.inside.add(at)


def _words(rows: Sequence[ForwardCall], users: dict[int, set[int]], found: Roles) -> None:
    """Tables that words are looked up in, and the matmul with all of them before the loss.

    Tables alone are split only beside other pairs: without any, ranks would share no other work.
    """
    tables = {at: row.call.dims[0][0] for at, row in enumerate(rows) if _is_table(row)}
    most = max(tables.values(), default=0)
    logits = [at for at in range(len(rows)) if _is_logits(at, rows, users, found, tables)]
    if found.row or logits:
        found.words |= {at for at, words in tables.items() if 4 * words >= most}
    for at in logits:
        found.words.add(at)
        found.enters.add(at)
        _mark_inside(rows, {at}, users[at], (), found)


def _is_logits(
    at: int,
    rows: Sequence[ForwardCall],
    users: dict[int, set[int]],
    found: Roles,
    tables: dict[int, int],
) -> bool:
    """A linear layer as wide as a table of words, for the loss alone; classes are no words."""
    if not is_linear(rows[at]) or at in found.row or at in found.column:
        return False
    after = users.get(at, set())
    is_last = bool(after) and all(rows[i].op == "_log_softmax" for i in after)
    return is_last and wide(rows[at])[1] in tables.values()


def _is_table(row: ForwardCall) -> bool:
    return row.op == "embedding" and row.live and bool(row.weights or row.tied)
