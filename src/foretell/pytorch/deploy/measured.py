"""A measured step of a run: noted while it runs, and as a graph that simulates to itself, in the
words of a predicted one.

    forward, backward, optimizer   of the first rank of every stage, which stands for the others as
                                   in a plan that is lowered (→ foretell.plan.lower)
    all_reduce, …                  its messages, from when they were begun to when they were done

So `foretell compare` lays the prediction beside it: each task waits for the beginning by as long
as it was measured to begin late, and runs for as long as it ran. No torch is needed to read it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from foretell.errors import InputError
from foretell.graph import Builder, Graph
from foretell.plan import Plan
from foretell.pytorch.deploy import run_files

Array = NDArray[np.float64]
Piece = tuple[str, float, float]  # op, begun, done: seconds of the clock that ranks share
_OWN = {"F": "forward", "B": "backward", "I": "backward", "W": "backward"}  # of a pipeline
_MESSAGES = ("all_reduce", "reduce", "broadcast")  # of torch.distributed, that are listened to
_COMPUTE = ("forward", "backward", "optimizer")
_SURE = 1.858  # 1.4826 · 1.2533: from a median distance to the standard error of a median


class Notes:
    """Listens to one step of a deployed model: `marks` of its own work, messages that were `sent`.

    Gradients are noted as they become ready, collectives when they are begun and when they are
    done, the update by the optimizer's own hooks, all on the clock that ranks share.
    """

    def __init__(self, deployed: Any) -> None:
        self.deployed = deployed
        self.lock = threading.Lock()
        self.marks: list[tuple[str, float]] = []
        self.sent: list[dict[str, Any]] = []
        self.hooks: list[Any] = []
        self.patched: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> Self:
        import torch.distributed as dist

        from foretell.pytorch.deploy import sync

        optimizer, call = self.deployed.optimizer, self.deployed.loss
        for name, parameter in self.deployed.model.named_parameters():
            mark = self._marker(f"gradient {name}")
            self.hooks.append(parameter.register_post_accumulate_grad_hook(mark))
        self.hooks.append(optimizer.register_step_pre_hook(self._marker("ready")))
        self.hooks.append(optimizer.register_step_post_hook(self._marker("update")))
        self._patch(self.deployed, "loss", self._after(call, "forward"))
        for op in _MESSAGES:
            self._patch(dist, op, self._sending(op, getattr(dist, op)))
        self._patch(sync, "_gather", self._sending("all_gather", sync._gather))
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


def of_marks(begun: float, marks: Iterable[tuple[str, float]]) -> list[Piece]:
    """The pieces between marks: `forward` and `update` at their ends, `gradient …` as they come,
    `ready` when there is nothing left to wait for."""
    found: list[Piece] = []
    before = begun
    for name, at in marks:
        word = name.split()[0]
        if word == "gradient" and found and found[-1][0] == "backward":
            found[-1] = ("backward", found[-1][1], at)
        elif word == "gradient" or (word == "ready" and found and found[-1][0] == "forward"):
            found.append(("backward", before, at))
        elif word in ("forward", "update"):
            found.append(("optimizer" if word == "update" else word, before, at))
        before = at
    return found


def of_actions(ran: Iterable[tuple[str, float, float]]) -> list[Piece]:
    """The pieces of a pipeline: `3F0` is a forward."""
    return [(_OWN[action.lstrip("0123456789")[0]], start, end) for action, start, end in ran]


def length(pieces: list[Piece]) -> float:
    """Seconds from the first beginning to the last end."""
    return max(end for _, _, end in pieces) - min(start for _, start, _ in pieces)


def spent_on(pieces: list[Piece]) -> dict[str, float]:
    """What a rank's step was spent on: work, messages (what lies under others counts), update."""
    return {
        "compute_s": _covered(pieces, "forward", "backward"),
        "talk_s": _covered([piece for piece in pieces if piece[0] not in _COMPUTE]),
        "update_s": _covered(pieces, "optimizer"),
        "whole_s": length(pieces),
    }


def _covered(pieces: list[Piece], *ops: str) -> float:
    """Seconds in which at least one of some pieces was under way."""
    total = until = 0.0
    for op, start, end in sorted(pieces, key=lambda piece: piece[1]):
        if not ops or op in ops:
            total += max(0.0, end - max(start, until))
            until = max(until, end)
    return total


