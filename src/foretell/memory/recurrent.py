"""Outputs and saved tensors of cuDNN's recurrent layers, from the allocations of their calls.

All layers of a stack run in one call. It asks for its output, its last states, a workspace and a
*reserve* that its backward reads, in this order; the backward asks for the gradients of input and
states, workspaces, and one gradient for all weights together, of which the parameters' gradients
are views. The flat weights that it is given are the parameters themselves.
"""

from __future__ import annotations

from math import prod

from foretell.memory.tape import CODES, ITEMS, Call, Key

FORWARD, BACKWARD = "_cudnn_rnn", "_cudnn_rnn_backward"
ALIASES = {FORWARD: (3,), BACKWARD: (3,)}  # inputs that are views of parameters
_BATCH_FIRST, _FLAT = 10, 3  # places of arguments; _FLAT: all weights as one tensor
_BYTE = "unsigned char"


def recurrent(call: Call) -> list[Key]:
    """Output, last states, reserve; last the workspace, of which nothing keeps anything."""
    outputs, raw = _allocations(call)
    if not outputs:
        return []
    out, *states = outputs
    if call.flag(_BATCH_FIRST):
        out = ((out[0][1], out[0][0], *out[0][2:]), out[1])
    reserve = [_numbers(raw[-1], out[1])] if raw else []
    return [out, *states, *[_EMPTY] * (2 - len(states)), *reserve, *_workspace(call, raw[:-1])]


def recurrent_backward(call: Call) -> list[Key]:
    """Gradients of input, states and weights, and the largest workspace."""
    x = call.tensor(0)
    if x is None:
        return []
    states = [t for t in (call.tensor(4), call.tensor(5)) if t]
    return [x, *states, *_weights(call), *_workspace(call, _allocations(call)[1])]


def _weights(call: Call) -> list[Key]:
    """The parameters, which are given as a list, in the format of the input.

    A trace leaves out lists of more than thirty tensors. Then the backward tells their sizes, where
    it shapes each gradient, and the forward their sum, as one flat tensor.
    """
    x = call.tensor(0)
    if x is None:
        return []
    listed = [dims for dims, dtype in call.tensors() if dims and not dtype]
    shaped = [tuple(c.ints(1) or ()) for c in call.inner if c.name == "resize_"]
    flat = call.tensor(_FLAT)
    return [(dims, x[1]) for dims in listed or shaped or ([flat[0]] if flat else [])]


def _workspace(call: Call, raw: list[int]) -> list[Key]:
    """The largest of some workspaces: a copy of the weights, and what follows the batch."""
    weights = _weights(call)
    if not raw or not weights:
        return []
    item = ITEMS[weights[0][1]]
    left = max(raw) - item * sum(prod(dims) for dims, _ in weights)
    return [*weights, _numbers(left, weights[0][1])] if left > 0 else weights


_EMPTY: Key = ((0,), "float")


def _allocations(call: Call) -> tuple[list[Key], list[int]]:
    """Tensors and bytes that a call asks for itself, in order."""
    tensors: list[Key] = []
    raw: list[int] = []
    for inner in call.inner:
        sizes = inner.ints(0) if inner.name == "empty" else None
        if not sizes or 0 in sizes:
            continue
        dtype = CODES.get((inner.ints(1) or [6])[0], "float")
        if dtype == _BYTE:
            raw.append(sizes[0])
        else:
            tensors.append((tuple(sizes), dtype))
    return tensors, raw


def _numbers(size: int, dtype: str) -> Key:
    """So many bytes as numbers of that format: in another format they are more or fewer."""
    return (-(-size // ITEMS[dtype]),), dtype
