"""A graph as a small file: a line of magic, a JSON header, then one zstd frame a column.

Numbers are stored as their bytes, grouped by significance (all first bytes, then all second …),
which makes columns of similar numbers several times smaller. A file is written beside its place and
then renamed, so nobody ever sees half of one. Text (`.txt`) works too, for people.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from foretell.errors import InputError
from foretell.graph.columns import COLUMNS, Array, frozen
from foretell.graph.edges import Edges
from foretell.graph.graph import Graph
from foretell.graph.names import Names
from foretell.graph.tables import Buffers, Drained, Held, Lanes, Links, Table, Used
from foretell.graph.text import parse, text
from foretell.graph.verify import verify

MAGIC = b"foretell-graph\n"
VERSION = 1
_TABLES: Mapping[str, type[Table]] = {
    "lanes": Lanes,
    "links": Links,
    "held": Held,
    "drained": Drained,
    "used": Used,
    "buffers": Buffers,
}


def save(graph: Graph, path: str | os.PathLike[str]) -> None:
    """Write a graph to a file; readable text where the name ends in `.txt`."""
    path = Path(path)
    if path.suffix == ".txt":
        return write_atomically(path, lambda f: f.write(text(graph).encode()))
    return write_atomically(path, lambda f: _write(graph, f))


def load(path: str | os.PathLike[str]) -> Graph:
    """The graph in a file, verified."""
    path = Path(path)
    try:
        with open(path, "rb") as file:
            head = file.read(len(MAGIC))
            if head == MAGIC:
                return verify(_read(file, str(path)))
            rest = file.read()
    except OSError as error:
        raise InputError(f"cannot read `{path}`: {error.strerror}") from None
    return parse(_decoded(head + rest, path), where=str(path))


def is_graph_file(path: str | os.PathLike[str]) -> bool:
    """Whether a file begins like a graph, binary or text."""
    try:
        with open(path, "rb") as file:
            head = file.read(len(MAGIC))
    except OSError as error:
        raise InputError(f"cannot read `{path}`: {error.strerror}") from None
    return head == MAGIC or head.startswith(b"foretell graph")


def fingerprint(graph: Graph) -> str:
    """A hash of all columns and tables; history and facts do not count."""
    digest = hashlib.sha256(json.dumps([graph.size, *graph.names]).encode())
    for name, array in _arrays(graph):
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:16]


def write_atomically(path: Path, write: Any) -> None:
    """Let `write` fill a file beside `path`, then put it there in one move."""
    try:
        handle, beside = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except OSError as error:
        raise InputError(f"cannot write `{path}`: {error.strerror}") from None
    try:
        with os.fdopen(handle, "wb") as file:
            write(file)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(beside, 0o666 & ~mask)  # as a plain open() would have made it
        os.replace(beside, path)
    except BaseException:
        Path(beside).unlink(missing_ok=True)
        raise


def _arrays(graph: Graph) -> Iterator[tuple[str, Array]]:
    for name in COLUMNS:
        if name in graph.columns:
            yield f"column.{name}", graph.columns[name]
    e = graph.edges
    for name, array in (("start", e.start), ("after", e.after), ("lag", e.lag), ("kind", e.kind)):
        if array is not None:
            yield f"edges.{name}", array
    for part in _TABLES:
        for name, array in getattr(graph, part).columns().items():
            yield f"{part}.{name}", array


def _write(graph: Graph, file: BinaryIO) -> None:
    import zstandard

    packer = zstandard.ZstdCompressor(level=3)
    names, frames = [], []
    for name, array in _arrays(graph):
        frame = packer.compress(_by_significance(array))
        names.append([name, array.dtype.str, len(array), len(frame)])
        frames.append(frame)
    header = {
        "version": VERSION,
        "size": graph.size,
        "arrays": names,
        "history": graph.history,
        "facts": dict(graph.facts),
        "names": list(graph.names),
    }
    packed = packer.compress(json.dumps(header).encode())
    file.write(MAGIC + len(packed).to_bytes(8, "little") + packed)
    for frame in frames:
        file.write(frame)


def _read(file: BinaryIO, where: str) -> Graph:
    header = _header(file, where)
    _check_room(header, where)
    arrays = {name: _array(file, where, *spec) for name, *spec in header["arrays"]}
    try:
        edges = Edges(*(arrays.get(f"edges.{n}") for n in ("start", "after", "lag", "kind")))  # type: ignore[arg-type]
        tables: dict[str, Any] = {
            part: kind(**{c: arrays[f"{part}.{c}"] for c in kind.types()})
            for part, kind in _TABLES.items()
        }
        columns = {n.split(".")[1]: a for n, a in arrays.items() if n.startswith("column.")}
        return Graph(
            size=header["size"],
            columns={name: frozen(columns[name], COLUMNS[name].dtype) for name in columns},
            edges=edges,
            names=Names(header["names"]),
            history=tuple(header["history"]),
            facts=header["facts"],
            **tables,
        )
    except (KeyError, AssertionError, TypeError) as error:
        raise InputError(f"`{where}` lacks a part of a graph: {error}") from None


def _header(file: BinaryIO, where: str) -> dict[str, Any]:
    import zstandard

    length = int.from_bytes(file.read(8), "little")
    if length > 1 << 30:
        raise _broken(where)
    try:
        packed = zstandard.ZstdDecompressor().decompress(file.read(length))
        header: dict[str, Any] = json.loads(packed)
    except (zstandard.ZstdError, ValueError, MemoryError):
        raise _broken(where) from None
    if header.get("version") != VERSION:
        raise InputError(
            f"`{where}` is a graph of version {header.get('version')}; "
            f"this foretell reads version {VERSION}",
            hint="write it again with the foretell that made it, as text: `foretell show --text`",
        )
    return header


def _check_room(header: dict[str, Any], where: str) -> None:
    """Refuse a file that says it is larger than the memory that is free."""
    needed = sum(np.dtype(kind).itemsize * length for _, kind, length, _ in header["arrays"])
    free = free_memory()
    if needed > free:
        raise InputError(
            f"`{where}` holds {needed / 2**30:.1f} GiB of columns; {free / 2**30:.1f} GiB are free",
            hint="read it on a machine with more memory, or cut the graph first",
        )


def free_memory() -> float:
    """Bytes that could be taken now without swapping."""
    try:
        with open("/proc/meminfo") as file:
            lines = dict(line.split(":") for line in file)
        return float(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return float("inf")


def _array(file: BinaryIO, where: str, kind: str, length: int, packed: int) -> Array:
    import zstandard

    dtype = np.dtype(kind)
    frame, size = file.read(packed), dtype.itemsize * length
    try:
        raw = zstandard.ZstdDecompressor().decompress(frame, max_output_size=size)
    except zstandard.ZstdError:
        raise _broken(where) from None
    if len(frame) != packed or len(raw) != size:
        raise _broken(where)
    planes = np.frombuffer(raw, np.uint8).reshape(dtype.itemsize, length)
    return frozen(np.ascontiguousarray(planes.T).reshape(-1).view(dtype))


def _by_significance(array: Array) -> bytes:
    raw = np.ascontiguousarray(array).view(np.uint8).reshape(len(array), array.dtype.itemsize)
    return np.ascontiguousarray(raw.T).tobytes()


def _broken(where: str) -> InputError:
    return InputError(
        f"`{where}` is cut short or damaged",
        hint="write or copy it again; foretell itself never leaves half a file",
    )


def _decoded(raw: bytes, path: Path) -> str:
    if not raw:
        raise InputError(f"`{path}` is empty")
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise InputError(
            f"`{path}` is neither a graph nor text", hint="`foretell show FILE` says what a file is"
        ) from None
