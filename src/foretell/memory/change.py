"""Memory effect of changes to a step: one function per change, from tape to tape.

`half_precision` follows the op lists of PyTorch's documentation (Automatic Mixed Precision, CUDA
op-specific behavior): matmuls, convolutions and attention cast their inputs to the narrow format;
norms, powers, losses and the like cast theirs to fp32; all others take what they get, the widest
of it. Casts of parameters are made once and held until the forward pass has ended, casts of
activations are held as long as anything keeps them. Gradients have the format of what they are
gradients of; those of parameters are cast back to fp32.

`fused` is the tape as torch.compile would make it: light ops (pointwise, norms, softmax, dropout)
run inside others, so what passes between them is never written to memory. Of what light ops save, a
compiler saves what it cannot cheaply recompute: results of heavy ops, inputs of heavy ops, and else
the smaller of a tensor and what it is made from (the idea of the min-cut partitioner of
torch.compile, Horace He et al., functorch). `checkpoint` recomputes the stack of equal blocks of a
language model block by block, as its libraries do (`gradient_checkpointing_enable`), where the
scale that they give attention tells of one; any other forward pass as a whole, with its loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from foretell.graph.graph import NONE, BufferKind, Phase
from foretell.memory.outputs import copied
from foretell.memory.tape import (
    BY_BLOCK,
    FORWARD,
    LASTING,
    WIDENED,
    Op,
    Rewrite,
    Tape,
    parameter_bytes,
    states,
    substituted,
    with_workspace,
    without_update,
)
from foretell.operators import having

HALF = 2  # bytes
NARROW, WIDE = having("autocast", "half"), having("autocast", "fp32")
WIDENS = having("autocast", "widens")  # read narrow, write wide numbers
# Their parameters stay wide beside narrow inputs; or all they are given must have one format.
AS_FIRST = tuple(name for name in having("makes") if "batch_norm" in name)
AS_FIRST += ("index_add", "index_copy", "index_put", "scatter")
ARITHMETIC = ("add", "sub", "mul")  # kernels that read two formats at a time


class WrittenAttention(NamedTuple):
    """Attention written out for lack of a kernel: ops that go in half precision or stay wide."""

    gone: set[int]
    wide: set[int]


def written_attention(ops: Sequence[Op]) -> WrittenAttention:
    """Softmaxes that one kernel will hold, or their matmuls where the bias has a gradient.

    No kernel has that gradient, and PyTorch then runs all of it in fp32 (attention.cpp in
    aten/src/ATen/native/transformers). It is a sum right behind the gradient of the softmax.
    """
    found = WrittenAttention(set(), set())
    ends = {o.node: k for k, o in enumerate(ops) if o.ends and o.node != NONE}
    for k, op in enumerate(ops):
        if op.name != WRITTEN_OUT:
            continue
        behind = ends.get(op.node, len(ops))
        if any(o.name == "sum" for o in ops[behind + 1 : behind + 1 + _BEHIND]):
            near = range(max(k - _AROUND, 0), min(k + _AROUND + 1, len(ops)))
            found.wide.update(j for j in near if ops[j].name == "bmm")
        else:
            found.gone.add(k)
    return found


WRITTEN_OUT = "_safe_softmax"  # the softmax that attention has for lack of a kernel
_NEXT = 4  # ops among which the next on a tensor is looked for
_AROUND, _BEHIND = 4, 4  # ops between the softmax and its matmuls; and behind its gradient


class Cast(NamedTuple):
    """A copy in another format that autocast makes, or that a backward pass makes of a gradient."""

    elements: float
    to_half: bool
    of_parameter: bool = False
    has_gradient: bool = False  # which is cast the other way in the backward pass

    def turned(self) -> Cast:
        """The cast of its gradient."""
        return self._replace(to_half=not self.to_half)


class Decision(NamedTuple):
    """How autocast runs one op of the forward pass."""

    op: Op
    is_narrow: bool
    is_mixed: bool  # reads both formats, and writes fp32
    casts: tuple[Cast, ...]  # before it
    returned: tuple[float, ...]  # numbers of gradients that a sum of both formats narrows


class Autocast(Rewrite):
    """Goes along a tape and decides about each op."""

    def __init__(self, tape: Tape) -> None:
        super().__init__(tape)
        self.decisions: list[Decision] = []
        self.made: list[Cast] = []  # casts since the last decision
        self.differentiable: set[int] = set()  # storages that autograd follows
        self.without: dict[int, int] = {}  # reads of a cast parameter that autograd does not follow
        self.narrow: set[int] = set()  # storages that have become so
        self.casts: dict[int, int] = {}  # of parameters
        self.node_is_narrow: dict[int, bool] = {}
        self.widened: dict[int, int] = {}  # copies that the model asks for itself
        self.raised: set[int] = set()  # storages that are wide because autocast has made them so
        self.written = written_attention(tape.ops)
        self.back: list[Op] = []  # casts of gradients that wait for the end of their node
        self.cast_sizes: dict[int, set[float]] = {}  # numbers in cast inputs, by node

    def run(self) -> Tape:
        forward = [k for k, o in enumerate(self.before.ops) if o.phase in FORWARD]
        last = forward[-1] if forward else NONE
        for k, op in enumerate(self.before.ops):
            if op.phase in FORWARD:
                self.forward(op, k)
            elif op.phase == Phase.BACKWARD:
                self.backward(op)
            else:
                self.ops.append(op)
            if k == last and self.casts:
                self.ops.append(Op("autocast", op.phase, reads=tuple(self.casts.values())))
        return self.tape()

    def is_wide(self, k: int) -> bool:
        s = self.storages[k]
        return s.is_float and s.item == 4 and s.count > 1 and k not in self.narrow

    def is_gradient(self, k: int) -> bool:
        return self.storages[k].kind == BufferKind.GRADIENT

    def cast(self, k: int, op: Op, item: int) -> int:
        """A copy of a storage in another format; of a parameter there is one for all."""
        is_own = self.storages[k].kind == BufferKind.PARAMETER
        has_gradient = k in self.differentiable or (is_own and op.node != NONE)
        made = Cast(self.storages[k].count, item == HALF, is_own, has_gradient)
        if is_own and op.node == NONE:
            self.without[k] = self.without.get(k, 0) + 1
        if k in self.casts:
            if self.without.get(k, 0) > 1 and op.node == NONE:  # of a copy, as of a target network
                self.made.append(made)
            return self.casts[k]
        self.made.append(made)
        new = self.new(k, item=item, kind=int(BufferKind.ACTIVATION))
        if k in self.differentiable:
            self.differentiable.add(new)
        name = WIDENED if op.name == WIDENED and item > HALF else "_to_copy"
        self.ops.append(Op(name, op.phase, NONE, (k,), (new,)))
        if item == HALF:
            self.narrow.add(new)
            if is_own:
                self.casts[k] = new
        return new

    def forward(self, op: Op, at: int) -> None:
        op = _with_inputs(op, self.widened)
        if op.name == WIDENED:
            for k in op.reads:
                item = self.requested_item(k, at)
                if item is not None:
                    self.widened[k] = self.cast(k, op, item)
            return
        if at in self.written.gone:
            for k in (*op.reads, *op.makes):
                self.storages[k] = replace(self.storages[k], count=0.0)
        casts, is_narrow = self.decision(op, stays_wide=at in self.written.wide)
        if is_narrow:
            self.halve_outputs(op)
        elif (op.name in WIDE and casts) or self.raised.intersection(op.reads):
            self.raised.update(op.makes)
        data = [self.storages[k] for k in casts if is_narrow]
        sizes = {s.count for s in data if s.kind != BufferKind.PARAMETER}
        self.ops.append(self.without_copies(_with_inputs(op, casts), sizes))
        self.record_decision(self.ops[-1], is_narrow)
        if op.node != NONE:
            self.node_is_narrow[op.node] = is_narrow
            self.cast_sizes[op.node] = sizes
            self.differentiable.update(op.makes)

    def requested_item(self, k: int, at: int) -> int | None:
        """The format that a program asks for there, as bytes a number; none where it has that.

        `x.float()` and `x.to(y.dtype)` are one call in a trace. Behind what autocast has raised, or
        beside half precision, the program asks for the format that it had itself.
        """
        if k in self.raised:
            return HALF
        beside = self.beside(k, at)
        is_beside_narrow = bool(beside) and self.narrow.issuperset(beside)
        if k in self.narrow:
            return None if is_beside_narrow else 4
        return HALF if is_beside_narrow and self.is_wide(k) and k in self.differentiable else None

    def beside(self, k: int, at: int) -> list[int]:
        """The other numbers that the next operator on a storage reads."""
        reader = next((o for o in self.before.ops[at + 1 : at + _NEXT] if k in o.reads), None)
        reads = _with_inputs(reader, self.widened).reads if reader is not None else ()
        return [r for r in reads if r != k and self.storages[r].is_float]

    def record_decision(self, op: Op, is_narrow: bool) -> None:
        """Note how an op runs. What a sum of both formats gives back is cast for its narrow one."""
        read = [k for k in op.reads if self.storages[k].is_float and self.storages[k].count > 1]
        narrow = [k for k in read if k in self.narrow]
        is_free = op.name not in (*NARROW, *WIDE, *WIDENS) and not op.name.startswith(AS_FIRST)
        is_both = is_free and 0 < len(narrow) < len(read)
        back = [self.storages[k].count for k in narrow if k in self.differentiable]
        returned = tuple(back) if is_both and op.node != NONE else ()
        sizes = {self.storages[k].count for k in read}
        mixed = is_both and len(sizes) == 1 and op.name.startswith(ARITHMETIC)
        self.decisions.append(Decision(op, is_narrow, mixed, tuple(self.made), returned))
        self.made = []

    def decision(self, op: Op, *, stays_wide: bool) -> tuple[dict[int, int], bool]:
        """Copies that an op reads instead of its inputs, and whether it makes narrow tensors."""
        if op.name in NARROW and not stays_wide:
            return {k: self.cast(k, op, HALF) for k in op.reads if self.is_wide(k)}, True
        if op.name in WIDE or stays_wide:
            return {k: self.cast(k, op, 4) for k in op.reads if k in self.narrow}, False
        # A cross entropy asks its log-softmax for the format that it was given itself.
        widens = op.name in WIDENS and op.phase != Phase.LOSS
        return {}, not widens and self.reads_only_half(op)

    def reads_only_half(self, op: Op) -> bool:
        """Whether all numbers that an op reads are narrow by now."""
        reads = op.reads[:1] if op.name.endswith("_") or op.name.startswith(AS_FIRST) else op.reads
        floats = [k for k in reads if self.storages[k].is_float and self.storages[k].count > 1]
        return bool(floats) and all(k in self.narrow for k in floats)

    def halve_outputs(self, op: Op) -> None:
        """Outputs of an op become half precision; statistics of norms and attention do not."""
        has_more = "norm" in op.name or "attention" in op.name
        makes = op.makes[:1] if has_more and op.phase in FORWARD else op.makes
        for k in makes:
            s = self.storages[k]
            if s.is_float and s.item == 4:
                self.storages[k] = replace(s, item=HALF)
                self.narrow.add(k)

    def backward(self, op: Op) -> None:
        is_narrow = self.node_is_narrow.get(op.node, False) or (
            op.node not in self.node_is_narrow and self.reads_only_half(op)
        )
        if is_narrow and op.makes:
            op = self.without_copies(self.half_gradients(op), self.cast_sizes.get(op.node, set()))
        self.ops.append(op)
        if op.ends:  # by then the node has let go of what it kept
            self.ops += self.back
            self.back = []

    def without_copies(self, op: Op, sizes: set[float]) -> Op:
        """An op without copies of (parts of) inputs of such sizes, which a cast has made dense."""

        def is_copy(k: int) -> bool:
            s = self.storages[k]
            return s.kind == BufferKind.WORKSPACE and any(n % s.count == 0 for n in sizes)

        return replace(op, makes=tuple(k for k in op.makes if not is_copy(k)))

    def half_gradients(self, op: Op) -> Op:
        """A backward op that makes narrow gradients; those of parameters are cast back."""
        own = [k for k in op.makes if self.is_gradient(k) and "norm" not in op.name]
        new = {k: self.new(k, item=HALF, kind=int(BufferKind.ACTIVATION)) for k in own}
        self.narrow.update(new.values())
        self.halve_outputs(replace(op, makes=tuple(k for k in op.makes if not self.is_gradient(k))))
        self.back += [Op("_to_copy", op.phase, NONE, (half,), (k,)) for k, half in new.items()]
        return replace(op, makes=substituted(op.makes, new))


def _with_inputs(op: Op, new: dict[int, int]) -> Op:
    """An op that reads and keeps some storages in the place of others."""
    return replace(op, reads=substituted(op.reads, new), keeps=substituted(op.keeps, new))


def half_precision(tape: Tape) -> Tape:
    """The tape under autocast to bf16 or fp16; convolutions run on tensor cores."""
    return with_workspace(Autocast(tape).run(), lambda op, n: copied(n, HALF))


HEAVY = having("compiled", "library")
WEIGHS = ("_softmax", "_safe_softmax", "native_dropout")


def is_heavy(op: Op) -> bool:
    """Whether an op reads from and writes to memory."""
    is_library = "attention" in op.name or op.name.startswith("_cudnn_rnn")
    return op.name in HEAVY or is_library or op.phase == Phase.UPDATE


def fused(tape: Tape) -> Tape:
    """The tape with light ops fused and their kept tensors made again."""
    return _without_fused_outputs(_gradient_formats(_cheaper_saved(tape)))


def _cheaper_saved(tape: Tape) -> Tape:
    """Saved tensors in the order of the forward pass, each in its cheapest form.

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


