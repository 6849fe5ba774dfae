"""How gradients of all ranks come together: in buckets, each a collective beside the backward pass.

As PyTorch's DistributedDataParallel does it (torch/csrc/distributed/c10d/reducer.cpp): gradients
are copied into buckets in the order they are ready; a bucket is closed by the gradient that fills
it, the first at 1 MiB, so that something is sent early, the others at `bucket_mb`; a bucket
whose gradients are all there is sent at once, buckets in order; the averages are copied back before
the optimizer, whose stream waits for them.

One rank stands for all that are like it: a collective of eight ranks in a graph of one rank holds
that rank's communication lane for as long as the eight would take.
"""

from __future__ import annotations

import numpy as np

from foretell.graph.edit import Edit
from foretell.graph.graph import NONE, Array, Graph, Ids, Kind, LaneKind, group_text, ranks_of
from foretell.whatif.base import DoesNotApply
from foretell.whatif.bucket_copies import Ready, picked_up
from foretell.whatif.collective_cost import Wires
from foretell.whatif.gradients import Gradients, exchanged
from foretell.whatif.interference import share_devices
from foretell.whatif.parameters import PACK, UNPACK
from foretell.whatif.remove import launches_of
from foretell.whatif.skew import share_since_last_message, straggler_delay

FIRST = float(1 << 20)  # bytes that close the first bucket: kDefaultFirstBucketBytes, reducer.hpp

MIB = float(1 << 20)

# Seconds of host work to start a collective: the median `record_param_comms` of the eight-rank DLRM
# trace on V100 hosts (facebookresearch/param), 41 µs.
CALL = 4.1e-5


def bucket_of(bytes: Array, cap: float, first: float = FIRST) -> Ids:
    """The bucket of each gradient: one is closed by the gradient that fills it."""
    found, bucket, filled = [], 0, 0.0
    for size in bytes.tolist():
        found.append(bucket)
        filled += size
        if filled >= (cap if bucket else min(first, cap)):
            bucket, filled = bucket + 1, 0.0
    return np.array(found, np.int64)


def group_of(graph: Graph, collectives: Ids) -> tuple[int, ...]:
    """The ranks that exchange gradients already."""
    groups = {graph.text_of("group", int(i)) for i in collectives}
    sizes = [ranks_of(text) for text in sorted(groups)]
    return max(sizes, key=len, default=())


def exchanging_ranks(graph: Graph, *, op: str = "") -> Ids:
    """The gradient collectives of a graph, or a reason why there are none to change."""
    found = exchanged(graph)
    if op:
        found = found[np.isin(graph.op[found], graph.names.matching(op))]
    if not len(found):
        raise DoesNotApply(
            f"the step exchanges no gradients{f' by {op}' if op else ''}",
            hint="put data-parallel:ranks=8 before it",
        )
    return found


def check_whole(graph: Graph) -> None:
    """Refuse to make anew what a what-if has taken apart: its pieces would stay."""
    apart = graph.facts.get("taken_apart")
    if apart:
        raise DoesNotApply(
            f"the exchange of gradients was taken apart by `{apart}`",
            hint=f"ask for `{apart}` behind what changes ranks, buckets or overlap",
        )


def check_alike(found: tuple[Gradients, ...]) -> None:
    """Refuse ranks whose gradients differ: no bucket could hold both."""
    for other in found[1:]:
        if len(other) != len(found[0]) or not np.allclose(other.bytes, found[0].bytes):
            raise DoesNotApply(
                f"ranks {found[0].rank} and {other.rank} hold different gradients "
                f"({found[0].bytes.sum():.0f} and {other.bytes.sum():.0f} bytes)"
            )


def comm_lane(edit: Edit, rank: int, name: str = "communication stream") -> int:
    """The lane on which a rank communicates: the one it has, else a new one of that name."""
    lanes = edit.before.lanes
    mine = np.flatnonzero((lanes.kind == LaneKind.COMM) & (lanes.rank == rank))
    if len(mine) and name == "communication stream":
        return int(mine[0])
    return edit.lane(name, rank=rank, kind="comm")


