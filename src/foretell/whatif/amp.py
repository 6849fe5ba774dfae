"""Automatic mixed precision: matmuls in half precision, and everything that comes with it.

Kernels take what the measured tables say the format makes of them (→ `foretell.cost.ratios`): a
matmul on tensor cores a tenth, a batch-norm longer, an optimizer the same. Autocast is paid for:
every parameter and many an activation is cast in each forward pass and its gradient cast back, each
a kernel and a call on the host. Where CPU-bound, that is what remains of it. With
fp16 a gradient scaler looks at all gradients and lets the host wait for the verdict.

PyTorch has kernels for attention in half precision that it lacks in fp32, so what
`scaled_dot_product_attention` wrote out as matmuls around a softmax becomes one kernel. It stays
written out where the scores have a bias that is learned: no kernel has its gradient, and PyTorch
then runs it in fp32 (aten/src/ATen/native/transformers/attention.cpp). What ran as memory-efficient
attention runs as cuDNN's, which works out `grad · out` itself and writes gradients in the layout of
what they are gradients of, so that no transpose follows it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from foretell.cost.aten import read
from foretell.cost.kernel import passes
from foretell.errors import InputError
from foretell.graph.edit import Edit
from foretell.graph.graph import Array, Dtype, Graph, Kind, Phase, word_of
from foretell.memory import change as memory
from foretell.memory.change import Cast
from foretell.memory.tape import FORWARD, Tape
from foretell.whatif import autocast
from foretell.whatif.autocast import AutocastOp, is_narrow
from foretell.whatif.base import DoesNotApply, Setting, WhatIf
from foretell.whatif.calls import call_seconds, host_of, issued_by, kernels_of, launch_of, ops_of
from foretell.whatif.flash_attention import Chain, chains, in_one_kernel
from foretell.whatif.kernel_request import first_input
from foretell.whatif.machine import check_format, device_of
from foretell.whatif.memory_effect import lists_memory, narrowed
from foretell.whatif.parameters import CAST_WEIGHT, UNSCALE
from foretell.whatif.table_lookup import (
    Change,
    KernelGroup,
    format_change,
    kernel_groups,
    retimed,
    without_helpers,
)

WRITTEN_OUT = "isneginf"  # of the softmax that attention has for lack of a kernel
EFFICIENT = ("_efficient_attention_forward", "_efficient_attention_backward")
PREPARES = ("mul", "copy_", "sum")
AROUND = 6  # kernels on either side that may be attention's own
_NONE = np.zeros(0, np.int64)


class FusedAttention(NamedTuple):
    """A step with attention as half precision has it, and the kernels that stay in fp32."""

    graph: Graph
    wide: Array


def amp_attention(graph: Graph, setting: Setting, dtype: str) -> FusedAttention:
    """Attention in half precision, everything else as it was."""
    graph = _without_transposes(graph)
    if graph.names.number(WRITTEN_OUT) < 0 or not len(graph.select(op=WRITTEN_OUT)):
        return FusedAttention(graph, _NONE)
    found = [c for r in np.unique(graph.rank).tolist() for c in chains(graph, r)]
    biased = _with_learned_bias(graph, found)
    if biased:
        return FusedAttention(graph, np.concatenate([c.tasks for c in biased]))
    whole = [_with_preparation(graph, c) for c in found]
    return FusedAttention(in_one_kernel(graph, whole, device_of(graph, setting), dtype), _NONE)


def _with_learned_bias(graph: Graph, found: list[Chain]) -> list[Chain]:
    """Attentions whose scores have a bias with a gradient: a sum behind the softmax's gradient."""
    back = [c for c in found if c.backward]
    learned = [any(o == "sum" for o in ops_of(graph, c.tasks)) for c in back]
    forward = [c for c in found if not c.backward]
    if len(back) != len(forward):
        return found if any(learned) else []
    pairs = zip(reversed(forward), back, learned, strict=True)
    return [c for f, b, is_learned in pairs if is_learned for c in (f, b)]


