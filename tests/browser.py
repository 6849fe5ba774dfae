"""A real browser for tests: Debian's Chromium driven by Selenium, or a clear reason to skip."""

import tempfile
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest

CHROMIUM, DRIVER = Path("/usr/bin/chromium"), Path("/usr/bin/chromedriver")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--window-size=1400,1000",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip


def missing() -> str:
    """What a browser test lacks here; empty where it lacks nothing."""
    if find_spec("selenium") is None:
        return "selenium is not installed"
    absent = [str(path) for path in (CHROMIUM, DRIVER) if not path.exists()]
    return f"no {' and '.join(absent)}: install chromium and chromium-driver" if absent else ""


needs_browser = pytest.mark.skipif(bool(missing()), reason=missing() or "there is a browser")


@contextmanager
def browser():
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


def errors(driver):
    """What the page complained of on its console."""
    return [entry["message"] for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]
