"""The parameters a step's optimizer treats, and how the shapes of a trace are read.

An optimizer that loops launches the same kernels once a parameter; one that takes lists has the
shapes of all of them with every kernel. Either way they come in the order the optimizer was given.
"""

from __future__ import annotations

import numpy as np

from foretell.graph.graph import Array, Dtype, Graph, Ids, Kind, Phase

PACK, UNPACK = "bucket_pack", "bucket_unpack"  # ops of the copies into and out of buckets
CAST_WEIGHT = "cast_weight"  # op of autocast's casts of parameters, inserted by `amp`
UNSCALE = "_amp_foreach_unscale"  # op of a gradient scaler's pass, before the optimizer's own

_PLAIN = ("fill_", "zero_", "copy_", "_to_copy", "add", "add_", "mul", "mul_")  # shapes stay
SIZES = {Dtype.FP64: 8.0, Dtype.FP16: 2.0, Dtype.BF16: 2.0, Dtype.FP8: 1.0}  # bytes; else 4


def in_order(graph: Graph, tasks: Ids) -> Ids:
    return tasks[np.argsort(graph.order[tasks], kind="stable")]


def parameters(graph: Graph, rank: int) -> list[tuple[str, float]]:
    """Shape and bytes a number of every parameter, in the order the optimizer treats them."""
    kernels = _update_kernels(graph, rank)
    if not len(kernels):
        return []
    lists = [k for k in kernels.tolist() if "|" in _first_input(graph.text_of("shape", k))]
    if lists:
        return _listed(graph, lists)
    ops, counts = np.unique(graph.op[kernels], return_counts=True)
    once = kernels[graph.op[kernels] == ops[np.argmin(counts)]]
    shapes = [first_shape(graph.text_of("shape", int(i))) for i in once]
    return [(s, item_bytes(graph, int(i))) for s, i in zip(shapes, once, strict=True) if s]


def treats_parameters(graph: Graph) -> Array:
    """Which tasks only fill, cast or add tensors of the shapes that parameters have.

    Casts that `amp` inserted say it themselves. Vectors are left out: their shapes are not
    telling, and they are small.
    """
    ranks = np.unique(graph.rank).tolist()
    known = {s for rank in ranks for s, _ in parameters(graph, rank) if "x" in s}
    alike = [n for n in np.unique(graph.shape).tolist() if _are_all(graph.names[n], known)]
    ops = np.concatenate([graph.names.matching(op) for op in _PLAIN])
    found: Array = np.isin(graph.shape, alike) & np.isin(graph.op, ops)
    return found | np.isin(graph.op, graph.names.matching(CAST_WEIGHT))


def _are_all(shape: str, known: set[str]) -> bool:
    """Whether all tensors among an operator's inputs have a known shape."""
    found = [s for s in inputs_of(shape) if s != "-"]
    return bool(found) and all(s in known for s in found)


def _update_kernels(graph: Graph, rank: int) -> Ids:
    """Kernels of the optimizer's step: what comes behind the whole backward pass."""
    is_update = (graph.rank == rank) & (graph.phase == Phase.UPDATE) & (graph.kind == Kind.KERNEL)
    for own in (UNPACK, UNSCALE):
        is_update &= ~np.isin(graph.op, graph.names.matching(own))
    behind = graph.order > backward_ends(graph, rank)
    return in_order(graph, np.flatnonzero(is_update & behind))


def backward_ends(graph: Graph, rank: int) -> int:
    """The place in the issue order behind which nothing of a rank's backward pass comes."""
    is_visit = np.isin(graph.name, graph.names.matching("AccumulateGrad"))
    mine = (graph.rank == rank) & ((graph.phase == Phase.BACKWARD) | is_visit)
    return int(graph.order[mine].max(initial=-1))


def _listed(graph: Graph, kernels: list[int]) -> list[tuple[str, float]]:
    """The tensors in the lists of a `foreach` or fused optimizer: each operation's once."""
    ops, found = graph.op[kernels[0]], []
    seen: set[int] = set()
    for k in kernels:
        shape = int(graph.shape[k])
        if graph.op[k] != ops or shape in seen:  # a long list takes several kernels
            continue
        seen.add(shape)
        found += [(s, item_bytes(graph, k)) for s in _first_input(graph.names[shape]).split("|")]
    return [(s, each) for s, each in found if numbers(s)]


def item_bytes(graph: Graph, task: int) -> float:
    return SIZES.get(Dtype(int(graph.dtype[task])), 4.0)


def inputs_of(shape: str) -> list[str]:
    return next((p[3:].split("+") for p in shape.split(",") if p.startswith("in=")), [])


def _first_input(shape: str) -> str:
    return next(iter(inputs_of(shape)), "")


def first_shape(shape: str) -> str:
    """`in=30522x768+768,…` → `30522x768`; empty where the first input is no tensor of known size.

    A scalar is written `-` and counts as unknown: no parameter of weight has none.
    """
    found = _first_input(shape)
    return found if numbers(found) else ""


def numbers(dims: str) -> float:
    """`30522x768` → how many numbers that is; 0 where it cannot be read."""
    try:
        return float(np.prod([int(n) for n in dims.split("x")], dtype=np.float64))
    except ValueError:
        return 0.0
