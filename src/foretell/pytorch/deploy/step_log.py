"""What each step of a run gave, in files that people's tools read; written by the first rank.

steps.jsonl          a line a step: step, loss, seconds
events.out.tfevents… TensorBoard's, where tensorboard is installed (tensorboard --logdir FOLDER)
wandb/offline-run-…  Weights & Biases', where wandb is installed and WANDB_PROJECT says for what;
                     `wandb sync` sends it, nothing is sent from here
"""

from __future__ import annotations

import json
import os
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any


class StepLog:
    """Appends a line a step; a disk that takes none ends the log, not the run."""

    def __init__(self, folder: Path, *, is_on: bool = True, plan: str = "") -> None:
        self.file: Any = None
        self.board: Any = None
        self.wandb: Any = None
        if not is_on:
            return
        self.file = (folder / "steps.jsonl").open("w", buffering=1)
        if find_spec("tensorboard") is not None:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(str(folder))
        if os.environ.get("WANDB_PROJECT") and find_spec("wandb") is not None:
            self.wandb = import_module("wandb").init(
                dir=str(folder), mode="offline", config={"plan": plan}
            )

    def write(self, step: int, loss: float | None, seconds: float) -> None:
        """Note a step."""
        if self.file is None:
            return
        row = {"seconds": seconds} | ({} if loss is None else {"loss": loss})
        try:
            self.file.write(json.dumps({"step": step, "loss": loss, "seconds": seconds}) + "\n")
            for name, value in row.items() if self.board is not None else ():
                self.board.add_scalar(name, value, step)
            if self.wandb is not None:
                self.wandb.log(row, step=step)
        except OSError:
            self.file = None

    def close(self) -> None:
        """Flush what is written."""
        for one in (self.file, self.board):
            if one is not None:
                one.close()
        if self.wandb is not None:
            self.wandb.finish()
