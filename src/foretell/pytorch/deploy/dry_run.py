"""A dry run of a step: the messages that a plan sends, with as much work between them as it has.

The plan is deployed on a copy of the model, and each rank takes steps of it by itself: messages are
recorded in place of being sent, with the core seconds between them. Then the ranks send messages of
the same sizes, in the same order, and work for these core seconds in between. So ops, hooks and
updates take what they take here, and work and messages meet each other and the load of the machine
as in steps of the plan. No step of the plan itself is taken.
"""

from __future__ import annotations

import copy
import statistics
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from foretell.pytorch import timed
from foretell.pytorch.deploy import run_files
from foretell.pytorch.deploy.collective import everyones

Tensor = Any
Step = Callable[[], object]
_COPIES = 16.0  # bytes a parameter: values, gradients, two states of an optimizer, in fp32
_SHARE = 0.25  # of the memory that is free, for the copies of all ranks
_WARM, _LEAST, _MOST = 3, 8, 60  # steps
_WHILE = 2.0  # seconds of steps on an idle machine, beyond the least
_BUSY = 12.0  # and on a busy one at most: what else runs there comes and goes within seconds
_SIDES = (256, 32)  # of the matmuls that stand for ops: many threads share the larger
_UNEVEN = "alltoall_base_"  # how many rows it sends is up to the samples
_OUTPUT = "output"  # how the first argument of ops begins that have inputs besides
_Work: Any = dist._Work


class DryRun(NamedTuple):
    """Seconds of a step of the dry run, by its slowest rank."""

    seconds: float
    unsure: float  # standard error of their logarithm
    load: float  # core and waiting seconds over core seconds, of the rank that waits longest
    work: float  # core seconds of a rank, without messages, of the one that works longest


class Shape(NamedTuple):
    """A tensor of a message."""

    sizes: tuple[int, ...]
    dtype: Any


class Event(NamedTuple):
    """A message that begins, or is waited for, and the core seconds before it."""

    seconds: float
    op: str  # of torch.ops.c10d; nothing where it is waited for
    args: Any = ()  # tensors as shapes
    message: int = -1  # that is waited for, by its place among the events


@dataclass(frozen=True)
class Recording:
    """A rank's step by itself."""

    events: Sequence[Event]
    rest: float  # core seconds behind the last
    active: float = 1.0  # threads that were busy

    @property
    def work(self) -> float:
        return sum(event.seconds for event in self.events) + self.rest


class _Recorded(_Work):  # type: ignore[misc]
    """Stands for the work of a message that is not sent."""

    def __init__(self, recorder: Recorder, message: int, value: list[Tensor]) -> None:
        super().__init__()
        self.recorder, self.message, self.value = recorder, message, value

    def wait(self, *_: Any) -> bool:
        if self.message >= 0:
            self.recorder.note("", (), self.message)
        self.message = -1
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> Any:
        found = torch.futures.Future()
        found.set_result(self.value)
        return found


