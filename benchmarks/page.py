"""How quickly a report of a hundred thousand spans opens and pans: headless Chromium, measured.

    python benchmarks/page.py            100,000 spans
    python benchmarks/page.py 50000      another number

Frames are counted while the view is moved a little in every one of them, zoomed out (all spans in
sight) and zoomed in; the page is drawn by the CPU alone, as there is no GPU in a CI machine.
"""

import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from chromium import browser, errors, missing
from table import Row, show

from foretell.graph import Builder, Graph, replicate
from foretell.report.page import write
from foretell.simulate import Timeline, simulate

PAN = """
const [zoom, done] = arguments, view = window.foretellView, span = view.total * zoom;
const begin = performance.now();
let frames = 0, at = 0;
function frame() {
  at = (at + span / 40) % (view.total - span || 1);
  const from = zoom < 1 ? at : 0; // where all is in sight, a millionth less in every other frame
  view.view(from, from + span * (1 - frames % 2 * 1e-6));
  if (++frames < 60) requestAnimationFrame(frame); else done(60000 / (performance.now() - begin));
}
requestAnimationFrame(frame);
"""


def step(spans: int, ranks: int = 8) -> Graph:
    """A step of so many tasks: on each rank a host thread that launches, and a stream."""
    drawn = np.random.default_rng(7)
    make = Builder()
    thread, stream = make.lane("thread", kind="host"), make.lane("stream", kind="compute")
    for i in range(spans // ranks // 2):
        op = f"op{i % 40}"
        launch = make.task(kind="host", op=op, lane=thread)
        make.task(kind="kernel", op=op, lane=stream, after=[launch])
    # No two ranks alike, so that nothing is smaller than it would be for a real step.
    with replicate(make.graph(), ranks).edit("drawn") as edit:
        everyone = np.arange(edit.before.size)
        edit.set(everyone, seconds=drawn.exponential(4e-6, len(everyone)))
    return edit.graph


def rows(spans: int = 100_000) -> list[Row]:
    """Size, opening time and frames a second of a page."""
    if missing():
        return [Row("page", f"skipped: {missing()}")]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "page.html"
        played = simulate(step(spans // 2))
        late = np.cumsum(np.random.default_rng(8).exponential(1e-8, len(played)))
        measured = Timeline(played.graph, played.start + late, played.end + late)
        began = time.perf_counter()
        write([("measured", measured), ("predicted", played)], path)
        wrote = time.perf_counter() - began
        return [
            Row("spans", f"{2 * len(played):,}"),
            Row("written in", f"{wrote:.2f} s"),
            Row("page", f"{path.stat().st_size / 2**20:.2f} MiB", "6 MiB"),
            *_browsed(path),
        ]


def _browsed(path: Path) -> list[Row]:
    with browser() as driver:
        driver.get("about:blank")
        began = time.perf_counter()
        driver.get(path.as_uri())
        while not driver.execute_script("return document.documentElement.dataset.ready"):
            time.sleep(0.01)
        opened = time.perf_counter() - began
        driver.execute_script("document.getElementById('timeline').scrollIntoView()")
        driver.find_element("xpath", "//label[contains(., 'all ranks')]/input").click()
        frames = [driver.execute_async_script(PAN, zoom) for zoom in (1.0, 0.2, 0.01)]
        complaints = len(errors(driver))
    names = ("all in sight", "a fifth", "a hundredth")
    found = [Row("opens in", f"{opened:.2f} s", "3 s")]
    found += [Row(f"frames/s, {n}", f"{f:.0f}", "30") for n, f in zip(names, frames, strict=True)]
    return [*found, Row("console errors", str(complaints), "0")]


if __name__ == "__main__":
    show("Report page", rows(int(sys.argv[1]) if len(sys.argv) > 1 else 100_000))
