"""A script watched for a profile: its steps timed as they are, then traced."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import distributed

from foretell import profile as marks
from foretell.pytorch.deploy.run_files import Board
from foretell.pytorch.intake.files import Journal
from foretell.pytorch.intake.launch import PROGRESS
from foretell.pytorch.intake.request import Request, is_description, is_rank, rank_and_world
from foretell.pytorch.intake.watch import Watch, watched_processes
from foretell.pytorch.profile.run import Recorder, trained_forever, write

Leave = Callable[[dict[str, Any]], None]


@dataclass
class Profiling:
    """Times and traces the steps of whatever runs while it is open, then leaves."""

    request: Request
    journal: Journal
    leave: Leave
    is_started: bool = False  # in a process that the script started: perhaps one of several ranks
    recorder: Recorder = field(init=False)

    def __post_init__(self) -> None:
        request, (rank, world) = self.request, rank_and_world()
        trace = Path(request.folder) / f"trace{os.getpid()}.json"
        tell = progress_in(Path(request.folder)) if rank == 0 else (lambda words, share: None)
        is_alone = world == 1 and not self.is_started
        self.recorder = Recorder(request.wanted, trace, tell, self._finish, is_alone=is_alone)

    @property
    def steps(self) -> int:
        """Steps that have ended so far."""
        return self.recorder.steps

    @contextmanager
    def open(self) -> Iterator[None]:
        """Watch the script; nothing stays changed in torch behind it."""
        watch = Watch(self.recorder)
        with ExitStack() as stack:
            stack.callback(self.recorder.close)
            stack.enter_context(self.recorder.parents.noted())
            stack.enter_context(watch.open())
            stack.enter_context(marks.recording_to(watch))
            stack.enter_context(journalled_saves(self.journal))
            stack.enter_context(watched_processes(self.request))
            self.journal.begin()
            yield

    def runs_itself(self, path: Path) -> bool:
        """Whether a script only describes a step, which then is run here without an end."""
        if not is_description(path):
            return False
        default = "cuda" if torch.cuda.is_available() else "cpu"
        trained_forever(path, torch.device(self.request.device or default))
        return True

    def _finish(self) -> None:
        if distributed.is_available() and distributed.is_initialized():
            is_rank(distributed.get_rank(), distributed.get_world_size())
        rank, world = rank_and_world()
        output = self.request.output_of(rank, world)
        output.parent.mkdir(parents=True, exist_ok=True)
        found = self.recorder
        write(found.trace, output, found.measured())
        assert found.plain is not None
        host = platform.processor() or platform.machine()
        device = torch.cuda.get_device_name() if found.on_gpu else host
        self.leave({"trace": str(output), **found.measured(), "device": device})


@contextmanager
def journalled_saves(journal: Journal) -> Iterator[None]:
    """`torch.save` writes from C++, where no audit hook sees it: its files are noted here."""
    plain = torch.save

    def save(what: Any, file: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(file, (str, os.PathLike)):
            journal.note(os.fspath(file))
        return plain(what, file, *args, **kwargs)

    with patch.object(torch, "save", save):
        yield


def progress_in(folder: Path) -> Callable[[str, float], None]:
    """Progress put where the process that waits looks for it."""
    board = Board(folder / PROGRESS)
    return lambda words, share: board.write((words, share))
