"""Moving data without arithmetic: turned copies, joins, gathers, shifts, and across the bus.

permute   a copy of a tensor whose dims are read in another order; layout is that order (`0213`)
cat       `parts` tensors joined along rows (dim 0) or columns (dim 1)
roll      a cyclic shift of both sides of an n×h×w×c image (shifted windows)
h2d, d2h  across the bus, from or to pinned or pageable memory; n bytes
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from foretell_lab.bench.call import Build, Call, Place
from foretell_lab.bench.case import Case, case, fill, one_of, sizes, wholes


def cases() -> Iterator[Case]:
    """Every move to measure."""
    yield from _permutes()
    for i, (m, n) in enumerate(wholes(20, (64, 65536), (16, 4096))):
        for dtype in ("fp32", "bf16"):
            parts = one_of((2, 2, 3, 4, 8, 27), i)
            if m * n * parts < 3e8:
                yield case(
                    "cat", "forward", dtype, "rows" if i % 2 else "columns", m=m, n=n, parts=parts
                )
    for b, side, c in fill(14, (4, 128), (7, 112), (32, 1024)):
        shape = {"n": round(b), "h": round(side), "w": round(side), "c": round(c / 8) * 8}
        for dtype in ("fp32", "bf16"):
            yield case("roll", "forward", dtype, "-", **shape)
            yield case("pad", "forward", dtype, "-", **shape)
    for i, (m, n, rows) in enumerate(wholes(24, (256, 1000000), (16, 1024), (256, 65536))):
        for dtype in ("fp32", "bf16"):
            for op in ("index_select", "gather", "index_put", "scatter_add")[i % 2 :: 2]:
                yield case(op, "forward", dtype, "-", m=m, n=n, rows=rows)
    for size in sizes(14, 1e3, 1e9):
        for op in ("h2d", "d2h"):
            for layout in ("pinned", "pageable"):
                yield case(op, "forward", "fp32", layout, n=size // 4)


def _permutes() -> Iterator[Case]:
    orders = ("0213", "0213", "0132", "0231", "0312", "20314", "013245")
    for i, point in enumerate(fill(36, (2, 64), (16, 1024), (2, 32), (16, 128))):
        b, s, h, d = (round(v) for v in point)
        if b * s * h * d > 2e8:
            b = max(1, int(2e8 / (s * h * d)))
        order = orders[i % len(orders)]
        dims = {"0": b, "1": s, "2": h, "3": d}
        if order == "20314":
            dims = {"0": b, "1": s, "2": 3, "3": h, "4": d}
        if order == "013245":
            side = max(2, round(s**0.5) // 7)
            dims = {"0": b, "1": side, "2": 7, "3": side, "4": 7, "5": 32 * max(1, h // 8)}
        named = {f"d{key}": value for key, value in dims.items()}
        for dtype in ("fp32", "bf16"):
            yield case("permute", "forward", dtype, order, **named)


def permute(case: Case, place: Place) -> Call:
    """A contiguous copy of a tensor seen in another order."""
    x = place.randn(*(case[f"d{i}"] for i in range(len(case.layout))), dtype=case.dtype)
    seen = x.permute(*(int(at) for at in case.layout))
    return Call(lambda: seen.contiguous(), fresh=(x,))


def cat(case: Case, place: Place) -> Call:
    """Several tensors joined."""
    parts = [place.randn(case["m"], case["n"], dtype=case.dtype) for _ in range(case["parts"])]
    dim = 0 if case.layout == "rows" else 1
    return Call(lambda: torch.cat(parts, dim), fresh=parts[-1:])


def shift(case: Case, place: Place) -> Call:
    """A cyclic shift of an image, or a border of one pixel around it."""
    x = place.randn(*(case[name] for name in "nhwc"), dtype=case.dtype)
    if case.op == "roll":
        return Call(lambda: torch.roll(x, (-3, -3), (1, 2)), fresh=(x,))
    return Call(lambda: F.pad(x, (0, 0, 1, 1, 1, 1)), fresh=(x,))


def indexed(case: Case, place: Place) -> Call:
    """Rows picked from or put into a table of m rows of n."""
    m, n, rows = case["m"], case["n"], case["rows"]
    table, at = place.randn(m, n, dtype=case.dtype), place.whole(m, rows)
    values = place.randn(rows, n, dtype=case.dtype)
    wide = at[:, None].expand(rows, n)
    runs = {
        "index_select": lambda: table.index_select(0, at),
        "gather": lambda: table.gather(0, wide),
        "index_put": lambda: table.index_put_((at,), values, accumulate=True),
        "scatter_add": lambda: table.scatter_add_(0, wide, values),
    }
    return Call(runs[case.op], fresh=(values,) if case.op in ("index_put", "scatter_add") else ())


def bus(case: Case, place: Place) -> Call:
    """A copy between host and device."""
    here = torch.randn(case["n"])
    if case.layout == "pinned" and place.is_cuda:
        here = here.pin_memory()
    there = place.randn(case["n"])
    waits = case.layout == "pageable"
    if case.op == "h2d":
        return Call(lambda: there.copy_(here, non_blocking=not waits))
    return Call(lambda: here.copy_(there, non_blocking=not waits))


BUILD: dict[str, Build] = {
    "permute": permute,
    "cat": cat,
    "roll": shift,
    "pad": shift,
    **dict.fromkeys(("index_select", "gather", "index_put", "scatter_add"), indexed),
    "h2d": bus,
    "d2h": bus,
}
