"""The optimizer's loop over parameters made into few kernels: `foreach` or `fused`.

The loop launches every operation once a parameter. `foreach` launches each operation once for all
parameters and moves the same bytes; `fused` does everything in one pass, reading and writing each
tensor once.

    foreach   seconds = operations · START + bytes of all operations / RATE
    fused     seconds = START_FUSED + bytes of one pass / RATE_FUSED

Those constants are fits to the optimizer rows of the shipped H200 table
(`cost/tables/measured/h200.csv.gz`, 4 to 390 parameters). What the host spends is that of
`cost/host.toml`, on a host as fast as the loop shows it to be.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from foretell.cost.price import constants, updated
from foretell.graph.edit import Edit
from foretell.graph.graph import Array, Graph, Kind, Phase
from foretell.memory import change
from foretell.memory.tape import Tape
from foretell.whatif.base import DoesNotApply, Setting, WhatIf
from foretell.whatif.parameters import UNSCALE, first_shape

START, RATE = 14e-6, 3.8e12  # of a kernel over a list of tensors
START_FUSED, RATE_FUSED = 35e-6, 3.25e12
# By an operation of the loop: the optimizer, and the tensors that one pass reads or writes: p, g, m
# and v in, p, m and v out; p, g and m in, p and m out; p and g in, p out.
SORTS = {"addcdiv_": ("adam", 7), "mul_": ("momentum", 5), "": ("sgd", 3)}
ITEM = 4.0  # bytes of a parameter and of its state


@dataclass(frozen=True)
class Loop:
    """What a step's optimizer loop does."""

    tasks: Array  # host and device
    first: int  # the first host task
    host: float  # seconds the host spends
    operations: int  # kernels a parameter
    tensors: int
    parameters: float  # numbers, not tensors
    moved: float  # bytes all operations read and write
    kernel: int  # one of its kernels, for lane and rank
    shape: str  # of all its tensors, as an operator on lists has it
    ops: frozenset[str]

    @property
    def sort(self) -> tuple[str, int]:
        """Which optimizer it is, and the tensors that one pass reads or writes."""
        return next(sort for op, sort in SORTS.items() if not op or op in self.ops)

    def issuing(self, how: str) -> float:
        """Seconds in which this host issues the same step as few kernels."""
        usual = self.tensors * self.operations * float(constants()["chain"]["update"])
        seconds = updated(self.sort[0], how, np.array([float(self.tensors)]), scaled=False)
        return float(seconds[0]) * self.host / usual


@dataclass(frozen=True)
class ForeachOptimizer(WhatIf):
    """Let the optimizer treat all parameters in one kernel an operation."""

    name = "foreach-optimizer"
    source = "PyTorch documentation, torch.optim (foreach)"
    assumes = ("the optimizer loops over parameters now; the list kernels move the same bytes",)
    code = "torch.optim.Adam(params, foreach=True)"

    def apply(self, graph: Graph, setting: Setting) -> Graph:
        with graph.edit(str(self)) as edit:
            for loop in loops(graph):
                seconds = START + loop.moved / RATE / loop.operations
                host = loop.issuing("foreach") / loop.operations
                replace(edit, loop, "_foreach", host, seconds, loop.operations)
        return edit.graph

    def hold(self, tape: Tape) -> Tape:
        return change.foreach_optimizer(tape)


@dataclass(frozen=True)
class FusedOptimizer(WhatIf):
    """Let the optimizer update all parameters in one pass."""

    name = "fused-optimizer"
    source = (
        "PyTorch documentation, torch.optim (fused); Daydream (Zhu et al., ATC 2020), FusedAdam"
    )
    assumes = (
        "the optimizer loops over parameters now; one pass reads and writes every tensor once",
    )
    code = "torch.optim.Adam(params, fused=True)"

    def apply(self, graph: Graph, setting: Setting) -> Graph:
        with graph.edit(str(self)) as edit:
            for loop in loops(graph):
                seconds = START_FUSED + loop.parameters * ITEM * loop.sort[1] / RATE_FUSED
                replace(edit, loop, "_fused", loop.issuing("fused"), seconds, 1)
        return edit.graph

    def hold(self, tape: Tape) -> Tape:
        return change.fused_optimizer(tape)


def loops(graph: Graph) -> list[Loop]:
    """The optimizer's loop over parameters of every rank."""
    ranks = np.unique(graph.rank[graph.phase == Phase.UPDATE]).tolist()
    if not ranks:
        raise DoesNotApply("the step has no optimizer")
    return [found(graph, rank) for rank in ranks]


