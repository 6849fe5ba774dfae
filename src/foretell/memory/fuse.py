"""A tape as a compiler that fuses would make it.

Light ops (pointwise, norms, softmax, dropout) run inside others: what one hands to the next is
never written to memory. Of what light ops keep, a compiler keeps what it cannot cheaply make again:
results of heavy ops, inputs of heavy ops, and else the smaller of a tensor and what it is made from
(the idea of the min-cut partitioner of torch.compile, Horace He et al., functorch).
"""

from __future__ import annotations

from dataclasses import replace

from foretell.graph.columns import NONE, BufferKind, Phase
from foretell.memory.edit import FORWARD
from foretell.memory.tape import Op, Tape

HEAVY = (
    *("mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward", "embedding"),
    *("embedding_dense_backward", "_embedding_bag", "_embedding_bag_dense_backward", "cat"),
    *("max_pool2d_with_indices", "max_pool2d_with_indices_backward", "AccumulateGrad"),
)


WEIGHS = ("_softmax", "_safe_softmax", "native_dropout")


def is_heavy(op: Op) -> bool:
    """Whether an op reads from and writes to memory."""
    return op.name in HEAVY or "attention" in op.name or op.phase == Phase.UPDATE


def fused(tape: Tape) -> Tape:
    """The tape with light ops fused and their kept tensors made again."""
    return _unwritten(_as_read(_kept_less(tape)))


def _kept_less(tape: Tape) -> Tape:
    """What is kept, in the order of the forward pass, as cheap as it gets.

    What a heavy op reads is kept as it is, but for the weights of attention under autocast: they
    are cast on their way into the product, and made again from the scores.
    """
    maker = {s: o for o in tape.ops if o.phase in FORWARD for s in o.makes}
    weights = {s for s, o in maker.items() if o.name in WEIGHS} if _is_narrow(tape) else set()
    stays = {s for o in tape.ops if is_heavy(o) for s in o.keeps} - weights
    ops = []
    for op in tape.ops:
        again = tuple(s for s in op.keeps if s in weights) if is_heavy(op) else op.keeps
        if op.phase not in FORWARD or not again:
            ops.append(op)
            continue
        keeps = set(op.keeps) - set(again)
        for s in again:
            keeps |= _cheapest(tape, maker, stays, s)
        stays |= keeps
        ops.append(replace(op, keeps=tuple(sorted(keeps))))
    return tape.changed(ops=tuple(ops))


def _is_narrow(tape: Tape) -> bool:
    return any(s.item == 2 and s.is_float for s in tape.storages)


def _as_read(tape: Tape) -> Tape:
    """What light ops write for a heavy one of the backward pass has the format it reads."""
    light = {s for o in tape.ops if o.phase == Phase.BACKWARD and not is_heavy(o) for s in o.makes}
    storages = list(tape.storages)
    for op in tape.ops:
        if op.phase != Phase.BACKWARD or not is_heavy(op):
            continue
        items = {storages[s].item for s in (*op.reads, *op.makes) if storages[s].is_float}
        for s in light.intersection(op.reads) if 2 in items else ():
            if storages[s].is_float and storages[s].kind == BufferKind.ACTIVATION:
                storages[s] = replace(storages[s], item=2)
    return tape.changed(storages=tuple(storages))


def _cheapest(
    tape: Tape, maker: dict[int, Op], stays: set[int], s: int, depth: int = 0
) -> set[int]:
    """The tensor, or what it can be made from where that is smaller or kept anyway."""
    if s in stays or s not in maker or is_heavy(maker[s]) or depth > 32:
        return {s}
    sources: set[int] = set()
    for r in maker[s].reads:
        if r in maker:
            sources |= _cheapest(tape, maker, stays, r, depth + 1)
    cost = sum(tape.storages[r].bytes for r in sources - stays)
    return sources if cost <= tape.storages[s].bytes else {s}


def _unwritten(tape: Tape) -> Tape:
    """Tensors that only light ops make and read take no memory."""
    light_node = {o.node: True for o in tape.ops if o.ends}
    for o in tape.ops:
        if o.phase == Phase.BACKWARD and o.node != NONE and not o.ends and is_heavy(o):
            light_node[o.node] = False
    needed = {s for o in tape.ops for s in o.keeps}
    made: set[int] = set()
    for o in tape.ops:
        heavy = is_heavy(o) or (o.ends and not light_node.get(o.node, True))
        if heavy:
            needed.update(o.reads, o.makes)
        made.update(o.makes)
    unseen = made - needed
    storages = tuple(
        replace(s, count=0) if k in unseen and s.kind == BufferKind.ACTIVATION else s
        for k, s in enumerate(tape.storages)
    )
    return tape.changed(storages=storages)
