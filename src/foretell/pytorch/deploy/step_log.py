"""What each step of a run gave and when its pieces ran, in files that people's tools read.

steps.jsonl          a line a step: step, loss, seconds
events.out.tfevents… TensorBoard's, where tensorboard is installed (tensorboard --logdir FOLDER)
wandb/offline-run-…  Weights & Biases', where wandb is installed and WANDB_PROJECT says for what;
                     `wandb sync` sends it, nothing is sent from here

When each piece of one deployed step began and ended, on the clock that all ranks share.

Gradients are noted as they become ready, collectives when they are begun and when they are done,
the update by the optimizer's own hooks.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch.distributed as dist

from foretell.pytorch.deploy import factors
from foretell.pytorch.deploy.apply import Deployed

_OPS = ("all_reduce", "reduce", "broadcast")


class Notes:
    """Listens to one step; `rows` tells what it heard."""

    def __init__(self, deployed: Deployed) -> None:
        self.deployed = deployed
        self.lock = threading.Lock()
        self.marks: list[tuple[str, float]] = []
        self.sent: list[dict[str, Any]] = []
        self.hooks: list[Any] = []
        self.patched: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> Self:
        optimizer, call = self.deployed.optimizer, self.deployed.loss
        for name, parameter in self.deployed.model.named_parameters():
            mark = self._marker(f"gradient {name}")
            self.hooks.append(parameter.register_post_accumulate_grad_hook(mark))
        self.hooks.append(optimizer.register_step_pre_hook(self._marker("ready")))
        self.hooks.append(optimizer.register_step_post_hook(self._marker("update")))
        self._patch(self.deployed, "loss", self._after(call, "forward"))
        for op in _OPS:
            self._patch(dist, op, self._sending(op, getattr(dist, op)))
        self._patch(factors, "_gather", self._sending("all_gather", factors._gather))
        self.begun = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        self.ended = time.perf_counter()
        for place, name, value in self.patched:
            setattr(place, name, value)
        for hook in self.hooks:
            hook.remove()

    def rows(self) -> list[dict[str, Any]]:
        """Every piece: name, op, start, end, bytes; seconds of the shared clock."""
        found: list[dict[str, Any]] = []
        before = self.begun
        for name, at in self.marks:
            if name != "ready":  # what lies before it is waiting
                own = {"name": name, "op": name.split()[0], "start": before, "end": at, "bytes": 0}
                found.append(own)
            before = at
        counts: dict[str, int] = {}
        for row in self.sent:
            op = row["op"]
            number = counts[op] = counts.get(op, -1) + 1
            found.append(row | {"name": f"{row['op']} {number}", "end": row["end"] or self.ended})
        return found

    def _marker(self, name: str) -> Callable[..., None]:
        def mark(*_: Any) -> None:
            self.marks.append((name, time.perf_counter()))

        return mark

    def _after(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def called(*args: Any) -> Any:
            value = call(*args)
            self.marks.append((name, time.perf_counter()))
            return value

        return called

    def _sending(self, op: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **options: Any) -> Any:
            row = {"op": op, "start": time.perf_counter(), "end": 0.0}
            row["bytes"] = args[0].numel() * args[0].element_size()
            with self.lock:
                self.sent.append(row)
            work = call(*args, **options)
            if work is None:
                row["end"] = time.perf_counter()
            else:
                work.get_future().then(lambda _: row.update(end=time.perf_counter()))
            return work

        return called

    def _patch(self, place: Any, name: str, value: Any) -> None:
        self.patched.append((place, name, getattr(place, name)))
        setattr(place, name, value)


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
