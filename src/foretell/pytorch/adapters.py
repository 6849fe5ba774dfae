"""Plans under the loops of others: Hugging Face's Trainer and Lightning's, as far as hooks go.

    Trainer(model, …, callbacks=[hugging_face(model, plan)])
    lightning.Trainer(…, strategy=lightning_strategy(plan))

Both hand data out and keep ranks in step as they always do; what happens between ranks is the
plan's, in place of their DistributedDataParallel. Gradients are whole when a backward ends, so
that clipping sees what it should. A pipeline has a loop of its own, and is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from foretell.errors import InputError
from foretell.plan import Plan
from foretell.pytorch.deploy.apply import Deployed
from foretell.pytorch.deploy.loop import in_own_loop, require_own_loop


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
