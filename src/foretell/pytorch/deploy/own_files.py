"""What a script writes while several ranks run it: the first rank's files count.

Writes of other ranks go to a place of their own, from where they read them again; what `torch.save`
is given is put together from all ranks first, so that a checkpoint is that of one process.
"""

from __future__ import annotations

import builtins
import io
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.utils import _pytree as pytree

from foretell.pytorch.intake.files import own_places

_WRITES = set("wax+")


@contextmanager
def one_writer(rank: int, scratch: Path) -> Iterator[None]:
    """Let only the first rank write where the script says."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(torch, "save", _whole_save(torch.save, rank)))
        if rank:
            for owner, name, new in _Elsewhere(scratch).changes():
                stack.enter_context(patch.object(owner, name, new))
        yield


def whole(x: Any) -> Any:
    """A tensor as one process has it; all ranks ask together."""
    if isinstance(x, torch.Tensor) and hasattr(x, "full_tensor"):
        found = x.detach().full_tensor()
        return torch.nn.Parameter(found) if isinstance(x, torch.nn.Parameter) else found
    return x


def _whole_save(plain: Callable[..., Any], rank: int) -> Callable[..., Any]:
    def save(what: Any, *args: Any, **kwargs: Any) -> Any:
        what = pytree.tree_map(whole, what)
        return plain(what, *args, **kwargs) if rank == 0 else None

    return save


class _Elsewhere:
    """Files of a rank other than the first: what it writes is where only it looks."""

    def __init__(self, scratch: Path) -> None:
        self.scratch, self.moved = scratch, dict[str, str]()
        self.free = [os.path.realpath(p) for p in own_places()]
        self.here = os.getcwd() + os.sep  # the user's, even where it is a temporary folder

    def changes(self) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
        """What is put in place of functions that open, make and remove files."""
        plain = builtins.open
        for owner in (builtins, io):
            yield (
                owner,
                "open",
                lambda file, mode="r", *a, **k: plain(
                    self._path(file, bool(_WRITES & set(mode))), mode, *a, **k
                ),
            )
        for name in ("mkdir", "makedirs"):
            yield os, name, self._made(getattr(os, name))
        for name in ("remove", "unlink", "rmdir"):
            yield os, name, self._only_mine(getattr(os, name))
        for name in ("rename", "replace"):
            yield os, name, self._renamed(getattr(os, name))

    def _path(self, file: Any, writes: bool) -> Any:
        """Where a file of this rank is."""
        if not isinstance(file, str | os.PathLike):
            return file
        full = os.path.realpath(os.fspath(file))
        if full in self.moved:
            return self.moved[full]
        is_free = any(full.startswith(place + os.sep) for place in self.free)
        if not writes or (is_free and not full.startswith(self.here)):
            return file
        self.moved[full] = str(self.scratch / f"{len(self.moved)}")
        return self.moved[full]

    def _made(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def make(*args: Any, **kwargs: Any) -> None:
            try:
                plain(*args, **kwargs)
            except FileExistsError:  # the first rank was faster
                return

        return make

    def _only_mine(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def remove(path: Any, *args: Any, **kwargs: Any) -> None:
            found = self._path(path, True)
            if os.path.lexists(found):
                plain(found, *args, **kwargs)

        return remove

    def _renamed(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def rename(old: Any, new: Any, *args: Any, **kwargs: Any) -> None:
            here, there = self._path(old, True), self._path(new, True)
            if os.path.lexists(here):
                plain(here, there, *args, **kwargs)

        return rename