@dataclass
class Recorder:
    """Records what this rank would send, in place of sending it, while it is open."""

    events: list[Event] = field(default_factory=list)
    works: list[_Recorded] = field(default_factory=list)
    clock: Callable[[], float] = field(default_factory=timed.clock)
    since: float = 0.0

    @contextmanager
    def open(self) -> Iterator[None]:
        """Take the place of every op of torch.distributed on the CPU."""
        library = torch.library.Library("c10d", "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that ops are overridden, which is the purpose
            for schema in torch._C._jit_get_all_schemas():
                if schema.name.startswith("c10d::") and _returns_work(schema):
                    name = schema.name.removeprefix("c10d::")
                    has_inputs = schema.arguments[0].name.startswith(_OUTPUT)
                    run = partial(self._send, name, has_inputs, len(schema.returns))
                    library.impl(name, run, "CPU")
        try:
            yield
        finally:
            library._destroy()

    def step(self, take: Step) -> Recording:
        """Record one step."""
        self.events, self.works = [], []
        wall, cores = time.perf_counter(), time.process_time()
        self.since = self.clock()
        take()
        rest = self.clock() - self.since
        active = (time.process_time() - cores) / max(time.perf_counter() - wall, 1e-9)
        return Recording(self.events, rest, active)

    def note(self, op: str, args: Any, message: int = -1) -> None:
        self.events.append(Event(self.clock() - self.since, op, args, message))
        self.since = self.clock()

    def _send(self, op: str, has_inputs: bool, results: int, *args: Any) -> Any:
        """Give back what a message would if all ranks had the same."""
        self.note(op, tree_map(_shape, args))
        first = tree_leaves(args[0])
        if has_inputs:
            _fill(first, [x.clone() for x in tree_leaves(args[1])])
        elif op.startswith("recv"):
            for x in first:
                x.zero_()
        work = _Recorded(self, len(self.events) - 1, first)
        self.works.append(work)
        self.since = self.clock()
        return work.boxed() if results == 1 else (args[0], work.boxed())


def _returns_work(schema: Any) -> bool:
    return bool(schema.returns) and str(schema.returns[-1].type).endswith(".Work")


def _shape(x: Any) -> Any:
    return Shape(tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else x


def _fill(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """Outputs from inputs, again and again where there are more of them."""
    for place, out in enumerate(outputs):
        given = inputs[place % len(inputs)].flatten()
        if not given.numel():
            out.zero_()
        elif out.numel():
            times = -(-out.numel() // given.numel())
            out.copy_(given.repeat(times)[: out.numel()].view(out.shape))


def fits(model: Any, ranks: int) -> bool:
    """Whether copies of a model for so many ranks fit in a part of the free memory."""
    count = sum(p.numel() for p in model.parameters())
    return bool(_COPIES * count * ranks < _SHARE * run_files.free_memory())


def copied(model: Any, others: Any = None) -> tuple[Any, Any]:
    """The model with memory of its own, and values where it had none; what else refers to it."""
    found, others = copy.deepcopy((model, others))
    if any(p.is_meta for p in found.parameters()):
        found = found.to_empty(device="cpu")
        for parameter in found.parameters():
            nn.init.normal_(parameter.data, std=0.02)
        for buffer in found.buffers():
            buffer.data.fill_(1)
    return found.train(model.training), others


def freeze(optimizer: Any) -> None:
    """Let updates change nothing: a batch taken again and again would be learnt by heart, and its
    gradients become denormal numbers, which take a hundred times as long."""
    for group in optimizer.param_groups:
        group["lr"] = 0.0 * group.get("lr", 0.0)


def recorded(take: Step) -> tuple[Recording | None, str]:
    """A step of this rank by itself, or why it could not be taken; called on all ranks."""
    recorder, rows, begun, why = Recorder(), list[Recording](), time.perf_counter(), ""
    with torch.random.fork_rng(devices=[]), recorder.open():
        try:
            while len(rows) < _WARM + _LEAST or (
                len(rows) < _MOST and time.perf_counter() - begun < _WHILE
            ):
                rows.append(recorder.step(take))
        except Exception as error:  # whatever a model may want from the messages of others
            why = f"{type(error).__name__}: {error}"[:200]
    whys = [one for one in everyones(why) if one]
    if whys:
        return None, f"a rank by itself cannot take a step of it ({whys[0]})"
    return _even(_median(rows[_WARM:])), ""


def _median(rows: Sequence[Recording]) -> Recording:
    """The step with the usual events: of each the usual core seconds, and of all together."""
    kinds = defaultdict[Any, list[Recording]](list)
    for row in rows:
        kinds[tuple(event.op for event in row.events)].append(row)
    same = max(kinds.values(), key=len)
    first, whole = same[0], statistics.median(row.work for row in same)
    each = [
        statistics.median(row.events[k].seconds for row in same) for k in range(len(first.events))
    ]
    rest = statistics.median(row.rest for row in same)
    scale = whole / max(sum(each) + rest, 1e-12)
    return Recording(
        [e._replace(seconds=s * scale) for e, s in zip(first.events, each, strict=True)],
        rest * scale,
        statistics.median(row.active for row in same),
    )


def _even(mine: Recording) -> Recording:
    """Rows that samples send to where they are wanted, as many to each rank: all have the same."""
    found = [_rows_of(event) for event in mine.events if _is_uneven(event)]
    shared = defaultdict[Any, list[int]](list)
    for rows in everyones(found):
        for place, (ranks, sent, got) in enumerate(rows):
            shared[place, ranks] += [sent, got]
    means = iter(statistics.mean(shared[k, row[0]]) for k, row in enumerate(found))
    events = [_evened(e, next(means)) if _is_uneven(e) else e for e in mine.events]
    return replace(mine, events=events)


def _is_uneven(event: Event) -> bool:
    return event.op == _UNEVEN and bool(event.args[3])


def _rows_of(event: Event) -> tuple[tuple[int, ...], int, int]:
    """Ranks of a message, rows that this one sends and those it is sent."""
    into, out, group, *_ = event.args
    ranks = dist.get_process_group_ranks(dist.ProcessGroup.unbox(group))
    return tuple(ranks), out.sizes[0], into.sizes[0]


def _evened(event: Event, rows: float) -> Event:
    into, out, group, got, _, *rest = event.args
    each = round(rows / len(got))
    sizes = [each] * len(got)
    into, out = (x._replace(sizes=(sum(sizes), *x.sizes[1:])) for x in (into, out))
    return event._replace(args=(into, out, group, sizes, sizes, *rest))


def dry_run(recording: Recording, between: Callable[[], Any] | None = None) -> DryRun:
    """Seconds of a step of a dry run; called on all ranks. `between`: what is done between two."""
    rows, load = _steps(_Replay(recording), between or dist.barrier)
    found = torch.tensor([*rows[_WARM:], load, recording.work], dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    *took, load, work = found.tolist()
    unsure = float(found[:-2].log().std()) / len(took) ** 0.5
    return DryRun(statistics.median(took), unsure, load, work)


def _steps(step: Step, between: Callable[[], Any]) -> tuple[list[float], float]:
    """Seconds of each step, and the load of this rank: the busier it is, the longer they go on."""
    rows, begun, waited, core, load = list[float](), time.perf_counter(), 0.0, 0.0, 1.0
    while agreed(
        len(rows) < _WARM + _LEAST or time.perf_counter() - begun < min(_WHILE * load**2, _BUSY)
    ):
        between()
        queued, start, spent = run_files.queued(), time.perf_counter(), time.thread_time()
        step()
        rows.append(time.perf_counter() - start)
        core += time.thread_time() - spent
        waited += run_files.queued() - queued
        load = 1.0 + waited / max(core, 1e-9)
    return rows, load


class _Replay:
    """A recorded step with its messages sent."""

    def __init__(self, recording: Recording) -> None:
        self.work, self.recording = Work(recording.active), recording
        self.calls = [
            partial(getattr(torch.ops.c10d, event.op), *tree_map(_tensor, event.args, is_leaf=_is))
            if event.op
            else None
            for event in recording.events
        ]

    def __call__(self) -> None:
        sent: dict[int, Any] = {}
        for place, (event, call) in enumerate(zip(self.recording.events, self.calls, strict=True)):
            self.work(event.seconds)
            if call is None:
                sent.pop(event.message).wait()
            else:
                found = call()
                sent[place] = _Work.unbox(found[-1] if isinstance(found, tuple) else found)
        self.work(self.recording.rest)
        for work in sent.values():
            work.wait()


def _is(x: Any) -> bool:
    return isinstance(x, Shape)


def _tensor(x: Any) -> Any:
    return torch.zeros(x.sizes, dtype=x.dtype) if isinstance(x, Shape) else x


class Work:
    """Work of any number of seconds, in matmuls: some by all threads, others by one."""

    def __init__(self, active: float = 1.0) -> None:
        others = torch.get_num_threads() - 1
        self.wide = min(max((active - 1) / others, 0.0), 1.0) if others else 0.0
        self.large, self.small = (torch.randn(side, side) for side in _SIDES)
        self.clock = timed.clock()

    def __call__(self, seconds: float) -> None:
        start = self.clock()
        while self.wide and self.clock() - start < seconds * self.wide:
            self.large @ self.large
        while self.clock() - start < seconds:
            self.small @ self.small


def agreed(here: bool) -> bool:
    """Whether something holds on every rank."""
    found = torch.tensor(int(here))
    dist.all_reduce(found, op=dist.ReduceOp.MIN)
    return bool(found)