def _with_preparation(graph: Graph, chain: Chain) -> Chain:
    """With what prepares its matmuls: scaled, repeated and turned queries, keys and values."""
    line = kernels_of(graph, int(graph.rank[chain.tasks[0]]))
    ops = ops_of(graph, line)
    least = chain.sizes["heads"] * min(chain.sizes["sq"], chain.sizes["sk"]) * chain.sizes["d"]
    if chain.backward:
        at = int(np.flatnonzero(line == chain.tasks[-1])[0])
        more = _preparing_kernels(graph, line, ops, range(at + 1, len(line)), least)
    else:
        at = int(np.flatnonzero(line == chain.tasks[0])[0])
        more = _preparing_kernels(graph, line, ops, range(at - 1, -1, -1), least)
    tasks = np.concatenate([chain.tasks, np.array(more, np.int64)])
    return replace(chain, tasks=tasks)


def _preparing_kernels(
    graph: Graph, line: Array, ops: list[str], places: range, least: float
) -> list[int]:
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


def _without_transposes(graph: Graph) -> Graph:
    """Without what memory-efficient attention needs around it and cuDNN's does not."""
    gone = [t for r in np.unique(graph.rank).tolist() for t in _transpose_kernels(graph, r)]
    if not gone:
        return graph
    with graph.edit() as edit:
        tasks = np.unique(np.array(gone, np.int64))
        edit.remove(tasks)
        edit.remove(host_of(graph, tasks))
    return edit.graph


def _transpose_kernels(graph: Graph, rank: int) -> list[int]:
    line = kernels_of(graph, rank)
    ops = ops_of(graph, line)
    found: list[int] = []
    for at, op in enumerate(ops):
        if op in EFFICIENT:
            size = first_input(op, graph.text_of("shape", int(line[at])))[0]
            found += _neighbouring_copies(
                graph, line, ops, range(at + 1, len(line)), size, ("copy_",)
            )
            if op == EFFICIENT[1]:
                before = ("copy_", "mul", "sum", "fill_")
                found += _neighbouring_copies(graph, line, ops, range(at - 1, -1, -1), size, before)
    return found


