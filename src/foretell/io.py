"""Files of the user: read within limits, written whole or not at all, shown without control bytes.

Every format goes through here. A reader takes regular files only, counts bytes after
decompression, and refuses what is nested too deep, numbers that are no numbers and texts without
end. Each limit is an environment variable (`FORETELL_MAX_…`), with a default that no sound file
meets. What is wrong is always an `InputError` that names the file.
"""

from __future__ import annotations

import io
import math
import os
import re
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from foretell.errors import InputError

Path_ = str | os.PathLike[str]
T = TypeVar("T")

_LEAST_RATIO = 1 << 26  # unpacked bytes below which no ratio is suspicious
_LONGEST_INT = 1 << 63
_MOST_PARTS = 100  # of a dotted key of TOML
_WORD = re.compile(r"""[ \t]+|"(?:[^"\\]|\\.)*(?:"|$)|'[^']*(?:'|$)|[\w-]+|.""")  # of a line of it


@dataclass(frozen=True)
class Limits:
    """Limits of a file: bytes after decompression, nesting levels, letters."""

    document: int = 256 << 20  # a file that is read whole: answers, plans, tables
    trace: int = 16 << 30  # all of a trace, which is read piece by piece
    event: int = 64 << 20  # one event of a trace, or all that stands around its events
    ratio: int = 200  # unpacked to packed bytes; real traces have 10 to 30
    members: int = 20_000  # files of a folder or archive
    depth: int = 64
    string: int = 16 << 20  # letters of one text
    config: int = 4 << 20  # a file a person writes: clusters, prices


def limits() -> Limits:
    """The limits of this process: the defaults, and what the environment says instead."""
    given = {
        name: os.environ[key]
        for name in Limits.__dataclass_fields__
        if (key := f"FORETELL_MAX_{name.upper()}") in os.environ
    }
    for name, text in given.items():
        if not (text.isascii() and text.isdigit() and 0 < int(text[:19]) == int(text)):
            raise InputError(f"FORETELL_MAX_{name.upper()} is `{text[:40]}`, not a whole number")
    return Limits(**{name: int(text) for name, text in given.items()})


# Reading


def is_there(text: str) -> bool:
    """Whether a text is the path of something on this machine; no text is too odd to ask."""
    try:
        return os.path.exists(text)
    except (OSError, ValueError):  # too long for a name, or with a zero byte in it
        return False


def open_file(path: Path_, what: str = "file") -> BinaryIO:
    """A regular file, opened; devices, pipes and folders are refused without waiting for them."""
    try:
        number = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | os.O_CLOEXEC)
    except FileNotFoundError:
        raise InputError(
            f"cannot read `{path}`: there is no {what} of that name", hint="is the name right?"
        ) from None
    except OSError as error:
        raise InputError(f"cannot read `{path}`: {error.strerror or error}") from None
    except ValueError as error:
        raise InputError(f"cannot read `{path}`: {error}") from None
    mode = os.fstat(number).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(number, "rb")
    os.close(number)
    is_folder = stat.S_ISDIR(mode)
    raise InputError(
        f"cannot read `{path}`: it is {'a folder' if is_folder else 'not a regular file'}",
        hint="" if is_folder else "devices and pipes are not read: write it to a file first",
    )


def unpacked(file: BinaryIO) -> BinaryIO:
    """The same bytes decompressed, by the magic number at their start."""
    buffered = io.BufferedReader(file) if not hasattr(file, "peek") else file  # type: ignore[type-var]
    head = buffered.peek(4)[:4]
    if head[:2] == b"\x1f\x8b":
        import gzip

        return gzip.GzipFile(fileobj=buffered)  # type: ignore[return-value]
    if head == b"\x28\xb5\x2f\xfd":
        import zstandard

        unpack = zstandard.ZstdDecompressor(max_window_size=1 << 27)
        return unpack.stream_reader(buffered, read_across_frames=True)
    return buffered


@dataclass
class Counter:
    """Bytes that came out of a file, compared with what may come out of it."""

    name: str
    packed: int
    most: int
    ratio: int
    done: int = 0

    def add(self, count: int) -> None:
        """Count more bytes; raise where there are too many."""
        self.done += count
        if self.done > self.most:
            raise too_large(self.name, self.most)
        if self.done > max(_LEAST_RATIO, self.ratio * max(self.packed, 1)):
            raise InputError(
                f"`{self.name}` unpacks to more than {self.ratio} times its size",
                hint="unpack it yourself if it is sound, or raise FORETELL_MAX_RATIO",
            )


def too_large(name: Path_, most: int) -> InputError:
    """An error for a file with more bytes than are read."""
    return InputError(
        f"`{name}` holds more than {most / 2**20:g} MiB",
        hint="raise the limit if it is sound: FORETELL_MAX_DOCUMENT or FORETELL_MAX_TRACE, bytes",
    )


def read_bytes(path: Path_, most: int | None = None, what: str = "file") -> bytes:
    """All of a file, unpacked, within the limit of a document."""
    limit = most or limits().document
    try:
        with open_file(path, what) as packed, unpacked(packed) as file:
            raw = file.read(limit + 1)
    except broken() as error:
        raise InputError(f"`{path}` cannot be read to its end: {error}") from None
    if len(raw) > limit:
        raise too_large(path, limit)
    return raw


def broken() -> tuple[type[Exception], ...]:
    """Exceptions that reading a damaged file raises."""
    import lzma
    import sys
    import zlib

    import zstandard

    # an archive's own errors can only be raised where its module is loaded
    loaded = ((sys.modules.get("tarfile"), "TarError"), (sys.modules.get("zipfile"), "BadZipFile"))
    more = tuple(getattr(module, name) for module, name in loaded if module is not None)
    known = (EOFError, OSError, zlib.error, lzma.LZMAError, zstandard.ZstdError)
    return (*known, *more, NotImplementedError)


