"""The pictures of the README and the gallery: `make picture`, or `python docs/picture.py`.

A report of the sample trace and a studio, photographed in headless Chromium at each view: 1280 and
1920 pixels wide, light and dark. Of each view there is one picture, and one with all four looks.
"""

from __future__ import annotations

import base64
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from benchmarks.chromium import browser, missing  # noqa: E402
from tests.trace.kineto import data_parallel  # noqa: E402

GALLERY = HERE / "gallery"
TRACE = HERE.parent / "src/foretell/samples/traces/resnet18-h200.json.gz"
REPORT = ("report", str(TRACE), "--real-ms", "48.2")
RANKS = {"report-ranks": "ranks"}  # of a report of several ranks
LAPTOP, WIDE = (1280, 800), (1920, 1080)
LOOKS = [(size, theme) for size in (LAPTOP, WIDE) for theme in ("light", "dark")]
MOST = 400_000  # bytes of a picture
PLAN = {
    "on-count": "16", "plan-tp": "2", "plan-pp": "4", "plan-micro_batch": "1",
    "plan-global_batch": "32",
}  # fmt: skip
# Of a report: the view, and the section in sight.
SECTIONS = {
    "report": "", "report-changes": "changes", "report-time": "goes", "report-modules": "modules",
    "report-kernels": "kernels", "report-timeline": "timeline", "report-memory": "memory",
    "report-measured": "measured",
}  # fmt: skip
Views = dict[str, list[str]]  # a view, and its pictures in every look as base64


def photographed(driver: Any, views: Views, name: str, section: str = "") -> None:
    """What the browser shows from a section on, in every look; the first one is a picture."""
    views[name] = [_shot(driver, size, theme, section) for size, theme in LOOKS]
    _write(name, _shot(driver, *LOOKS[0], section, width=1000))


def _shot(driver: Any, size: tuple[int, int], theme: str, section: str, width: int = 0) -> str:
    dark = {"features": [{"name": "prefers-color-scheme", "value": theme}]}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", dark)
    metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    time.sleep(0.4)
    scrolled(driver, section)
    time.sleep(0.4)
    clip = {"x": 0, "y": driver.execute_script("return scrollY"), "width": size[0]}
    clip |= {"height": size[1], "scale": width / size[0] if width else 1}
    raw = driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "png", "clip": clip})
    return str(raw["data"])


def _write(name: str, raw: str) -> None:
    picture = GALLERY / f"{name}.png"
    picture.write_bytes(base64.b64decode(raw))
    size = picture.stat().st_size
    print(f"{picture.name}: {size // 1000} kB{' TOO LARGE' if size > MOST else ''}")


def sheets(driver: Any, views: Views) -> None:
    """Of each view a picture with all its looks side by side."""
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    metrics = {"width": 1240, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    for name, looks in views.items():
        driver.get("about:blank")
        driver.execute_script(_SHEET, looks)
        until(driver, "[...document.images].every(i => i.complete)")
        height = driver.execute_script("return document.body.offsetHeight")
        clip = {"x": 0, "y": 0, "width": 1240, "height": height, "scale": 1}
        query = {"format": "png", "clip": clip, "captureBeyondViewport": True}
        _write(f"{name}-looks", driver.execute_cdp_cmd("Page.captureScreenshot", query)["data"])


_SHEET = """
document.body.style.cssText = 'margin: 0; display: grid; gap: 8px; background: #888;'
  + 'grid-template-columns: 496px 736px';
for (const raw of [0, 2, 1, 3].map(k => arguments[0][k])) {
  const image = document.createElement('img');
  image.src = 'data:image/png;base64,' + raw;
  image.style.width = '100%';
  document.body.append(image);
}"""


def until(driver: Any, script: str, seconds: float = 180.0) -> None:
    """Wait until a script of the page answers something."""
    end = time.monotonic() + seconds
    while not driver.execute_script(f"return {script}"):
        if time.monotonic() > end:
            sys.exit(f"the page never said `{script}`")
        time.sleep(0.1)


def scrolled(driver: Any, name: str) -> None:
    script = (
        "const e = document.getElementById(arguments[0]); e ? e.scrollIntoView() : scrollTo(0, 0)"
    )
    driver.execute_script("document.documentElement.style.scrollBehavior = 'auto';" + script, name)


def report(driver: Any, given: tuple[str, ...], page: Path, views: Views, sections: Any) -> None:
    """The sections of a report."""
    command = [sys.executable, "-m", "foretell", *given, "-o", str(page)]
    subprocess.run(command, check=True, capture_output=True)
    driver.get(page.as_uri())
    until(driver, "document.documentElement.dataset.ready")
    for name, section in sections.items():
        photographed(driver, views, name, section)


def studio(driver: Any, url: str, views: Views) -> None:
    """Every view of a studio."""
    driver.get(url)
    until(driver, "document.documentElement.dataset.ready")
    until(driver, "document.getElementById('changes-h')")  # every change was tried
    for spec in ("amp:dtype=bf16", "channels-last"):
        driver.execute_script(f"document.querySelector('#changes input[value=\"{spec}\"]').click()")
        until(driver, f"document.getElementById('sections').innerText.includes('{spec[:3]}')")
    until(driver, "!document.getElementById('sections').classList.contains('busy')")
    photographed(driver, views, "studio")
    photographed(driver, views, "studio-timeline", "timeline")
    for changes in ([], ["tf32"], ["amp:dtype=bf16", "channels-last"]):
        script = "return ask('save', {step: state.step, changes: arguments[0]})"
        driver.execute_script(script, changes)
    driver.execute_script("document.getElementById('tab-layouts').click()")
    photographed(driver, views, "studio-start")
    driver.execute_script("document.getElementById('explore').click()")
    until(driver, "document.getElementById('job-says').textContent.includes('layouts in')")
    photographed(driver, views, "studio-layouts")
    for field, value in PLAN.items():
        script = "const e = document.getElementById(arguments[0]); e.value = arguments[1];"
        driver.execute_script(script + "e.dispatchEvent(new Event('change'))", field, value)
    until(driver, "document.getElementById('on-says').textContent.startsWith('16')")
    driver.execute_script("document.getElementById('predict').click()")
    until(driver, "document.getElementById('plan-timeline')")
    photographed(driver, views, "studio-plan", "plan-plan0")
    photographed(driver, views, "studio-plan-timeline", "plan-timeline")
    driver.execute_script("document.getElementById('tab-compare').click()")
    until(driver, "document.getElementById('compared-table').innerText.includes('amp')")
    photographed(driver, views, "studio-compare")


def write() -> None:
    """Make the pages and photograph them."""
    if missing():
        sys.exit(missing())
    from foretell.studio import serve

    GALLERY.mkdir(exist_ok=True)
    views: Views = {}
    with tempfile.TemporaryDirectory() as folder, browser() as driver:
        page, ranks = Path(folder) / "report.html", Path(folder) / "ranks"
        ranks.mkdir()
        report(driver, REPORT, page, views, SECTIONS)
        report(driver, ("report", str(data_parallel(ranks))), page, views, RANKS)
        running = serve([TRACE])
        try:
            studio(driver, running.url, views)
        finally:
            running.close()
        sheets(driver, views)
    (HERE / "report.png").write_bytes((GALLERY / "report.png").read_bytes())


if __name__ == "__main__":
    write()
