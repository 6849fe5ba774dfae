"""What one step holds in device memory, as the host asks for it: storages, and the ops on them.

PyTorch's allocator takes and gives back memory when the *host* runs an operator, whatever the
device is doing by then, so what is held follows from the order of the operators alone:

    a storage is there from the op that makes it to the last op that reads it;
    what an op keeps for its backward is there until that backward has run.

A `Tape` is that list. `play` finds the peak, rewrites make one tape from another.
"""

from __future__ import annotations

import base64
import json
import zlib
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from foretell.errors import InputError
from foretell.graph.columns import NONE, BufferKind, Phase
from foretell.io import decode as decode_json
from foretell.io import limits

FACT = "tape"  # under which a graph carries it
WIDENED = "float"  # an op that asks for fp32 and gets what it gives: a copy where that is narrow
BLOCK = 512  # bytes: what the caching allocator rounds to (c10/cuda/CUDACachingAllocator.cpp)
LASTING = (BufferKind.PARAMETER, BufferKind.OPTIMIZER, BufferKind.INPUT)  # there all the time


@dataclass(frozen=True, slots=True)
class Storage:
    """One piece of memory, whatever views there are of it."""

    count: float  # numbers
    item: int = 4  # bytes of one
    kind: int = BufferKind.ACTIVATION
    is_float: bool = True
    grows: bool = False  # in step with the batch

    @property
    def bytes(self) -> float:
        """What the allocator counts for it."""
        return -(-self.count * self.item // BLOCK) * BLOCK


@dataclass(frozen=True, slots=True)
class Op:
    """One operator as the allocator sees it; numbers are those of storages."""

    name: str
    phase: int = Phase.FORWARD
    node: int = NONE  # the autograd node it belongs to: made in forward, run in backward
    reads: tuple[int, ...] = ()
    makes: tuple[int, ...] = ()
    keeps: tuple[int, ...] = ()  # until the backward of its node has run
    workspace: float = 0.0  # bytes, while it runs
    ends: bool = False  # the last of the backward of its node: what was kept goes
    where: str = ""  # of a convolution: what decides about workspaces


@dataclass(frozen=True)
class Tape:
    """The ops of one step in the order the host runs them."""

    storages: tuple[Storage, ...] = ()
    ops: tuple[Op, ...] = ()
    fixed: float = 0.0  # bytes that libraries hold all the time: cuBLAS workspaces
    is_zeroed_first: bool = True  # gradients are given back before the forward pass
    notes: tuple[str, ...] = field(default=())

    def __repr__(self) -> str:
        return f"<Tape: ops {len(self.ops)}, storages {len(self.storages)}>"

    def changed(self, **parts: Any) -> Tape:
        """The same tape with some parts instead of its own."""
        return replace(self, **parts)


def encode(tape: Tape) -> str:
    """A tape as text, small enough to travel with a graph."""
    names: dict[str, int] = {}
    whole = {
        "storages": [[s.count, s.item, int(s.kind), int(s.is_float), int(s.grows)]
                     for s in tape.storages],
        "ops": [_row(o, names) for o in tape.ops],
        "names": list(names),
        "fixed": tape.fixed,
        "first": tape.is_zeroed_first,
        "notes": list(tape.notes),
    }  # fmt: skip
    return base64.b85encode(zlib.compress(json.dumps(whole).encode(), 6)).decode()


def _row(o: Op, names: dict[str, int]) -> list[Any]:
    name = names.setdefault(o.name, len(names))
    where = names.setdefault(o.where, len(names))
    return [name, int(o.phase), o.node, o.reads, o.makes, o.keeps, o.workspace, int(o.ends), where]


@lru_cache(16)
def decode(text: str) -> Tape:
    """The tape that a text stands for."""
    try:
        unpack = zlib.decompressobj()
        whole = decode_json(
            unpack.decompress(base64.b85decode(text), limits().document), Any, "the graph's tape"
        )
        names = whole["names"]
        return Tape(
            tuple(Storage(c, i, k, bool(f), bool(g)) for c, i, k, f, g in whole["storages"]),
            tuple(
                Op(names[n], p, d, tuple(r), tuple(m), tuple(k), w, bool(e), names[v])
                for n, p, d, r, m, k, w, e, v in whole["ops"]
            ),
            whole["fixed"], whole["first"], tuple(whole["notes"]),
        )  # fmt: skip
    except (ValueError, KeyError, IndexError, TypeError, zlib.error) as error:
        raise InputError(f"the graph's tape cannot be read: {error}") from None
