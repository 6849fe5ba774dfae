"""Accessibility by axe-core, which a package of the extra `dev` brings, or a clear reason to skip.

`AXE_CORE=path/to/axe.min.js` takes another version.
"""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

PACKAGES = ("axe_playwright_python", "axe_core_python")  # the newer first
GRAVE = ("serious", "critical")


def script():
    """Where axe-core lies; None where no package brings it."""
    if given := os.environ.get("AXE_CORE"):
        return Path(given)
    for name in PACKAGES:
        found = find_spec(name)
        if found and found.origin:
            return Path(found.origin).parent / "axe.min.js"
    return None


needs_axe = pytest.mark.skipif(script() is None, reason="no axe-core: pip install axe-core-python")


def grave(driver):
    """What axe finds of weight in the page as it stands: (rule, where)."""
    driver.execute_script(script().read_text())
    driver.set_script_timeout(60)
    found = driver.execute_async_script(
        "const done = arguments[0]; axe.run(document).then(r => done(r.violations), e => done(e))"
    )
    assert isinstance(found, list), found
    return [(f["id"], n["target"], n["html"][:160]) for f in found if f["impact"] in GRAVE
            for n in f["nodes"]]  # fmt: skip
