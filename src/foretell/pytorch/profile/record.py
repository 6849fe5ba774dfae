"""Steps counted as they end: some to warm up, some timed, some traced, and then enough."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from foretell.pytorch.intake.request import Wanted
from foretell.pytorch.profile.layers import Parents, named_layers
from foretell.pytorch.profile.run import Clock, Times

_SETTLE = 2  # steps a profiler is given before what it records counts
_PATIENCE = 20.0  # seconds for warming up, and again for timing, where steps are slow
_SLOW = 4.0  # seconds of a step of which one is traced, behind one to settle
_FEWEST = 3  # steps timed, however slow


class Finished(BaseException):
    """All wanted steps are done; no script should catch it by accident."""


def _raise() -> None:
    raise Finished


@dataclass
class Recorder:
    """Called at the end of every step; leaves times and a trace.

    Where steps are slow and no other rank has to agree, fewer than wanted are taken.
    """

    wanted: Wanted
    trace: Path  # where the trace is written, as plain JSON
    progress: Callable[[str, float], None] = lambda words, share: None
    finish: Callable[[], None] = _raise  # called when all is done
    parents: Parents = field(default_factory=Parents)
    is_alone: bool = True  # no other rank has to stop at the same step
    steps: int = 0  # ended so far
    plain: Times | None = None
    profiled: Times | None = None
    peak: float = 0.0  # bytes of the device, un-profiled
    timed: int = 0
    on_gpu: bool = False
    _done: int = 0  # steps of the present sort
    _began: float = field(default_factory=time.monotonic)
    _clock: Clock | None = None
    _settle: int = 0
    _active: int = 0
    _profiler: Any = None
    _open: ExitStack = field(default_factory=ExitStack)

    def step_ended(self, is_new: bool) -> None:
        """A step has ended; where what a step is has changed, counting begins anew."""
        if is_new and self._profiler is None:
            self._clock, self._done, self._began = None, 0, time.monotonic()
        self.end()

    def backward_begins(self) -> None:
        """Of no interest here."""

    def backward_ended(self) -> None:
        """Of no interest here."""

    def end(self) -> None:
        """A step has ended: go on to what comes next."""
        self.steps, self._done = self.steps + 1, self._done + 1
        if self._profiler is not None:
            self._traced()
        elif self._clock is not None:
            self._clock.tick()
            self._tell("timed", 0.3, self.wanted.timed)
            if self._is_enough(self.wanted.timed, _FEWEST):
                self._end_timing()
        else:
            self._tell("to warm up", 0.0, self.wanted.warmup)
            if self._is_enough(self.wanted.warmup, 1):
                self._begin_timing()

    def close(self) -> None:
        """Leave nothing behind in torch, however the script ended."""
        with _quiet():
            self._open.close()

    def measured(self) -> dict[str, Any]:
        """Measurements for the trace's reader: seconds and bytes."""
        assert self.plain is not None
        assert self.profiled is not None
        return {
            "unprofiled_s": self.plain.median,
            "unprofiled_low_s": self.plain.low,
            "unprofiled_high_s": self.plain.high,
            "unprofiled_steps": self.timed,
            "profiled_s": self.profiled.median,
            "peak_bytes": self.peak,
            "torch": torch.__version__,
        }

    def _tell(self, sort: str, share: float, of: int) -> None:
        self.progress(f"step {self.steps}, {sort}", share + 0.3 * min(self._done / of, 1.0))

    def _is_enough(self, wanted: int, fewest: int) -> bool:
        spent = time.monotonic() - self._began
        is_slow = self.is_alone and self._done >= fewest and spent > _PATIENCE
        return self._done >= wanted or is_slow

    def _begin_timing(self) -> None:
        self.on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
        if self.on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        self._clock, self._done, self._began = Clock(self.on_gpu), 0, time.monotonic()
        self._clock.tick()

    def _end_timing(self) -> None:
        assert self._clock is not None
        self.plain, self.timed = Times.of(self._clock.seconds()), self._done
        if self.on_gpu:
            self.peak = float(torch.cuda.max_memory_allocated())
        self._clock, self._done = Clock(self.on_gpu), 0
        self._begin_trace(self.is_alone and self.plain.median > _SLOW)
        self._clock.tick()

    def _begin_trace(self, is_slow: bool) -> None:
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if self.on_gpu:
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        self._settle = 1 if is_slow else _SETTLE
        self._active = 1 if is_slow else self.wanted.traced
        profiler = torch.profiler.profile(
            activities=kinds,
            schedule=torch.profiler.schedule(wait=0, warmup=self._settle, active=self._active),
            record_shapes=True,
            profile_memory=self.wanted.memory,
            on_trace_ready=lambda p: p.export_chrome_trace(str(self.trace)),
        )
        if self.wanted.layers and not _is_compiled():
            self._open.enter_context(named_layers(self.parents))
        with _quiet():
            self._profiler = self._open.enter_context(profiler)

    def _traced(self) -> None:
        assert self._clock is not None
        self._clock.tick()
        with _quiet():
            self._profiler.step()
        self._tell("traced", 0.6, self._settle + self._active)
        if self._done == self._settle + self._active:
            self.profiled = Times.of(self._clock.seconds()[self._settle :])
            self.close()
            self.finish()


def _is_compiled() -> bool:
    """Whether torch.compile has made anything: hooks of ours would make it compile again."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters["frames"].get("ok"))


@contextmanager
def _quiet() -> Iterator[None]:
    """No warnings: torch's profiler warns of what is meant here, that it forgets earlier steps."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
