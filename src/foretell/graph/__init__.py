"""The task graph of one step."""

from foretell.graph.build import Builder, assemble, concat, replicate
from foretell.graph.columns import (
    COLLECTIVES,
    COLUMNS,
    NONE,
    BufferKind,
    Buffers,
    Drained,
    Dtype,
    Edges,
    Held,
    Kind,
    LaneKind,
    Lanes,
    Links,
    Names,
    Phase,
    Source,
    Used,
    WaitKind,
    edges,
)
from foretell.graph.edit import Edit
from foretell.graph.file import load, save
from foretell.graph.graph import Graph, Task
from foretell.graph.text import parse, text
from foretell.graph.verify import verify

__all__ = [
    "COLLECTIVES",
    "COLUMNS",
    "NONE",
    "BufferKind",
    "Buffers",
    "Builder",
    "Drained",
    "Dtype",
    "Edges",
    "Edit",
    "Graph",
    "Held",
    "Kind",
    "LaneKind",
    "Lanes",
    "Links",
    "Names",
    "Phase",
    "Source",
    "Task",
    "Used",
    "WaitKind",
    "assemble",
    "concat",
    "edges",
    "load",
    "parse",
    "replicate",
    "save",
    "text",
    "verify",
]
