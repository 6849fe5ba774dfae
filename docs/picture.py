"""The pictures of the README and the gallery: `make picture`, or `python docs/picture.py`.

A report of the sample trace and a studio, photographed in headless Chromium at each view.
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

GALLERY = HERE / "gallery"
TRACE = HERE.parent / "src/foretell/samples/traces/resnet18-h200.json.gz"
REPORT = ("report", str(TRACE), "--real-ms", "48.2")
LAPTOP, WIDE = (1280, 800), (1920, 1080)
MOST = 150_000  # bytes of a picture
PLAN = {
    "on-count": "16", "plan-tp": "2", "plan-pp": "4", "plan-micro_batch": "1",
    "plan-global_batch": "32",
}  # fmt: skip
# Of a report: name, the section in sight, theme.
SECTIONS = (
    ("report", "", "light"), ("report-dark", "", "dark"), ("report-modules", "modules", "light"),
    ("report-kernels", "kernels", "light"), ("report-timeline", "timeline", "light"),
    ("report-memory", "memory", "light"),
)  # fmt: skip


def photographed(
    driver: Any, name: str, size: tuple[int, int], theme: str, section: str = ""
) -> None:
    """What the browser shows from a section on, as a picture of the gallery."""
    dark = {"features": [{"name": "prefers-color-scheme", "value": theme}]}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", dark)
    width, height = size
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    time.sleep(0.4)
    scrolled(driver, section)
    time.sleep(0.4)
    small = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1000 / width}
    clip = {**small, "y": driver.execute_script("return scrollY")}
    raw = driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "png", "clip": clip})
    picture = GALLERY / f"{name}.png"
    picture.write_bytes(base64.b64decode(raw["data"]))
    told = picture.stat().st_size
    print(f"{picture.name}: {told // 1000} kB{' TOO LARGE' if told > MOST else ''}")


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


def report(driver: Any, page: Path) -> None:
    """The sections of a report."""
    driver.get(page.as_uri())
    until(driver, "document.documentElement.dataset.ready")
    for name, section, theme in SECTIONS:
        photographed(driver, name, LAPTOP, theme, section)


def studio(driver: Any, url: str) -> None:
    """Every view of a studio."""
    driver.get(url)
    until(driver, "document.documentElement.dataset.ready")
    until(driver, "document.getElementById('changes-h')")  # every change was tried
    for spec in ("amp:dtype=bf16", "channels-last"):
        driver.execute_script(f"document.querySelector('#changes input[value=\"{spec}\"]').click()")
        until(driver, f"document.getElementById('sections').innerText.includes('{spec[:3]}')")
    until(driver, "!document.getElementById('sections').classList.contains('busy')")
    photographed(driver, "studio", LAPTOP, "light")
    photographed(driver, "studio-wide-dark", WIDE, "dark")
    for changes in ([], ["tf32"], ["amp:dtype=bf16", "channels-last"]):
        script = "return ask('save', {step: state.step, changes: arguments[0]})"
        driver.execute_script(script, changes)
    driver.execute_script("document.getElementById('tab-layouts').click()")
    photographed(driver, "studio-start", LAPTOP, "light")
    driver.execute_script("document.getElementById('explore').click()")
    until(driver, "document.getElementById('job-says').textContent.includes('layouts in')")
    photographed(driver, "studio-layouts", LAPTOP, "light")
    photographed(driver, "studio-layouts-wide-dark", WIDE, "dark")
    for field, value in PLAN.items():
        script = "const e = document.getElementById(arguments[0]); e.value = arguments[1];"
        driver.execute_script(script + "e.dispatchEvent(new Event('change'))", field, value)
    until(driver, "document.getElementById('on-says').textContent.startsWith('16')")
    driver.execute_script("document.getElementById('predict').click()")
    until(driver, "document.getElementById('plan-timeline')")
    photographed(driver, "studio-plan", LAPTOP, "light", "plan-plan0")
    photographed(driver, "studio-plan-timeline", LAPTOP, "dark", "plan-timeline")
    driver.execute_script("document.getElementById('tab-compare').click()")
    until(driver, "document.getElementById('compared-table').innerText.includes('amp')")
    photographed(driver, "studio-compare", LAPTOP, "light")


def write() -> None:
    """Make the pages and photograph them."""
    if missing():
        sys.exit(missing())
    from foretell.studio import serve

    GALLERY.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, browser() as driver:
        page = Path(folder) / "report.html"
        command = [sys.executable, "-m", "foretell", *REPORT, "-o", str(page)]
        subprocess.run(command, check=True, capture_output=True)
        report(driver, page)
        running = serve([TRACE])
        try:
            studio(driver, running.url)
        finally:
            running.close()
    (HERE / "report.png").write_bytes((GALLERY / "report.png").read_bytes())


if __name__ == "__main__":
    write()
