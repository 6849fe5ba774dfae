"""A trace of a gibibyte is read in a minute and little memory."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest

from foretell.trace import read
from tests.trace.kineto import Kineto, training_step

GIBI = 1 << 30


def tiled(path: Path, size: int) -> int:
    """A trace of at least that many bytes, of many steps; how many."""
    steps = 0
    with open(path, "w") as file:
        file.write('{"schemaVersion": 1, "traceEvents": [\n')
        while file.tell() < size:
            k = Kineto(base=1000.0 * steps)
            for _ in range(100):
                training_step(k, 1000.0 * len(k.events) / 25, steps + 1)
                steps += 1
            file.write(",\n".join(json.dumps(e, indent=1) for e in k.events) + ",\n")
        file.write('{"ph": "M", "name": "end"}]}\n')
    return steps


@pytest.mark.slow
def test_a_gibibyte(tmp_path: Path) -> None:
    steps = tiled(tmp_path / "big.json", GIBI)
    trace = read(tmp_path / "big.json")
    assert len(trace.graph.facts["steps"]) == steps
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 < 6 * GIBI
