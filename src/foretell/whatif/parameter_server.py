"""Gradients pushed to parameter servers, new parameters pulled from them.

Each tensor lives on one server, tensor by tensor in turn; one of more than a million numbers is cut
over all of them, as MXNet does. A push waits for the gradient, a pull for its push; the layer's
next forward waits for its pull. Servers update the parameters, so the optimizer leaves the step.

All n ranks push the same piece at the same time, so a piece of b bytes takes its server's link for
n·b / bandwidth, each way; servers work side by side. What is ready first goes first.

So that the next forward can wait for this backward, the step is turned: it begins with the backward
pass and ends with the forward of the next step. Steps in a row are the same either way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from foretell.errors import InputError
from foretell.graph.edit import Edit
from foretell.graph.graph import NONE, Array, Graph, Ids, Kind, LaneKind, Phase, group_text
from foretell.memory.tape import Tape
from foretell.whatif.base import DoesNotApply, Setting, WhatIf
from foretell.whatif.collective_cost import START, Wires, wires
from foretell.whatif.data_parallel import check_ranks
from foretell.whatif.exchange import check_alike, group_of, take_out
from foretell.whatif.gradients import Gradients, compute_lane, exchanged, gradients
from foretell.whatif.memory_effect import without_state
from foretell.whatif.parameters import UNPACK, backward_ends
from foretell.whatif.skew import SKEW, straggler_delay

BIG = 4e6  # bytes of a tensor that is cut over all servers: MXNET_KVSTORE_BIGARRAY_BOUND, 10⁶ fp32
SAMPLE = np.array([float(1 << 20), float(1 << 26)])  # bytes of two messages that tell a link's rate


@dataclass(frozen=True, eq=False)
class Pieces:
    """What is pushed and pulled: of which gradient, to which server, how large, how urgent."""

    gradient: Ids
    server: Ids
    bytes: Array
    priority: Ids


@dataclass(frozen=True)
class ParameterServer(WhatIf):
    """Exchange gradients through parameter servers instead of collectives."""

    name = "parameter-server"
    assumes = (
        "servers stand on machines of their own, with a link like a rank's each",
        "servers add and update in no time; pieces are sent in the order they are ready",
    )
    source = "Li et al. 2014, Parameter Server (OSDI); Daydream, section 5.4"
    code = "kv = mxnet.kv.create('dist_sync')"
    ranks: int = 0  # how many devices; 0: those that exchange gradients now
    servers: int = 0  # how many servers; 0: as many as ranks
    skew: float = SKEW  # relative spread of a rank's step: servers wait for the slowest

    def apply(self, graph: Graph, setting: Setting) -> Graph:
        group = group_named(self, graph, self.ranks)
        servers = server_count(self, self.servers, group)
        found = gradients(graph)
        check_alike(found)
        pieces = whole_tensors(found[0].bytes, servers)
        with graph.edit(str(self)) as edit:
            links = wires(graph, setting, len(group))
            serve(edit, found, pieces, group, links, straggler_delay(graph, len(group), self.skew))
        return edit.graph

    def hold(self, tape: Tape) -> Tape:
        return without_state(tape)


def group_named(change: WhatIf, graph: Graph, ranks: int) -> tuple[int, ...]:
    """The ranks a what-if names, or those that exchange gradients now."""
    group = tuple(range(ranks)) if ranks else group_of(graph, exchanged(graph))
    if not group:
        raise DoesNotApply("the step is of one rank", hint=f"say how many: {change.name}:ranks=8")
    check_ranks(change, len(group))
    return group


def server_count(change: WhatIf, servers: int, group: tuple[int, ...]) -> int:
    if not 0 <= servers <= 4096:
        raise InputError(f"`{change}` has {servers} servers", hint="use 1 or more")
    return servers or min(len(group), 4096)


def whole_tensors(bytes: Array, servers: int) -> Pieces:
    """Small tensors on one server each, in turn; big ones over all."""
    parts = np.where(bytes > BIG, servers, 1)
    gradient = np.repeat(np.arange(len(bytes)), parts)
    within = np.arange(len(gradient)) - np.repeat(np.cumsum(parts) - parts, parts)
    server = np.where(parts[gradient] > 1, within, gradient % servers)
    return Pieces(gradient, server, (bytes / parts)[gradient], np.zeros(len(gradient), np.int64))


def serve(
    edit: Edit,
    found: tuple[Gradients, ...],
    pieces: Pieces,
    group: tuple[int, ...],
    links: Wires,
    behind: float,
) -> None:
    """Pushes and pulls of all pieces on every rank, and the step turned round.

    The slowest rank is `behind` so many seconds with the gradient that is ready last.
    """
    start, pace = link(links, group)
    graph = edit.before
    if len(np.setdiff1d(graph.select(kind="collective"), take_out(edit))):
        raise DoesNotApply("the passes of this step hold other collectives than gradients'")
    edit.remove(graph.select(op=UNPACK))
    text = group_text(group)
    edit.fact(turned=True)
    for side in found:
        pushes = _exchange(edit, side, pieces, start, pace * len(group), text)
        last = pushes[pieces.gradient == len(side) - 1]
        edit.wait(last, kernel_at(graph, int(side.ready[-1]), side.rank), lag=start + behind)
        _turn(edit, side.rank)


def link(links: Wires, group: tuple[int, ...]) -> tuple[float, float]:
    """Seconds before a message moves, and seconds a byte of it takes from one rank to another."""
    pair = (group[0], group[-1])
    first, second = links.seconds("send", SAMPLE, pair).tolist()
    pace = (second - first) / float(SAMPLE[1] - SAMPLE[0])
    return min(max(first - pace * float(SAMPLE[0]), 0.0), 10 * START), pace


def _exchange(
    edit: Edit, side: Gradients, pieces: Pieces, start: float, pace: float, group: str
) -> Ids:
    graph, rank = edit.before, side.rank
    ready = np.array([kernel_at(graph, int(i), rank) for i in side.ready])
    like: dict[str, Any] = {
        "kind": "send",
        "rank": rank,
        "phase": "communicate",
        "seconds": pieces.bytes * pace,
        "comm_bytes": pieces.bytes,
        "priority": pieces.priority,
        "name": [f"gradients {g}" for g in pieces.gradient.tolist()],
        "group": group,
        "source": "formula",
    }
    lanes = [_lanes(edit, rank, way, pieces.server) for way in ("push to", "pull from")]
    push = edit.insert(op="push", lane=lanes[0], **like)
    pull = edit.insert(op="pull", lane=lanes[1], **like)
    edit.wait(push, ready[pieces.gradient], lag=start)
    edit.wait(pull, push, lag=start)
    users = np.array([_user(graph, side, k) for k in range(len(side))])
    known = users[pieces.gradient] != NONE
    edit.wait(users[pieces.gradient][known], pull[known])
    return push


def _lanes(edit: Edit, rank: int, way: str, server: Ids) -> Array:
    lanes = [
        edit.lane(f"{way} server {k}", rank=rank, kind="comm", ordered=False)
        for k in range(int(server.max()) + 1)
    ]
    return np.array(lanes)[server]


def kernel_at(graph: Graph, task: int, rank: int) -> int:
    """The device task behind which a gradient is there: itself, or the last one issued before."""
    if graph.kind[task] != Kind.HOST:
        return task
    lane = compute_lane(graph, rank)
    mine = np.flatnonzero((graph.lane == lane) & (graph.order < graph.order[task]))
    return int(mine[np.argmax(graph.order[mine])]) if len(mine) else task


def _user(graph: Graph, side: Gradients, which: int) -> int:
    """The first forward kernel of a gradient's layer, else of the whole step."""
    number = graph.names.number(side.layer[which]) if side.layer[which] else NONE
    mine = (graph.phase == Phase.FORWARD) & (graph.kind == Kind.KERNEL) & (graph.rank == side.rank)
    mine &= graph.lane == compute_lane(graph, side.rank)
    tasks = np.flatnonzero(mine & (graph.layer == number) & (number != NONE))
    tasks = tasks if len(tasks) else np.flatnonzero(mine)
    return int(tasks[np.argmin(graph.order[tasks])]) if len(tasks) else NONE


