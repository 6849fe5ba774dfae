"""Builds libraries of compiled loops: what an installation does, and a working copy by use.

`python -m foretell.compiled.build FOLDER` builds all into a folder. A library is named by the loops
it was made of (→ `foretell.compiled.build`); after a change of the translator or of `runtime.hpp`
build anew.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path

from foretell.compiled import LOOPS
from foretell.compiled.build import ROOT, UNITS, key_of, unit_of
from foretell_lab.loops.translate import unit as translated

HERE = Path(__file__).resolve().parent
FLAGS = ("-std=c++17", "-O2", "-fPIC", "-shared", "-ffp-contract=off", "-fno-math-errno", "-w")
_MARK = "@compiled"


def build(unit: str, path: Path, *, anew: bool = False) -> None:
    """Build a unit's library; the same C++ is not compiled twice."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with (path.parent / f"{unit}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.is_file() and not anew:
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
    for package in UNITS[unit][0]:
        for path in sorted((ROOT / package).rglob("*.py")):
            if _MARK in path.read_text("utf-8"):
                name = path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
                import_module(f"foretell.{name}")
    mine = [loop for loop in LOOPS if unit_of(loop.function.__module__) == unit]
    entries = [loop.function for loop in mine if loop.is_entry]
    return translated([loop.function for loop in LOOPS], entries)


def build_all(folder: Path) -> None:
    """Build every unit into a folder; what was there before goes."""
    paths = {unit: folder / f"{unit}-{key_of(unit)}.so" for unit in UNITS}
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda unit: build(unit, paths[unit], anew=True), paths))
    found = {unit: sorted(folder.glob(f"{unit}-*.text"), key=os.path.getmtime) for unit in UNITS}
    stays = {*paths.values(), *(texts[-1] for texts in found.values() if texts)}
    for path in folder.iterdir():
        if path not in stays:
            path.unlink()
