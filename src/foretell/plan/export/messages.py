"""Actions with the messages between them, as torch's runtime takes them without a thought.

    0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD,0RESHARD

Stages are a line. A stage sends as soon as it has computed; a rank asks for what it needs just
before it needs it, and for what another rank sent it earlier too: both ends keep one order.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from foretell.errors import InputError
from foretell.plan.plan import Names

_CELL = re.compile(r"(\d+)([FBIW])(\d+)")
Cell = tuple[int, str, int]


def with_messages(rows: Sequence[Sequence[str]]) -> Names:
    """The actions of each rank, sends and receives among them."""
    acts = [[_cell(text, rank) for text in row] for rank, row in enumerate(rows)]
    homes = {stage: rank for rank, row in enumerate(acts) for stage, _, _ in row}
    last = max(homes)
    sent: dict[tuple[int, int], list[str]] = {}  # by sender and receiver: what is requested
    for rank, row in enumerate(acts):
        for act in row:
            for to, _, receive in _moves(act, homes, last):
                sent.setdefault((rank, to), []).append(receive)
    return tuple(_row(rank, row, homes, last, sent) for rank, row in enumerate(acts))


def _cell(text: str, rank: int) -> Cell:
    found = _CELL.fullmatch(text)
    if not found:
        raise InputError(
            f"`{text}` of rank {rank} is not stage, kind and micro-batch", hint="write 3F0"
        )
    return int(found[1]), found[2], int(found[3])


def _moves(act: Cell, homes: dict[int, int], last: int) -> list[tuple[int, str, str]]:
    """Where the result of an action goes: the rank, the send and the matching receive."""
    stage, kind, m = act
    there, letter = (stage + 1, "F") if kind == "F" else (stage - 1, "B")
    if kind == "W" or not 0 <= there <= last or homes[there] == homes[stage]:
        return []
    return [(homes[there], f"{stage}SEND_{letter}{m}", f"{there}RECV_{letter}{m}")]


def _row(
    rank: int,
    row: Sequence[Cell],
    homes: dict[int, int],
    last: int,
    sent: dict[tuple[int, int], list[str]],
) -> tuple[str, ...]:
    stages = sorted({stage for stage, _, _ in row})
    at = {source: 0 for source, to in sent if to == rank}
    out = [f"{s}UNSHARD" for s in stages]
    for act in row:
        stage, kind, m = act
        before, letter = (stage - 1, "F") if kind == "F" else (stage + 1, "B")
        if kind != "W" and 0 <= before <= last and homes[before] != rank:
            source, receive = homes[before], f"{stage}RECV_{letter}{m}"
            upto = sent[source, rank].index(receive) + 1
            out += sent[source, rank][at[source] : upto]
            at[source] = max(at[source], upto)
        out.append(f"{stage}{kind}{m}")
        out += [text for _, text, _ in _moves(act, homes, last)]
    if any(kind != "F" for _, kind, _ in row):
        out += [f"{s}REDUCE_GRAD" for s in stages]
    return (*out, *(f"{s}RESHARD" for s in stages))
