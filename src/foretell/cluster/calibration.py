"""How a cluster really runs: factors on what is priced, learned from runs (`foretell fit`).

    kernels    compute              host work          host
    optimizer  compute · update     on a CPU many passes over memory, where one is priced
    messages   `talk` · alpha       before the first byte and at each hop
               `talk` · inside      a byte inside a node
               `talk` · beta        a byte between nodes
    families   of op (gemm, conv, norm …), each a factor beside `compute`
    messages   collectives as they were measured, in place of their price: start + bytes · slope

A factor says how many times as long as priced something takes; 1 where that was not measured. A
cluster carries its calibration: whatever prices work on it gets the factors with it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from foretell.cluster.level import Level, Message
from foretell.errors import InputError, unknown
from foretell.io import read_json


@dataclass(frozen=True)
class Calibration:
    """Factors on prices, and how far all-reduces go by trees."""

    compute: float = 1.0
    host: float = 1.0
    update: float = 1.0
    talk: float = 1.0  # all of a message: what the transport does to starts and bytes alike
    alpha: float = 1.0
    beta: float = 1.0
    inside: float = 1.0
    tree_bytes: float = math.inf  # NCCL_TREE_THRESHOLD: all-reduces above it are rings
    families: tuple[tuple[str, float], ...] = ()  # of ops, over `compute`
    messages: tuple[Message, ...] = ()

    @classmethod
    def of(cls, values: Mapping[str, Any], where: str) -> Calibration:
        """Factors by name; all above zero."""
        known = [f.name for f in fields(cls) if f.name != "messages"]
        for name in values:
            if name not in known:
                raise unknown("factor of a calibration", name, known)
        rows = values.get("families", {})
        if not isinstance(rows, Mapping):
            raise InputError(f"`families` is no table in {where}", hint="families = { gemm = 1.2 }")
        found: dict[str, Any] = {
            name: _factor(name, v, where) for name, v in values.items() if name != "families"
        }
        of = tuple((str(name), _factor(str(name), v, where)) for name, v in sorted(rows.items()))
        return cls(**found, families=of)

    def plain(self) -> dict[str, Any]:
        """What is not as priced; messages are of a moment, and measured again."""
        usual = asdict(type(self)())
        found = {n: v for n, v in asdict(self).items() if v != usual[n] and n != "messages"}
        return found | ({"families": dict(self.families)} if self.families else {})

    def family(self, op: str) -> float:
        """How many times as long as priced ops of a kind take, beside `compute`."""
        return dict(self.families).get(op, 1.0) if self.families else 1.0

    def levels(self, found: tuple[Level, ...]) -> tuple[Level, ...]:
        """What a collective sees, as slow as it was measured."""
        if self == PLAIN:
            return found
        return tuple(
            replace(
                level,
                later=self.talk * self.alpha,
                slower=self.talk * (self.inside if level.name == "node" else self.beta),
                tree_bytes=self.tree_bytes,
                timed=self.messages,
            )
            for level in found
        )


def _factor(name: str, value: Any, where: str) -> float:
    least, most = _RANGE.get(name, (1e-6, 1e6))
    if type(value) not in (int, float) or not least <= value <= most:
        raise InputError(
            f"`{name}` is `{str(value)[:40]}` in {where}",
            hint=f"it is a number from {least:g} to {most:g}",
        )
    return float(value)


PLAIN = Calibration()
_RANGE = {"tree_bytes": (0.0, math.inf)}  # 0: never a tree


def load(path: str | Path) -> Calibration:
    """The calibration in a file that `foretell fit` has written."""
    hint = "make one with `foretell fit RUNS -o FILE`"
    found = read_json(path, what="calibration", hint=hint)
    values = found.get("calibration") if isinstance(found, dict) else None
    if not isinstance(values, dict):
        raise InputError(f"`{path}` is no calibration", hint=hint)
    return Calibration.of(values, f"`{path}`")
