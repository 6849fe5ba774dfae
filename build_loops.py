"""Builds the compiled loops when the package is installed, so that first use is like any other.

Where there is no C++ compiler the package installs all the same: loops then run as Python.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class LoopsHook(BuildHookInterface):  # type: ignore[type-arg]
    """Builds libraries of loops into the package."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build them from the source that is installed."""
        source, lab = Path(self.root) / "src", Path(self.root) / "lab" / "src"
        built = source / "foretell" / "compiled" / "built"
        code = (
            f"import sys; sys.path[:0] = {[str(source), str(lab)]!r}; from pathlib import Path; "
            f"from foretell_lab.loops.build import build_all; build_all(Path({str(built)!r}))"
        )
        ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        if ran.returncode:
            self.app.display_warning(f"loops are not compiled and will run slowly:\n{ran.stderr}")
            return
        tag = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{tag}"
