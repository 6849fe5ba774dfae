"""Libraries of compiled loops: found where they were installed, or built and kept.

Loops are built in units, each from the source of some packages. A library is named by what it was
made of, so that one that does not fit is never loaded. `python -m foretell.compiled.build FOLDER`
builds all into a folder, as an installation does.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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
FLAGS = ("-std=c++17", "-O2", "-fPIC", "-shared", "-ffp-contract=off", "-fno-math-errno", "-w")
_MARK = "@compiled"


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
    key = _key(unit)
    for folder in (BUILT, _kept()):
        path = folder / f"{unit}-{key}.so"
        if path.is_file():
            return ctypes.PyDLL(str(path))
    path = _kept() / f"{unit}-{key}.so"
    try:
        build(unit, path)
    except (OSError, RuntimeError) as why:
        print(f"foretell: loops of `{unit}` run as Python, slowly: {why}", file=sys.stderr)
        return None
    return ctypes.PyDLL(str(path))


def _kept() -> Path:
    """Where libraries are kept that were built by use."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "foretell" / "loops"


def _sources(unit: str) -> list[Path]:
    packages, besides = UNITS[unit]
    found = [p for name in (*packages, *besides) for p in sorted((ROOT / name).rglob("*.py"))]
    return [*found, HERE / "runtime.hpp", HERE / "translate.py", HERE / "build.py"]


def _key(unit: str) -> str:
    """What a unit is made of, as a number."""
    found = hashlib.sha256(f"{sys.platform} {os.uname().machine}".encode())
    for path in _sources(unit):
        found.update(path.read_bytes())
    return found.hexdigest()[:20]


def build(unit: str, path: Path) -> None:
    """Build a unit's library; the same C++ is not compiled twice."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with (path.parent / f"{unit}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.is_file():
            return
        text = source(unit)
        made = hashlib.sha256((text + (HERE / "runtime.hpp").read_text()).encode()).hexdigest()
        same = path.parent / f"{unit}-{made[:20]}.text"
        if not same.is_file():
            _compile(text, same)
        part = path.with_suffix(f".{os.getpid()}")
        shutil.copyfile(same, part)
        part.replace(path)


def _compile(text: str, path: Path) -> None:
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    compiler = compiler or shutil.which("clang++")
    if compiler is None:
        raise RuntimeError("there is no C++ compiler (install g++)")
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        file, out = Path(folder) / "loops.cpp", Path(folder) / "loops.so"
        file.write_text(text)
        ran = subprocess.run(
            [compiler, *FLAGS, f"-I{HERE}", str(file), "-o", str(out)],
            capture_output=True, text=True,
        )  # fmt: skip
        if ran.returncode:
            raise RuntimeError(f"{compiler} failed:\n{ran.stderr[:4000]}")
        out.replace(path)


def source(unit: str) -> str:
    """The C++ of a unit."""
    from foretell.compiled import LOOPS
    from foretell.compiled.translate import unit as translated

    for package in UNITS[unit][0]:
        for path in sorted((ROOT / package).rglob("*.py")):
            if _MARK in path.read_text("utf-8"):
                name = path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
                import_module(f"foretell.{name}")
    mine = [loop for loop in LOOPS if unit_of(loop.function.__module__) == unit]
    entries = [loop.function for loop in mine if loop.is_entry]
    return translated([loop.function for loop in LOOPS], entries)


def main(folder: Path) -> None:
    """Build every unit into a folder; what was there before goes."""
    paths = {unit: folder / f"{unit}-{_key(unit)}.so" for unit in UNITS}
    with ThreadPoolExecutor() as pool:
        list(pool.map(build, paths, paths.values()))
    found = {unit: sorted(folder.glob(f"{unit}-*.text"), key=os.path.getmtime) for unit in UNITS}
    stays = {*paths.values(), *(texts[-1] for texts in found.values() if texts)}
    for path in folder.iterdir():
        if path not in stays:
            path.unlink()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
