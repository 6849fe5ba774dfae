"""The request to the process that runs a script, as JSON; nothing here imports torch."""

from __future__ import annotations

import ast
import json
import os
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from foretell.errors import InputError
from foretell.io import limits, read_bytes


def no_step(script: object, hint: str = "") -> InputError:
    """A script that was run and took no step."""
    hint = f" {hint}" if hint else ""
    why = "no optimizer stepped and no backward pass ran: does it train with these arguments?"
    return InputError(f"`{script}` ended without a step", hint=why + hint)


_NEEDED = ("model", "batch")  # functions of a script that describes a step


@dataclass(frozen=True)
class Script:
    """A training script as a person names it: a file or a module, and its arguments."""

    name: str
    args: tuple[str, ...] = ()
    is_module: bool = False  # as in `python -m`

    @property
    def source(self) -> str:
        """The text of a file; nothing of a module, which is not looked for."""
        try:
            return read_bytes(self.name, limits().config, "script").decode("utf-8", "replace")
        except InputError:
            return ""

    def __str__(self) -> str:
        return f"-m {self.name}" if self.is_module else self.name


@dataclass(frozen=True)
class Wanted:
    """How many steps of each sort, and what a trace should hold."""

    warmup: int = 10
    timed: int = 20
    traced: int = 3
    layers: bool = True
    memory: bool = True


@dataclass(frozen=True)
class Request:
    """One run of a script: what is wanted of it and where answers go."""

    goal: str  # `profile` or `capture`
    script: Script
    output: str  # file, or with several ranks a folder
    folder: str  # for the answers of ranks, their progress and the journal of files
    device: str = ""
    wanted: Wanted = field(default_factory=Wanted)
    options: dict[str, Any] = field(default_factory=dict)  # of a capture
    is_real: bool = False  # a capture with real tensors

    def write(self) -> Path:
        """Put it where the process that runs the script finds it."""
        path = Path(self.folder) / "request.json"
        path.write_text(json.dumps(asdict(self)))
        return path

    @classmethod
    def read(cls, path: Path) -> Request:
        stored = json.loads(path.read_text())
        script, wanted = stored.pop("script"), Wanted(**stored.pop("wanted"))
        script["args"] = tuple(script["args"])
        return cls(**stored, script=Script(**script), wanted=wanted)

    def answer(self, rank: int) -> Path:
        """Where a rank writes the result of its run."""
        return Path(self.folder) / f"answer{rank}.json"

    def output_of(self, rank: int, world: int) -> Path:
        """The file of a rank: the output itself where there is one rank, else one in a folder."""
        output = Path(self.output)
        return folder_of(output) / f"rank{rank}.json.gz" if world > 1 else output


def folder_of(output: Path) -> Path:
    """The folder for the traces of several ranks, whatever ending was named."""
    return output.with_name(output.name.removesuffix(".gz").removesuffix(".json"))


_rank: list[tuple[int, int]] = []  # of a process that a script started as one of several ranks


def rank_and_world() -> tuple[int, int]:
    """This process among those of its job, as torchrun and its like tell it."""
    if _rank:
        return _rank[-1]
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def is_rank(rank: int, world: int) -> None:
    """This process is one of several ranks that a script started itself."""
    _rank.append((rank, world))


def job_of_one_machine(ranks: int) -> dict[str, str]:
    """What ranks of one machine find in their environment when `torchrun` starts them."""
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    environment |= {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    return {name: str(value) for name, value in environment.items()}


def free_port() -> int:
    """A port of this machine that nothing listens at."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def is_description(path: Path) -> bool:
    """Whether a script has the functions that describe a step; the script is read, not run."""
    try:
        tree = ast.parse(read_bytes(path, limits().config, "script"))
    except (SyntaxError, ValueError) as error:
        raise InputError(f"`{path}` is not Python: {error}") from None
    there = {name for node in tree.body for name in _names(node)}
    return set(_NEEDED) <= there


def _names(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        yield node.name
    elif isinstance(node, ast.Assign):
        yield from (t.id for t in node.targets if isinstance(t, ast.Name))
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
        yield from (a.asname or a.name for a in node.names)