def _gradient_formats(tape: Tape) -> Tape:
    """Outputs of light ops take the format that the heavy op of the backward pass reads."""
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


def _without_fused_outputs(tape: Tape) -> Tape:
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


def checkpoint(tape: Tape) -> Tape:
    """The tape with its forward pass, or each of its blocks, run again before its backward."""
    forward = [k for k, o in enumerate(tape.ops) if o.phase == Phase.FORWARD]
    if not forward:
        return tape
    names = [tape.ops[k].name for k in forward]
    if not _of_words(names) or BY_BLOCK not in tape.notes:
        return _Recompute(tape, [[k for k, o in enumerate(tape.ops) if o.phase in FORWARD]]).run()
    spans = blocks(names)
    return _Recompute(tape, [[forward[k] for k in range(a, b)] for a, b in spans]).run()


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


class _Recompute(Rewrite):
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
                o.name, int(Phase.BACKWARD), o.node, substituted(o.reads, new),
                substituted(o.makes, new), substituted(o.keeps, new), o.workspace, False, o.where,
            ))  # fmt: skip


_ADAM = 2  # numbers of state for each of a parameter, from which on there is a denominator


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


def foreach_optimizer(tape: Tape) -> Tape:
    """All parameters at once: what the loop makes for one is made for all (Adam's denominators)."""
    return without_update(tape, parameter_bytes(tape) if states(tape) >= _ADAM else 0.0)


def fused_optimizer(tape: Tape) -> Tape:
    """One pass over all parameters: nothing is made on the way."""
    return without_update(tape)


def compiled(tape: Tape) -> Tape:
    """Light ops fused, what they keep made again; what formulas of a backward name goes at once."""
    return fused(tape.changed(ops=tuple(_unnamed(tape.ops))))


def _unnamed(ops: Sequence[Op]) -> Iterator[Op]:
    """Ops of which none at the end of a backward node reads what that node has made."""
    made: dict[int, set[int]] = {}
    for op in ops:
        if op.phase == Phase.BACKWARD and not op.ends:
            made.setdefault(op.node, set()).update(op.makes)
        own = made.get(op.node, set()) if op.ends else set()
        yield replace(op, reads=tuple(k for k in op.reads if k not in own)) if own else op
