"""Plans in a training loop of one's own.

    model, optimizer = foretell.parallelize(model, optimizer, "dp=2,tp=2,zero=1")
    for x, y in batches:                            # of this data-parallel rank
        loss(model(x), y).backward()                # gradients are whole when it returns
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

`model.foretell` is the `Deployed`: `no_sync()` for accumulation, `share` of this rank's loss.
"""

from __future__ import annotations

from typing import Any

from foretell.errors import InputError
from foretell.plan import Plan, read, unsupported
from foretell.pytorch.deploy.apply import Deployed, deploy
from foretell.pytorch.deploy.sync import Sync


def parallelize(model: Any, optimizer: Any, plan: Plan | str, **options: Any) -> tuple[Any, Any]:
    """The model and optimizer as a plan wants them on this rank, for a plain loop over them.

    Every rank calls it inside an initialised process group; options are those of `deploy`.
    """
    made = in_own_loop(model, optimizer, read(plan) if isinstance(plan, str) else plan, **options)
    object.__setattr__(made.model, "foretell", made)
    return made.model, optimizer


def in_own_loop(model: Any, optimizer: Any, plan: Plan, **options: Any) -> Deployed:
    """A model deployed for a loop that is not ours: gradients are whole when a backward ends."""
    require_own_loop(plan)
    made = deploy(model, optimizer, plan, own_loop=True, **options)
    if made.stages is not None:
        for one in getattr(optimizer, "each", [optimizer]):
            made.stages.share_state(one)
    if isinstance(made.sync, Sync):
        made.sync.finish_with_backward(made.model.parameters(), optimizer)
    if made.usage is not None:
        made.usage.average_in_backward(made.model)
        optimizer.register_step_pre_hook(lambda *_: made.usage.finish())
    return made


def require_own_loop(plan: Plan) -> None:
    """Raise where a plan takes its steps itself."""
    found = unsupported.in_own_loop(plan)
    if found:
        raise InputError(
            f"a plan cannot be run in a loop of one's own with {found[0]}",
            hint="take its steps: foretell.deploy(model, optimizer, plan).step(inputs, target), "
            "or `foretell run`",
        )
