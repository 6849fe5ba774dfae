"""In which order a stage runs forwards and backwards: GPipe, 1F1B, interleaved, or as written.

Each stage gets arrays of one length: is it a backward, of which chunk, of which micro-batch.
Interleaved follows Narayanan et al. 2021 (arXiv 2104.04473, section 2.2): groups of `pp`
micro-batches go through chunk after chunk, with 2(p−s−1) + (v−1)p forwards before the first
backward.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from foretell.errors import InputError
from foretell.plan.plan import Plan

Ints = npt.NDArray[np.int64]
_ACTION = re.compile(r"([FB])(\d+)(?:\.(\d+))?")


class Turns(NamedTuple):
    """What one stage does, first to last."""

    backward: Ints  # 0 or 1
    chunk: Ints
    micro: Ints


def turns(plan: Plan, stage: int, micro_batches: int) -> Turns:
    """The order of one stage."""
    if plan.actions:
        return _written(plan, stage, micro_batches)
    chunks = plan.chunks if plan.schedule == "interleaved" else 1
    total = micro_batches * chunks
    if plan.schedule == "gpipe":
        warm = total
    elif chunks > 1:
        warm = 2 * (plan.pp - stage - 1) + (chunks - 1) * plan.pp
    else:
        warm = plan.pp - stage - 1
    return _alternating(plan.pp, chunks, micro_batches, min(warm, total))


def _alternating(pp: int, chunks: int, micro_batches: int, warm: int) -> Turns:
    """`warm` forwards, then one forward and one backward in turns, then the backwards left."""
    total = micro_batches * chunks
    steady = total - warm
    middle = np.tile([0, 1], steady)
    backward = np.concatenate([np.zeros(warm, int), middle, np.ones(warm, int)])
    place = np.where(backward == 1, np.cumsum(backward), np.cumsum(1 - backward)) - 1
    chunk, micro = _places(pp, chunks, micro_batches)
    flipped = np.where(backward == 1, chunks - 1 - chunk[place], chunk[place])
    return Turns(backward, flipped, micro[place])


def _places(pp: int, chunks: int, micro_batches: int) -> tuple[Ints, Ints]:
    """Chunk and micro-batch of each forward: groups of `pp` micro-batches, chunk by chunk."""
    group = pp if chunks > 1 else micro_batches
    firsts = range(0, micro_batches, group)
    pairs = [
        (chunk, micro)
        for first in firsts
        for chunk in range(chunks)
        for micro in range(first, min(first + group, micro_batches))
    ]
    found = np.array(pairs, int).reshape(-1, 2)
    return found[:, 0], found[:, 1]


def _written(plan: Plan, stage: int, micro_batches: int) -> Turns:
    if len(plan.actions) != plan.pp:
        raise InputError(
            f"actions for {len(plan.actions)} stages in a plan with pp={plan.pp}",
            hint="give one list a stage, such as F0 F1 B0 B1",
        )
    rows = [_action(text) for text in plan.actions[stage]]
    wanted = {(b, c, m) for b in (0, 1) for c in range(plan.chunks) for m in range(micro_batches)}
    if set(rows) != wanted or len(rows) != len(wanted):
        raise InputError(
            f"the actions of stage {stage} are not every F and B of {micro_batches} micro-batches",
            hint="each once: F0 … and B0 …, with `.chunk` behind where a stage has several",
        )
    return Turns(*(np.array(column, int) for column in zip(*rows, strict=True)))


def _action(text: str) -> tuple[int, int, int]:
    found = _ACTION.fullmatch(text)
    if not found:
        raise InputError(f"`{text}` is no action of a plan", hint="write F3, B3 or F3.1")
    return int(found[1] == "B"), int(found[3] or 0), int(found[2])
