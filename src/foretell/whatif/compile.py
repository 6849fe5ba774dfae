"""The model compiled: neighbouring kernels fused, and the host issues few calls.

torch.compile makes one kernel of a run of operators that pass numbers through: pointwise work,
norms, reductions, losses. Matmuls, convolutions and attention stay what they are, and between two
of them what lies there costs about its longest kernel. A network of convolutions is turned to
channels last on the way. The optimizer is not compiled.

    run of kernels    longest + share · (all the others)
    host              2 · start + launch · kernels left + parameter · parameters
                      + statistic · batch-norms                                (calls' worth)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from foretell import portable
from foretell.cost.aten import read
from foretell.cost.kernel import is_call, passes
from foretell.graph.edit import Edit
from foretell.graph.graph import NONE, Array, Graph, Kind, Phase
from foretell.memory import change as memory
from foretell.memory.tape import Tape
from foretell.trace.words import is_compiled
from foretell.whatif.autocast import is_narrow
from foretell.whatif.base import DoesNotApply, Setting, WhatIf
from foretell.whatif.calls import USUAL, call_seconds, launch_of, operators
from foretell.whatif.channels_last import turned
from foretell.whatif.cuda_graph import masked
from foretell.whatif.table_lookup import (
    CONVOLVES,
    elements_of,
    image_layout,
    kernel_groups,
    retimed,
)


def _constant(name: str) -> float:
    """A constant of compiled steps: `[compiled]` of the table of passes."""
    return float(passes()["compiled"][name])


COMPILED = (Phase.FORWARD, Phase.LOSS, Phase.BACKWARD)
# Operators that Inductor leaves to libraries or to PyTorch (torch 2.11, CUDA).
KEPT = ("embedding_dense_backward", "_embedding_bag", "_cudnn_rnn", "sort", "topk", "nonzero")
# Those that loop over kernels: called as a whole, they cost the host what they cost now.
LOOPS = ("_cudnn_rnn", "CudnnRnn", "_thnn_fused", "_grouped_mm", "GroupedMm")


@dataclass(frozen=True)
class Compile(WhatIf):
    """Compile the model with Inductor."""

    name = "compile"
    assumes = (
        "the whole model is captured without graph breaks; the optimizer stays as it is",
        f"a run of fused kernels takes its longest and {_constant('share'):.0%} of the others",
    )
    source = "PyTorch 2 (Ansel et al., ASPLOS 2024)"
    code = "model = torch.compile(model)"

    def apply(self, graph: Graph, setting: Setting) -> Graph:
        if is_compiled(graph):
            raise DoesNotApply("the step runs kernels of torch.compile already")
        mine = np.isin(graph.phase, COMPILED)
        device = np.flatnonzero(mine & np.isin(graph.kind, (Kind.KERNEL, Kind.COPY)))
        host = np.flatnonzero(mine & (graph.kind == Kind.HOST))
        if not len(device) or not len(host):
            raise DoesNotApply("the step has no forward pass that a host launches on a device")
        graph = masked(_channels_last(graph, setting), setting, is_compiled=True)
        with graph.edit(str(self)) as edit:
            left = _fused(edit, graph, device)
            _host_calls(edit, graph, host[~_loops(graph)[host]], left)
        return edit.graph

    def hold(self, tape: Tape) -> Tape:
        return memory.compiled(tape)


def _loops(graph: Graph) -> Array:
    """Tasks of calls that loop over kernels, by their operator or the outermost around it."""
    used = np.unique(np.concatenate([graph.name, graph.op]))
    mine = [int(k) for k in used if k >= 0 and graph.names[int(k)].startswith(LOOPS)]
    found: Array = np.isin(graph.name, mine) | np.isin(graph.op, mine)
    return found


def _channels_last(graph: Graph, setting: Setting) -> Graph:
    """Convolutions with channels last, as Inductor lays them out."""
    sorts = [s for s in kernel_groups(graph) if s.rows[0][0] in CONVOLVES]
    plain = sum(len(s.kernels) for s in sorts if s.sizes.get("groups", 1) == 1)
    if image_layout(graph) == "nhwc" or plain <= len(sorts) / 2:
        return graph
    with graph.edit("channels-last") as edit:
        retimed(edit, graph, turned(graph, setting))
    return replace(edit.graph, history=graph.history)


def _fused(edit: Edit, graph: Graph, device: Array) -> Array:
    """Fuse runs of kernels; the ids of what is left, each with the time of its run."""
    order = device[np.lexsort((graph.order[device], graph.lane[device]))]
    extern = np.array([_is_kept(graph.names[int(o)]) for o in graph.op[order]], bool)
    backward = graph.phase[order] == Phase.BACKWARD
    cut = extern.copy()
    cut[1:] |= extern[:-1] | (backward[1:] != backward[:-1])
    cut[1:] |= graph.lane[order[1:]] != graph.lane[order[:-1]]
    cut[0] = True
    run = np.cumsum(cut) - 1
    seconds = _streamed(graph, order)
    total = np.bincount(run, seconds)
    longest = np.zeros(len(total))
    np.maximum.at(longest, run, seconds)
    keeps = np.zeros(len(order), bool)
    best = np.lexsort((-seconds, run))
    keeps[best[np.unique(run[best], return_index=True)[1]]] = True
    left = order[keeps]
    others = (total - longest)[run[keeps]]
    fused = longest[run[keeps]] + _constant("share") * others
    spread = _constant("spread") * others / np.where(fused > 0, fused, 1.0)  # of the share, in ln
    edit.set(left, seconds=fused, sigma=portable.hypot(graph.sigma[left], spread))
    edit.remove(order[~keeps])
    return left


# Passes along an index that Inductor writes into the kernels beside them.
INDEXED = frozenset({"index", "gather", "index_add", "scatter_add", "_index_put_impl_"})
_BOTH = 2  # what is read there is written too, or added to memory


def _streamed(graph: Graph, kernels: Array) -> Array:
    """Seconds of kernels; those along an index take what their numbers take to pass by.

    PyTorch's own sort indices, go over them a row at a time or add number by number.
    """
    seconds = graph.seconds[kernels].copy()
    for k, task in enumerate(kernels.tolist()):
        op, shape = graph.names[int(graph.op[task])], graph.text_of("shape", task)
        if op in INDEXED and is_call(shape):
            moved = _BOTH * 4.0 * elements_of(read(op, shape))
            seconds[k] = min(seconds[k], moved / _constant("rate"))
    return seconds


def _is_kept(op: str) -> bool:
    plain = op.removesuffix("_backward")
    return is_narrow(op) or is_narrow(plain) or op.startswith(KEPT)


def _host_calls(edit: Edit, graph: Graph, host: Array, left: Array) -> None:
    """The host's calls: one a kernel, and what each pass costs before it."""
    if not len(host):
        return
    call = _call(graph)
    launches = np.intersect1d(launch_of(graph, left), host)
    seams = np.union1d(_seams(graph, host), launches)
    gone = np.setdiff1d(host, seams)
    edit.set(seams, seconds=0.0, gap=0.0)
    first = _is_first(graph, launches)
    edit.set(
        launches,
        seconds=np.where(first, _constant("launch") * call, _group_seconds(graph, launches)),
    )
    for phases in ((Phase.FORWARD, Phase.LOSS), (Phase.BACKWARD,)):
        mine = launches[np.isin(graph.phase[launches], phases)]
        if len(mine):
            first = mine[np.argmin(graph.order[mine])]
            edit.set(np.array([first]), seconds=(_constant("launch") + _constant("start")) * call)
    last = host[np.argmax(graph.order[host])]
    edit.set(np.array([last]), seconds=_returned_gradients(graph) * call)
    edit.remove(gone)


