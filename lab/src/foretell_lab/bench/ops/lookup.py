"""Embedding tables: rows picked by token, or summed in bags, and their dense gradients.

`rows` of width `n`; `m` tokens. With skew=1 low rows come far more often, as words and items do,
so that gradients collide; with skew=0 all come alike.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from foretell_lab.bench.call import Build, Call, Place, forward_or_backward
from foretell_lab.bench.case import Case, case, dims, one_of, wholes

# Vocabularies × widths of language models; tables × widths of recommenders (DLRM, NCF, DeepFM).
_WORDS = dims("30522x768 50257x768 50257x1024 32000x4096 512x768 2x768 1024x768 28996x1024")
_WORDS += dims("32128x512 119547x768 50265x768")
_ITEMS = dims("200000x64 1000000x64 100000x16 1000000x128 138493x64 26744x64 10000x32 1000x16")
_ITEMS += dims("5000000x32 100x64")


def cases() -> Iterator[Case]:
    """Every lookup to measure."""
    for i, (rows, n) in enumerate(_WORDS * 2):
        yield from _each("embedding", i, rows, n, one_of((512, 2048, 4096, 8192, 16384), i))
    for i, (rows, n) in enumerate(_ITEMS):
        yield from _each("embedding", i, rows, n, one_of((1024, 2048, 8192, 65536), i))
    for i, (rows, n, m) in enumerate(wholes(16, (64, 1e6), (16, 1024), (128, 65536))):
        yield from _each("embedding", i, rows, n, m)
    for i, (rows, n) in enumerate(_ITEMS * 3):
        m, bag = one_of((1024, 2048, 2048, 4096, 16384), i), one_of((1, 1, 1, 4, 20), i)
        for direction in ("forward", "backward"):
            yield case(
                "embedding_bag", direction, "fp32", "-", rows=rows, n=n, m=m, bag=bag, skew=i % 2
            )


def _each(op: str, i: int, rows: int, n: int, m: int) -> Iterator[Case]:
    for dtype in ("fp32",) + (("bf16",) if i % 3 == 0 else ()):
        for direction in ("forward", "backward"):
            yield case(op, direction, dtype, "-", rows=rows, n=n, m=m, skew=i % 2)


def embedding(case: Case, place: Place) -> Call:
    """Rows of a table, one a token."""
    table = place.randn(case["rows"], case["n"], dtype=case.dtype, grad=True)
    tokens = _tokens(case, place, case["m"])
    return forward_or_backward(case, lambda t: F.embedding(tokens, t), (table,))


def embedding_bag(case: Case, place: Place) -> Call:
    """Sums of rows, `bag` of them for each of m samples."""
    table = place.randn(case["rows"], case["n"], dtype=case.dtype, grad=True)
    tokens = _tokens(case, place, case["m"] * case["bag"])
    starts = torch.arange(case["m"], device=place.device) * case["bag"]
    return forward_or_backward(
        case, lambda t: F.embedding_bag(tokens, t, starts, mode="sum"), (table,)
    )


def _tokens(case: Case, place: Place, count: int) -> torch.Tensor:
    """Row numbers; squared twice towards zero where skewed, so that a tenth holds over half."""
    at = torch.rand(count, device=place.device)
    at = at**4 if case["skew"] else at
    return (at * case["rows"]).long().clamp_(max=case["rows"] - 1)


BUILD: dict[str, Build] = {"embedding": embedding, "embedding_bag": embedding_bag}
