"""Ops timed on the machine at hand: their seconds by shape, and those of others of their family.

A shape that was timed costs what it took; another of the same op is interpolated by its work
(flop, else bytes, else numbers). What is asked for and not there is kept in `asked`, so that it can
be timed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
SIGMA = 0.1  # of ln(seconds in a step / seconds alone)
_PRODUCTS = ("gemm", "conv", "conv_dgrad", "conv_wgrad", "attention")
_UNSAID = {"b": 1.0, "ta": 0.0, "tb": 0.0, "groups": 1.0, "stride": 1.0, "pad": 0.0}


class TimedOp(NamedTuple):
    """One op, number format and shape."""

    op: str
    dtype: str
    shape: tuple[tuple[str, float], ...]  # sorted; `bytes` among them where they are counted

    @property
    def work(self) -> float:
        """What its seconds grow with."""
        size = dict(self.shape)
        if self.op == "gemm":
            return size.get("b", 1.0) * size["m"] * size["n"] * size["k"]
        if self.op == "attention":
            pairs = size["sq"] * size["sk"] * size["d"]
            return size.get("b", 1.0) * size.get("heads", 1.0) * pairs
        if self.op in _PRODUCTS:
            side = size["h"] * size["w"] * size["r"] * size["s"] / size.get("stride", 1.0) ** 2
            return size["n"] * size["c"] * size["k"] / size.get("groups", 1.0) * side
        whole = size.get("n") or size.get("rows", 1.0) * size.get("cols", 1.0)
        return size.get("bytes") or whole


@dataclass
class TimedOps:
    """Seconds of ops; `load` times as long as on an idle machine."""

    seconds: Mapping[TimedOp, float] = field(default_factory=dict)
    load: float = 1.0
    asked: dict[TimedOp, None] = field(default_factory=dict)  # an ordered set

    def price(self, op: str, dtype: str, shape: Mapping[str, Array], moved: Array) -> Array:
        """Seconds of each row; NaN where no op of the kind was timed."""
        rows = [named(op, dtype, shape, moved, i) for i in range(len(moved))]
        found = []
        for row in rows:
            if row not in self.seconds:
                self.asked[row] = None
            found.append(self.seconds.get(row) or self._like(row))
        return self.load * np.array(found, float)

    def _like(self, row: TimedOp) -> float:
        """Interpolated between ops of the same kind with less and more work."""
        kin = [(k.work, s) for k, s in self.seconds.items() if k[:2] == row[:2] and k.work > 0]
        if not kin:
            return float("nan")
        work, took = (np.log(np.array(v)) for v in zip(*sorted(kin), strict=True))
        at = np.log(max(row.work, 1e-9))
        if at > work[-1]:
            return float(np.exp(took[-1] + at - work[-1]))  # large ops: seconds grow as work does
        return float(np.exp(np.interp(at, work, took)))


def named(
    op: str, dtype: str, shape: Mapping[str, Array], moved: Array, row: int
) -> TimedOp:  # fmt: skip
    """One row of a question as a key."""
    sizes = {k: float(v[row]) for k, v in shape.items() if not np.isnan(v[row])}
    if not np.isnan(moved[row]) and op not in _PRODUCTS:
        sizes["bytes"] = float(moved[row])
    kept = {k: round(v, 3) for k, v in sizes.items() if _UNSAID.get(k) != v}
    return TimedOp(op, dtype, tuple(sorted(kept.items())))
