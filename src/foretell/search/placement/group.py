"""Op groups: layers that nothing but splittable tensors joins, put together by METIS.

A unit is one layer of a workload, once: inside it all ops are split or none is, and what it hands
on has a row for each sample. Where there are more units than a search can decide about, METIS
(through pymetis) makes `most` groups of them, vertices weighing the root of their time and edges
their bytes, as TAG does; a group is then cut where it is not in one piece of the chain.
Tied weights belong to the first group that has them; the others follow its choice.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foretell.errors import UnmodelledError
from foretell.plan.grouped import Unit, units
from foretell.workload import Workload

Array = npt.NDArray[np.float64]

MOST_GROUPS = 40  # op groups at most: TAG's number


@dataclass(frozen=True)
class Group:
    """Units that are placed together, in a row."""

    units: tuple[Unit, ...]
    leader: int  # the group whose choice it follows: its own number unless weights are tied

    @property
    def name(self) -> str:
        """Its first and last unit."""
        first, last = self.units[0].name, self.units[-1].name
        return first if first == last else f"{first}…{last}"


def grouped(
    workload: Workload, seconds: Array, handed: Array, most: int = MOST_GROUPS
) -> tuple[Group, ...]:
    """Groups of units, given the seconds of each and the bytes each hands to the next."""
    found = units(workload)
    parts = list(range(len(found))) if len(found) <= most else metis_parts(seconds, handed, most)
    runs: list[list[Unit]] = []
    for i, unit in enumerate(found):
        if i == 0 or parts[i] != parts[i - 1]:
            runs.append([])
        runs[-1].append(unit)
    return tuple(Group(tuple(run), _leader(workload, runs, g)) for g, run in enumerate(runs))


def metis_parts(seconds: Array, handed: Array, most: int) -> list[int]:
    """The part of each unit of a chain."""
    try:
        import pymetis
    except ImportError:
        raise UnmodelledError(
            "grouping ops needs pymetis, which is not installed",
            hint=f"pip install 'foretell[solve]', or a model of at most {most} layers",
        ) from None
    n = len(seconds)
    heavy = 1 + np.sqrt(seconds / max(seconds.max(), 1e-12)) * 1000
    wide = np.maximum(1, handed[: n - 1] / max(handed.max(), 1.0) * 10_000).astype(int)
    around = [[j for j in (i - 1, i + 1) if 0 <= j < n] for i in range(n)]
    weights = [int(wide[min(i, j)]) for i in range(n) for j in around[i]]
    options = pymetis.Options(seed=1)
    _, parts = pymetis.part_graph(
        most,
        around,
        vweights=heavy.astype(int).tolist(),
        eweights=weights,
        options=options,
        recursive=False,
    )
    return list(parts)


def _leader(workload: Workload, runs: list[list[Unit]], number: int) -> int:
    """The first group that holds a weight which this one holds too."""
    for kept, again in workload.tied:
        names = (kept.partition("/")[0], again.partition("/")[0])
        where = [_holder(workload, runs, name) for name in names]
        if number in where:
            return min(where)
    return number


def _holder(workload: Workload, runs: list[list[Unit]], layer: str) -> int:
    at = next(i for i, found in enumerate(workload.layers) if found.name == layer)
    return next(g for g, run in enumerate(runs) if any(unit.layer == at for unit in run))