def found(graph: Graph, rank: int) -> Loop:
    """The optimizer's loop over parameters on one rank."""
    mine = graph.rank == rank
    ends = int(graph.order[mine & (graph.phase == Phase.BACKWARD)].max(initial=-1))
    # Before the backward pass ends only gradients are set to zero.
    in_update = mine & (graph.phase == Phase.UPDATE) & (graph.order > ends)
    in_update &= ~np.isin(graph.op, graph.names.matching(UNSCALE))
    kernels = np.flatnonzero(in_update & (graph.kind == Kind.KERNEL))
    host = np.flatnonzero(in_update & (graph.kind == Kind.HOST))
    ops = frozenset(graph.names[int(k)] for k in np.unique(graph.op[kernels]))
    known = next((w for w in ("fused", "foreach") if any(w in o for o in ops)), "")
    if known:
        raise DoesNotApply(f"the optimizer of this step is a {known} one, no loop over parameters")
    if not len(kernels) or not len(host):
        raise DoesNotApply("the optimizer of this step is no loop over parameters")
    counts = np.bincount(graph.op[kernels])
    tensors = int(counts[counts > 0].min())
    sizes, moved = _sizes(graph, kernels)
    once = graph.op[kernels] == int(np.flatnonzero(counts == tensors)[0])
    return Loop(
        tasks=np.concatenate([host, kernels]),
        first=int(host[np.argmin(graph.order[host])]),
        host=float(graph.seconds[host].sum() + graph.gap[host].sum()),
        operations=max(1, round(len(kernels) / tensors)),
        tensors=tensors,
        parameters=float(sizes[once].sum()),
        moved=moved,
        kernel=int(kernels[0]),
        shape=_as_list(graph, graph.shape[kernels[once]]),
        ops=ops,
    )


def _sizes(graph: Graph, kernels: Array) -> tuple[Array, float]:
    """Numbers in the tensor each kernel updates, and the bytes all of them move."""
    shapes, place = np.unique(graph.shape[kernels], return_inverse=True)
    known = np.array([_tensors(graph.names[int(s)]) for s in shapes], float).reshape(-1, 2)
    sizes, count = known[place.reshape(-1)].T
    if not sizes.any():
        raise DoesNotApply(
            "the trace does not say how large the parameters are",
            hint="profile with record_shapes=True",
        )
    return sizes, float((sizes * (count + 1) * ITEM).sum())


def _as_list(graph: Graph, shapes: Array) -> str:
    """The tensors that single calls update as one list, as a trace writes it."""
    tensors = [first_shape(graph.names[int(s)]) for s in shapes]
    return f"in={'|'.join(t for t in tensors if t)},types=TensorList"


def _tensors(shape: str) -> tuple[float, float]:
    """`in=30522x768+30522x768+-,…` → numbers in the first tensor, and how many are like it."""
    inputs = next((p[3:].split("+") for p in shape.split(",") if p.startswith("in=")), [""])
    try:
        return float(np.prod([int(n) for n in inputs[0].split("x")])), inputs.count(inputs[0])
    except ValueError:
        return 0.0, 0.0


def replace(edit: Edit, loop: Loop, op: str, host: float, seconds: float, count: int) -> None:
    """Put so many launches and kernels in the place of the loop."""
    graph = edit.before
    where: dict[str, Any] = {"phase": "update", "rank": graph.rank[loop.kernel], "op": op}
    where["issued_before"] = np.full(count, loop.first)
    lanes = graph.lane[[loop.first, loop.kernel]]
    launch = edit.insert(kind="host", lane=lanes[0], seconds=host, **where)
    kernel = edit.insert(
        kind="kernel", lane=lanes[1], seconds=seconds, dtype="fp32", shape=loop.shape, **where
    )
    edit.wait(kernel, launch, kind="launch")
    handed_over = _handed_over(graph, loop.tasks)
    edit.wait(np.full(len(handed_over), launch[0]), handed_over, kind="thread")
    edit.remove(loop.tasks)


def _handed_over(graph: Graph, tasks: Array) -> Array:
    """Host tasks of other threads that the loop waited for: the end of the backward pass."""
    mine = np.zeros(graph.size, bool)
    mine[tasks] = True
    e = graph.edges
    from_host = graph.kind[e.after] == Kind.HOST
    found: Array = np.unique(e.after[mine[e.waiting] & ~mine[e.after] & from_host])
    return found
