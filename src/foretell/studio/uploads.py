"""Uploads from a browser: limited in size while they arrive and once unpacked, and renamed.

A file is stored under a name the studio makes up, so that an uploaded name is never used as a path.
What unpacks to more than the limit is refused before anything reads it.
"""

from __future__ import annotations

import itertools
import struct
import time
import zipfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from foretell.errors import InputError
from foretell.io import broken, unpacked
from foretell.studio.child import call

MOST = 256 * 2**20  # bytes of a file; the largest public trace has 60 MB
MOST_UNPACKED = 2 * 2**30  # bytes in it once unpacked
MOST_MEMBERS = 4096  # files of an archive: ranks of a job
BLOCK = 1 << 20  # bytes taken at once
MOST_SECONDS = 600.0  # seconds in which a file must have arrived
LONGEST = 80  # letters of a name that are shown
# What may follow the last dots of a name; longest first.
ENDINGS = (
    ".json.gz", ".json.zst", ".json", ".graph", ".plan", ".toml", ".txt", ".zip", ".gz", ".zst",
    ".et",
)  # fmt: skip
_numbers = itertools.count(1)


def display_name(name: str) -> str:
    """A name to print: its last part, printable letters only."""
    last = name.replace("\\", "/").rsplit("/", 1)[-1]
    return "".join(c for c in last if c.isprintable())[:LONGEST] or "unnamed"


def safe_name(name: str) -> str:
    """A name for an exported file made of letters, digits and dashes."""
    kept = "".join(c if c.isascii() and (c.isalnum() or c in "-_.") else "-" for c in name)
    found = kept.strip("-.")[:60]
    if not found:
        raise InputError(f"`{name[:40]}` makes no name for a file")
    return found


def ending(name: str) -> str:
    """The ending a file is kept under, or an error where it is none we read."""
    for one in ENDINGS:
        if name.lower().endswith(one):
            return one
    raise InputError(
        f"`{display_name(name)}` is none of the files the studio reads",
        hint=f"they end in {', '.join(sorted(set(ENDINGS)))}",
    )


def receive(read: Callable[[int], bytes], name: str, folder: Path, most: int = MOST) -> Path:
    """Write an upload to a file of the folder; a file that is too long is removed again."""
    path = folder / f"upload-{next(_numbers)}{ending(name)}"
    done, ends = 0, time.monotonic() + MOST_SECONDS
    try:
        with open(path, "xb") as file:
            while block := read(BLOCK):
                done += len(block)
                if done > most:
                    raise too_large(name, most)
                if time.monotonic() > ends:
                    raise InputError(f"`{display_name(name)}` took too long to arrive")
                file.write(block)
        if not done:
            raise InputError(f"`{display_name(name)}` is empty")
        call(check, path, name, MOST_UNPACKED, MOST_MEMBERS)
    except TimeoutError:
        path.unlink(missing_ok=True)
        raise InputError(f"`{display_name(name)}` stopped arriving") from None
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return path


def too_large(name: str, most: int) -> InputError:
    return InputError(
        f"`{display_name(name)}` has more than {most >> 20} MiB",
        hint="name it on the command line instead: foretell studio FILE",
    )


def check(path: Path, name: str, most: int = MOST_UNPACKED, members: int = MOST_MEMBERS) -> None:
    """Raise where a file unpacks to more than it may, or an archive has paths outside itself."""
    damaged: tuple[type[Exception], ...] = (*broken(), ValueError, RuntimeError, struct.error)
    if zipfile.is_zipfile(path):
        try:
            return _check_zip(path, name, most, members)
        except damaged as error:
            raise InputError(f"`{display_name(name)}` cannot be unpacked: {error}") from None
    with open(path, "rb") as file, closing(unpacked(file)) as inner:
        _unpacked_size(inner, name, most)
    return None


def _check_zip(path: Path, name: str, most: int, members: int) -> None:
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        if len(entries) > members:
            raise InputError(f"`{display_name(name)}` has {len(entries)} files, {members} at most")
        left = most
        for entry in entries:
            inside = PurePosixPath(entry.filename.replace("\\", "/"))
            if inside.is_absolute() or ".." in inside.parts:
                raise InputError(f"`{display_name(name)}` holds a file outside itself")
            with archive.open(entry) as packed, closing(unpacked(packed)) as inner:  # type: ignore[arg-type]
                left -= _unpacked_size(inner, name, left)


def _unpacked_size(inner: BinaryIO, name: str, most: int) -> int:
    done = 0
    try:
        while block := inner.read(BLOCK):
            done += len(block)
            if done > most:
                raise InputError(
                    f"`{display_name(name)}` unpacks to more than {MOST_UNPACKED >> 30} GiB"
                )
    except InputError:
        raise
    except Exception as error:  # every format has errors of its own
        raise InputError(f"`{display_name(name)}` cannot be unpacked: {error}") from None
    return done
