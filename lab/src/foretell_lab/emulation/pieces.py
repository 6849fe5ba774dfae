"""What one rank does alone, for any number of samples: forward, each gradient, rest, update.

Between profiled numbers of samples pieces are taken to grow in a straight line.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Pieces:
    """Seconds of a core for the pieces of one micro-batch."""

    samples: int
    forward: float
    backward: tuple[tuple[str, float], ...]  # parameter, up to its gradient; as they become ready
    rest: float
    update: float
    layers: tuple[tuple[str, float], ...] = ()  # forward of each, where the model can be cut

    @property
    def seconds(self) -> float:
        """The whole step."""
        return self.forward + sum(s for _, s in self.backward) + self.rest + self.update


def pieces(profile: dict[str, Any], samples: int, threads: int = 1) -> Pieces:
    """The pieces of a step of so many samples; of one thread where so many were not clocked."""
    clocked = profile.get("threads", {}).get(str(threads), profile["steps"])
    known = {int(n): step for n, step in clocked.items()}
    sizes = sorted(known)
    columns = [_flat(known[n]) for n in sizes]
    values = np.array([[column[k] for column in columns] for k in range(len(columns[0]))])
    at = [_between(samples, sizes, row) for row in values]
    names = [name for name, _ in known[sizes[0]]["backward"]]
    layers = [name for name, _ in known[sizes[0]].get("layers", [])]
    back, ahead = at[3 : 3 + len(names)], at[3 + len(names) :]
    return Pieces(
        samples,
        at[0],
        tuple(zip(names, back, strict=True)),
        at[1],
        at[2],
        tuple(zip(layers, ahead, strict=True)),
    )


def _flat(step: dict[str, Any]) -> list[float]:
    each = [s for _, s in [*step["backward"], *step.get("layers", [])]]
    return [step["forward"], step["rest"], step["update"], *each]


def _between(samples: int, sizes: list[int], row: Any) -> float:
    """A straight line between neighbours, and on from the last two."""
    if len(sizes) == 1:
        return float(row[0]) * samples / sizes[0]
    if sizes[0] <= samples <= sizes[-1]:
        return float(np.interp(samples, sizes, row))
    a, b = (0, 1) if samples < sizes[0] else (-2, -1)
    slope = (row[b] - row[a]) / (sizes[b] - sizes[a])
    return max(0.0, float(row[a] + slope * (samples - sizes[a])))
