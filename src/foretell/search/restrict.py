"""What a search may choose: `--only` names the axes it is free in, `--fix` the fields that are set.

    Restriction.of(only="dp,tp,zero", fix="micro_batch=1,recompute=full")

An axis that is not named keeps what a plan says by itself. The number of replicas and the
micro-batch are always free: something has to use the devices and divide the batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from foretell import spec
from foretell.errors import InputError, unknown
from foretell.plan import Plan
from foretell.plan.segments import OWN, segments
from foretell.workload import Workload

# Axis -> fields of a plan that it changes.
AXES: dict[str, tuple[str, ...]] = {
    "dp": ("dp",),
    "tp": ("tp", "sp"),
    "pp": ("pp", "layers", "segments"),
    "cp": ("cp",),
    "ep": ("ep", "etp"),
    "spatial": ("spatial",),
    "filter": ("filter",),
    "channel": ("channel",),
    "zero": ("zero", "shard"),
    "recompute": ("recompute", "recompute_layers"),
    "offload": ("offload",),
    "batch": ("micro_batch",),
    "schedule": ("schedule", "chunks", "actions"),
    "buckets": ("bucket_mb", "buckets", "parts", "overlap", "update"),
    "fusion": ("compile", "regions", "late", "optimizer_kernels"),
    "sync": ("sync",),
    "placement": ("placement", "shares", "groups", "stages"),
}
_FREE = ("dp", "batch")
_SEARCHED = tuple(name for axis in AXES.values() for name in axis)
_SET = ("bucket_mb", "overlap", "compile", "optimizer_kernels")  # as good as numerics once fixed
_SAID = ("dp", "zero", "shard", "micro_batch", "global_batch", "chunks", "sp", "framework")
_PLAIN = Plan()


@dataclass(frozen=True)
class Restriction:
    """The axes that may change, and the fields that have a value."""

    only: tuple[str, ...] = ()  # all where empty
    fixed: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, only: str, fix: str) -> Restriction:
        """What two texts ask for."""
        axes = tuple(part.strip() for part in only.split(",") if part.strip())
        for axis in axes:
            if axis not in AXES:
                raise unknown("axis of a search", axis, AXES)
        given = spec.options(fix, where=fix) if fix else {}
        plan = Plan.parse(fix) if fix else _PLAIN
        names = {f.name for f in fields(Plan)} & set(given)
        if len(names) < len(given):  # other programs' words: `fsdp=8` says dp, zero and shard
            names |= {n for n in _SAID if getattr(plan, n) != getattr(_PLAIN, n)}
        return cls(axes, {name: getattr(plan, name) for name in sorted(names)})

    @cached_property
    def held(self) -> dict[str, Any]:
        """Fields that keep a value: those of axes that are not free, and those that are fixed."""
        shut = [] if not self.only else [a for a in AXES if a not in (*self.only, *_FREE)]
        out = {name: getattr(_PLAIN, name) for axis in shut for name in AXES[axis]}
        return out | dict(self.fixed or {})

    def is_free(self, axis: str) -> bool:
        """Whether an axis may change at all."""
        return not all(name in self.held for name in AXES[axis])

    def filled(self, plan: Plan) -> Plan:
        """A plan with the fixed fields that no layout is made of: numerics, buckets, framework."""
        said = (self.fixed or {}).items()
        more = {n: v for n, v in said if n not in _SEARCHED or n in _SET}
        return plan.but(**more) if more else plan

    def allows(self, plan: Plan, workload: Workload) -> bool:
        """Whether a plan keeps to it."""
        if not self.held:
            return True
        if not plan.segments:
            return all(_same(plan, name, value) for name, value in self.held.items())
        if not self.is_free("pp") or not self._segments_allowed(plan):
            return False
        rows = segments(plan, workload)
        own = {n: v for n, v in self.held.items() if n in (*OWN, "dp")}
        if self.held.get("pp", len(rows)) != len(rows):
            return False
        return all(_same(row.plan, name, value) for row in rows for name, value in own.items())

    def _segments_allowed(self, plan: Plan) -> bool:
        rest = ("layers", "segments", "pp", "dp", "micro_batch", *OWN)
        return all(_same(plan, n, v) for n, v in self.held.items() if n not in rest)

    def require_possible(self, ranks: int) -> None:
        """Raise where fixed degrees do not divide the number of devices."""
        fixed = self.fixed or {}
        degrees = [fixed[n] for n in ("dp", "tp", "pp", "cp", "filter", "channel") if n in fixed]
        product = 1
        for degree in degrees:
            product *= degree
        if product and ranks % product:
            raise InputError(
                f"fixed degrees make {product} ranks, which do not divide {ranks} devices",
                hint="their product divides the number of devices",
            )


def _same(plan: Plan, name: str, value: Any) -> bool:
    if name == "sp" and plan.tp == 1:
        return True
    if name == "micro_batch" and not plan.micro_batch:
        return bool(plan.global_batch == value * plan.dp)
    return bool(getattr(plan, name) == value)
