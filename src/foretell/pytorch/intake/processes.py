"""Processes that a script starts itself: what trains in them is watched too.

Only functions of the script's own are: workers of loaders, pools and managers stay as they are.
"""

from __future__ import annotations

import multiprocessing
import site
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.process import BaseProcess
from typing import Any
from unittest.mock import patch

from foretell.pytorch.intake.request import Request, is_rank


@dataclass(frozen=True)
class Watched:
    """A function that a script runs in a process of its own; it is sent there."""

    request: Request
    function: Callable[..., Any]
    ranks: int = 0  # where the first argument is a rank: of how many

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from foretell.pytorch.intake.child import job_of

        if self.ranks:
            is_rank(args[0], self.ranks)
        with job_of(self.request, is_started=True).open():
            return self.function(*args, **kwargs)


@contextmanager
def watched_processes(request: Request) -> Iterator[None]:
    """Watch what the script starts by torch.multiprocessing.spawn or as a process of its own."""
    spawning = import_module("torch.multiprocessing.spawn")  # a function has its name too
    many, one = spawning.start_processes, BaseProcess.start

    def start_many(fn: Any, args: Any = (), nprocs: int = 1, *more: Any, **options: Any) -> Any:
        return many(Watched(request, fn, nprocs), args, nprocs, *more, **options)

    def start(process: Any) -> None:
        if _starts_anew(process) and _is_own(process._target):
            process._target = Watched(request, process._target)
        one(process)

    with ExitStack() as stack:
        stack.enter_context(patch.object(spawning, "start_processes", start_many))
        stack.enter_context(patch.object(BaseProcess, "start", start))
        yield


def _starts_anew(process: Any) -> bool:
    """Whether a process begins without what is open here: all but forked ones do."""
    method = getattr(process, "_start_method", None) or multiprocessing.get_start_method()
    return bool(method != "fork")


def _is_own(function: Any) -> bool:
    """Whether a function is the script's or of what lies beside it, and not of a package."""
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    file = str(getattr(module, "__file__", None) or "")
    packages = (*site.getsitepackages(), *sysconfig.get_paths().values())
    inner = ("site-packages", "dist-packages")
    return bool(file) and not file.startswith(packages) and not any(p in file for p in inner)
