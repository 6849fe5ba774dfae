"""Ops of one stage for one micro-batch, in a chain: compute and communication.

`stage` makes one piece of all that runs without a choice in between, which is exact and quick to
simulate; `layer` shows every layer with its exchanges. Sharded parameters (zero 3) always show
layers: each is gathered ahead of its use while others compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from foretell.cluster import Cluster
from foretell.plan.costs import (
    Costs,
    layer_parts,
    layer_seconds,
    shard_talk,
    sharded_seconds,
    width,
)
from foretell.plan.gradient_ready import shares
from foretell.plan.layouts import Array
from foretell.plan.order import BACKWARD, FORWARD, WEIGHT, chunks_of
from foretell.plan.plan import Plan
from foretell.plan.stages import layers_of
from foretell.workload import Workload

DETAILS = ("stage", "layer")
MOST = 64  # parts of a backward: finer ones change nothing that can be seen


class Piece(NamedTuple):
    """One task of a chain; `after` counts back to pieces of the same chain."""

    kind: str
    op: str
    seconds: float
    layer: str
    after: tuple[int, ...] = (1,)
    flops: float = 0.0
    comm_bytes: float = 0.0
    axis: str = ""  # of an exchange


def chain(
    c: Costs, workload: Workload, cluster: Cluster, where: tuple[int, int, int], detail: str,
    alone: Sequence[float] = (),
) -> list[Piece]:  # fmt: skip
    """The pieces of a stage's chunk, forward or backward: `where` is (stage, chunk, way).

    `alone` are the seconds of each layer's weight gradients where they are apart.
    """
    stage, chunk, way = where
    plan = c.plans.plans[0]
    many = times_of(plan, workload, stage, chunk)
    named = [(at, n) for at, n in enumerate(many) if n]
    sharded = plan.zero == 3 and plan.dp * plan.cp > 1
    if detail == "stage" and not sharded:
        return [_whole(c, workload, many, way, alone)]
    layers = [(at, n / max(round(n), 1)) for at, n in named for _ in range(max(round(n), 1))]
    layers = layers[::-1] if way else layers
    known = {which: _layer(c, workload, cluster, which, way, alone) for which in set(layers)}
    if sharded:
        scatters = way == (WEIGHT if alone else BACKWARD)
        return _sharded(c, workload, cluster, layers, known, scatters)
    return [piece for which in layers for piece in known[which]]


def _sharded(
    c: Costs,
    workload: Workload,
    cluster: Cluster,
    layers: list[tuple[int, float]],
    known: dict[tuple[int, float], list[Piece]],
    scatters: bool,
) -> list[Piece]:
    """Layers whose parameters are gathered one layer ahead, their gradients scattered behind."""
    gather, scatter = (
        {at: _over(op, c, workload, cluster, at) for at, _ in known}
        for op in ("all_gather", "reduce_scatter")
    )
    pieces = [gather[layers[0][0]]]
    gathered, done = 0, -1  # where the gather and the compute of the layer before stand
    for k, which in enumerate(layers):
        coming = len(pieces)
        if k + 1 < len(layers):
            wait = (coming - done,) if done >= 0 else ()
            pieces.append(gather[layers[k + 1][0]]._replace(after=wait))
        for piece in known[which]:
            here = len(pieces)
            waits = (here - gathered, here - done) if done >= 0 else (here - gathered,)
            pieces.append(piece._replace(after=waits) if piece.kind == "kernel" else piece)
            done = here
        if scatters:
            pieces.append(scatter[which[0]]._replace(after=(1,)))
        gathered = coming
    return pieces


def times_of(plan: Plan, workload: Workload, stage: int, chunk: int) -> list[float]:
    """How often each layer runs in one chunk: blocks split, the ends where they belong."""
    counts = layers_of(plan, workload, stage)
    chunks = chunks_of(plan)
    first = next(i for i, layer in enumerate(workload.layers) if layer.is_block)
    out = []
    for at, (layer, n) in enumerate(zip(workload.layers, counts, strict=True)):
        mine = chunk == (0 if at < first else chunks - 1)
        out.append(n / chunks if layer.is_block else n * mine)
    return out


def few(sizes: Array) -> Array:
    """Shares of messages, equal ones where there are more of them than can be seen."""
    return sizes if len(sizes) <= MOST else np.full(MOST, 1 / MOST)


NAMES = ("forward", "backward", "weight gradients")


def _whole(
    c: Costs, workload: Workload, many: list[float], way: int, alone: Sequence[float]
) -> Piece:
    """All layers of a chunk as one piece: nothing in between has a choice."""
    back = min(way, BACKWARD)
    parts = [(at, layer_parts(c, at, workload)[back], n) for at, n in enumerate(many) if n]
    seconds = [n * float(part.seconds(c.bend)[0]) for _, part, n in parts]
    pairs = zip(seconds, parts, strict=True)
    share = sum(min(n * alone[at], took) for took, (at, _, n) in pairs) if alone else 0.0
    total = sum(seconds)
    flops = sum(n * float(part.flops[0]) for _, part, n in parts)
    if way == WEIGHT:
        return Piece("kernel", NAMES[way], share, "", flops=flops / 2)
    if way == BACKWARD and alone:
        total, flops = total - share, flops / 2
    return Piece("kernel", NAMES[way], total + _turn(c, many, way == BACKWARD), "", flops=flops)


def _turn(c: Costs, many: list[float], backward: bool) -> float:
    """What the host does besides, on the stage that has the loss."""
    return float(c.turn[0]) if backward and many[-1] else 0.0


def _layer(
    c: Costs, workload: Workload, cluster: Cluster, which: tuple[int, float], way: int,
    alone: Sequence[float],
) -> list[Piece]:  # fmt: skip
    """Compute of one layer and what it exchanges, one after the other."""
    at, share = which
    layer, plan, backward = workload.layers[at], c.plans.plans[0], min(way, BACKWARD)
    part = layer_parts(c, at, workload)[backward].times(share)
    talk = float((part.talk + part.skew)[0])
    seconds = float(part.seconds(c.bend)[0]) - talk
    if plan.zero == 3 and plan.dp * plan.cp > 1:
        plain = layer_seconds(c, at, workload)
        slower = sharded_seconds(c, at, workload, cluster, plain)
        seconds += share * float((slower[backward] - plain[backward])[0])
    flops, apart = float(part.flops[0]), min(share * alone[at], seconds) if alone else 0.0
    if way != FORWARD and alone:
        seconds, flops = apart if way == WEIGHT else seconds - apart, flops / 2
    if at == len(workload.layers) - 1 and way == BACKWARD:
        seconds += float(c.turn[0])
    pieces = [Piece("kernel", NAMES[way], seconds, layer.name, flops=flops)]
    if talk and way != WEIGHT:
        pieces.append(Piece("collective", "all_reduce", talk, layer.name, axis="tp"))
    return pieces


def _over(op: str, c: Costs, workload: Workload, cluster: Cluster, at: int) -> Piece:
    """A collective of one layer's shards, waiting for nothing."""
    gather, scatter = shard_talk(c, at, workload, cluster)
    seconds = gather if op == "all_gather" else scatter
    size = float((c.holdings[at].weights * width(c, workload))[0])
    layer = workload.layers[at].name
    return Piece("collective", op, float(seconds[0]), layer, (), comm_bytes=size, axis="dp")


def split(
    pieces: list[Piece], c: Costs, workload: Workload, where: tuple[int, int], sizes: Array
) -> list[Piece]:
    """A last backward in parts, each of which makes the gradients of one of some messages."""
    if len(pieces) > 1 or len(sizes) < 2:
        return pieces
    many = times_of(c.plans.plans[0], workload, *where)
    parts = shares(c, np.array(many)[:, None], workload, sizes)
    whole = pieces[0]
    return [whole._replace(seconds=whole.seconds * p, flops=whole.flops * p) for p in parts]
