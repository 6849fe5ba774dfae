"""An optimizer pointed at the parameters that are on this rank after a model was split."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping, Sequence
from typing import Any

from torch.distributed.tensor import DTensor, distribute_tensor

from foretell.errors import InputError
from foretell.plan import Plan

Tensor = Any


def repoint(optimizer: Any, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
    """Replace each parameter by what it became; drop those that are on other ranks.

    Names tell which became which; parameters of other models stay. State that is there already (a
    checkpoint was loaded) is split as its parameter is.
    """
    names = {id(p): n for n, p in before.items()}
    if all(after.get(n) is p for n, p in before.items()):
        return
    for group in optimizer.param_groups:
        each = [after.get(names[id(p)]) if id(p) in names else p for p in group["params"]]
        group["params"][:] = [p for p in each if p is not None]  # LBFGS keeps this very list
    for old in [p for p in optimizer.state if id(p) in names]:
        new, state = after.get(names[id(old)]), optimizer.state.pop(old)
        if new is not None:
            optimizer.state[new] = {k: _like(v, old, new) for k, v in state.items()}


def _like(value: Any, old: Tensor, new: Tensor) -> Any:
    """What an optimizer keeps of a parameter, split as the parameter is now."""
    if value is None or getattr(value, "shape", None) != old.shape or type(new.data) is type(value):
        return value
    if not hasattr(new, "placements"):
        raise InputError(
            "the optimizer has been stepped before the model was deployed",
            hint="deploy first; load the optimizer's state afterwards",
        )
    return distribute_tensor(value, new.device_mesh, new.placements)


class Several:
    """Optimizers of parts of one model, as far as deploying needs one."""

    def __init__(self, each: Sequence[Any]) -> None:
        self.each = list(each)
        self.defaults = each[0].defaults if each else {}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for one in self.each for group in one.param_groups]

    @property
    def state(self) -> _States:
        return _States([one.state for one in self.each])

    def register_step_pre_hook(self, hook: Any) -> Any:
        return _Handles([one.register_step_pre_hook(hook) for one in self.each])

    def register_step_post_hook(self, hook: Any) -> Any:
        return _Handles([one.register_step_post_hook(hook) for one in self.each])


class _States(ChainMap[Any, Any]):
    """States of several optimizers: a parameter's stays where it was."""

    def __init__(self, each: Sequence[Any]) -> None:
        super().__init__(*(each or [{}]))
        self.was = 0

    def pop(self, key: Any, *default: Any) -> Any:
        self.was = next(k for k, state in enumerate(self.maps) if key in state)
        return self.maps[self.was].pop(key, *default)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.maps[self.was][key] = value


class _Handles:
    def __init__(self, each: Sequence[Any]) -> None:
        self.each = each

    def remove(self) -> None:
        for one in self.each:
            one.remove()


def tuned(optimizer: Any, plan: Plan) -> None:
    """Turn on the kernels that a plan names for the update."""
    names = {spec.partition(":")[0] for spec in plan.whatifs}
    for word in ("foreach", "fused"):
        if plan.optimizer_kernels != word and f"{word}-optimizer" not in names:
            continue
        if word not in optimizer.defaults:
            raise InputError(f"{type(optimizer).__name__} has no {word} update")
        for group in optimizer.param_groups:
            if _is_mixed(group):
                raise InputError(
                    f"a {word} update takes parameters that are all split over ranks, or none; "
                    "under tp some are and some are not",
                    hint="leave optimizer_kernels out of the plan",
                )
            group[word] = True
            group["foreach" if word == "fused" else "fused"] = False
    for group in optimizer.param_groups:
        if _is_mixed(group):  # one by one: torch's kernels for many take one kind
            group.update({word: False for word in ("foreach", "fused") if word in group})


def _is_mixed(group: Mapping[str, Any]) -> bool:
    """Whether some parameters are split over ranks and others are whole."""
    return len({isinstance(p.data, DTensor) for p in group["params"]}) > 1
