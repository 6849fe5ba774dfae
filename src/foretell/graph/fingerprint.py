"""A short name for what is in a graph: equal graphs have equal ones, however they were made.

Strings count by what they say and not by their number, columns that are all default not at all;
history and facts do not count, for they change nothing in how a step runs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np

from foretell.graph.graph import COLUMNS, Array, Graph, is_default

TABLES = ("lanes", "links", "held", "drained", "used", "buffers")


def arrays(graph: Graph) -> Iterator[tuple[str, Array]]:
    """Every array of a graph with its name, in a fixed order."""
    for name in COLUMNS:
        if name in graph.columns:
            yield f"column.{name}", graph.columns[name]
    e = graph.edges
    for name, array in (("start", e.start), ("after", e.after), ("lag", e.lag), ("kind", e.kind)):
        if array is not None:
            yield f"edges.{name}", array
    for part in TABLES:
        for name, array in getattr(graph, part).columns().items():
            yield f"{part}.{name}", array


def fingerprint(graph: Graph) -> str:
    """A hash of all columns and tables."""
    import hashlib

    columns = {name: array for name, array in arrays(graph) if _says_something(name, array)}
    used = np.zeros(len(graph.names), bool)
    for name in filter(_is_text, columns):
        used[columns[name]] = True
    numbers = np.flatnonzero(used)
    texts = [graph.names[int(k)] for k in numbers]
    rank = np.zeros(len(graph.names), np.int32)
    rank[numbers[sorted(range(len(texts)), key=texts.__getitem__)]] = np.arange(len(texts))
    digest = hashlib.sha256(json.dumps([graph.size, *sorted(texts)]).encode())
    for name, array in columns.items():
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(rank[array] if _is_text(name) else array).data)
    return digest.hexdigest()[:16]


def _is_text(name: str) -> bool:
    part, column = name.split(".")
    return COLUMNS[column].is_text if part == "column" else column == "name"


def _says_something(name: str, array: Array) -> bool:
    part, column = name.split(".")
    if part == "column":
        return not is_default(column, array)
    return name not in ("edges.lag", "edges.kind") or bool(array.any())
