"""Where the bytes of a trace come from: plain, gzip, zstd, a zip or tar archive, or a folder.

What a file is, is read from its first bytes and never from its name. A file that cannot be read to
its end is an error that says where it stops.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from foretell.errors import InputError
from foretell.io import Counter, broken, limits, open_file, unpacked

BLOCK = 1 << 17  # bytes read at once: what is made of more no longer fits in the cache
_HEAD = 512  # bytes that tell what a file is: a tar header is that long
_ZIP = (b"PK\x03\x04", b"PK\x05\x06")  # with files in it, or without
# Endings of files a folder or archive may hold besides traces are passed over.
_ENDINGS = (".json", ".json.gz", ".gz", ".et", ".zst", ".zip")


@dataclass(frozen=True)
class Member:
    """One file that may hold a trace: its name for people, and how to open it."""

    name: str
    open: Callable[[], BinaryIO]

    packed: int = 0  # bytes it takes before it is unpacked

    def blocks(self) -> Iterator[bytes]:
        """The bytes of the file, unpacked, block by block; no more than a trace may have."""
        limit = limits()
        count = Counter(self.name, self.packed, limit.trace, limit.ratio)
        try:
            with closing(self.open()) as packed, closing(unpacked(packed)) as file:
                while block := file.read(BLOCK):
                    count.add(len(block))
                    yield block
        except broken() as error:
            raise _cut_short(self.name, count.done, error) from None


def members(path: str | os.PathLike[str]) -> list[Member]:
    """Every file that a path stands for, by name: itself, or what a folder or archive holds."""
    path = Path(path)
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.is_file() and _is_wanted(p.name))
        if not files:
            raise InputError(f"no trace in the folder `{path}`", hint="it should hold .json files")
        _check_number(path, len(files))
        return [m for p in files for m in members(p)]
    damaged: tuple[type[Exception], ...] = (*broken(), ValueError, RuntimeError)  # zipfile's own
    try:
        with open_file(path) as file:
            head = file.read(_HEAD)
        return _members_of(path, head)
    except damaged as error:
        raise _cut_short(str(path), 0, error) from None


def _members_of(path: Path, head: bytes) -> list[Member]:
    if head.startswith(_ZIP):
        return _zip_members(path)
    if _is_tar(head) or (_is_packed(head) and _is_tar(_first_bytes(path))):
        return _tar_members(path)
    return [Member(str(path), lambda: open_file(path), path.stat().st_size)]


def _check_number(path: Path, count: int) -> None:
    if count > limits().members:
        raise InputError(
            f"`{path}` has {count} files, {limits().members} at most",
            hint="name one of them, or raise FORETELL_MAX_MEMBERS",
        )


def _is_wanted(name: str) -> bool:
    base = os.path.basename(name)
    return base.endswith(_ENDINGS) and not base.startswith(".")


def _is_packed(head: bytes) -> bool:
    return head[:2] == b"\x1f\x8b" or head[:4] == b"\x28\xb5\x2f\xfd"


def _is_tar(head: bytes) -> bool:
    return head[257:262] == b"ustar"


def _first_bytes(path: Path) -> bytes:
    with open_file(path) as file, closing(unpacked(file)) as inner:
        return inner.read(_HEAD)


def _zip_members(path: Path) -> list[Member]:
    import zipfile

    with open_file(path) as file, zipfile.ZipFile(file) as archive:
        _check_number(path, len(archive.filelist))
        entries = {e.filename: e for e in archive.infolist() if _is_wanted(e.filename)}

    def reader(name: str) -> Callable[[], BinaryIO]:
        def opened() -> BinaryIO:
            with zipfile.ZipFile(path) as archive:
                return archive.open(name)  # type: ignore[return-value]

        return opened

    return _named(path, [(n, reader(n), entries[n].compress_size) for n in sorted(entries)])


def _tar_members(path: Path) -> list[Member]:
    """Members are read once, in the order of the archive: a packed tar cannot be sought in."""
    import tarfile

    found: list[tuple[str, Callable[[], BinaryIO], int]] = []
    limit, size = limits(), path.stat().st_size
    count = Counter(str(path), size, limit.document, limit.ratio)
    with (
        open_file(path) as file,
        closing(unpacked(file)) as inner,
        tarfile.open(fileobj=inner, mode="r|") as archive,
    ):
        for entry in archive:
            _check_number(path, len(found))
            content = archive.extractfile(entry) if _is_wanted(entry.name) else None
            if content is not None:
                count.add(entry.size)  # they are all held until they are read
                data = content.read(entry.size)
                found.append((entry.name, lambda data=data: io.BytesIO(data), size))  # type: ignore[misc]
    return _named(path, sorted(found, key=lambda row: row[0]))


def _named(path: Path, found: list[tuple[str, Callable[[], BinaryIO], int]]) -> list[Member]:
    if not found:
        raise InputError(f"no trace in the archive `{path}`", hint="it should hold .json files")
    return [Member(f"{path}:{name}", opener, size) for name, opener, size in found]


def _cut_short(name: str, done: int, error: BaseException) -> InputError:
    reason = str(error) or type(error).__name__
    return InputError(
        f"`{name}` cannot be read beyond byte {done} of its content: {reason}",
        hint="the file is damaged or was cut short; copy it again",
    )
