"""The user's files as they were: what a script writes while it is watched is undone afterwards.

The process of the script keeps a journal: every file or folder it makes, and a copy of every file
it is about to change. Whatever started it undoes the journal when it has ended, however it ended.
Temporary files and caches are left alone.
"""

from __future__ import annotations

import json
import os
import shutil
import site
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from foretell.pytorch.intake.request import folder_of

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_LARGE = 1 << 28  # bytes: larger files are not copied before they are changed
JOURNAL = "journal"


class Journal:
    """Notes what a process makes and changes; an audit hook, so that all of Python is seen."""

    def __init__(self, folder: Path, output: str, *users: Path) -> None:
        self.folder = folder
        self.ours = [os.path.realpath(p) for p in (folder, output, folder_of(Path(output)))]
        self.here = [os.path.realpath(p) for p in users]
        self.elsewhere = [os.path.realpath(p) for p in own_places()]
        self.seen: set[str] = set()
        self.busy = threading.local()
        self.file = os.open(folder / JOURNAL, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def begin(self) -> None:
        """Watch from here on; a process cannot stop watching itself."""
        sys.addaudithook(self._hear)

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        find = _EVENTS.get(event)
        if find is None or getattr(self.busy, "is_so", False):
            return
        self.busy.is_so = True
        try:
            for path in find(args):
                if isinstance(path, (str, bytes, os.PathLike)):
                    self.note(os.fsdecode(path))
        finally:
            self.busy.is_so = False

    def note(self, path: str) -> None:
        """Something is about to be written here."""
        full = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
        if full in self.seen or not self._is_the_users(full):
            return
        self.seen.add(full)
        if not os.path.lexists(full):
            self._write({"made": full})
        elif os.path.isfile(full) and os.path.getsize(full) <= _LARGE:
            copy = self.folder / f"copy-{os.getpid()}-{len(self.seen)}"
            with suppress(OSError):
                shutil.copy2(full, copy)
                self._write({"changed": full, "copy": str(copy)})

    def _is_the_users(self, full: str) -> bool:
        if any(full == place or full.startswith(place + os.sep) for place in self.ours):
            return False
        if any(full.startswith(place + os.sep) for place in self.here):
            return True
        return not any(full.startswith(place + os.sep) for place in self.elsewhere)

    def _write(self, row: dict[str, str]) -> None:
        os.write(self.file, (json.dumps(row) + "\n").encode())


def undo(folder: Path) -> None:
    """Take back what the journal of a run says: remove what was made, restore what was changed."""
    try:
        lines = (folder / JOURNAL).read_text().splitlines()
    except OSError:
        return
    rows = [json.loads(line) for line in lines]
    made = dict.fromkeys(row["made"] for row in rows if "made" in row)
    for path in reversed(list(made)):
        with suppress(OSError):
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path)
            else:
                os.remove(path)
    for row in rows:
        if "changed" in row and row["changed"] not in made:
            with suppress(OSError):
                shutil.copy2(row["copy"], row["changed"])


def own_places() -> list[str]:
    """Folders whose files are no user's work: devices, temporary files, caches, packages."""
    home = os.path.expanduser("~")
    cache = [os.environ.get(k, "") for k in ("XDG_CACHE_HOME", "HF_HOME", "TORCH_HOME")]
    found = ["/dev", "/proc", "/sys", tempfile.gettempdir(), os.path.join(home, ".cache"), *cache]
    return [p for p in (*found, *site.getsitepackages(), sys.prefix) if p]


def _opened(args: tuple[Any, ...]) -> tuple[Any, ...]:
    path, _, flags = args
    return (path,) if isinstance(flags, int) and flags & _WRITES else ()


_EVENTS: dict[str, Callable[[tuple[Any, ...]], tuple[Any, ...]]] = {
    "open": _opened,
    "os.mkdir": lambda args: args[:1],
    "os.rename": lambda args: args[:2],
    "os.remove": lambda args: args[:1],
    "os.truncate": lambda args: args[:1],
    "os.link": lambda args: args[1:2],
    "os.symlink": lambda args: args[1:2],
    "sqlite3.connect": lambda args: args[:1],
}
