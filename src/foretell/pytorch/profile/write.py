"""A trace with what was timed beside it, written so that every reader of traces still reads it."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path
from typing import Any, BinaryIO

from foretell.errors import InputError
from foretell.trace.words import MEASURED

_HEAD = 64  # bytes in which the first brace stands


def write(trace: Path, output: Path, measured: dict[str, Any]) -> None:
    """Copy a trace, with one more key at its top, packed where the name says so."""
    head = json.dumps({MEASURED: measured}).encode()[:-1] + b","
    try:
        with open(trace, "rb") as source, _opened(output) as file:
            begin, _, rest = source.read(_HEAD).partition(b"{")
            if begin.strip() or not rest:
                raise InputError(f"the profiler wrote no trace but `{begin[:20]!r}`")
            file.write(head + rest)
            shutil.copyfileobj(source, file, 1 << 20)
    except OSError as error:
        raise InputError(f"cannot write `{output}`: {error.strerror or error}") from None


def _opened(output: Path) -> BinaryIO:
    packed = output.suffix == ".gz"
    return gzip.open(output, "wb", compresslevel=6) if packed else open(output, "wb")  # type: ignore[return-value]
