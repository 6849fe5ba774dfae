"""What Megatron's way of splitting can do with a recorded step: heads, pairs of products, words.

Rows that are no pointwise work are followed through those that are. Attention is a fused call, or
product · softmax · product; the linear layers that feed it alone give out their outputs (`column`),
the one it alone feeds takes in its inputs (`row`). Linear layers that together feed one other, of
their width, are such a pair too (up and gate → down). What fits no pattern stays whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from foretell.cost.aten import kernels
from foretell.cost.shape import parse
from foretell.graph import Phase
from foretell.workload.captured.row import Row
from foretell.workload.captured.sizes import PRODUCTS

# Pointwise work and copies: what they make can be split as what they are given.
THROUGH = (
    *("add", "sub", "mul", "div", "neg", "pow", "exp", "tanh", "sqrt", "rsqrt", "where", "sigmoid"),
    *("gelu", "silu", "clamp_min", "clamp", "hardswish", "hardsigmoid", "native_dropout", "erf"),
    *("copy_", "masked_fill", "cat", "roll", "leaky_relu", "elu", "softplus", "clone", "slice"),
    *("constant_pad_nd", "bernoulli_", "lt", "gt", "eq", "ne", "logical_and", "reciprocal"),
)


@dataclass
class Core:
    """One attention: its rows, sizes of all heads of one sample, and who feeds it."""

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
    enters: set[int] = field(default_factory=set)  # the first row of each split part
    words: set[int] = field(default_factory=set)  # tables of words, products with all of them


def is_through(row: Row) -> bool:
    return row.op.rstrip("_") in THROUGH or row.op in THROUGH


def is_linear(row: Row) -> bool:
    return row.op in ("mm", "addmm") and bool(row.weights or row.tied)


def is_expert(row: Row) -> bool:
    """A product of every expert at once: one factor is a parameter with a matrix for each."""
    return row.op == "bmm" and bool(row.weights or row.tied) and len(row.call.dims[1]) == 3


def wide(row: Row) -> tuple[int, int]:
    """Inputs and outputs of a linear layer."""
    first = PRODUCTS[row.op]
    return row.call.dims[first + 1][-2], row.call.dims[first + 1][-1]


def roles_of(rows: Sequence[Row], batch: int) -> Roles:
    """The patterns in a step."""
    _trace_sources(rows)
    users = _users(rows)
    found = Roles()
    for core in _cores(rows, batch):
        found.cores |= dict.fromkeys(core.rows, core)
        _around(core, rows, users, found)
    _pairs(rows, users, found)
    if found.row:
        _words(rows, users, found)
    return found


def _trace_sources(rows: Sequence[Row]) -> None:
    for row in rows:
        found: set[int] = set()
        for i in row.after:
            if rows[i].live:
                found |= rows[i].sources if is_through(rows[i]) else {i}
        row.sources = frozenset(found)


def _users(rows: Sequence[Row]) -> dict[int, set[int]]:
    """For each row that is no pointwise work, those of its kind that use what it makes."""
    found: dict[int, set[int]] = {}
    for at, row in enumerate(rows):
        if not is_through(row):
            for i in row.sources:
                found.setdefault(i, set()).add(at)
    return found


def _cores(rows: Sequence[Row], batch: int) -> list[Core]:
    found = []
    for at, row in enumerate(rows):
        if row.op.endswith("_attention_forward"):
            found.append(_fused(at, row, rows, batch))
        elif row.op == "_softmax" and row.phase != Phase.LOSS:
            core = _spelled(at, rows, batch)
            found += [core] if core else []
    return found


def _fused(at: int, row: Row, rows: Sequence[Row], batch: int) -> Core:
    call = row.call
    q, k = call.dims[0], call.dims[1]
    turned = row.op.startswith("_cudnn")  # heads before tokens
    seq, head = (2, 1) if turned else (1, 2)
    shape = dict(parse(kernels(row.op, _text(row))[0].shape))
    return Core(
        (at,),
        q[head],
        q[0] * q[head] / batch,
        q[seq],
        k[seq],
        q[-1],
        row.sources,
        True,
        causal=bool(shape.get("causal", 0.0)),
        dropout=bool(shape.get("dropout", 0.0)),
        groups=k[head],
    )


def _text(row: Row) -> str:
    """The call as its shape was written."""
    dims = "+".join("x".join(map(str, d)) or "-" for d in row.call.dims)
    return f"in={dims},types={'+'.join(row.call.types)},args={'+'.join(row.call.values)}"


def _spelled(at: int, rows: Sequence[Row], batch: int) -> Core | None:
    """A product before and behind a softmax."""
    soft = rows[at]
    first = [i for i in soft.sources if rows[i].op in ("bmm", "baddbmm")]
    behind = [i for i, r in enumerate(rows) if at in r.sources and r.op in ("bmm", "baddbmm")]
    if len(first) != 1 or len(behind) != 1 or len(soft.sources) != 1:
        return None
    a, b = rows[first[0]].call, rows[behind[0]].call
    one, two = a.dims[PRODUCTS[a.op]], b.dims[PRODUCTS[b.op] + 1]
    many = one[0] / batch
    heads = soft.call.dims[0][-3] if len(soft.call.dims[0]) >= 4 else math.ceil(many)
    feeds = rows[first[0]].sources | (rows[behind[0]].sources - {at})
    return Core((first[0], at, behind[0]), heads, many, one[1], two[1], one[2], feeds, False)


def _around(core: Core, rows: Sequence[Row], users: dict[int, set[int]], found: Roles) -> None:
    """The linear layers that feed a core alone, and the one it alone feeds."""
    mine, behind = set(core.rows), users.get(core.last, set())
    feeds = sorted(core.feeds)
    alone = all(is_linear(rows[i]) and users.get(i, set()) <= mine for i in feeds)
    if not feeds or not alone or len(behind) != 1:
        return
    last = next(iter(behind))
    width = core.heads * core.depth
    if not is_linear(rows[last]) or wide(rows[last])[0] != width:
        return
    most = min(core.heads, _groups(core, rows, feeds))
    found.column |= dict.fromkeys(feeds, most)
    found.row[last] = most
    found.enters.add(feeds[0])
    _mark_inside(rows, {*feeds, *core.rows}, {*core.rows, last}, found)


def _groups(core: Core, rows: Sequence[Row], feeds: list[int]) -> int:
    """Heads of keys and values, from the widths of what makes them."""
    widths = [wide(rows[i])[1] // core.depth for i in feeds]
    if len(widths) == 1:  # queries, keys and values in one product
        return max((widths[0] - core.heads) // 2, 1)
    return max(min(widths), 1)


def _pairs(rows: Sequence[Row], users: dict[int, set[int]], found: Roles) -> None:
    """Linear layers that together feed one other: out to a width and back."""
    for at, row in enumerate(rows):
        alike = is_expert if is_expert(row) else is_linear
        if not alike(row) or at in found.row or at in found.column:
            continue
        ups = sorted(row.sources)
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
        found.column |= dict.fromkeys(ups, inner)
        found.row[at] = inner
        found.enters.add(ups[0])
        _mark_inside(rows, set(ups), {at}, found)


def _mark_inside(rows: Sequence[Row], first: set[int], last: set[int], found: Roles) -> None:
    """Pointwise rows between the columns and the row."""
    low, high = min(first), max(last)
    for at in range(low + 1, high):
        row = rows[at]
        if row.live and is_through(row) and row.sources and row.sources <= first:
            found.inside.add(at)


def _words(rows: Sequence[Row], users: dict[int, set[int]], found: Roles) -> None:
    """Tables that words are looked up in, and the product with all of them before the loss."""
    tables = {at: row.call.dims[0][0] for at, row in enumerate(rows) if _is_table(row)}
    most = max(tables.values(), default=0)
    found.words |= {at for at, words in tables.items() if 4 * words >= most}
    for at, row in enumerate(rows):
        is_last = is_linear(row) and at not in found.row and at not in found.column
        after = users.get(at, set())
        if is_last and after and all(rows[i].op == "_log_softmax" for i in after):
            found.words.add(at)
            found.enters.add(at)
            _mark_inside(rows, {at}, after, found)


def _is_table(row: Row) -> bool:
    return row.op == "embedding" and row.live and bool(row.weights or row.tied)
