"""What each step of a run gave, in files that people's tools read; written by the first rank.

steps.jsonl          a line a step: step, loss, seconds
events.out.tfevents… TensorBoard's, where tensorboard is installed (tensorboard --logdir FOLDER)
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any


class StepLog:
    """Appends a line a step; a disk that takes none ends the log, not the run."""

    def __init__(self, folder: Path, *, is_on: bool = True) -> None:
        self.file: Any = None
        self.board: Any = None
        if not is_on:
            return
        self.file = (folder / "steps.jsonl").open("w", buffering=1)
        if find_spec("tensorboard") is not None:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(str(folder))

    def write(self, step: int, loss: float | None, seconds: float) -> None:
        """Note a step."""
        if self.file is None:
            return
        try:
            self.file.write(json.dumps({"step": step, "loss": loss, "seconds": seconds}) + "\n")
            if self.board is not None:
                self.board.add_scalar("seconds", seconds, step)
                if loss is not None:
                    self.board.add_scalar("loss", loss, step)
        except OSError:
            self.file = None

    def close(self) -> None:
        """Flush what is written."""
        for one in (self.file, self.board):
            if one is not None:
                one.close()
