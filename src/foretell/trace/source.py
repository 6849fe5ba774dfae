"""Where the bytes of a trace come from: plain, gzip, zstd, a zip or tar archive, or a folder.

What a file is, is read from its first bytes and never from its name. A file that cannot be read to
its end is an error that says where it stops.
"""

from __future__ import annotations

import gzip
import io
import os
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from foretell.errors import InputError

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

    def blocks(self) -> Iterator[bytes]:
        """The bytes of the file, unpacked, block by block."""
        done = 0
        try:
            with closing(self.open()) as packed, closing(unpacked(packed)) as file:
                while block := file.read(BLOCK):
                    yield block
                    done += len(block)
        except _broken() as error:
            raise _cut_short(self.name, done, error) from None


def members(path: str | os.PathLike[str]) -> list[Member]:
    """Every file that a path stands for, by name: itself, or what a folder or archive holds."""
    path = Path(path)
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.is_file() and _is_wanted(p.name))
        if not files:
            raise InputError(f"no trace in the folder `{path}`", hint="it should hold .json files")
        return [m for p in files for m in members(p)]
    try:
        with open(path, "rb") as file:
            head = file.read(_HEAD)
    except OSError as error:
        raise InputError(f"cannot read `{path}`: {error.strerror or error}") from None
    try:
        return _members_of(path, head)
    except _broken() as error:
        raise _cut_short(str(path), 0, error) from None


def _members_of(path: Path, head: bytes) -> list[Member]:
    if head.startswith(_ZIP):
        return _zip_members(path)
    if _is_tar(head) or (_is_packed(head) and _is_tar(_first_bytes(path))):
        return _tar_members(path)
    return [Member(str(path), lambda: open(path, "rb"))]


def unpacked(file: BinaryIO) -> BinaryIO:
    """The same bytes without their compression, told by the first of them."""
    buffered = io.BufferedReader(file) if not hasattr(file, "peek") else file  # type: ignore[type-var]
    head = buffered.peek(4)[:4]
    if head[:2] == b"\x1f\x8b":
        return gzip.GzipFile(fileobj=buffered)  # type: ignore[return-value]
    if head == b"\x28\xb5\x2f\xfd":
        import zstandard

        return zstandard.ZstdDecompressor().stream_reader(buffered, read_across_frames=True)
    return buffered


def _is_wanted(name: str) -> bool:
    base = os.path.basename(name)
    return base.endswith(_ENDINGS) and not base.startswith(".")


def _is_packed(head: bytes) -> bool:
    return head[:2] == b"\x1f\x8b" or head[:4] == b"\x28\xb5\x2f\xfd"


def _is_tar(head: bytes) -> bool:
    return head[257:262] == b"ustar"


def _first_bytes(path: Path) -> bytes:
    with open(path, "rb") as file, closing(unpacked(file)) as inner:
        return inner.read(_HEAD)


def _zip_members(path: Path) -> list[Member]:
    import zipfile

    with zipfile.ZipFile(path) as archive:
        names = sorted(n for n in archive.namelist() if _is_wanted(n))

    def reader(name: str) -> Callable[[], BinaryIO]:
        def opened() -> BinaryIO:
            with zipfile.ZipFile(path) as archive:
                return io.BytesIO(archive.read(name))

        return opened

    return _named(path, [(n, reader(n)) for n in names])


def _tar_members(path: Path) -> list[Member]:
    """Members are read once, in the order of the archive: a packed tar cannot be sought in."""
    import tarfile

    found: list[tuple[str, Callable[[], BinaryIO]]] = []
    with (
        open(path, "rb") as file,
        closing(unpacked(file)) as inner,
        tarfile.open(fileobj=inner, mode="r|") as archive,
    ):
        for entry in archive:
            content = archive.extractfile(entry) if _is_wanted(entry.name) else None
            if content is not None:
                data = content.read()
                found.append((entry.name, lambda data=data: io.BytesIO(data)))  # type: ignore[misc]
    return _named(path, sorted(found, key=lambda pair: pair[0]))


def _named(path: Path, found: list[tuple[str, Callable[[], BinaryIO]]]) -> list[Member]:
    if not found:
        raise InputError(f"no trace in the archive `{path}`", hint="it should hold .json files")
    return [Member(f"{path}:{name}", opener) for name, opener in found]


def _broken() -> tuple[type[Exception], ...]:
    """What reading a damaged file raises; looked up where something is raised."""
    import lzma
    import tarfile
    import zipfile
    import zlib

    import zstandard

    more = (lzma.LZMAError, zipfile.BadZipFile, tarfile.TarError, zstandard.ZstdError)
    return (EOFError, OSError, zlib.error, *more)


def _cut_short(name: str, done: int, error: BaseException) -> InputError:
    reason = str(error) or type(error).__name__
    return InputError(
        f"`{name}` cannot be read beyond byte {done} of its content: {reason}",
        hint="the file is damaged or was cut short; copy it again",
    )
