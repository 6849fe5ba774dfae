"""The picture in the README: `make picture`, or `python docs/picture.py [FILE]`.

A report of the sample trace, opened in headless Chromium and photographed.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
TRACE = HERE.parent / "src/foretell/samples/traces/resnet18-h200.json.gz"
REPORT = ("report", str(TRACE), "amp:dtype=bf16", "channels-last", "--real-ms", "48.2")
CHROMIUM = Path("/usr/bin/chromium")
SIZE = "1240,1535"  # to the end of the timeline


def photographed(page: Path, picture: Path) -> None:
    """What a browser shows of a page."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        flags += [f"--window-size={SIZE}", f"--user-data-dir={profile}"]
        flags += ["--virtual-time-budget=8000", f"--screenshot={picture}", page.as_uri()]
        subprocess.run([str(CHROMIUM), *flags], check=True, capture_output=True, timeout=120)


def write(picture: Path) -> None:
    """Make the report and photograph it."""
    if not CHROMIUM.exists():
        sys.exit(f"no {CHROMIUM}: install Chromium (Debian: apt-get install chromium)")
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        command = [sys.executable, "-m", "foretell", *REPORT, "--no-advice", "-o", str(page)]
        subprocess.run(command, check=True, capture_output=True)
        photographed(page, picture)
    print(f"{picture}: {picture.stat().st_size // 1000} kB")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "report.png")