def graph(folder: Path) -> Graph:
    """The step that the ranks of a run wrote down last."""
    first: dict[int, dict[str, Any]] = {}
    for found in run_files.results(folder).values():
        first.setdefault(found.get("stage", 0), found)
    if not any(found.get("pieces") for found in first.values()):
        raise InputError(
            f"`{folder}` has no step to compare", hint="run it again: foretell run … -o FOLDER"
        )
    builder = Builder()
    zero = min(piece[1] for found in first.values() for piece in found["pieces"])
    begin = builder.task(kind="host", op="begin", name="begin", seconds=0.0)
    for stage, found in sorted(first.items()):
        _put(builder, begin, stage, found["pieces"], zero)
    return builder.graph(plan=run_files.read_request(folder).plan)


@dataclass(frozen=True)
class Spent:
    """The median step of a run by its slowest rank, and what it was spent on; how sure that is."""

    seconds: float
    noise: float  # standard error of the median, relative
    parts: dict[str, float]  # seconds; none where they cannot be told apart
    unsure: float  # how far steps lie apart in them, as a share of the step


def spent(folder: Path) -> Spent:
    """What a run measured. Parts are told apart only where nothing but gradients travels: inside
    forwards and backwards no messages were seen."""
    each, plan = _results(folder), Plan.parse(run_files.read_request(folder).plan)
    steps = np.array([found["steps_s"] for found in each]).max(axis=0)
    middle = float(np.median(steps))
    noise = _SURE * float(np.median(np.abs(steps - middle))) / middle / len(steps) ** 0.5
    if plan.ranks != plan.dp or plan.zero > 1 or plan.groups or "spent" not in each[0]:
        return Spent(middle, noise, {}, 0.0)
    shares = _shares([found["spent"] for found in each])
    parts = {name: float(np.median(row)) * middle for name, row in shares.items()}
    unsure = [float(np.median(np.abs(row - np.median(row)))) for row in shares.values()]
    return Spent(middle, noise, parts, max(unsure))


def _results(folder: Path) -> list[dict[str, Any]]:
    """What every rank of a run measured; raise where a file is cut, or nothing was measured."""
    whole = run_files.results(folder)
    files = sorted(folder.glob("rank-*.result.json"))
    cut = [path for path in files if run_files.rank_of(path) not in whole]
    if cut:
        hint = f"run it again: foretell run … -o {folder}"
        raise InputError(f"`{cut[0]}` is cut short", hint=hint)
    if not whole or not min(len(found["steps_s"]) for found in whole.values()):
        raise InputError(
            f"`{folder}` has no steps that were measured", hint="let a run end: foretell run … -o"
        )
    return list(whole.values())


def _shares(ranks: list[list[dict[str, float]]]) -> dict[str, Array]:
    """Shares of each noted step: of the slowest rank; of messages those of the rank that came last.

    Whatever comes first waits for the others, which is no part of a message.
    """
    ways = {"compute_s": np.max, "talk_s": np.min, "update_s": np.max}
    whole = np.max([[step["whole_s"] for step in rank] for rank in ranks], axis=0)
    return {
        name: way([[step[name] for step in rank] for rank in ranks], axis=0) / whole
        for name, way in ways.items()
    }


def samples(folder: Path) -> int:
    """Samples of a step, of all ranks that have their own; 0 where a run did not say."""
    found = run_files.results(folder).values()
    each = {row["at"]: row["samples"] for row in found if "samples" in row}
    return sum(each.values())


def _put(builder: Builder, begin: int, stage: int, pieces: list[Piece], zero: float) -> None:
    compute = builder.lane("compute", rank=stage, kind="compute")
    free: list[tuple[float, int]] = []  # lanes of messages, and until when each is taken
    for op, start, end in sorted(pieces, key=lambda piece: piece[1]):
        lane, kind = compute, "host"
        if op not in _COMPUTE:
            kind = "collective"
            known = next((k for k, (until, _) in enumerate(free) if until <= start), len(free))
            if known == len(free):
                name = f"collectives {known}" if known else "collectives"
                free.append((0.0, builder.lane(name, rank=stage, kind="comm")))
            free[known] = (end, free[known][1])
            lane = free[known][1]
        task = builder.task(kind=kind, op=op, name="", rank=stage, lane=lane, seconds=end - start,
                            source="measured")  # fmt: skip
        builder.wait(task, begin, lag=start - zero)