def _neighbouring_copies(
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


def _cast_costs() -> dict[str, Any]:
    """What casts and a gradient scaler cost: `[cast]` of the table of passes."""
    found: dict[str, Any] = passes()["cast"]
    return found


CAST_BYTES = 6  # of one number: four read and two written, or the other way round


@dataclass(frozen=True)
class Amp(WhatIf):
    """Run forward and backward under autocast in half precision."""

    name = "amp"
    assumes = (
        "matmuls, convolutions and attention run in half precision, sums and norms in fp32, and "
        "every parameter is cast once a step",
        "kernels change as they did where both formats were measured, on an H200",
    )
    source = "PyTorch documentation, Automatic Mixed Precision; Daydream, section 5"
    code = 'with torch.autocast("cuda", dtype=torch.bfloat16): loss = model(batch)'
    dtype: str = "bf16"  # or fp16, with a gradient scaler

    def apply(self, graph: Graph, setting: Setting) -> Graph:
        if self.dtype not in ("bf16", "fp16"):
            raise InputError(f"`{self}` names `{self.dtype}`", hint="use dtype=bf16 or dtype=fp16")
        check_format(graph, setting, self.dtype)
        found = autocast.autocast_ops(graph)
        if not (graph.kind == Kind.KERNEL).any():
            raise DoesNotApply(
                "the step has no GPU kernels", hint="profile it on a GPU, or capture its script"
            )
        if not any(run.is_half for run in found):
            raise DoesNotApply(
                "the forward pass has no matmul or convolution that could run in half precision, "
                "or the trace does not say which",
                hint="profile with record_shapes=True",
            )
        if np.isin(graph.dtype[[r.task for r in found if r.is_half]], _HALF).mean() > 0.5:
            raise DoesNotApply("the step runs in half precision already")
        graph, wide = amp_attention(graph, setting, self.dtype)
        found = autocast.autocast_ops(graph, wide)
        wide = np.union1d(wide, autocast.inside_unlisted(graph))
        factors = _factors(graph, found, wide, setting, self.dtype)
        narrow = [change.sort.kernels for change in factors if change.dtype == self.dtype]
        given = ((run.task, n) for run in found if run.is_half for n in run.inputs)
        graph = narrowed(graph, np.concatenate(narrow or [np.zeros(0, np.int64)]), given)
        with graph.edit(str(self)) as edit:
            retimed(edit, graph, factors)
            without_helpers(edit, graph)
            _cast(edit, graph, found)
            if self.dtype == "fp16":
                _scale(edit, graph)
            if lists_memory(graph):
                _hold_casts(edit, graph, found)
        return edit.graph

    def hold(self, tape: Tape) -> Tape:
        return memory.half_precision(tape)


_HALF = (Dtype.BF16, Dtype.FP16)


def _factors(
    graph: Graph, found: list[AutocastOp], wide: Array, setting: Setting, dtype: str
) -> list[Change]:
    """Every sort of kernel that changes, how many times as long it takes, and its new format."""
    rule = _Rule(found)
    answer = []
    for sort in kernel_groups(graph):
        if sort.phase == Phase.UPDATE or np.isin(sort.kernels, wide).mean() > 0.5:
            continue
        if rule.is_mixed(sort):
            answer.append(Change(sort, passes()["mixed"]["times"], 0.1, "fp32"))
            continue
        if not rule.is_half(sort):
            continue
        before = word_of(Dtype, int(graph.dtype[sort.kernels[0]]))
        before = before if before != "none" else "fp32"  # a list of tensors
        change = format_change(graph, setting, sort, before, dtype)
        if change is not None:
            answer.append(Change(sort, *change, dtype))
    return answer


class _Rule:
    """Which sorts of kernels run in half precision, of the forward pass and behind it."""

    def __init__(self, found: list[AutocastOp]) -> None:
        self.by_name: dict[tuple[str, float], list[bool]] = {}
        self.by_size: dict[float, list[bool]] = {}
        self.mixed: dict[tuple[str, float], list[bool]] = {}
        self.made = {run.makes for run in found if run.makes}
        for run in found:
            self.by_name.setdefault((run.op.rstrip("_"), run.elements), []).append(run.is_half)
            self.mixed.setdefault((run.op, run.elements), []).append(run.is_mixed)
            if run.op not in autocast.WIDE and not is_narrow(run.op):
                self.by_size.setdefault(run.elements, []).append(run.is_half)

    def is_mixed(self, sort: KernelGroup) -> bool:
        known = self.mixed.get((sort.op, sort.elements), [])
        return sort.phase in FORWARD and bool(known) and float(np.mean(known)) > 0.5

    def is_half(self, sort: KernelGroup) -> bool:
        if is_narrow(sort.op):
            return True
        plain = sort.op.removesuffix("_data").removesuffix("_backward").rstrip("_")
        plain = {"threshold": "clamp_min"}.get(plain, plain)
        if plain in autocast.WIDE and plain != "_log_softmax":  # which takes what a loss is given
            # The sums of a backward pass are not autocast: they take what they get.
            return sort.phase == Phase.BACKWARD and plain == "sum"
        known = self.by_name.get((plain, sort.elements)) or self.by_size.get(sort.elements, [])
        if not known:  # a gradient of what only a product made
            return sort.phase == Phase.BACKWARD and sort.elements in self.made
        return float(np.mean(known)) > 0.5


def _cast(edit: Edit, graph: Graph, found: list[AutocastOp]) -> None:
    """A cast before each operator that needs one, and one of its gradient in the backward pass."""
    call = call_seconds(graph)
    forward = [(run.task, c) for run in found for c in run.casts]
    _insert_casts(edit, graph, forward, _cast_costs()["host"] * call, "forward")
    back = _mirrored(graph, found)
    if len(back):
        own = [(i, c.turned()) for i, run in enumerate(found) for c in run.casts if c.has_gradient]
        own += [(i, Cast(n, True)) for i, run in enumerate(found) for n in run.returned]
        order = {i: k for k, i in enumerate(sorted({i for i, _ in own}))}
        behind = [(int(back[order[i] * len(back) // len(order)]), c) for i, c in sorted(own)]
        _insert_casts(edit, graph, behind, _cast_costs()["host_back"] * call, "backward")


def _seconds(sizes: Array, to_half: Array) -> Array:
    both = zip(_cast_costs()["to_half"], _cast_costs()["to_fp32"], strict=True)
    start, rate = (np.where(to_half, *pair) for pair in both)
    found: Array = start + CAST_BYTES * sizes / rate
    return found


def _mirrored(graph: Graph, found: list[AutocastOp]) -> Array:
    """The kernels of matmuls in the backward pass, last first."""
    ops = {r.op for r in found if r.is_half and r.casts}
    names = ops | {f"{o}_backward" for o in ops} | {"mm"}
    codes = [c for c in np.unique(graph.op).tolist() if graph.names[int(c)] in names]
    mine = (graph.kind == Kind.KERNEL) & (graph.phase == Phase.BACKWARD) & np.isin(graph.op, codes)
    tasks = np.flatnonzero(mine)
    answer: Array = tasks[np.argsort(-graph.order[tasks], kind="stable")]
    return answer


def _insert_casts(
    edit: Edit, graph: Graph, casts: list[tuple[int, Cast]], host: float, phase: str
) -> None:
    """Casts before some kernels, each with its call."""
    launches = launch_of(graph, np.array([task for task, _ in casts], np.int64)).tolist()
    casts = [pair for pair, launch in zip(casts, launches, strict=True) if launch >= 0]
    if not casts:
        return
    before = np.array([task for task, _ in casts])
    where = issued_by(graph, launch_of(graph, before))
    sizes, to_half = (np.array([c[k] for _, c in casts], float) for k in (0, 1))
    calls = edit.insert(
        issued_before=where, kind="host", op="_to_copy", phase=phase, lane=graph.lane[where],
        rank=graph.rank[where], layer=graph.layer[before], seconds=np.full(len(where), host),
    )  # fmt: skip
    kernels = edit.insert(
        issued_before=before, kind="kernel", phase=phase, lane=graph.lane[before],
        op=[CAST_WEIGHT if c.of_parameter else "copy_" for _, c in casts],
        rank=graph.rank[before], layer=graph.layer[before], dtype="bf16",
        seconds=_seconds(sizes, to_half > 0), gap=graph.gap[before], bytes=CAST_BYTES * sizes,
    )  # fmt: skip
    edit.wait(kernels, calls, kind="launch")


def _hold_casts(edit: Edit, graph: Graph, found: list[AutocastOp]) -> None:
    """Half copies of parameters, which matmuls keep until the backward of their layer.

    What an operator in fp32 reads is copied too, and that copy goes with it.
    """
    back = np.flatnonzero((graph.kind == Kind.KERNEL) & (graph.phase == Phase.BACKWARD))
    order = back[np.argsort(graph.order[back], kind="stable")].tolist()
    last = {int(graph.layer[k]): k for k in order}
    rows = [(r.task, r.task, 4.0 * n) for r in found if not r.is_half for n in r.inputs]
    for run in found:
        dies = last.get(int(graph.layer[run.task]), order[-1] if order else run.task)
        rows += [(run.task, dies, 2.0 * n) for n in run.weights if run.is_half]
    if rows:
        born, dead, size = (np.array(column) for column in zip(*rows, strict=True))
        edit.buffer(size, born=born, dies=dead, name=CAST_WEIGHT, kind="activation")


def _scale(edit: Edit, graph: Graph) -> None:
    """Check all gradients before the update, and let the host wait for what it says."""
    ends = int(graph.order[graph.phase == Phase.BACKWARD].max(initial=-1))
    update = np.flatnonzero((graph.phase == Phase.UPDATE) & (graph.order > ends))
    host = update[graph.kind[update] == Kind.HOST]
    kernels = update[graph.kind[update] == Kind.KERNEL]
    if not len(host) or not len(kernels):
        return
    first = host[np.argmin(graph.order[host])]
    kernel = kernels[np.argmin(graph.order[kernels])]
    moved = float(graph.bytes[kernels].sum()) / 4 if "bytes" in graph.columns else 0.0
    call = edit.insert(
        issued_before=np.array([first]), kind="host", op=UNSCALE, phase="update",
        lane=graph.lane[first], rank=graph.rank[first],
        seconds=_cast_costs()["scaler"] * call_seconds(graph),
    )  # fmt: skip
    check = edit.insert(
        issued_before=np.array([kernel]), kind="kernel", op=UNSCALE, phase="update",
        lane=graph.lane[kernel], rank=graph.rank[kernel],
        seconds=2e-5 + moved / _cast_costs()["checked"],
    )  # fmt: skip
    edit.wait(check, call, kind="launch")
    edit.wait(np.array([first]), check, kind="sync")
    e = graph.edges  # the backward pass ends on another thread: what follows it waits for it
    behind = e.after[(e.waiting == first) & (graph.kind[e.after] == Kind.HOST)]
    if len(behind):
        edit.wait(np.repeat(call, len(behind)), behind)
