"""A trace with what was timed beside it, written so that every reader of traces still reads it."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path
from typing import Any, BinaryIO

from foretell.errors import InputError
from foretell.io import write_atomically
from foretell.trace.words import MEASURED

_HEAD = 64  # bytes in which the first brace stands


def write(trace: Path, output: Path, measured: dict[str, Any]) -> None:
    """Copy a trace, with one more key at its top, packed where the name says so."""
    head = json.dumps({MEASURED: measured}).encode()[:-1] + b","

    def copy(file: Any) -> None:
        with open(trace, "rb") as source:
            begin, _, rest = source.read(_HEAD).partition(b"{")
            if begin.strip() or not rest:
                raise InputError(f"the profiler wrote no trace but `{begin[:20]!r}`")
            file.write(head + rest)
            shutil.copyfileobj(source, file, 1 << 20)

    def pack(file: BinaryIO) -> None:
        with gzip.GzipFile("", "wb", 6, file) as packed:
            copy(packed)

    write_atomically(output, pack if output.suffix == ".gz" else copy)
