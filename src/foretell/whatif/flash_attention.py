"""Attention in one kernel each way: the scores never reach memory.

Written out, attention is a product, some scaling and masking, a softmax, a dropout and a product,
each with a kernel of its own, and about twice that backward:

    forward    product · pointwise* · softmax · pointwise* · dropout · product
    backward   product · product · pointwise* · softmax's gradient · pointwise* · product · product

Every such chain becomes one kernel with the price of fused attention, launched where its first
kernel was; the host's part of all others goes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from foretell.cluster.node import Device
from foretell.cost import kernel as kernels
from foretell.cost.kernel import write_shape as write
from foretell.graph.edit import Edit
from foretell.graph.graph import Array, Dtype, Graph, Kind, Phase, word_of
from foretell.memory.tape import Tape
from foretell.whatif.base import DoesNotApply, Setting, WhatIf
from foretell.whatif.calls import kernels_of, launch_of, operators, ops_of
from foretell.whatif.kernel_request import largest_input, sizes_of
from foretell.whatif.machine import device_of
from foretell.whatif.memory_effect import released

_LETTERS = {
    "bmm": "B", "baddbmm": "B", "_softmax": "S", "softmax": "S",
    "_softmax_backward_data": "X", "softmax_backward": "X",
}  # fmt: skip
_POINTWISE = (
    "add", "add_", "mul", "mul_", "div", "div_", "sub", "masked_fill", "masked_fill_", "where",
    "native_dropout", "native_dropout_backward", "dropout", "copy_", "clone", "_to_copy", "fill_",
    "elementwise", "sum", "masked_scale", "_masked_scale", "triu", "tril", "eq", "ne", "cast",
    "bernoulli_", "isneginf", "all", "logical_not", "logical_not_",
)  # fmt: skip
# Some models make their masks anew in the middle of it, with a score of small kernels.
_FORWARD = re.compile(r"BP{0,24}SP{0,8}B")
_BACKWARD = re.compile(r"BP{0,2}BP{0,4}XP{0,6}BP{0,2}B")


@dataclass(frozen=True)
class Chain:
    """An attention written out: its kernels in order, and the sizes of what it does."""

    tasks: Array
    sizes: dict[str, float]
    dropout: bool
    backward: bool


@dataclass(frozen=True)
class FlashAttention(WhatIf):
    """Replace written-out attention by one fused kernel, forward and backward."""

    name = "flash-attention"
    assumes = (
        "matmuls around a softmax are attention; masks do not make it cheaper, and the "
        "gradient of a bias on the scores comes with it",
        "the host's part is that of the first of the replaced operators",
    )
    source = "Dao, FlashAttention-2, 2023; the price is that of `foretell.cost`"
    code = "torch.nn.functional.scaled_dot_product_attention(q, k, v)"

    def apply(self, graph: Graph, setting: Setting) -> Graph:
        found = [c for r in np.unique(graph.rank).tolist() for c in chains(graph, r)]
        if not found:
            raise DoesNotApply(
                "the step has no attention written out as matmuls around a softmax",
                hint="fused attention may be in use already; shapes must have been recorded",
            )
        return in_one_kernel(graph, found, device_of(graph, setting), spec=str(self))

    def hold(self, tape: Tape) -> Tape:
        forward = [op for op in tape.ops if op.phase == Phase.FORWARD]
        line = "".join(_LETTERS.get(o.name, "P" if o.name in _POINTWISE else "-") for o in forward)
        scores: dict[int, float] = {}
        for hit in _FORWARD.finditer(line):
            inside = forward[hit.start() : hit.end() - 1]
            least = tape.storages[inside[0].makes[0]].count if inside[0].makes else 0.0
            made = (k for op in inside for k in op.makes if tape.storages[k].count >= least)
            scores |= dict.fromkeys(made, 0.0)
        return released(tape, scores, whole=False)


def in_one_kernel(
    graph: Graph, found: list[Chain], device: Device, dtype: str = "", spec: str = ""
) -> Graph:
    """Every chain as one kernel, of another format where one is named."""
    number = operators(graph)
    with graph.edit(spec) as edit:
        for chain in found:
            _fused(edit, chain, device, number, dtype)
        edit.fact(scores_bytes=float(sum(_kept(graph, c) for c in found if not c.backward)))
    return edit.graph


def chains(graph: Graph, rank: int) -> list[Chain]:
    """All written-out attentions of a rank, forward and backward."""
    tasks = kernels_of(graph, rank)
    ops = ops_of(graph, tasks)
    line = "".join(_letter(graph, op, int(t)) for op, t in zip(ops, tasks.tolist(), strict=True))
    found = []
    for pattern, back in ((_FORWARD, False), (_BACKWARD, True)):
        for hit in pattern.finditer(line):
            part = tasks[hit.start() : hit.end()]
            sizes = _sizes(graph, part, back)
            if sizes:
                inside = ops[hit.start() : hit.end()]
                part = part[_on_scores(graph, part, sizes)]
                found.append(Chain(part, sizes, any("dropout" in o for o in inside), back))
    return found


def _letter(graph: Graph, op: str, task: int) -> str:
    if op == "gemm":  # of a captured graph: many small matmuls at once
        return "B" if _product(graph, task).get("b", 1.0) > 1 else "-"
    return _LETTERS.get(op, "P" if op in _POINTWISE else "-")


def _product(graph: Graph, task: int) -> dict[str, float]:
    return sizes_of(graph.text_of("op", task), graph.text_of("shape", task))


def _sizes(graph: Graph, part: Array, back: bool) -> dict[str, float]:
    """Batch times heads, queries, keys and the width of a head; empty where a shape is missing.

    Forward the first product is queries by keys. Backward the first two are the gradient of the
    values (keys by width) and of the scores (queries by keys), in either order.
    """
    products = [p for p in (_product(graph, int(t)) for t in part) if p]
    if not products or (back and len(products) < 4):
        return {}
    if not back:
        p = products[0]
        return {"b": 1.0, "heads": p["b"], "sq": p["m"], "sk": p["n"], "d": p["k"]}
    # The gradient of the scores is the one of the first two whose contraction is the head's width.
    scores = min(products[:2], key=lambda p: p["k"])
    sizes = {"sq": scores["m"], "sk": scores["n"], "d": scores["k"]}
    return {"b": 1.0, "heads": scores["b"], **sizes}


def _on_scores(graph: Graph, part: Array, sizes: dict[str, float]) -> Array:
    """Which kernels work on scores, queries, keys or values: small ones make masks, and stay."""
    least = sizes["heads"] * sizes["sq"] * min(sizes["sk"], sizes["d"]) / 2
    found = []
    for t in part.tolist():
        op, shape = graph.text_of("op", t), graph.text_of("shape", t)
        is_core = _letter(graph, op, t) != "P"
        found.append(is_core or not shape or largest_input(op, shape) >= least)
    return np.array(found, bool)


def _fused(edit: Edit, chain: Chain, device: Device, number: Array, dtype: str) -> None:
    graph, first, rest = edit.before, int(chain.tasks[0]), chain.tasks[1:]
    own = word_of(Dtype, graph.dtype[first])
    dtype = dtype or (own if own != "none" else "fp32")
    options = {"direction": float(chain.backward), "dropout": float(chain.dropout)}
    shape = write({**chain.sizes, **options})
    found = kernels.seconds(device, "attention", dtype, [shape])
    edit.set(
        first, op="attention", name="fused attention", shape=shape, dtype=dtype,
        seconds=float(found.seconds[0]), sigma=float(found.sigma[0]), source="formula",
    )  # fmt: skip
    edit.remove(rest)
    edit.remove(_host_between(graph, chain, number))


def _host_between(graph: Graph, chain: Chain, number: Array) -> Array:
    """Host tasks of the chain behind the operator of its first kernel, up to its last operator.

    Views and other operators between that launch nothing go too: they shape what is gone.
    """
    launches = launch_of(graph, chain.tasks)
    if (launches < 0).any():
        return np.zeros(0, np.int64)
    first, last = number[launches[0]], number[launches[-1]]
    host = np.flatnonzero((graph.kind == Kind.HOST) & (graph.lane == graph.lane[launches[0]]))
    inside = host[(number[host] > first) & (number[host] <= last)]
    others = np.setdiff1d(launch_of(graph, graph.select(kind=("kernel", "copy"))), launches)
    busy = number[others[others >= 0]]
    found: Array = inside[~np.isin(number[inside], busy)]
    return found


def _kept(graph: Graph, chain: Chain) -> float:
    """Bytes of the scores that the backward no longer finds: before and behind the softmax."""
    s = chain.sizes
    size = 2.0 if word_of(Dtype, graph.dtype[chain.tasks[0]]) in ("fp16", "bf16") else 4.0
    return s["heads"] * s["sq"] * s["sk"] * size * 2
