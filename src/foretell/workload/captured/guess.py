"""What a trace does not tell: which call uses what another made, and calls by their own names.

A call is taken to use the last tensor of each size it reads. Sums at the end of a branch, matmuls
beside each other and tensors made in one piece are told apart by a few rules.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from foretell.cost.aten import Call, Dims
from foretell.workload.captured.row import Row
from foretell.workload.captured.sizes import PRODUCTS


def outermost(call: Call, key: str) -> Call:
    """A call of a trace in the words of a capture: look-ups and windows show what is inside them.

    A look-up shows its gather, with indices spread to rows; a window the call of cuDNN (padding,
    stride, dilation, groups) or the one for single channels (window, bias, stride, padding …).
    """
    if call.op == "convolution" and len(call.types) > 3 and call.types[2] == "ScalarList":
        alone = call.types[3] == "-"
        pad, stride, dilation = (call.values[i] for i in ((5, 4, 6) if alone else (2, 3, 4)))
        groups = str(call.dims[0][1]) if alone else call.values[5]
        values = ("-", "-", "-", stride, pad, dilation, "False", "0x0", groups)
        dims = (*call.dims[:2], *[()] * 7)
        return replace(call, dims=dims, values=values, types=(*call.types[:2], *["-"] * 7))
    tables = [d for d in call.dims if len(d) == 2]
    if not key.startswith("embedding.") or call.op == "embedding" or len(tables) < 2:
        return call
    dims = (tables[0], tables[1][:1])
    return replace(call, op="embedding", dims=dims, types=(call.types[0], "long int"))


def guessed(rows: Sequence[Row]) -> Iterator[tuple[int, ...]]:
    """The last call that made a tensor of each size that is read, or of all of one size at once."""
    made: dict[int, list[int]] = {}
    found: tuple[int, ...] = ()
    for at, row in enumerate(rows):
        given = row.call.tensors()
        if row.op in PRODUCTS:
            given = [PRODUCTS[row.op]]
        if at and _is_beside(rows[at - 1], row):
            yield found
            made.setdefault(math.prod(row.out), []).append(at)
            continue
        sizes = Counter(row.call.size(i) for i in given)
        sizes += Counter(math.prod(dims) for dims in _all_lists(row.call))
        found = tuple(sorted({i for n, k in sizes.items() for i in _makers(made, n, k)}))
        if row.op.rstrip("_") == "add" and list(sizes.values()) == [2]:
            found = _summed(rows, made.get(math.prod(row.out), []))
        row.after = found
        yield found
        made.setdefault(math.prod(row.out), []).append(at)


def _all_lists(call: Call) -> list[Dims]:
    return [dims for group in call.lists for dims in group]


def _makers(made: dict[int, list[int]], size: int, many: int) -> list[int]:
    """Whatever made `many` tensors of a size: one call that made them all, or the last ones."""
    apart, whole = made.get(size, [])[-many:], made.get(size * many, [])[-1:]
    return whole if many > 1 and whole and whole > apart[-1:] else apart


def _summed(rows: Sequence[Row], made: list[int]) -> tuple[int, ...]:
    """What a sum of two reads: the last of its size, and the last that did not lead up to it.

    Matmuls, windows and norms are followed by something before they are added to.
    """
    if not made:
        return ()
    last = chain = made[-1]
    if not (is_followed(rows[last]) or rows[last].op in ("native_dropout", "native_batch_norm")):
        return tuple(made[-2:])  # a formula, not the end of a branch
    while rows[chain].after and rows[chain].after[-1] in made:
        chain = rows[chain].after[-1]
    before = [i for i in made if i < chain and not is_followed(rows[i])]
    return (*before[-1:], last)


def is_followed(row: Row) -> bool:
    return row.op in PRODUCTS or row.op == "convolution" or row.op == "native_layer_norm"


def _is_beside(one: Row, two: Row) -> bool:
    """Matmuls in a row over equal inputs read the same: nothing multiplies twice in between."""
    if one.op not in ("mm", "addmm") or two.op not in ("mm", "addmm"):
        return False
    return one.call.dims[PRODUCTS[one.op]] == two.call.dims[PRODUCTS[two.op]]
