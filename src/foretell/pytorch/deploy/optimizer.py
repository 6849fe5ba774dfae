"""An optimizer pointed at the parameters that are on this rank after a model was split."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from foretell.errors import InputError

Tensor = Any


def repoint(optimizer: Any, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
    """Replace each parameter by what it became; drop those that are on other ranks.

    Names tell which became which. An optimizer that has been stepped is refused: its state is of
    the old parameters.
    """
    names = {id(p): n for n, p in before.items()}
    if all(after.get(n) is p for n, p in before.items()):
        return
    if optimizer.state:
        raise InputError(
            "the optimizer has been stepped before the model was deployed",
            hint="deploy first; load the optimizer's state afterwards",
        )
    for group in optimizer.param_groups:
        kept = [names[id(p)] for p in group["params"] if id(p) in names]
        group["params"] = [after[n] for n in kept if n in after]


def tuned(optimizer: Any, whatifs: Sequence[str]) -> None:
    """Turn on what a plan's what-ifs say of the optimizer."""
    names = {spec.partition(":")[0] for spec in whatifs}
    for word, name in (("foreach", "foreach-optimizer"), ("fused", "fused-optimizer")):
        if name not in names:
            continue
        if word not in optimizer.defaults:
            raise InputError(f"{type(optimizer).__name__} has no {word} update")
        for group in optimizer.param_groups:
            group[word] = True
            group["foreach" if word == "fused" else "fused"] = False
