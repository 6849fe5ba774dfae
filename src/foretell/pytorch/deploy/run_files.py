"""What a run leaves in its folder, and how its ranks and their launcher read it: no torch.

    run.json             what was asked for
    rank-0.state.json    how far a rank is, written again and again
    rank-0.error.json    why it failed
    rank-0.result.json   what it measured
    rank-0.trace.json.gz one profiled step, if asked for
    rank-0.log           what it printed
    steps.jsonl          a line a step: step, loss, seconds
    events.out.tfevents… TensorBoard's, where tensorboard is installed (tensorboard --logdir FOLDER)
    wandb/offline-run-…  Weights & Biases', where wandb is there and WANDB_PROJECT says for what;
                         `wandb sync` sends it, nothing is sent from here
    reference.npz        losses and gradients of one process, to be compared

Every file is written whole or not at all; the state of a rank, which changes with every step, is
written over in one go, and read again where a reader has come in between.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from foretell.errors import InputError
from foretell.io import write_text

ENDED = "foretell: this rank has failed"  # in its log, before the traceback
BEFORE = ("starting", "model", "deploy", "verify", "predict")  # phases before the first step
_TRIES, _SOON = 5, 1e-3  # times a file is read, and seconds between


@dataclass(frozen=True)
class RunRequest:
    """One run: what every rank is given."""

    script: str
    plan: str
    steps: int = 10
    warmup: int = 3
    profile: bool = False
    timeout: float = 120.0  # seconds without progress before a run is given up
    device: str = ""
    predict: bool = True  # the step, for the machine it runs on, before it is run
    verify: str = "first"  # compare with one process: yes, no, or the first time
    batch_norm: str = "sync"  # statistics of all data-parallel ranks, or local ones
    checkpoint: str = ""  # folder that checkpoints go to, and are taken up from
    every: int = 0  # steps between them; one at the end where 0
    resume: bool = False
    until: int = 0  # step that a run which was started again ends at; after `steps` where 0
    args: tuple[str, ...] = ()  # of a script with a loop of its own
    is_module: bool = False  # it is named as in `python -m`
    goal: str = ""  # of such a script: train, or of its first steps `reference` and `compare`
    captured: str = ""  # graph of a step of such a script, to predict it from
    launcher: int = 0  # process id: ranks end when it is gone


@dataclass(frozen=True)
class State:
    """How far a rank is."""

    pid: int
    phase: str  # starting, verify, model, deploy, step 3, done
    moved: float  # when the phase began, seconds of the wall clock
    seen: float  # when this was written
    where: str  # the line of code that the rank is at
    waits: bool  # whether that is inside torch.distributed
    done: float = 0.0  # share of its steps that is over


def write(path: Path, value: Any) -> None:
    """Write JSON so that a reader sees the whole of it or what was there before."""
    write_text(path, json.dumps(value))


class Board:
    """A file of JSON that is written over again and again: a hundredth of a new file's cost."""

    def __init__(self, path: Path) -> None:
        self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self.size = 0

    def write(self, value: Any) -> None:
        """Put this in place of what was there; blanks cover what was longer."""
        line = json.dumps(value).encode()
        self.size = max(self.size, len(line))
        with suppress(OSError):  # a full disk is reported by required writes
            os.pwrite(self.file, line.ljust(self.size), 0)


def read(path: Path) -> Any:
    """The JSON in a file; None where there is no file, or nothing whole in it for now."""
    for _ in range(_TRIES):
        try:
            return json.loads(path.read_text())
        except FileNotFoundError:
            return None
        except (ValueError, RecursionError):  # it was being written, or is none of ours
            time.sleep(_SOON)
    return None


def write_request(folder: Path, request: RunRequest) -> None:
    """Tell the ranks what to do."""
    write(folder / "run.json", asdict(request))


def read_request(folder: Path) -> RunRequest:
    """What a run is to do; raise where its file is cut or another's."""
    path = folder / "run.json"
    found, known = read(path), {f.name for f in fields(RunRequest)}
    try:
        if isinstance(found, dict) and {"script", "plan"} <= set(found) <= known:
            return msgspec.convert(found, RunRequest)
    except msgspec.ValidationError:
        pass
    raise InputError(
        f"`{path}` is cut short, or not what `foretell run` writes",
        hint=f"run it again: foretell run … -o {folder}",
    )


def states(folder: Path) -> dict[int, State]:
    """How far each rank is, of those that have begun."""
    return {r: State(**found) for r, found in _each(folder, "state").items()}


def errors(folder: Path) -> dict[int, dict[str, Any]]:
    """Why ranks failed."""
    return _each(folder, "error")


def results(folder: Path) -> dict[int, dict[str, Any]]:
    """What ranks measured."""
    return _each(folder, "result")


def _each(folder: Path, what: str) -> dict[int, dict[str, Any]]:
    found = {}
    for path in folder.glob(f"rank-*.{what}.json"):
        value = read(path)
        if value is not None:
            found[rank_of(path)] = value
    return dict(sorted(found.items()))


def rank_of(path: Path) -> int:
    """The rank that a file is of."""
    return int(path.name.split(".")[0].removeprefix("rank-"))


def queued() -> float:
    """Seconds that this thread was ready to run and had no core; 0 where Linux does not tell."""
    try:
        return 1e-9 * int(Path("/proc/thread-self/schedstat").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0.0


def free_memory() -> float:
    """Bytes of memory that are free; without end where the system does not say."""
    try:
        rows = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return 1024.0 * float(rows["MemAvailable"].split()[0])
    except (OSError, KeyError, ValueError):
        return float("inf")


def kept(what: str) -> Path:
    """The folder that keeps something from run to run: verified plans, machines."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "foretell" / what


def keep(path: Path, value: Any) -> None:
    """Write down what was found; where that cannot be, it is found again next time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, value)
    except OSError:
        return


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