def send(
    edit: Edit,
    ready: list[Ready],
    found: Gradients,
    bucket: Ids,
    group: tuple[int, ...],
    wires: Wires,
    *,
    op: str = "all_reduce",
    overlap: bool = True,
) -> Ids:
    """One collective a bucket, as soon as its gradients are there on every rank; their numbers."""
    last, begin = sending(bucket, True), sending(bucket, overlap)
    total = np.bincount(bucket, found.bytes)
    calls = [_calls(edit, side, begin) for side in ready]
    issued = np.array(
        [c if c[0] != NONE else s.kernels[begin] for c, s in zip(calls, ready, strict=True)]
    )
    order = edit.column("order")
    ready_at = np.max([order[side.kernels[begin]] for side in ready], axis=0)
    latest = issued[np.argmax(order[issued], axis=0), np.arange(len(last))]
    sent = edit.insert(
        issued_after=latest,
        kind="collective",
        op=op,
        name=[f"gradients {k}" for k in range(len(last))],
        rank=ready[0].rank,
        lane=comm_lane(edit, ready[0].rank),
        phase="communicate",
        comm_bytes=total,
        seconds=wires.seconds(op, total, group),
        sigma=wires.sigma(op, total, group),
        group=group_text(group),
        shape=_shapes(found.shape, bucket),
        layer=[found.layer[i] for i in last],
        source="formula",
    )
    for side, call in zip(ready, calls, strict=True):
        _join(edit, side, call, begin, bucket, sent, ready_at)
        if side.rank != ready[0].rank:
            edit.hold(sent, comm_lane(edit, side.rank))
    return sent


def sending(bucket: Ids, overlap: bool) -> Ids:
    """The gradient each bucket waits for: its own last one, or without overlap the last of all."""
    last = np.append(np.flatnonzero(np.diff(bucket)), len(bucket) - 1)
    return last if overlap else np.full(len(last), len(bucket) - 1)


def _shapes(shapes: tuple[str, ...], bucket: Ids) -> list[str]:
    """The tensors of each bucket as one text, empty where one of them is not known."""
    found = []
    for k in range(int(bucket[-1]) + 1):
        mine = [shapes[i] for i in np.flatnonzero(bucket == k)]
        found.append(f"in={'+'.join(mine)}" if all(mine) else "")
    return found


def _calls(edit: Edit, side: Ready, begin: Ids) -> Ids:
    """The host's calls that start the collectives of one rank, NONE where no host does."""
    if (side.calls == NONE).any():
        return np.full(len(begin), NONE)
    return edit.insert(
        issued_after=side.kernels[begin], kind="host", op="all_reduce", name="gradients",
        rank=side.rank, lane=edit.column("lane")[side.calls[begin]], seconds=CALL,
        phase="backward",
    )  # fmt: skip


def _join(
    edit: Edit, side: Ready, calls: Ids, begin: Ids, bucket: Ids, sent: Ids, issued: Array
) -> None:
    """Tie collectives to one rank: what they wait for there, and who waits for them."""
    if calls[0] != NONE:
        edit.wait(sent, calls, kind="launch")
    edit.wait(sent, side.kernels[begin], kind="event")
    edit.wait(sent[bucket], side.kernels, kind="event")
    who, which = side.wanted
    # A trace may show a task behind an early bucket that comes before a later one is sent.
    is_new = who >= edit.before.size
    later = is_new | (edit.column("order")[who] > issued[bucket[which]])
    if later.any():
        edit.wait(who[later], sent[bucket[which[later]]], kind="event")


def take_out(edit: Edit, *, copies: bool = False) -> Ids:
    """Remove the gradient exchange of a graph, with its calls; with `copies` those too."""
    graph = edit.before
    check_whole(graph)
    old = exchanged(graph)
    edit.remove(old, bridge=False)  # a stream keeps its own order without it
    mine = graph.select(kind="host", name="gradients")
    edit.remove(np.intersect1d(mine, launches_of(graph, old)))
    if copies:
        edit.remove(graph.select(op=(PACK, UNPACK)))
    return old


def swap(
    edit: Edit,
    found: tuple[Gradients, ...],
    cap: float,
    group: tuple[int, ...],
    wires: Wires,
    rate: float,
    *,
    op: str = "all_reduce",
    overlap: bool = True,
    skew: float = 0.0,
) -> Ids:
    """The whole exchange in buckets of `cap` bytes, instead of the one that may be there."""
    check_alike(found)
    take_out(edit)
    before = edit.size
    ready = [picked_up(edit, side, rate) for side in found]
    bucket = bucket_of(found[0].bytes, cap)
    sent = send(edit, ready, found[0], bucket, group, wires, op=op, overlap=overlap)
    if skew:
        begin = sending(bucket, overlap)
        _wait_for_slowest(
            edit, found, ready, begin, sent, straggler_delay(edit.before, len(group), skew)
        )
    inserted = np.arange(before, edit.size)
    kernels = inserted[edit.column("kind")[inserted] == Kind.KERNEL]
    share_devices(edit, [side.rank for side in found], sent, kernels)
    return sent


def _wait_for_slowest(
    edit: Edit,
    found: tuple[Gradients, ...],
    ready: list[Ready],
    begin: Ids,
    sent: Ids,
    behind: float,
) -> None:
    """Let each message wait for the slowest rank, which is `behind` with the last gradient."""
    for side, at in zip(found, ready, strict=True):
        share = share_since_last_message(edit.before, side)[begin]
        edit.wait(sent, at.kernels[begin], lag=behind * share, kind="event")
