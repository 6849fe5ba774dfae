"""Profiles and plans under the loops of others: Hugging Face's Trainer and Lightning's.

    profiled = profiler("step.json.gz")         # a loop of one's own: profiled.step() ends a step
    Trainer(model, …, callbacks=[profile_trainer("step.json.gz")])
    lightning.Trainer(…, callbacks=[profile_lightning("step.json.gz")])

Steps are timed, then traced, while training goes on; nothing more is done once the trace is there.

    Trainer(model, …, callbacks=[hugging_face(model, plan)])
    lightning.Trainer(…, strategy=lightning_strategy(plan))

Both hand data out and keep ranks in step as they always do; what happens between ranks is the
plan's, in place of their DistributedDataParallel. Gradients are whole when a backward ends, so
that clipping sees what it should. A pipeline has a loop of its own, and is refused.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from foretell.errors import InputError
from foretell.plan import Plan
from foretell.pytorch.deploy.apply import Deployed, in_own_loop
from foretell.pytorch.deploy.requirements import require_own_loop
from foretell.pytorch.intake.request import Wanted
from foretell.pytorch.profile.run import Recorder, write


class Profiler:
    """Times and traces the steps of a loop of one's own; `warmup`, `timed` and `traced` count."""

    def __init__(self, output: str | os.PathLike[str], **counts: Any) -> None:
        self.output = Path(output)
        self.is_done = False
        self._folder = tempfile.TemporaryDirectory(prefix="foretell-")
        trace = Path(self._folder.name) / "trace.json"
        is_alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
        self._recorder = Recorder(Wanted(**counts), trace, finish=self._finish, is_alone=is_alone)

    def step(self) -> None:
        """A step has ended."""
        if not self.is_done:
            self._recorder.end()

    def _finish(self) -> None:
        self.is_done = True
        write(self._recorder.trace, self.output, self._recorder.measured())
        self._folder.cleanup()


profiler = Profiler


def profile_trainer(output: str | os.PathLike[str], **counts: Any) -> Any:
    """A callback that profiles the steps of a Hugging Face Trainer."""
    from transformers import TrainerCallback

    profiled = profiler(output, **counts)

    class Profiling(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            profiled.step()

    return Profiling()


def profile_lightning(output: str | os.PathLike[str], **counts: Any) -> Any:
    """A callback that profiles the steps of a Lightning Trainer, accumulated ones as one."""
    try:
        from lightning.pytorch import Callback
    except ModuleNotFoundError:
        from pytorch_lightning import Callback

    profiled = profiler(output, **counts)

    class Profiling(Callback):  # type: ignore[misc]
        steps = 0

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step != self.steps:
                self.steps = trainer.global_step
                profiled.step()

    return Profiling()


def hugging_face(model: Any, plan: Plan, **options: Any) -> Any:
    """A callback that deploys the model of a Hugging Face Trainer when training begins."""
    from transformers import TrainerCallback

    require_own_loop(plan)
    model._is_accelerate_prepared = True  # accelerate's own word for "do not wrap it"

    class Deploying(TrainerCallback):  # type: ignore[misc]
        deployed: Deployed

        def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            made, optimizer = given["model"], given["optimizer"]
            inner = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
            self.deployed = in_own_loop(made, inner, plan, **options)
            made.no_sync = self.deployed.no_sync  # accelerate asks for it when it accumulates

    return Deploying()


def lightning_strategy(plan: Plan, **options: Any) -> Any:
    """A strategy for Lightning's Trainer that deploys instead of wrapping."""
    from lightning.pytorch.strategies import DDPStrategy

    require_own_loop(plan)

    class Deploying(DDPStrategy):  # type: ignore[misc]
        deployed: Deployed | None = None

        def configure_ddp(self) -> None:
            """Leave the module as it is."""

        def setup_optimizers(self, trainer: Any) -> None:
            super().setup_optimizers(trainer)
            if len(self.optimizers) != 1:
                raise InputError(
                    f"the module has {len(self.optimizers)} optimizers, a plan is for one"
                )
            self.deployed = in_own_loop(self.model, self.optimizers[0], plan, **options)

        @contextmanager
        def block_backward_sync(self) -> Iterator[None]:
            assert self.deployed is not None
            with self.deployed.no_sync():
                yield

    return Deploying()
