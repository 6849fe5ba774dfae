"""Debian's Chromium without a screen, driven by Selenium: for figures of pages."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM, DRIVER = Path("/usr/bin/chromium"), Path("/usr/bin/chromedriver")
MISSING = "skipped: chromium and chromium-driver are not installed"
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--window-size=1400,900",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip


def is_there() -> bool:
    """Whether pages can be measured here."""
    return CHROMIUM.exists() and DRIVER.exists()


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


def complaints(driver: Any) -> int:
    """How often the page complained on its console."""
    return sum(entry["level"] == "SEVERE" for entry in driver.get_log("browser"))
