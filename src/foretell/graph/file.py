"""A graph as a small file: a version, a digest, a JSON header, then one zstd frame a column.

    foretell-graph 1\\n                  what it is and how to read it
    16 bytes                            BLAKE2b of all that follows: a flipped bit is found out
    8 bytes, header                     its length and itself: sizes, names, history, facts
    frames                              one an array, in the order of the header

Numbers are stored as their bytes, grouped by significance (all first bytes, then all second …),
which makes columns of similar numbers several times smaller. A file is written beside its place and
then renamed, so nothing ever sees half of one. Text (`.txt`) works too, for people.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from foretell.errors import GraphError, InputError
from foretell.graph.build import verify
from foretell.graph.fingerprint import arrays
from foretell.graph.graph import (
    COLUMNS,
    TYPES,
    Array,
    Buffers,
    Drained,
    Edges,
    Graph,
    Held,
    Lanes,
    Links,
    Names,
    Table,
    Used,
    frozen,
)
from foretell.graph.text import as_json, parse, text
from foretell.io import checked, free_memory, open_file, write_atomically

__all__ = ["free_memory", "is_graph_file", "load", "save"]

NAME = b"foretell-graph"
VERSION = 1
MAGIC = NAME + f" {VERSION}\n".encode()
_DIGEST = 16  # bytes
_TEXT_GROWTH = 16  # bytes a byte of text takes while it is read: 13 with 100,000 tasks
_TABLES: Mapping[str, type[Table]] = {
    "lanes": Lanes,
    "links": Links,
    "held": Held,
    "drained": Drained,
    "used": Used,
    "buffers": Buffers,
}
# What each array is stored as; a file that says otherwise is not ours.
_STORED: Mapping[str, Any] = {
    **{f"column.{name}": np.dtype(spec.dtype) for name, spec in COLUMNS.items()},
    **{f"edges.{name}": np.dtype(kind) for name, kind in TYPES.items()},
    **{f"{t}.{c}": np.dtype(k) for t, table in _TABLES.items() for c, k in table.types().items()},
}


def save(graph: Graph, path: str | os.PathLike[str]) -> None:
    """Write a graph to a file; readable text where the name ends in `.txt`."""
    path = Path(path)
    if path.suffix == ".txt":
        return write_atomically(path, lambda file: file.write(text(graph).encode()))
    return write_atomically(path, lambda file: _write(graph, file))


def load(path: str | os.PathLike[str]) -> Graph:
    """The graph in a file, verified."""
    try:
        with open_file(path) as file:
            raw = _all_of(file, str(path))
        if raw.startswith(NAME):
            return _read(raw, str(path))
        return parse(_decoded(raw, str(path)), where=str(path))
    except OSError as error:
        raise InputError(
            f"cannot read `{path}`: {error.strerror}", hint="is the name right?"
        ) from None
    except ValueError as error:  # a name no file can have
        raise InputError(f"cannot read {str(path)!r}: {error}") from None
    except MemoryError:
        raise InputError(f"`{path}` needs more memory than there is", hint=_MORE) from None


def is_graph_file(path: str | os.PathLike[str]) -> bool:
    """Whether a file begins like a graph, binary or text."""
    try:
        with open_file(path) as file:
            head = file.read(len(NAME))
    except OSError as error:
        raise InputError(f"cannot read `{path}`: {error.strerror}") from None
    return head in (NAME, b"foretell graph")


def _write(graph: Graph, file: BinaryIO) -> None:
    import hashlib

    import zstandard

    packer = zstandard.ZstdCompressor(level=3)
    frames = [packer.compress(_by_significance(array)) for _, array in arrays(graph)]
    header = {
        "size": graph.size,
        "arrays": [
            [name, array.dtype.str, len(array), len(frame)]
            for (name, array), frame in zip(arrays(graph), frames, strict=True)
        ],
        "history": graph.history,
        "facts": {key: json.loads(as_json(v, f"fact `{key}`")) for key, v in graph.facts.items()},
        "names": list(graph.names),
    }
    packed = packer.compress(json.dumps(header).encode())
    parts = [len(packed).to_bytes(8, "little"), packed, *frames]
    digest = hashlib.blake2b(digest_size=_DIGEST)
    for part in parts:
        digest.update(part)
    for part in (MAGIC, digest.digest(), *parts):
        file.write(part)


def _by_significance(array: Array) -> bytes:
    raw = np.ascontiguousarray(array).view(np.uint8).reshape(len(array), array.dtype.itemsize)
    return np.ascontiguousarray(raw.T).tobytes()


_MORE = "read it on a machine with more memory, or cut the graph first"


def _all_of(file: BinaryIO, where: str) -> bytes:
    """All bytes of a file that memory has room for, and room for what they stand for."""
    head = file.read(len(NAME))
    grows = 1 if head == NAME else _TEXT_GROWTH
    needed, free = os.fstat(file.fileno()).st_size * grows, free_memory()
    if needed > free:
        raise _too_large(where, needed, free)
    return head + file.read()


def _read(raw: bytes, where: str) -> Graph:
    _check_whole(raw, where)
    body = memoryview(raw)[len(MAGIC) + _DIGEST :]
    header, at = _header(body, where)
    _check_room(header, where)
    found: dict[str, Array] = {}
    for name, kind, length, packed in header["arrays"]:
        found[name] = _array(body[at : at + packed], np.dtype(kind), length, where)
        at += packed
    try:
        return verify(_graph(header, found))
    except GraphError as error:
        raise GraphError(f"`{where}`: {error.message}", hint=error.hint) from None
    except KeyError as error:
        raise InputError(f"`{where}` lacks a part of a graph: {error}", hint=_AGAIN) from None


def _check_whole(raw: bytes, where: str) -> None:
    """Refuse another version, and bytes that are not those that were written."""
    import hashlib

    head, body = raw[: len(MAGIC)], memoryview(raw)[len(MAGIC) + _DIGEST :]
    if head != MAGIC:
        version = raw[len(NAME) : len(NAME) + 12].split(b"\n")[0].decode(errors="replace").strip()
        raise InputError(
            f"`{where}` is a graph of version `{version}`; this foretell reads version {VERSION}",
            hint="write it again with the foretell that made it, as text: `foretell show --text`",
        )
    digest = hashlib.blake2b(body, digest_size=_DIGEST).digest()
    if raw[len(MAGIC) : len(MAGIC) + _DIGEST] != digest:
        raise _broken(where)


def _header(body: memoryview, where: str) -> tuple[dict[str, Any], int]:
    """The header and where the frames begin; checked, for a digest can be right by intention."""
    end = 8 + int.from_bytes(body[:8], "little")
    raw = _unpacked(body[8:end], None, where)
    try:
        header = checked(json.loads(raw), where, finite=False)
    except (InputError, ValueError, RecursionError):
        raise _broken(where) from None
    if not _is_header(header) or end + sum(a[3] for a in header["arrays"]) != len(body):
        raise _broken(where)
    return header, end


def _is_header(header: Any) -> bool:
    return (
        isinstance(header, dict)
        and _is_count(header.get("size"))
        and isinstance(header.get("facts"), dict)
        and _are_texts(header.get("history"))
        and _are_texts(header.get("names"))
        and header["names"][:1] == [""]
        and isinstance(header.get("arrays"), list)
        and all(map(_is_stored, header["arrays"]))
        and len({name for name, *_ in header["arrays"]}) == len(header["arrays"])
    )


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _are_texts(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(v, str) for v in values)


def _is_stored(spec: Any) -> bool:
    """Whether it tells name, type, length and packed length of an array that a graph has."""
    if not (isinstance(spec, list) and len(spec) == 4 and isinstance(spec[0], str)):
        return False
    name, kind, length, packed = spec
    known = _STORED.get(name)
    return known is not None and kind == known.str and _is_count(length) and _is_count(packed)


def _check_room(header: dict[str, Any], where: str) -> None:
    """Refuse a file that says it is larger than the memory that is free."""
    needed = sum(np.dtype(kind).itemsize * length for _, kind, length, _ in header["arrays"])
    free = free_memory()
    if needed > free:
        raise _too_large(where, needed, free)


def _array(frame: memoryview, dtype: np.dtype[Any], length: int, where: str) -> Array:
    raw = _unpacked(frame, dtype.itemsize * length, where)
    planes = np.frombuffer(raw, np.uint8).reshape(dtype.itemsize, length)
    numbers = np.ascontiguousarray(planes.T)
    numbers.flags.writeable = False
    return frozen(numbers.reshape(-1).view(dtype))


def _unpacked(frame: memoryview, size: int | None, where: str) -> bytes:
    """A zstd frame decompressed: so many bytes, or its own size where that fits in memory."""
    import zstandard

    try:
        stated = zstandard.frame_content_size(frame)
        if stated < 0 or (size is not None and stated != size):
            raise _broken(where)
        if size is None and stated > free_memory():  # all others were summed up by the header
            raise _too_large(where, stated, free_memory())
        unpack = zstandard.ZstdDecompressor().decompress
        raw: bytes = unpack(frame, max_output_size=stated, allow_extra_data=False)
    except zstandard.ZstdError:
        raise _broken(where) from None
    if len(raw) != stated:
        raise _broken(where)
    return raw


def _graph(header: dict[str, Any], found: dict[str, Array]) -> Graph:
    tables: dict[str, Any] = {
        part: kind(**{c: found[f"{part}.{c}"] for c in kind.types()})
        for part, kind in _TABLES.items()
    }
    lag, kind = found.get("edges.lag"), found.get("edges.kind")
    return Graph(
        size=header["size"],
        columns={c: found[f"column.{c}"] for c in COLUMNS if f"column.{c}" in found},
        edges=Edges(found["edges.start"], found["edges.after"], lag, kind),
        names=Names(header["names"]),
        history=tuple(header["history"]),
        facts=header["facts"],
        **tables,
    )


_AGAIN = "write or copy it again; foretell itself never leaves half a file"


def _broken(where: str) -> InputError:
    return InputError(f"`{where}` is cut short or damaged", hint=_AGAIN)


def _too_large(where: str, needed: float, free: float) -> InputError:
    return InputError(
        f"`{where}` needs {needed / 2**30:.1f} GiB of memory; {free / 2**30:.1f} GiB are free",
        hint=_MORE,
    )


def _decoded(raw: bytes, where: str) -> str:
    if not raw:
        raise InputError(f"`{where}` is empty", hint=_AGAIN)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise InputError(
            f"`{where}` is neither a graph nor text",
            hint="`foretell show FILE` says what a file is",
        ) from None
