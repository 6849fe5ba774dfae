"""Plans under the loops of others: Hugging Face's Trainer and Lightning's, as far as hooks go.

    Trainer(model, …, callbacks=[hugging_face(model, plan)])
    lightning.Trainer(…, strategy=lightning_strategy(plan))

Both hand data out and keep ranks in step as they always do; what happens between ranks is the
plan's, in place of their DistributedDataParallel. Gradients are whole when a backward ends, so
that clipping sees what it should. Refused are a pipeline, which has a loop of its own, and plans
that leave a gradient on one rank alone: what such a loop clips by would not be the norm of all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from foretell.errors import InputError
from foretell.plan import Plan
from foretell.pytorch.deploy.apply import Deployed, deploy
from foretell.pytorch.deploy.sync import Sync


def hugging_face(model: Any, plan: Plan, **options: Any) -> Any:
    """A callback that deploys the model of a Hugging Face Trainer when training begins."""
    from transformers import TrainerCallback

    _check(plan)
    model._is_accelerate_prepared = True  # accelerate's own word for "do not wrap it"

    class Deploying(TrainerCallback):  # type: ignore[misc]
        deployed: Deployed

        def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            made, optimizer = given["model"], given["optimizer"]
            inner = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
            self.deployed = deployed(made, inner, plan, **options)
            made.no_sync = self.deployed.no_sync  # accelerate asks for it when it accumulates

    return Deploying()


def lightning_strategy(plan: Plan, **options: Any) -> Any:
    """A strategy for Lightning's Trainer that deploys instead of wrapping."""
    from lightning.pytorch.strategies import DDPStrategy

    _check(plan)

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
            self.deployed = deployed(self.model, self.optimizers[0], plan, **options)

        @contextmanager
        def block_backward_sync(self) -> Iterator[None]:
            assert self.deployed is not None
            with self.deployed.no_sync():
                yield

    return Deploying()


def deployed(model: Any, optimizer: Any, plan: Plan, **options: Any) -> Deployed:
    """A model deployed for a loop that is not ours: gradients are whole when a backward ends."""
    _check(plan)
    made = deploy(model, optimizer, plan, **options)
    if isinstance(made.sync, Sync):
        made.sync.finish_with_backward(made.model.parameters())
    return made


def _check(plan: Plan) -> None:
    why = {
        f"pp={plan.pp} has a loop of its own": plan.pp > 1,
        "stages has a loop of its own": bool(plan.stages),
        "groups has a loop of its own": bool(plan.groups),
        "zero=1 leaves each gradient on one rank": plan.zero == 1,
        "sync leaves some gradients on one rank": any(
            way.startswith(("ps:", "sharded")) for _, way in plan.sync
        ),
    }
    found = [word for word, is_so in why.items() if is_so]
    if found:
        raise InputError(
            f"a plan with {found[0]}",
            hint="take its steps yourself: foretell.deploy(…).step, or `foretell run`",
        )
