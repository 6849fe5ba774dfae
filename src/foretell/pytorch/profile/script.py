"""A user's script: functions that make a model and a batch, or a loop whose steps are marked.

With functions `model` and `batch` at its top level, a script is a description, in the words of
`foretell.pytorch.script`. Otherwise it is run as it is, and must mark its steps with
`foretell.profile.step()`.
"""

from __future__ import annotations

import ast
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from foretell import profile as marks
from foretell.errors import InputError
from foretell.pytorch.capture.step import Step
from foretell.pytorch.script import ask

_NEEDED = ("model", "batch")


def is_description(path: Path) -> bool:
    """Whether a script has the functions that describe a step; the script is read, not run."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read `{path}`: {error.strerror or error}") from None
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


def run_script(path: Path, args: Sequence[str], device: torch.device) -> None:
    """Run a script until it ends or somebody has seen enough of its steps."""
    with _as_main(path, args):
        if not is_description(path):
            runpy.run_path(str(path), run_name="__main__")
            return
        described = runpy.run_path(str(path), run_name="foretell_profile")
        train = training_step(described, path, device)
    while True:
        with marks.step():
            train()


@contextmanager
def _as_main(path: Path, args: Sequence[str]) -> Iterator[None]:
    """The command line and the search path that a script finds when Python runs it."""
    argv, search = sys.argv, sys.path[:]
    sys.argv, sys.path[0:0] = [str(path), *args], [str(path.resolve().parent)]
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, search


def training_step(names: Mapping[str, Any], path: Path, device: torch.device) -> Callable[[], None]:
    """One step of what a description describes: forward, loss, backward, update."""
    model = names["model"]()
    if not isinstance(model, torch.nn.Module):
        raise InputError(f"`model()` of `{path}` made {type(model).__name__}, no torch.nn.Module")
    model = model.to(device).train()
    batch = moved(ask(names["batch"]), device)
    make = names.get("optimizer")
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = make(trained) if make is not None else None
    step = Step(model, batch, names.get("loss"), optimizer)

    def train() -> None:
        for p in trained if optimizer is None else ():
            p.grad = None
        if optimizer is not None:
            optimizer.zero_grad(set_to_none=True)
        step.run().backward()
        if optimizer is not None:
            optimizer.step()

    return train


def moved(batch: Any, device: torch.device) -> Any:
    """A batch on a device, whatever it is made of."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {k: moved(v, device) for k, v in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(moved(v, device) for v in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(moved(v, device) for v in batch)
    return batch
