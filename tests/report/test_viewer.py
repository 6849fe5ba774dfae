"""Traces in the reader of chrome://tracing itself, where its page is at hand.

`CATAPULT` names `trace_viewer_full.html`, which the package torch-tb-profiler carries (the file
alone is needed: pip download --no-deps torch-tb-profiler). No registry carries Perfetto's trace
processor, which reads the same format; its rules are in test_chrome.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from foretell.report.chrome import write
from foretell.simulate import Timeline, simulate
from tests.transformer import transformer

VIEWER = Path(os.environ.get("CATAPULT", ""))
pytestmark = [
    pytest.mark.skipif(not VIEWER.is_file(), reason="CATAPULT does not name the viewer's page"),
    pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed"),
]


@pytest.fixture(scope="module")
def simulated():
    graph = transformer(ranks=2, layers=2)
    with graph.edit() as edit:
        edit.set(edit.select(kind=("kernel", "collective")), seconds=1e-4)
        edit.use(edit.select(kind="collective"), edit.link("nvlink", 300e9), 150e9)
    return simulate(edit.graph)


def seen(timelines, folder):
    """What the viewer reads of a trace."""
    path = folder / "trace.json"
    write(timelines, path)
    script = Path(__file__).parent / "viewer.js"
    done = subprocess.run(
        ["node", str(script), str(VIEWER), str(path)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("what", ["predicted", "measured", "both"])
def test_the_viewer_reads_everything(simulated, what, tmp_path):
    measured = Timeline(simulated.graph, simulated.start * 1.1, simulated.end * 1.1)
    lines = {"predicted": simulated, "measured": measured}
    chosen = [(n, line) for n, line in lines.items() if what in (n, "both")]
    found = seen(chosen, tmp_path)
    assert found["warnings"] == []
    assert {p["name"] for p in found["processes"]} == {f"{n}: rank {r}" for n, _ in chosen
                                                       for r in (0, 1)}  # fmt: skip
    spans = sum(count for p in found["processes"] for _, count in p["threads"])
    assert spans == len(chosen) * (len(simulated) + len(simulated.graph.held))
    assert found["flows"] == found["tied"] > 0
    assert found["span"] == pytest.approx(1e3 * max(line.seconds for _, line in chosen), rel=1e-6)
    counters = {name for p in found["processes"] for name, _ in p["counters"]}
    assert any("memory held" in name for name in counters)
    assert any("link nvlink" in name for name in counters)
    names = {name for p in found["processes"] for name, _ in p["threads"]}
    lanes = {simulated.graph.names[int(k)] for k in simulated.graph.lanes.name}
    assert names == lanes
