"""A tape with activations thrown away and made again in the backward pass.

The stack of equal blocks of a language model is checkpointed block by block, as its libraries do
(`gradient_checkpointing_enable`); any other forward pass as a whole, up to the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from foretell.graph.columns import NONE, BufferKind, Phase
from foretell.memory.edit import Rewrite, swapped
from foretell.memory.tape import LASTING, Op, Tape

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
