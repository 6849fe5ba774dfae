"""Kernels under autocast, predicted from a model's plain trace and compared with its own trace.

The time of a step under autocast is mostly the host's; the sum of its kernels tells whether what
was predicted of the device is right. Traces are `NAME.base` and `NAME.amp_bf16` in `h200/` or in
`h200/half/`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from foretell.graph.graph import Graph, Kind
from foretell.trace import read
from foretell.whatif import Setting, parse


class Half(NamedTuple):
    """Seconds of all kernels of one model."""

    model: str
    plain: float
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def halves(truth: Path) -> Iterator[Half]:
    """Every model that was traced both ways."""
    for path in sorted((truth / "h200").rglob("*.amp_bf16.json.gz")):
        model = path.name.partition(".")[0]
        found = [p for p in (path.parent, path.parent.parent) if (p / _base(model)).exists()]
        if found:
            plain = read(found[0] / _base(model)).graph
            after = parse("amp:dtype=bf16").apply(plain, Setting())
            measured = read(path).graph
            yield Half(model, _seconds(plain), _seconds(after), _seconds(measured))


def _base(model: str) -> str:
    return f"{model}.base.json.gz"


def _seconds(graph: Graph) -> float:
    return float(graph.seconds[np.isin(graph.kind, (Kind.KERNEL, Kind.COPY))].sum())


def lines(rows: list[Half]) -> Iterator[str]:
    """A table, and how far off it is."""
    for r in rows:
        yield (
            f"{r.model:18} kernels {1e3 * r.plain:6.1f} ms, under autocast {1e3 * r.measured:6.1f}"
            f"  predicted {1e3 * r.predicted:6.1f}  {r.error:+6.1%}"
        )
    if rows:
        off = np.abs([r.error for r in rows])
        yield (
            f"kernels under autocast: {len(rows)} models, median {np.median(off):.1%}, "
            f"worst {off.max():.1%}"
        )
