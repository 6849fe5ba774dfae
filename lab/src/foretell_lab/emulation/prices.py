"""What a message costs on a network of the laboratory, from what `links` measured there.

Between measured sizes both axes are taken in logarithms; beyond them α–β goes on. `share` is the
part of that time in which the link itself is busy: two messages at once slow each other only there.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from foretell.errors import InputError


@dataclass(frozen=True, eq=False)
class Prices:
    """The collectives of one network and number of ranks."""

    machine: dict[str, Any]
    network: str
    ranks: int

    @cached_property
    def curves(self) -> dict[str, tuple[Any, Any, Any]]:
        """Sizes, seconds and core seconds of each op; neither falls with size."""
        found: dict[str, tuple[Any, Any, Any]] = {}
        for op in {row["op"] for row in self.machine["links"]}:
            mine = sorted(
                (row["bytes"], row["seconds"], row["cpu_s"])
                for row in self.machine["links"]
                if (row["op"], row["network"], row["ranks"]) == (op, self.network, self.ranks)
            )
            if len(mine) > 1:
                sizes, seconds, core = np.array(mine).T
                found[op] = sizes, np.maximum.accumulate(seconds), np.maximum.accumulate(core)
        return found

    def seconds(self, op: str, bytes: float) -> float:
        """One message by itself."""
        sizes, seconds, _ = self._curve(op)
        if bytes >= sizes[-1]:
            return float(seconds[-1] + (bytes - sizes[-1]) * self._slope(op))
        return float(np.exp(np.interp(np.log(max(bytes, 1.0)), np.log(sizes), np.log(seconds))))

    def core(self, op: str, bytes: float) -> float:
        """Core seconds of a rank that one message takes."""
        sizes, _, core = self._curve(op)
        beyond = max(bytes / float(sizes[-1]), 1.0)
        return float(np.interp(bytes, sizes, core)) * beyond

    def share(self, op: str, bytes: float) -> float:
        """The part of a message's time in which it keeps the link busy."""
        return min(1.0, bytes * self._slope(op) / self.seconds(op, bytes))

    def _slope(self, op: str) -> float:
        """Seconds a byte: of the last two sizes, or of the last where noise has hidden that."""
        sizes, seconds, _ = self._curve(op)
        last = float((seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2]))
        return last or float(seconds[-1] / sizes[-1])

    def _curve(self, op: str) -> tuple[Any, Any, Any]:
        if op not in self.curves:
            raise InputError(
                f"there is no measurement of {op} on {self.ranks} ranks over {self.network}",
                hint="run `foretell lab` or `foretell bench` there first",
            )
        return self.curves[op]
