"""Where the step goes, over all ranks: parts that add up to it, the bubble apart from idling."""

from __future__ import annotations

from typing import Any

import numpy as np

from foretell.graph.columns import Kind
from foretell.simulate.timeline import Timeline, breakdown, covered


def split(name: str, timeline: Timeline) -> dict[str, Any]:
    """The mean over ranks; a rank is in the bubble while it does nothing and another one works."""
    ranks = breakdown(timeline)
    if not ranks:
        return {"name": name, "total": 0.0, "values": {}, "hidden": 0.0, "ranks": 0}
    works = timeline.graph.kind != Kind.SYNC
    working = covered(timeline.start[works], timeline.end[works])
    quiet = timeline.seconds - working
    parts = {
        "compute": _mean([r.compute for r in ranks]),
        "exposed communication": _mean([r.exposed for r in ranks]),
        "host": _mean([r.host for r in ranks]),
        "bubble": _mean([max(r.idle - quiet, 0.0) for r in ranks]),
        "idle": _mean([min(r.idle, quiet) for r in ranks]),
    }
    hidden = _mean([r.hidden for r in ranks])
    return {
        "name": name,
        "total": timeline.seconds,
        "values": {key: value if value > 1e-12 else 0.0 for key, value in parts.items()},
        "hidden": hidden,
        "ranks": len(ranks),
    }


def _mean(values: list[float]) -> float:
    return float(np.mean(values))