def _group_seconds(graph: Graph, tasks: Array) -> Array:
    found: Array = graph.seconds[tasks] + graph.gap[tasks]
    return found


def _is_first(graph: Graph, launches: Array) -> Array:
    """Whether a launch is the first of its operator: a library issues the others by itself."""
    number = operators(graph)[launches]
    order = np.argsort(graph.order[launches], kind="stable")
    found = np.zeros(len(launches), bool)
    found[order[np.unique(number[order], return_index=True)[1]]] = True
    found |= number == NONE
    return found


def _call(graph: Graph) -> float:
    """What a call takes on this host, whatever Python the model has around it."""
    eager = call_seconds(graph)
    # What an eager call takes goes by the model's own Python; compiled steps do not follow it,
    # unless it is so far from the usual that the host is another.
    return min(max(USUAL, eager / _constant("slow")), eager / _constant("fast"))


def _returned_gradients(graph: Graph) -> float:
    """Calls' worth of what the host does with each gradient and each running statistic."""
    parameters = len(graph.select(kind="host", op="AccumulateGrad"))
    norms = len(graph.select(kind="kernel", op="*batch_norm_backward"))
    return _constant("parameter") * parameters + _constant("statistic") * norms


def _seams(graph: Graph, host: Array) -> Array:
    """Host tasks at which threads hand over, and the first and last of each thread."""
    e = graph.edges
    mine = np.zeros(graph.size, bool)
    mine[host] = True
    both = (graph.kind[e.after] == Kind.HOST) & (graph.kind[e.waiting] == Kind.HOST)
    across = both & (graph.lane[e.after] != graph.lane[e.waiting])
    found = [e.after[across & mine[e.after]], e.waiting[across & mine[e.waiting]]]
    for lane in np.unique(graph.lane[host]).tolist():
        ours = host[graph.lane[host] == lane]
        found.append(ours[[np.argmin(graph.order[ours]), np.argmax(graph.order[ours])]])
    return np.unique(np.concatenate(found))
