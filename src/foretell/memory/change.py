"""What changes to a step make of its memory: one function a change, from tape to tape.

`fused` is the tape as torch.compile would make it: light ops (pointwise, norms, softmax, dropout)
run inside others, so what passes between them is never written to memory. Of what light ops save, a
compiler saves what it cannot cheaply recompute: results of heavy ops, inputs of heavy ops, and else
the smaller of a tensor and what it is made from (the idea of the min-cut partitioner of
torch.compile, Horace He et al., functorch). `recomputed` checkpoints the stack of equal blocks of a
language model block by block, as its libraries do (`gradient_checkpointing_enable`); any other
forward pass as a whole, up to the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from foretell.graph.columns import NONE, BufferKind, Phase
from foretell.memory.autocast import autocast
from foretell.memory.outputs import copied
from foretell.memory.tape import (
    FORWARD,
    LASTING,
    Op,
    Rewrite,
    Tape,
    parameter_bytes,
    resized,
    states,
    swapped,
    with_workspace,
    without_update,
)

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


_LEAST_TIMES, _LEAST_SHARE = 4, 0.6  # of the forward pass, for repetition to be a stack
_LONGEST = 200  # ops of a block that is looked for


def recomputed(tape: Tape) -> Tape:
    """The tape with its forward pass, or each of its blocks, run again before its backward."""
    forward = [k for k, o in enumerate(tape.ops) if o.phase == Phase.FORWARD]
    if not forward:
        return tape
    names = [tape.ops[k].name for k in forward]
    spans = blocks(names) if _of_words(names) else [(0, len(names))]
    return _Again(tape, [[forward[k] for k in range(a, b)] for a, b in spans]).run()


def _of_words(names: Sequence[str]) -> bool:
    """Whether a forward pass looks words up and convolves nothing."""
    return "embedding" in names and not any("convolution" in name for name in names)


def blocks(names: Sequence[str]) -> list[tuple[int, int]]:
    """Where each block of a stack begins and ends; one block of all where there is no stack."""
    best = (0, 0, 0)  # ops covered, start, length
    for length in range(4, min(_LONGEST, len(names) // _LEAST_TIMES) + 1):
        run = 0
        for k in range(len(names) - length):
            run = run + 1 if names[k] == names[k + length] else 0
            whole = (run // length + 1) * length if run >= length else 0
            if whole > best[0]:
                best = (whole, k + length + 1 - whole, length)
    covered, start, length = best
    if not length or covered < _LEAST_SHARE * len(names) or covered < _LEAST_TIMES * length:
        return [(0, len(names))]
    return [(a, a + length) for a in range(start, start + covered, length)]


class _Again(Rewrite):
    """Goes along a tape, drops what blocks keep and runs them again when their backward begins."""

    def __init__(self, tape: Tape, spans: Sequence[Sequence[int]]) -> None:
        super().__init__(tape)
        self.block = {k: n for n, span in enumerate(spans) for k in span}
        self.spans = spans
        self.of_node = {tape.ops[k].node: n for k, n in self.block.items()
                        if tape.ops[k].node != NONE}  # fmt: skip
        self.done: set[int] = set()

    def run(self) -> Tape:
        for k, op in enumerate(self.before.ops):
            n = self.of_node.get(op.node) if op.phase == Phase.BACKWARD else None
            if n is not None and n not in self.done:
                self.again(n)
            self.ops.append(replace(op, keeps=()) if k in self.block else op)
        return self.tape()

    def again(self, n: int) -> None:
        """The ops of a block once more, with storages of their own."""
        self.done.add(n)
        ops = [self.before.ops[k] for k in self.spans[n]]
        made = {s for o in ops for s in o.makes}
        new = {s: self.new(s) for s in made if self.storages[s].kind not in LASTING}
        for o in ops:
            self.ops.append(Op(
                o.name, int(Phase.BACKWARD), o.node, swapped(o.reads, new), swapped(o.makes, new),
                swapped(o.keeps, new), o.workspace, False, o.where,
            ))  # fmt: skip


__all__ = ["BufferKind", "blocks", "recomputed"]


_ADAM = 2  # numbers of state for each of a parameter, from which on there is a denominator


def batch(tape: Tape, times: float) -> Tape:
    """So many times as many samples."""
    return resized(tape, times)


def half_precision(tape: Tape) -> Tape:
    """Autocast to bf16 or fp16."""
    return autocast(tape)


def tensor_cores(tape: Tape) -> Tape:
    """TF32: the same tensors; convolutions copy theirs to channels last."""
    return with_workspace(tape, lambda op, n: copied(n, 4) if op.workspace else 0.0)


def channels_last(tape: Tape) -> Tape:
    """Channels last: the same tensors; tensor cores take them as they are.

    Plain fp32 does not: cuDNN turns them to channels first, runs the kernels it has for that, and
    turns the result back (`nhwcToNchwKernel` around FFTs and matmuls, H200, cuDNN 9.19).
    """
    is_half = any(s.item == 2 for s in tape.storages if s.is_float)
    return with_workspace(tape, lambda op, n: 0.0 if is_half else op.workspace + copied(n, 4))


def checkpoint(tape: Tape) -> Tape:
    """Activations made again in the backward pass, block by block or all at once."""
    return recomputed(tape)


def foreach_optimizer(tape: Tape) -> Tape:
    """All parameters at once: what the loop makes for one is made for all (Adam's denominators)."""
    return without_update(tape, parameter_bytes(tape) if states(tape) >= _ADAM else 0.0)


def fused_optimizer(tape: Tape) -> Tape:
    """One pass over all parameters: nothing is made on the way."""
    return without_update(tape)


def compiled(tape: Tape) -> Tape:
    """Light ops fused, what they keep made again."""
    return fused(tape)
