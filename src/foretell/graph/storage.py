"""What files need of the machine: a whole file or none, and how much memory there is."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from foretell.errors import InputError

# The memory a container may use and what it uses; absent where there is no limit.
_LIMIT, _TAKEN = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")


def write_atomically(path: Path, write: Callable[[BinaryIO], Any]) -> None:
    """Let `write` fill a file beside `path`, then put it there in one move.

    What is not a plain file (a pipe, /dev/stdout) is written to as it is.
    """
    path = Path(os.path.realpath(path))  # through a link, to what it names
    try:
        if path.exists() and not path.is_file():
            with open(path, "wb") as file:
                write(file)
        else:
            _write_beside(path, write)
    except OSError as error:
        raise InputError(
            f"cannot write `{path}`: {error.strerror or error}",
            hint="is there such a folder, may you write there, and is there room?",
        ) from None


def _write_beside(path: Path, write: Callable[[BinaryIO], Any]) -> None:
    import tempfile

    handle, beside = tempfile.mkstemp(prefix=".writing-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())  # or a crash could leave the name without the bytes
        os.chmod(beside, 0o666 & ~_mask())  # as a plain open() would have made it
        os.replace(beside, path)
    except BaseException:
        Path(beside).unlink(missing_ok=True)
        raise


def _mask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def free_memory() -> float:
    """Bytes that could be taken now without swapping, within what this process may use."""
    try:
        with open("/proc/meminfo") as file:
            lines = dict(line.split(":") for line in file)
        free = float(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        free = float("inf")
    try:
        return min(free, float(_LIMIT.read_text()) - float(_TAKEN.read_text()))
    except (OSError, ValueError):  # no container, or no limit: the file says `max`
        return free
