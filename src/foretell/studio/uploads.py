"""Files that come from a browser: counted while they arrive, unpacked only to be counted, renamed.

A file is kept under a name of the studio's own, so that no name that is sent is ever a path. What
unpacks to more than the limit is refused before anything reads it.
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
LONGEST_SENDING = 600.0  # seconds in which a file must have arrived
LONGEST = 80  # letters of a name that are shown
# What may follow the last dots of a name; longest first.
ENDINGS = (
    ".json.gz", ".json.zst", ".json", ".graph", ".plan", ".toml", ".txt", ".zip", ".gz", ".zst",
    ".et",
)  # fmt: skip
_numbers = itertools.count(1)


def shown(name: str) -> str:
    """A name fit to be shown: its last part, without what is not text."""
    last = name.replace("\\", "/").rsplit("/", 1)[-1]
    return "".join(c for c in last if c.isprintable())[:LONGEST] or "unnamed"


def known(name: str) -> str:
    """A name for an exported file made of letters, digits and dashes."""
    kept = "".join(c if c.isascii() and (c.isalnum() or c in "-_.") else "-" for c in name)
    found = kept.strip("-.")[:60]
    if not found:
        raise InputError(f"`{name[:40]}` makes no name for a file")
    return found


def ending(name: str) -> str:
    """The ending a file is kept under, or an error where it is none we read."""
    for known in ENDINGS:
        if name.lower().endswith(known):
            return known
    raise InputError(
        f"`{shown(name)}` is none of the files the studio reads",
        hint=f"they end in {', '.join(sorted(set(ENDINGS)))}",
    )


def keep(read: Callable[[int], bytes], name: str, folder: Path, most: int = MOST) -> Path:
    """Write what arrives to a file of the folder; what is too long is taken away again."""
    path = folder / f"upload-{next(_numbers)}{ending(name)}"
    done, ends = 0, time.monotonic() + LONGEST_SENDING
    try:
        with open(path, "xb") as file:
            while block := read(BLOCK):
                done += len(block)
                if done > most:
                    raise too_large(name, most)
                if time.monotonic() > ends:
                    raise InputError(f"`{shown(name)}` took too long to arrive")
                file.write(block)
        if not done:
            raise InputError(f"`{shown(name)}` is empty")
        call(check, path, name, MOST_UNPACKED, MOST_MEMBERS)
    except TimeoutError:
        path.unlink(missing_ok=True)
        raise InputError(f"`{shown(name)}` stopped arriving") from None
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return path


def too_large(name: str, most: int) -> InputError:
    return InputError(
        f"`{shown(name)}` has more than {most >> 20} MiB",
        hint="name it on the command line instead: foretell studio FILE",
    )


def check(path: Path, name: str, most: int = MOST_UNPACKED, members: int = MOST_MEMBERS) -> None:
    """Raise where a file holds more than it may once unpacked, or names paths of its own."""
    damaged: tuple[type[Exception], ...] = (*broken(), ValueError, RuntimeError, struct.error)
    if zipfile.is_zipfile(path):
        try:
            return _check_zip(path, name, most, members)
        except damaged as error:
            raise InputError(f"`{shown(name)}` cannot be unpacked: {error}") from None
    with open(path, "rb") as file, closing(unpacked(file)) as inner:
        _counted(inner, name, most)
    return None


def _check_zip(path: Path, name: str, most: int, members: int) -> None:
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        if len(entries) > members:
            raise InputError(f"`{shown(name)}` has {len(entries)} files, {members} at most")
        left = most
        for entry in entries:
            inside = PurePosixPath(entry.filename.replace("\\", "/"))
            if inside.is_absolute() or ".." in inside.parts:
                raise InputError(f"`{shown(name)}` holds a file outside itself")
            with archive.open(entry) as packed, closing(unpacked(packed)) as inner:  # type: ignore[arg-type]
                left -= _counted(inner, name, left)


def _counted(inner: BinaryIO, name: str, most: int) -> int:
    done = 0
    try:
        while block := inner.read(BLOCK):
            done += len(block)
            if done > most:
                raise InputError(f"`{shown(name)}` unpacks to more than {MOST_UNPACKED >> 30} GiB")
    except InputError:
        raise
    except Exception as error:  # every packer has errors of its own
        raise InputError(f"`{shown(name)}` cannot be unpacked: {error}") from None
    return done
