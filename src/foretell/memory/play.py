"""The peak of a tape: when storages come and go, how much is held at each op, and by whom."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foretell.graph.columns import NONE, Array, BufferKind, Phase, word_of
from foretell.memory.tape import LASTING, Tape


@dataclass(frozen=True, eq=False)
class Held:
    """What a step holds: `held[k]` bytes while op k runs, workspaces included."""

    tape: Tape
    born: Array  # the op that makes each storage; NONE from the beginning
    dies: Array  # the last that needs it; len(ops) for good
    held: Array
    peak: float
    at: int  # the op at which the peak is first reached; NONE where nothing runs

    def by_kind(self) -> dict[str, float]:
        """Bytes at the peak by what they are for, largest first."""
        t, sums = self.tape, {"library": self.tape.fixed}
        for k in np.flatnonzero((self.born <= self.at) & (self.dies >= self.at)).tolist():
            word = word_of(BufferKind, t.storages[k].kind)
            sums[word] = sums.get(word, 0.0) + t.storages[k].bytes
        if self.at != NONE:
            sums["workspace"] = sums.get("workspace", 0.0) + t.ops[self.at].workspace
        kept = {k: v for k, v in sums.items() if v}
        return dict(sorted(kept.items(), key=lambda item: (-item[1], item[0])))


def play(tape: Tape) -> Held:
    """When each storage comes and goes, and what is held meanwhile."""
    born, dies = lives(tape)
    size = np.array([s.bytes for s in tape.storages], float)
    steps = len(tape.ops)
    change = np.zeros(steps + 2)
    there = dies >= born
    np.add.at(change, np.maximum(born[there], 0), size[there])
    np.add.at(change, np.minimum(dies[there], steps) + 1, -size[there])
    held = np.cumsum(change)[:steps] + tape.fixed
    held = held + np.array([o.workspace for o in tape.ops], float)
    if not steps:
        return Held(tape, born, dies, held, float(size.sum() + tape.fixed), NONE)
    at = int(np.argmax(held))
    return Held(tape, born, dies, held, float(held[at]), at)


def lives(tape: Tape) -> tuple[Array, Array]:
    """The first and the last op of each storage; those that nothing makes are there from the start.

    Gradients stay to the end of the step; where they are not set to zero before the forward pass,
    those of the step before are there from its beginning.
    """
    count, steps = len(tape.storages), len(tape.ops)
    born, dies = np.full(count, steps + 1), np.full(count, NONE)
    ends = {o.node: k for k, o in enumerate(tape.ops) if o.ends and o.node != NONE}
    for k, o in enumerate(tape.ops):
        for s in o.makes:
            born[s] = min(born[s], k)
            dies[s] = max(dies[s], k)
        for s in o.reads:
            dies[s] = max(dies[s], k)
        for s in o.keeps:
            dies[s] = max(dies[s], ends.get(o.node, k))
    for s, storage in enumerate(tape.storages):
        if storage.kind in LASTING:
            born[s], dies[s] = NONE, steps
        elif storage.kind == BufferKind.GRADIENT:
            dies[s] = steps
            if not tape.is_zeroed_first:
                born[s] = NONE
    return born, dies


def peak_bytes(tape: Tape) -> float:
    """The most a step holds at any time."""
    return play(tape).peak


def phase_peaks(tape: Tape) -> dict[str, float]:
    """The most that is held in each phase."""
    found = play(tape)
    peaks: dict[str, float] = {}
    for o, held in zip(tape.ops, found.held.tolist(), strict=True):
        word = word_of(Phase, o.phase)
        peaks[word] = max(peaks.get(word, 0.0), held)
    return peaks
