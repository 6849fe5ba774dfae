"""What autocast does to a forward pass: which operators run in half precision, what is cast.

PyTorch's lists (documentation, Automatic Mixed Precision package, op reference): matmuls,
convolutions and attention run in half precision and cast what they are given; softmax, norms over
rows, losses and sums run in fp32 and cast likewise; all others take what they get, and the widest
of several inputs wins. A trace does not say which tensor is which, so tensors are followed by their
number of elements: what was made last with so many is what the next operator with so many reads,
and a sum of two such adds the last to what the last sum, norm or table look-up left behind.

A program may widen numbers itself (`logits.float()`): in fp32 that launches nothing, under autocast
it does. A cross entropy asks for the format it is given, so its softmax stays in half precision and
its loss casts what that made.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from functools import lru_cache

import numpy as np

from foretell.cost.aten import Call, read
from foretell.cost.kernel import is_call
from foretell.graph.graph import Array, Graph, Kind, Phase
from foretell.memory.change import Autocast, Cast, Decision
from foretell.memory.tape import FORWARD, Tape
from foretell.operators import PRODUCTS, having
from foretell.whatif.memory_effect import tape_of
from foretell.whatif.table_lookup import PLACES, elements_of, strides_of

LOOKS_UP = frozenset(having("autocast", "table"))  # from fp32 tables
# Operators that run in fp32 whatever they are given.
WIDE = frozenset(having("autocast", "fp32", "widens", "table"))
FLOAT = "6"  # torch.float32, as a trace writes formats (c10/core/ScalarType.h)
# Operators whose outputs a later sum may add to.
KEEPS = frozenset(
    {"add", "add_", "native_layer_norm", "embedding", "gather", "index_select", "native_batch_norm",
     "relu", "clamp_min", "clamp_min_", "max_pool2d_with_indices", "convolution", "hardswish_",
     "silu_", "cudnn_batch_norm"}
)  # fmt: skip


@dataclass(frozen=True)
class AutocastOp:
    """How one operator of the forward pass runs under autocast."""

    task: int  # its first kernel
    op: str
    elements: float  # of its largest input
    is_half: bool
    weights: tuple[float, ...] = ()  # elements of each parameter cast to half
    inputs: tuple[float, ...] = ()  # elements of each other tensor cast to its format
    widened: tuple[float, ...] = ()  # elements of what the program itself cast to fp32 before it
    is_mixed: bool = False  # it reads both formats, and writes fp32
    makes: float = 0.0  # elements of what a product makes
    recorded: tuple[Cast, ...] | None = None  # all casts before it, where a trace tells them
    returned: tuple[float, ...] = ()  # elements of gradients that it casts to half

    @property
    def casts(self) -> tuple[Cast, ...]:
        """What is cast before it."""
        if self.recorded is not None:
            return self.recorded
        found = [Cast(n, True, True, True) for n in self.weights]
        found += [Cast(n, self.is_half, False, True) for n in self.inputs]
        return (*found, *(Cast(n, False, False, True) for n in self.widened))


@dataclass
class _Formats:
    """Which tensors are half by now, by their number of elements."""

    wide: frozenset[int] = frozenset()  # tasks that run in fp32, whatever they are
    last: dict[float, bool] = field(default_factory=dict)
    kept: dict[float, bool] = field(default_factory=dict)
    product: tuple[float, float] = (0.0, 0.0)  # input and weight of the last product
    filters: float = 0.0  # of the convolution just before
    input_was_half: bool = False  # whether that input was half


def autocast_ops(graph: Graph, wide: Array | None = None) -> list[AutocastOp]:
    """Every operator of the forward pass and the loss, in order, and how it runs.

    `wide` are kernels of operators that run in fp32 whatever they are.
    """
    within = frozenset(inside_unlisted(graph).tolist())
    state = _Formats(within if wide is None else within.union(wide.tolist()))
    found = []
    firsts = _first_kernels(graph)
    explicit = _explicit_casts(graph, firsts)
    columns = (graph.op[firsts], graph.shape[firsts], graph.phase[firsts])
    for task, *codes, phase in zip(firsts.tolist(), *(c.tolist() for c in columns), strict=True):
        op, shape = (graph.names[code] for code in codes)
        if not is_call(shape):
            continue
        widened = tuple(n for n in explicit.pop(task, ()) if state.last.get(n, False))
        state.last |= dict.fromkeys(widened, False)
        run = _op(state, task, op, read(op, shape), phase)
        found.append(replace(run, widened=widened) if widened else run)
    tape = tape_of(graph)
    if tape is not None and found:
        found = _with_recorded_formats(found, tape, state.wide)
    return [replace(r, recorded=(), returned=()) if r.task in within else r for r in found]


UNLISTED = "_grouped_mm"  # in no list of autocast: what it calls runs in the format it is given


def inside_unlisted(graph: Graph) -> Array:
    """Kernels of matmuls inside an operator that autocast does not look into."""
    used = np.unique(graph.layer[graph.layer >= 0]).tolist()
    codes = [k for k in used if graph.names[int(k)].startswith(UNLISTED)]
    found: Array = np.flatnonzero((graph.kind == Kind.KERNEL) & np.isin(graph.layer, codes))
    return found


def _with_recorded_formats(
    found: list[AutocastOp], tape: Tape, wide: frozenset[int]
) -> list[AutocastOp]:
    """Runs with the formats and casts that the recorded operators of a trace have under autocast.

    Those say which tensor is which and what has a gradient, but not which kernels are theirs: both
    lists have one order, so the longest runs of equal names belong together.
    """
    decisions = _decisions(tape)
    own = _matched_ops(tuple(r.op for r in found), tuple(d.op.name for d in decisions))
    said: dict[int, list[Decision]] = {}
    last = 0
    for k, decision in enumerate(decisions):
        last = own.get(k, last)
        said.setdefault(last, []).append(decision)
    whose = {at: decisions[k] for k, at in own.items()}
    return [
        _with_decisions(run, said.get(at, []), None if run.task in wide else whose.get(at))
        for at, run in enumerate(found)
    ]


@lru_cache(4)  # a change looks at its step before and after it has joined attention
def _decisions(tape: Tape) -> tuple[Decision, ...]:
    """How autocast runs each recorded operator of the forward pass."""
    follow = Autocast(tape)
    follow.run()
    return tuple(follow.decisions)


@lru_cache(8)  # changes tried on a step one after the other leave most of its operators alone
def _matched_ops(autocast_ops: tuple[str, ...], decisions: tuple[str, ...]) -> dict[int, int]:
    """The run of each decision that has one: the longest stretches of equal names first."""
    blocks = SequenceMatcher(None, autocast_ops, decisions, autojunk=False).get_matching_blocks()
    return {first + k: at + k for at, first, count in blocks for k in range(count)}


def _with_decisions(run: AutocastOp, said: list[Decision], own: Decision | None) -> AutocastOp:
    """A run with the casts of some decisions, and the format of its own where it has one."""
    return replace(
        run, is_half=own.is_narrow if own else run.is_half,
        is_mixed=own.is_mixed if own else run.is_mixed,
        recorded=tuple(c for d in said for c in d.casts if c.elements > 1),
        returned=tuple(n for d in said for n in d.returned),
    )  # fmt: skip


def _explicit_casts(graph: Graph, firsts: Array) -> dict[int, list[float]]:
    """Behind the last product: elements of what is cast to fp32 before each kernel is launched."""
    products = [k for k in firsts.tolist() if is_narrow(graph.names[int(graph.op[k])])]
    host = graph.select(kind="host", op="to")
    host = host[(graph.shape[host] > 0) & np.isin(graph.phase[host], FORWARD)]
    if not products or not len(host):
        return {}
    since = int(graph.order[products[-1]])
    found: dict[int, list[float]] = {}
    for task in host[graph.order[host] > since].tolist():
        call = read("to", graph.names[int(graph.shape[task])])
        later = firsts[graph.order[firsts] > graph.order[task]]
        if len(later) and call.values[1:2] == (FLOAT,) and _is_float(call, 0):
            found.setdefault(int(later[0]), []).append(float(call.size(0)))
    return found


def _first_kernels(graph: Graph) -> Array:
    """The first kernel of each operator of the forward pass, in order."""
    mine = np.flatnonzero((graph.kind == Kind.KERNEL) & np.isin(graph.phase, FORWARD))
    mine = mine[np.argsort(graph.order[mine], kind="stable")]
    same = np.zeros(len(mine), bool)
    same[1:] = (graph.op[mine[1:]] == graph.op[mine[:-1]]) & (
        graph.shape[mine[1:]] == graph.shape[mine[:-1]]
    )
    # Two calls alike in a row are told from two kernels of one call by what a product must be.
    several = np.array([graph.names[int(o)] in PRODUCTS for o in graph.op[mine]], bool)
    main = np.array(["Memset" not in graph.names[int(n)] for n in graph.name[mine]], bool)
    found: Array = mine[main & (~same | several)]
    return found


def is_narrow(op: str) -> bool:
    """Whether autocast runs an operator in half precision."""
    return op in PRODUCTS or "convolution" in op or op in PLACES or op.startswith("_cudnn_rnn")


def _op(state: _Formats, task: int, op: str, call: Call, phase: int) -> AutocastOp:
    sizes = [float(call.size(i)) for i in call.tensors() if _is_float(call, i)]
    largest = max(sizes, default=0.0)
    if task in state.wide:
        return _fp32_op(state, task, op, call, sizes)
    if is_narrow(op):
        return _half_op(state, task, op, call, largest)
    if op in WIDE and not (op == "_log_softmax" and phase == Phase.LOSS):
        return _listed_fp32_op(state, task, op, call, largest)
    if any(call.lists):
        return _list_op(state, task, op, call)
    bias = op == "add_" and 0 < state.filters == min(sizes, default=0.0)
    is_half = _inputs_are_half(state, op, sizes, largest)
    mixed = not is_half and _is_mixed(state, op, sizes, largest)
    filters = state.filters
    _record_output(state, op, _pooled(call, op, largest), is_half)
    return AutocastOp(task, op, largest, is_half, (filters,) if bias else (), is_mixed=mixed)


def _pooled(call: Call, op: str, elements: float) -> float:
    """Elements of what an operator makes: as many as it reads, of a pooling fewer."""
    if "pool" not in op or op.endswith("backward"):
        return elements
    lists = [call.numbers(i) for i, kind in enumerate(call.types) if kind == "ScalarList"]
    if op.startswith("_adaptive") and lists:
        return float(math.prod(call.dims[0][:2]) * math.prod(lists[0]))
    window = lists[1] if len(lists) > 1 and lists[1] else lists[0] if lists else ()
    return elements / math.prod(window or (1,))


def _list_op(state: _Formats, task: int, op: str, call: Call) -> AutocastOp:
    """An operator on a list of tensors: half where all of them are."""
    parts = [float(math.prod(dims)) for each in call.lists for dims in each]
    is_half = all(state.last.get(n, False) for n in parts)
    _record_output(state, op, sum(parts), is_half)
    return AutocastOp(task, op, elements_of(call), is_half)


def _fp32_op(state: _Formats, task: int, op: str, call: Call, sizes: list[float]) -> AutocastOp:
    """An operator inside one that widens what it is given and narrows what it made."""
    largest = max(sizes, default=0.0)
    if op not in PRODUCTS:
        _record_output(state, op, largest, False)
        return AutocastOp(task, op, largest, False)
    first = PRODUCTS[op]
    given = [float(call.size(i)) for i in (first, first + 1)]
    cast = tuple(n for n in given if state.last.get(n, False))
    out = _product_out(call, op, first)
    if out < max(given):  # values by their weights: what goes on is half again
        _record_output(state, op, out, True)
        return AutocastOp(task, op, largest, False, inputs=(*cast, out))
    _record_output(state, op, out, False)
    return AutocastOp(task, op, largest, False, inputs=cast)


def _is_float(call: Call, i: int) -> bool:
    return i < len(call.types) and call.types[i] in ("float", "c10::Half", "c10::BFloat16")


def _half_op(state: _Formats, task: int, op: str, call: Call, largest: float) -> AutocastOp:
    first = PRODUCTS.get(op, 0)
    data, weight = float(call.size(first)), float(call.size(first + 1))
    if op in ("bmm", "baddbmm") or op in PLACES:
        given = [s for s in (data, weight) if not state.last.get(s, False)]
        out = _product_out(call, op, first)
        _record_output(state, op, out, True)
        return AutocastOp(task, op, largest, True, inputs=tuple(given), makes=out)
    if op.startswith("_cudnn_rnn"):  # all parameters of the stack come as one list
        weights = tuple(float(math.prod(dims)) for each in call.lists for dims in each)
        cast = () if state.last.get(data, False) else (data,)
        _record_output(state, op, data, True)
        return AutocastOp(task, op, largest, True, weights, cast)
    bias = (float(call.size(0)),) if op == "addmm" else ()
    if "convolution" in op and len(call.dims) > 2 and call.dims[2] and len(call.dims[2]) == 1:
        bias = (float(call.size(2)),)
    again = state.product == (data, weight)  # queries, keys and values read the same input
    was_half = state.input_was_half if again else state.last.get(data, False)
    state.product, state.input_was_half = (data, weight), was_half
    out = _product_out(call, op, first)
    _record_output(state, op, out, True)
    state.filters = float(call.dims[1][0]) if "convolution" in op else 0.0
    cast = () if was_half else (data,)
    return AutocastOp(task, op, largest, True, (weight, *bias), cast, makes=out)


def _product_out(call: Call, op: str, first: int) -> float:
    if op in PRODUCTS:
        a, b = call.dims[first], call.dims[first + 1]
        return float(np.prod(a[:-1]) * b[-1])
    if "convolution" in op:
        image, weight = call.dims[0], call.dims[1]
        strides = strides_of(call, 3, len(image) - 2)
        sides = [max(1, n // s) for n, s in zip(image[2:], strides, strict=True)]
        return float(image[0] * weight[0] * np.prod(sides))
    return float(call.size(0))


def _listed_fp32_op(state: _Formats, task: int, op: str, call: Call, largest: float) -> AutocastOp:
    is_table = op in LOOKS_UP
    data = float(call.size(0))
    given = () if is_table or not state.last.get(data, False) else (data,)
    out = max((float(call.size(i)) for i in call.tensors()[1:]), default=data) if is_table else data
    _record_output(state, op, out, False)
    return AutocastOp(task, op, largest, False, inputs=given)


def _inputs_are_half(state: _Formats, op: str, sizes: list[float], largest: float) -> bool:
    """Half where all it reads is half; a parameter or a constant tensor is not."""
    if not sizes:
        return False
    if op.endswith(("_", "batch_norm")):  # in place; parameters of a norm stay fp32 beside it
        return state.last.get(largest, False)
    if sizes.count(largest) > 1:
        kept = state.kept.get(largest, state.last.get(largest, False))
        both = state.last.get(largest, False) and kept
        return both if op.startswith(("add", "sub")) else state.last.get(largest, False)
    others = [s for s in sizes if s != largest]
    return state.last.get(largest, False) and all(state.last.get(s, False) for s in others)


def _is_mixed(state: _Formats, op: str, sizes: list[float], largest: float) -> bool:
    """Whether two tensors of one size come in both formats."""
    if sizes.count(largest) < 2 or op.endswith("_"):
        return False
    last, kept = state.last.get(largest, False), state.kept.get(largest, False)
    return last != kept and op.startswith(("add", "sub", "mul"))


def _record_output(state: _Formats, op: str, elements: float, is_half: bool) -> None:
    if not is_narrow(op):
        state.product = (0.0, 0.0)
    state.filters = 0.0
    state.last[elements] = is_half
    if op in KEEPS:
        state.kept[elements] = is_half
