"""Debian's Chromium without a screen, driven by Selenium: for figures of pages and their tests."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

CHROMIUM, DRIVER = Path("/usr/bin/chromium"), Path("/usr/bin/chromedriver")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--window-size=1400,1000",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip


def missing() -> str:
    """What driving a browser lacks here; empty where it lacks nothing."""
    if find_spec("selenium") is None:
        return "selenium is not installed"
    absent = [str(path) for path in (CHROMIUM, DRIVER) if not path.exists()]
    return f"no {' and '.join(absent)}: install chromium and chromium-driver" if absent else ""


@contextmanager
def browser() -> Iterator[Any]:
    """A browser with an empty profile, closed afterwards."""
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = Options()
        options.binary_location = str(CHROMIUM)
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        driver = webdriver.Chrome(options=options, service=Service(str(DRIVER)))
        try:
            yield driver
        finally:
            driver.quit()


def errors(driver: Any) -> list[str]:
    """What the page complained of on its console."""
    return [entry["message"] for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]
