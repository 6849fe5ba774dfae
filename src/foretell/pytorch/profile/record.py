"""Steps counted as they end: some to warm up, some timed, some traced, and then enough."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from foretell.pytorch.profile.clock import Clock, Times
from foretell.pytorch.profile.layers import named_layers

_SETTLE = 2  # steps a profiler is given before what it records counts


class Finished(BaseException):
    """All wanted steps are done; no script should catch it by accident."""


@dataclass(frozen=True)
class Wanted:
    """How many steps of each sort, and what a trace should hold."""

    warmup: int = 10
    timed: int = 20
    traced: int = 3
    layers: bool = True
    memory: bool = True


@dataclass
class Recorder:
    """Told of the end of every step; leaves times and a trace."""

    wanted: Wanted
    on_gpu: bool
    trace: Path  # where the trace is written, as plain JSON
    progress: Callable[[str, float], None] = lambda words, share: None
    done: int = 0  # steps so far
    plain: Times | None = None
    profiled: Times | None = None
    peak: float = 0.0  # bytes of the device, un-profiled
    _clock: Clock | None = None
    _profiler: Any = None
    _open: ExitStack = field(default_factory=ExitStack)

    def end(self) -> None:
        """A step has ended: go on to what comes next."""
        self.done += 1
        timed = self.wanted.warmup + self.wanted.timed
        traced = timed + _SETTLE + self.wanted.traced
        sort = "to warm up" if self.done < self.wanted.warmup else "timed"
        sort = sort if self.done < timed else "traced"
        self.progress(f"step {self.done} of {traced}, {sort}", self.done / traced)
        if self.done == self.wanted.warmup:
            self._begin_timing()
        elif self._clock is not None:
            self._clock.tick()
        if self.done == timed:
            self._end_timing()
        elif self._profiler is not None:
            with _quiet():
                self._profiler.step()
        if self.done == traced:
            self._end_trace()
            raise Finished

    def close(self) -> None:
        """Leave nothing behind in torch, however the script ended."""
        with _quiet():
            self._open.close()

    def _begin_timing(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        self._clock = Clock(self.on_gpu)
        self._clock.tick()

    def _end_timing(self) -> None:
        assert self._clock is not None
        self.plain = Times.of(self._clock.seconds())
        if self.on_gpu:
            self.peak = float(torch.cuda.max_memory_allocated())
        self._clock = Clock(self.on_gpu)
        self._begin_trace()
        self._clock.tick()

    def _begin_trace(self) -> None:
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if self.on_gpu:
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        wait = torch.profiler.schedule(wait=0, warmup=_SETTLE, active=self.wanted.traced)
        profiler = torch.profiler.profile(
            activities=kinds,
            schedule=wait,
            record_shapes=True,
            profile_memory=self.wanted.memory,
            on_trace_ready=lambda p: p.export_chrome_trace(str(self.trace)),
        )
        if self.wanted.layers:
            self._open.enter_context(named_layers())
        with _quiet():
            self._profiler = self._open.enter_context(profiler)

    def _end_trace(self) -> None:
        assert self._clock is not None
        self.profiled = Times.of(self._clock.seconds()[_SETTLE:])
        self.close()


@contextmanager
def _quiet() -> Iterator[None]:
    """No warnings: torch's profiler warns of what is meant here, that it forgets earlier steps."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
