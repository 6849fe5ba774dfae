"""Chains of recorded pointwise work as the one kernel that a fusing program makes of them.

Such a kernel reads what comes from outside, writes what is used outside, and keeps no more than
that; its backward reads both and the gradient. A chain that reduces over the last dim in a module
whose parameters are vectors is a norm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from foretell.workload.captured.model import Model, Piece
from foretell.workload.captured.roles import is_through
from foretell.workload.captured.rows import Row
from foretell.workload.workload import BYTES, Op, Tensor

_REDUCES = ("mean", "sum", "var", "linalg_vector_norm")


def fused(model: Model, parts: Sequence[tuple[int, list[Piece]]]) -> list[Piece]:
    """The pieces of a layer, each chain once as recorded and once as one kernel.

    A chain waits for more of it while what comes in between does not use it.
    """
    norms = {model.rows[at].path for at, _ in parts if model.rows[at].op in _REDUCES}
    out: list[Piece] = []
    chain: list[tuple[int, Op]] = []
    for at, pieces in parts:
        one = pieces[0] if len(pieces) == 1 else None
        free = one if isinstance(one, Op) and _is_pointwise(model.rows[at], one) else None
        apart = bool(chain) and _is_border(model.rows[chain[-1][0]], model.rows[at], norms)
        if free and not apart and _can_join(model, chain, at, free):
            chain.append((at, free))
            continue
        if free or {i for i, _ in chain} & set(model.rows[at].after):
            out += _flushed(model, chain)
            chain = []
        if free:
            chain = [(at, free)]
        else:
            out += pieces
    return out + _flushed(model, chain)


def _is_border(one: Row, two: Row, norms: set[str]) -> bool:
    """Norms begin and end with their module."""
    return one.path != two.path and (one.path in norms or two.path in norms)


def _is_pointwise(row: Row, op: Op) -> bool:
    is_free = op.kind == "recorded" and not op.when and not op.options.get("once")
    return is_free and (is_through(row) or row.op in _REDUCES)


def _can_join(model: Model, chain: list[tuple[int, Op]], at: int, op: Op) -> bool:
    """Whether a row uses what the chain makes and is split as it is."""
    if not chain:
        return False
    mine = {i for i, _ in chain}
    is_fed = bool(mine & set(model.rows[at].after))
    shared = set(model.rows[at].after) & {j for i in mine for j in model.rows[i].after}
    return (is_fed or bool(shared)) and op.splits == chain[0][1].splits


def _flushed(model: Model, chain: list[tuple[int, Op]]) -> list[Piece]:
    if len(chain) < 2:
        return [op for _, op in chain]
    rows = [at for at, _ in chain]
    inside = [replace(op, when="!fused", weights=()) for _, op in chain]
    weights = tuple(w for _, op in chain for w in op.weights)
    whole = _whole(model, rows, chain)
    return [*_carrier(f"{whole.name}.weights", weights), *inside, whole]


def _carrier(name: str, weights: tuple[Tensor, ...]) -> list[Op]:
    """Parameters are there however the chain runs."""
    options = {"forward": (), "backward": (), "once": True}
    one = Op(name, "recorded", {"n": 1.0}, weights=weights, options=options)
    return [one] if weights else []


def _whole(model: Model, rows: list[int], chain: list[tuple[int, Op]]) -> Op:
    """The chain as one kernel."""
    main = max((op for _, op in chain), key=lambda op: math.prod(op.dims.values()))
    name = f"{chain[0][1].name}.chain"
    given, made = _outside(model, rows)
    kept = _kept(model, rows, given, made, main)
    if _is_norm(model, chain, main):
        rms: dict[str, Any] = {"kernel": "rms_norm"}
        return Op(name, "norm", main.dims, main.splits, (), kept, options=rms, when="fused")
    n = model.batch * math.prod(main.dims.values())
    width = BYTES[model.dtype]
    reads, writes = (sum(model.rows[i].size for i in some) * width for some in (given, made))
    recorded = sum(k[3] * n for _, op in chain for k in op.options["backward"])
    back = min(recorded * width / 2.0, 2 * reads + writes)
    shape = (("n", 1.0),), (("uneven", 0.0),)
    half = 2.0 / width / n
    options: dict[str, Any] = {
        "forward": (("elementwise", *shape, (reads + writes) * half, "", 0.0),)
    }
    options["backward"] = (("elementwise", *shape, back * half, "", 0.0),) if back else ()
    return Op(name, "recorded", main.dims, main.splits, (), kept, options=options, when="fused")


def _is_norm(model: Model, chain: list[tuple[int, Op]], main: Op) -> bool:
    reduces = any(model.rows[at].op in _REDUCES for at, _ in chain)
    return reduces and any(op.weights for _, op in chain) and {"tokens", "cols"} <= set(main.dims)


def _outside(model: Model, rows: list[int]) -> tuple[list[int], list[int]]:
    """Rows outside whose results the chain reads, and its own that are used outside."""
    mine = set(rows)
    given = sorted({j for i in rows for j in model.rows[i].after if j not in mine})
    used = {j for i, row in enumerate(model.rows) if i not in mine for j in row.after}
    made = sorted(mine & used) or [rows[-1]]
    return [i for i in given if model.rows[i].live], made


def _kept(
    model: Model, rows: list[int], given: list[int], made: list[int], main: Op
) -> tuple[Tensor, ...]:
    """Its outputs that are used outside, and its inputs where the backward pass needs them."""
    width = BYTES[model.dtype]
    size = sum(_half(model, model.rows[i]) for i in made)
    drops = [model.rows[i] for i in rows if "dropout" in model.rows[i].op]
    masks = sum(row.kept - _half(model, row) for row in drops)
    needs = any(model.rows[i].kept and i not in made for i in rows)
    size += masks
    size += sum(model.rows[i].size * width for i in given if needs and not model.rows[i].kept)
    if not size:
        return ()
    whole = model.batch * math.prod(main.dims.values())
    return (Tensor("output", ("batch", *main.dims), times=size / width / whole),)


def _half(model: Model, row: Row) -> float:
    """Bytes of what a row made, where it is kept, in the workload's format."""
    return min(row.kept, row.size * BYTES[model.dtype])
