"""LoRA (Hu et al. 2021): frozen weights, with two small trained matmuls beside each product."""

from __future__ import annotations

from dataclasses import replace

from foretell.workload.workload import Layer, Op, Tensor, Workload


def adapted(model: Workload, rank: int, beside: str = "all") -> Workload:
    """The model with every weight frozen and adapters of a rank beside the matmuls of blocks.

    `beside` is the one matmul of a block that has them, or `all`.
    """
    return replace(model, layers=tuple(_layer(layer, rank, beside) for layer in model.layers))


def _layer(layer: Layer, rank: int, beside: str) -> Layer:
    ops: list[object] = []
    for op in layer.ops:
        if not isinstance(op, Op):
            ops.append(op)
            continue
        ops.append(_frozen(op))
        is_wanted = beside in ("all", op.name)
        if layer.is_block and op.kind == "matmul" and op.weights and is_wanted:
            ops += _adapters(op, rank)
    return replace(layer, ops=tuple(ops))  # type: ignore[arg-type]


def _frozen(op: Op) -> Op:
    return replace(op, weights=tuple(replace(w, frozen=True) for w in op.weights))


def _adapters(op: Op, rank: int) -> list[Op]:
    """Down to the rank and up again, split as the matmul is; the sum of both outputs."""
    rows = {"tokens": op.dims.get("tokens", 1.0)}
    split = op.splits.get("tp", "")
    axes = {axis: dim for axis, dim in op.splits.items() if dim == "tokens"}
    made = []
    for name, inner, out in (
        ("a", op.dims["in"], float(rank)),
        ("b", float(rank), op.dims["out"]),
    ):
        own = {"a": "in", "b": "out"}[name]
        weights = (Tensor(f"{op.name}.lora_{name}", ("in", "out")),)
        kept = (Tensor("input", ("batch", "tokens", "in")),) if name == "b" else ()
        splits = axes | ({"tp": own} if split == own else {})
        dims = rows | {"in": inner, "out": out}
        named = f"{op.name}.lora_{name}"
        made.append(Op(named, "matmul", dims, splits, weights, kept, options={"bare": True}))
    sums = rows | {"cols": op.dims["out"]}
    cut = axes | ({"tp": "cols"} if split == "out" else {})
    added = {"passes": 3.0, "back": 0.0}
    return [*made, Op(f"{op.name}.lora", "pointwise", sums, cut, options=added)]