def read_text(path: Path_, most: int | None = None, what: str = "file") -> str:
    """All of a file as text."""
    try:
        return read_bytes(path, most, what).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"`{path}` is not text: byte {error.start} is not UTF-8", hint="write it in UTF-8"
        ) from None


def read_json(path: Path_, kind: type[T] | Any = Any, what: str = "file", hint: str = "") -> Any:
    """The JSON of a file, of a type where one is named."""
    return decode(read_bytes(path, what=what), kind, f"`{path}`", hint, what)


def read_lines(path: Path_, what: str = "file") -> list[tuple[int, bytes]]:
    """The lines of a file that hold something, with their numbers, counted from 1."""
    raw = read_bytes(path, what=what).removeprefix(b"\xef\xbb\xbf")
    return [(k, line) for k, line in enumerate(raw.splitlines(), 1) if line.strip()]


def decode(
    raw: bytes | str, kind: type[T] | Any, where: str, hint: str = "", what: str = "file"
) -> Any:
    """JSON within the limits: depth, numbers that a computer has, texts that end."""
    import msgspec

    try:
        if kind is not Any:
            checked(msgspec.json.decode(raw), where)
        found = msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        raise InputError(f"{where} is no {what} of ours: {error}", hint=hint) from None
    except (ValueError, RecursionError) as error:
        reason = "nested too deep" if isinstance(error, RecursionError) else str(error)
        noun = "" if what == "file" else f"is no {what}: it "
        raise InputError(f"{where} {noun}is not JSON: {reason}", hint=hint) from None
    return found if kind is not Any else checked(found, where)


def read_toml(path: Path_, what: str = "file") -> dict[str, Any]:
    """The tables of a TOML file, all its numbers finite."""
    return parse_toml(read_text(path, limits().config, what), f"`{path}`")


def parse_toml(text: str, where: str, *, finite: bool = True) -> dict[str, Any]:
    """The tables of a TOML text, within the limits."""
    import tomllib

    if any(line.count(".") >= _MOST_PARTS and _has_long_key(line) for line in text.splitlines()):
        raise InputError(f"{where} has a key of more than {_MOST_PARTS} parts")
    try:
        found = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except (ValueError, RecursionError) as error:
        reason = "nested too deep" if isinstance(error, RecursionError) else str(error)
        raise InputError(f"{where} is not TOML: {reason}") from None
    return checked(found, where, finite=finite)


def _has_long_key(line: str) -> bool:
    """Whether a line has a key of many parts: the parser takes the square of their number."""
    parts = 0
    for word in filter(None, map(str.strip, _WORD.findall(line))):
        if word == ".":
            parts += 1
        elif len(word) == 1 and not (word.isalnum() or word in "_-"):
            parts = 0
        if parts >= _MOST_PARTS:
            return True
    return False


def checked(value: T, where: str, *, finite: bool = True) -> T:
    """A value of JSON or TOML, within the limits of depth, numbers and texts."""
    limit = limits()
    level: list[Any] = [value]
    for _ in range(limit.depth):
        level = [item for one in level for item in _children(one, where, limit.string, finite)]
        if not level:
            return value
    raise InputError(f"{where} is nested more than {limit.depth} levels deep")


def _children(value: Any, where: str, longest: int, finite: bool) -> Iterable[Any]:
    kind = type(value)
    if kind is dict:
        if max(map(len, value), default=0) > longest:
            raise InputError(f"{where} has a name of more than {longest} letters")
        return value.values()  # type: ignore[no-any-return]
    if kind is list:
        return value  # type: ignore[no-any-return]
    if kind is int and not -_LONGEST_INT <= value < _LONGEST_INT:
        raise InputError(f"{where} has a whole number of more than 64 bits")
    if kind is float and finite and not math.isfinite(value):
        raise InputError(f"{where} has a number that is not finite")
    if kind is str and len(value) > longest:
        raise InputError(f"{where} has a text of more than {longest} letters")
    return ()


# Writing


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


def write_text(path: Path, text: str) -> None:
    """Put a text in a file: all of it, or nothing and what was there before."""
    write_atomically(path, lambda file: file.write(text.encode()))


def append_text(path: Path, text: str) -> None:
    """Put a text behind what a file holds; the file is never seen with half of it."""
    before = path.read_bytes() if path.is_file() else b""
    write_atomically(path, lambda file: file.write(before + text.encode()))


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


# Memory

# What a container may use and what it uses; absent where there is no limit.
_LIMIT, _TAKEN = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")


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


# Showing

# Control bytes, and letters that turn the direction of a line or break it.
_UNFIT = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def shown(text: str, longest: int | None = None) -> str:
    """A text fit for a terminal: control bytes as `\\x1b`, its middle left out where it is long."""
    if longest is not None and len(text) > longest:
        text = f"{text[: longest // 2]} … {text[len(text) - longest // 2 :]}"
    return _UNFIT.sub(_code, text)


def coloured(text: str) -> str:
    """The same for text that may hold colours of our own."""
    parts = re.split("(\x1b\\[[0-9;]{0,16}m)", text)
    return "".join(part if k % 2 else shown(part) for k, part in enumerate(parts))


def _code(found: re.Match[str]) -> str:
    number = ord(found[0])
    return f"\\x{number:02x}" if number < 256 else f"\\u{number:04x}"


def finite(value: Any) -> Any:
    """A value as JSON has it: no number that is not finite, which becomes null."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