def _turn(edit: Edit, rank: int) -> None:
    """Begin a rank's step with the backward pass, and take its optimizer out."""
    graph, mine = edit.before, edit.before.rank == rank
    begins = int(graph.order[mine & (graph.phase == Phase.BACKWARD)].min())
    update = mine & (graph.phase == Phase.UPDATE) & (graph.order > backward_ends(graph, rank))
    edit.remove(np.flatnonzero(update))
    ahead = mine & (graph.order < begins)
    first = np.flatnonzero(ahead)
    rest = np.flatnonzero(mine & ~ahead & ~update)
    if not len(first):
        return
    first = first[np.argsort(graph.order[first], kind="stable")]
    last = int(rest[np.argmax(graph.order[rest])])
    edit.reorder(first, after=np.full(len(first), last))
    e = graph.edges
    over = ahead[e.after] & ~ahead[e.waiting] & mine[e.waiting]
    edit.release(e.waiting[over], e.after[over])
    _one_thread(edit, graph, first, rest)


def _one_thread(edit: Edit, graph: Graph, first: Ids, rest: Ids) -> None:
    """Host work of both passes on one thread: the one waits while the other works, always."""
    hosts = first[np.isin(graph.kind[first], (Kind.HOST, Kind.SYNC))]
    hosts = hosts[np.isin(graph.lane[hosts], graph.lanes.of_kind(LaneKind.HOST))]
    if len(hosts):
        main = int(np.bincount(graph.lane[hosts]).argmax())
        moved = rest[np.isin(graph.kind[rest], (Kind.HOST, Kind.SYNC)) & (graph.lane[rest] != NONE)]
        edit.set(moved, lane=main)
