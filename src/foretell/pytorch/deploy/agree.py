"""Whether all ranks are about to do the same thing: a fingerprint of plan and model, compared."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from foretell.errors import InputError
from foretell.plan import Plan


def fingerprint(plan: Plan, model: Any) -> str:
    """The same on two ranks exactly when plan and parameters are: names, shapes and formats."""
    rows = [
        f"{n} {tuple(p.shape)} {p.dtype} {p.requires_grad}" for n, p in model.named_parameters()
    ]
    return hashlib.sha256("\n".join([str(plan), *rows]).encode()).hexdigest()[:16]


def agree(plan: Plan, model: Any) -> bool:
    """Raise on every rank, naming those that differ from most, unless all have one fingerprint.

    Whether some ranks have made the model without values, on the meta device.
    """
    empty = any(p.is_meta for p in model.parameters())
    mine = {"plan": str(plan), "print": fingerprint(plan, model), "empty": empty}
    each: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(each, mine)
    if len({e["print"] for e in each}) == 1:
        return any(e["empty"] for e in each)
    usual = Counter(e["print"] for e in each).most_common(1)[0][0]
    odd = [r for r, e in enumerate(each) if e["print"] != usual]
    most = next(e for e in each if e["print"] == usual)
    what = "plan" if any(each[r]["plan"] != most["plan"] for r in odd) else "model"
    raise InputError(
        f"rank {', '.join(map(str, odd))} has another {what} than the others",
        hint="every rank has to make the same model and read the same plan",
    )


def told(ranks: Sequence[int], found: Callable[[], Any], hint: str) -> Any:
    """What the first of some ranks finds, on all there are; where it cannot, all raise its words.

    The others of `ranks` do the same: what is split over them takes all.
    """
    box: list[Any] = [None, ""]
    if dist.get_rank() in ranks:
        try:
            box[0] = found()
        except InputError as error:
            box[1] = error.message
    dist.broadcast_object_list(box, src=ranks[0])
    if box[1]:
        raise InputError(box[1], hint=hint)
    return box[0]
