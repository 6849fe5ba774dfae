"""Libraries of compiled loops: found where they were installed, or built and kept.

Loops are built in units, each from the source of some packages. A library is named by what it was
made of, so that one that does not fit is never loaded. `python -m foretell.compiled.build FOLDER`
builds all into a folder, as an installation does. What builds them, `foretell_lab.loops`, is not
installed with the package: a working copy has it.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from types import FunctionType
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
BUILT = HERE / "built"  # where an installation puts them
# The packages whose loops a unit has, and those it is made of besides.
UNITS = {
    "simulate": (("graph", "simulate"), ()),
    "cost": (("cost",), ()),
    "search": (("search/placement", "search/fusion"), ("simulate", "graph")),
    "schedule": (("search/schedule",), ()),
}


def native(loop: FunctionType) -> Callable[[tuple[Any, ...]], Any] | None:
    """The compiled form of a loop; nothing where it cannot be had."""
    unit = unit_of(loop.__module__)
    found: Any = library(unit) if unit else None
    name = f"call_{loop.__module__.removeprefix('foretell.')}.{loop.__name__}".replace(".", "_")
    found = getattr(found, name, None)
    if found is None:
        return None
    found.argtypes, found.restype = [ctypes.py_object], ctypes.py_object
    return found  # type: ignore[no-any-return]


def unit_of(module: str) -> str:
    """The unit that a module's loops belong to."""
    path = module.removeprefix("foretell.").replace(".", "/")
    for unit, (packages, _) in UNITS.items():
        if any(path.startswith(f"{p}/") for p in packages):
            return unit
    return ""


@cache
def library(unit: str) -> Any:
    """A unit's library, built where there is none yet; nothing where it cannot be had."""
    if os.environ.get("FORETELL_COMPILED") == "no":
        return None
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    kept = Path(root) / "foretell" / "loops"  # those built by use
    name = f"{unit}-{key_of(unit)}.so"
    for path in (BUILT / name, kept / name):
        if path.is_file():
            return ctypes.PyDLL(str(path))
    try:
        _builder().build(unit, kept / name)
    except (OSError, RuntimeError) as why:
        print(f"foretell: loops of `{unit}` run as Python, slowly: {why}", file=sys.stderr)
        return None
    return ctypes.PyDLL(str(kept / name))


def key_of(unit: str) -> str:
    """What a unit is made of, as a number."""
    found = hashlib.sha256(f"{sys.platform} {os.uname().machine}".encode())
    for name in (part for parts in UNITS[unit] for part in parts):
        for path in sorted((ROOT / name).rglob("*.py")):
            found.update(path.read_bytes())
    found.update(Path(__file__).read_bytes())
    return found.hexdigest()[:20]


def _builder() -> Any:
    try:
        return import_module("foretell_lab.loops.build")
    except ModuleNotFoundError:
        raise RuntimeError("install foretell where a C++ compiler (g++) is") from None


if __name__ == "__main__":
    _builder().build_all(Path(sys.argv[1]))
