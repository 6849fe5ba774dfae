"""The parts of a step from what a person names: `train.py`, `train.py:make`, `package.module:make`.

A script with functions `model` and `batch` (and, where wanted, `loss` and `optimizer`) is a
description (→ `foretell.pytorch.script`); so is a function that answers `(model, batch, loss,
optimizer)`, the last two of which may be left out. A function that answers a module alone takes the
others from its script. Options behind a second colon are passed to the function:
`samples.py:llama:size=70b,length=4096`.
"""

from __future__ import annotations

import importlib
import inspect
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from foretell import spec
from foretell.errors import InputError, unknown
from foretell.pytorch.capture.assume import first_line
from foretell.pytorch.script import ask, takes_part


@dataclass(frozen=True)
class Parts:
    """What a script says of a step."""

    model: Any
    batch: Any
    loss: Any = None
    optimizer: Any = None
    real: Callable[[], tuple[Any, ...]] | None = None  # the same with values, where these have none

    @property
    def four(self) -> tuple[Any, ...]:
        """Model, batch, loss and optimizer."""
        return self.model, self.batch, self.loss, self.optimizer


def find(text: str, batch: int | None = None, ranks: int = 1) -> Parts:
    """The parts of the step that a text names; `batch` is sent on where it is asked for.

    Of a script's batch the part of the first of so many `ranks` is taken.
    """
    where, name, given = _split(text)
    names = _names(where)
    if not name:
        return _described(names, where, batch, ranks)
    if not callable(names.get(name)):
        functions = (k for k, v in names.items() if callable(v) and not k.startswith("_"))
        raise unknown(f"function of `{where}`", name, functions)
    return _made(names, name, where, _options(names[name], given, batch, where))


def _split(text: str) -> tuple[str, str, dict[str, str]]:
    """`train.py:make:size=8` → train.py, make, {size: 8}."""
    where, _, rest = text.partition(":")
    name, _, options = rest.partition(":")
    return where, name, spec.options(options) if options else {}


def _names(where: str) -> Mapping[str, Any]:
    """What a script or module defines."""
    path = Path(where)
    if path.suffix == ".py":
        if not path.is_file():
            raise InputError(f"there is no file `{where}`")
        with _importing_from(path.resolve().parent):
            found = _ran(lambda: runpy.run_path(str(path), run_name="foretell_capture"), where)
            return dict(found)
    return dict(vars(_ran(lambda: importlib.import_module(where), where)))


def _ran(run: Callable[[], Any], where: str) -> Any:
    try:
        return run()
    except Exception as error:
        raise InputError(
            f"`{where}` cannot be loaded: {type(error).__name__}: {first_line(error)}",
            hint="name a script or a module: `train.py:make`",
        ) from error


@contextmanager
def _importing_from(folder: Path) -> Iterator[None]:
    """A script finds the modules beside it, as when Python runs it."""
    before = sys.path[:]
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path[:] = before


def _described(names: Mapping[str, Any], where: str, batch: int | None, ranks: int) -> Parts:
    missing = [name for name in ("model", "batch") if not callable(names.get(name))]
    if missing:
        raise InputError(
            f"`{where}` does not define {' and '.join(f'`{m}()`' for m in missing)}",
            hint=f"define them, or name a function that makes the step: `{where}:make`",
        )
    return _with_others(names, names["model"], where, batch, ranks)


def _options(
    make: Callable[..., Any], given: Mapping[str, str], batch: int | None, where: str
) -> dict[str, Any]:
    """Options a function takes; whole numbers as such."""
    wanted = inspect.signature(make).parameters
    options = {k: int(v) if v.lstrip("-").isdigit() else v for k, v in given.items()}
    if batch is not None:
        if not {"batch", "batch_size"} & set(wanted):
            raise InputError(
                f"a batch of {batch} was asked for, but `{make.__name__}` of `{where}` takes none",
                hint="give it a parameter `batch`",
            )
        options["batch" if "batch" in wanted else "batch_size"] = batch
    for name in options:
        if name not in wanted:
            raise unknown(f"option of `{make.__name__}`", name, wanted)
    return options


def _made(names: Mapping[str, Any], name: str, where: str, options: dict[str, Any]) -> Parts:
    """What a function answers: the parts of a step, or a model whose script has the others."""
    if isinstance(names[name], type) and issubclass(names[name], torch.nn.Module):
        return _with_others(names, partial(names[name], **options), where)

    def parts() -> Parts:
        return _parts(names, _ran(lambda: names[name](**options), f"{where}:{name}"), name, where)

    try:
        with torch.device("meta"):  # nothing is allocated, and a capture makes fakes of it
            found = parts()
    except InputError:  # it may read values while it is made
        return parts()
    return replace(found, real=lambda: parts().four)


def _parts(names: Mapping[str, Any], made: Any, name: str, where: str) -> Parts:
    if isinstance(made, torch.nn.Module):
        return _with_others(names, made, where)
    if isinstance(made, Mapping):
        return Parts(**made)
    if isinstance(made, tuple) and 2 <= len(made) <= 4:
        return Parts(*made)
    raise InputError(
        f"`{where}:{name}` answered {type(made).__name__}, which is no step",
        hint="answer (model, batch), (model, batch, loss) or (model, batch, loss, optimizer)",
    )


def _with_others(
    names: Mapping[str, Any], model: Any, where: str, batch: int | None = None, ranks: int = 1
) -> Parts:
    if not callable(names.get("batch")):
        raise InputError(
            f"`{where}` has a model but no `batch()`",
            hint="define `batch()`, or answer (model, batch, loss, optimizer)",
        )
    make = partial(_first_part, names["batch"], ranks, batch)
    return Parts(model, make, names.get("loss"), names.get("optimizer"))


def _first_part(batch: Callable[..., Any], ranks: int, samples: int | None) -> Any:
    """What the first of some ranks has of a script's batch."""
    found = ask(batch, 0, ranks, samples=samples)
    return found if ranks == 1 or takes_part(batch) else _cut(found, ranks)


def _cut(value: Any, ranks: int) -> Any:
    if isinstance(value, torch.Tensor):
        return value[: len(value) // ranks]
    if isinstance(value, Mapping):
        return {key: _cut(v, ranks) for key, v in value.items()}
    return type(value)(_cut(v, ranks) for v in value) if isinstance(value, list | tuple) else value
