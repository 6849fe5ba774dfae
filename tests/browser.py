"""A real browser for tests, or a clear reason to skip."""

import pytest
from benchmarks.chromium import browser, errors, missing

__all__ = ["browser", "errors", "needs_browser"]

needs_browser = pytest.mark.skipif(bool(missing()), reason=missing() or "there is a browser")
