"""What becomes of attention in half precision: other kernels take it, and some around it go.

PyTorch has kernels for attention in half precision that it lacks in fp32, so what
`scaled_dot_product_attention` wrote out as matmuls around a softmax becomes one kernel. It stays
written out where the scores have a bias that is learned: no kernel has its gradient, and PyTorch
then runs it in fp32 (aten/src/ATen/native/transformers/attention.cpp). What ran as memory-efficient
attention runs as cuDNN's, which works out `grad · out` itself and writes gradients in the layout of
what they are gradients of, so that nothing is turned round behind it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from foretell.cost.aten_call import read
from foretell.graph.columns import Array
from foretell.graph.graph import Graph
from foretell.whatif.asked import first_input
from foretell.whatif.base import Setting
from foretell.whatif.calls import host_of, kernels_of, ops_of
from foretell.whatif.flash_attention import Chain, chains, in_one_kernel
from foretell.whatif.machine import device_of

WRITTEN_OUT = "isneginf"  # of the softmax that attention has for lack of a kernel
EFFICIENT = ("_efficient_attention_forward", "_efficient_attention_backward")
PREPARES = ("mul", "copy_", "sum")
AROUND = 6  # kernels on either side that may be attention's own
_NONE = np.zeros(0, np.int64)


class Attended(NamedTuple):
    """A step with attention as half precision has it, and the kernels that stay in fp32."""

    graph: Graph
    wide: Array


def attended(graph: Graph, setting: Setting, dtype: str) -> Attended:
    """Attention in half precision, everything else as it was."""
    graph = _without_turning(graph)
    if graph.names.number(WRITTEN_OUT) < 0 or not len(graph.select(op=WRITTEN_OUT)):
        return Attended(graph, _NONE)
    found = [c for r in np.unique(graph.rank).tolist() for c in chains(graph, r)]
    biased = _biased(graph, found)
    if biased:
        return Attended(graph, np.concatenate([c.tasks for c in biased]))
    whole = [_whole(graph, c) for c in found]
    return Attended(in_one_kernel(graph, whole, device_of(graph, setting), dtype), _NONE)


def _biased(graph: Graph, found: list[Chain]) -> list[Chain]:
    """Attentions whose scores have a bias with a gradient: a sum behind the softmax's gradient."""
    back = [c for c in found if c.backward]
    learned = [any(o == "sum" for o in ops_of(graph, c.tasks)) for c in back]
    forward = [c for c in found if not c.backward]
    if len(back) != len(forward):
        return found if any(learned) else []
    pairs = zip(reversed(forward), back, learned, strict=True)
    return [c for f, b, is_learned in pairs if is_learned for c in (f, b)]


def _whole(graph: Graph, chain: Chain) -> Chain:
    """With what prepares its matmuls: scaled, repeated and turned queries, keys and values."""
    line = kernels_of(graph, int(graph.rank[chain.tasks[0]]))
    ops = ops_of(graph, line)
    least = chain.sizes["heads"] * min(chain.sizes["sq"], chain.sizes["sk"]) * chain.sizes["d"]
    if chain.backward:
        at = int(np.flatnonzero(line == chain.tasks[-1])[0])
        more = _alike(graph, line, ops, range(at + 1, len(line)), least)
    else:
        at = int(np.flatnonzero(line == chain.tasks[0])[0])
        more = _alike(graph, line, ops, range(at - 1, -1, -1), least)
    tasks = np.concatenate([chain.tasks, np.array(more, np.int64)])
    return replace(chain, tasks=tasks)


def _alike(graph: Graph, line: Array, ops: list[str], places: range, least: float) -> list[int]:
    """Copies, scalings and sums of whole queries, keys or values, one after the other."""
    found: list[int] = []
    for k in places[:AROUND]:
        task = int(line[k])
        call = read(ops[k], graph.text_of("shape", task))
        if ops[k] not in PREPARES or call.size(0) < least:
            break
        if ops[k] == "mul" and len(call.tensors()) > 1:
            break
        found.append(task)
    return found


def _without_turning(graph: Graph) -> Graph:
    """Without what memory-efficient attention needs around it and cuDNN's does not."""
    gone = [t for r in np.unique(graph.rank).tolist() for t in _turning(graph, r)]
    if not gone:
        return graph
    with graph.edit() as edit:
        tasks = np.unique(np.array(gone, np.int64))
        edit.remove(tasks)
        edit.remove(host_of(graph, tasks))
    return edit.graph


def _turning(graph: Graph, rank: int) -> list[int]:
    line = kernels_of(graph, rank)
    ops = ops_of(graph, line)
    found: list[int] = []
    for at, op in enumerate(ops):
        if op in EFFICIENT:
            size = first_input(op, graph.text_of("shape", int(line[at])))[0]
            found += _copies(graph, line, ops, range(at + 1, len(line)), size, ("copy_",))
            if op == EFFICIENT[1]:
                before = ("copy_", "mul", "sum", "fill_")
                found += _copies(graph, line, ops, range(at - 1, -1, -1), size, before)
    return found


def _copies(
    graph: Graph, line: Array, ops: list[str], places: range, size: float, words: tuple[str, ...]
) -> list[int]:
    """Neighbours of some ops with as many numbers as the queries, or its small helpers."""
    found: list[int] = []
    for k in places[:AROUND]:
        task = int(line[k])
        own = first_input(ops[k], graph.text_of("shape", task))[0]
        is_helper = ops[k] == "fill_" or (ops[k] == "copy_" and own < size / 16)
        if ops[k] not in words or (own != size and not is_helper):
            break
        found.append(task)
    return found
