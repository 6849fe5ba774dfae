"""Plans as settings of other programs: text only, none of them needs to be installed.

    export(plan, "megatron")      {"arguments.txt": "--tensor-model-parallel-size 8 …"}

What a program cannot say is refused by name. `read_*` takes a program's own file back to a plan.
"""

from collections.abc import Callable

from foretell.errors import unknown
from foretell.plan.export.configs import accelerate, lightning, nanotron
from foretell.plan.export.deepspeed import deepspeed, read_deepspeed
from foretell.plan.export.megatron import megatron, read_megatron
from foretell.plan.export.messages import with_messages
from foretell.plan.export.snippets import ddp, fsdp2
from foretell.plan.export.torchtitan import (
    read_schedule,
    read_torchtitan,
    schedule_csv,
    torchtitan,
)
from foretell.plan.plan import Plan

Files = dict[str, str]  # what each file is to be called, and its text
EXPORTS: dict[str, Callable[[Plan], Files]] = {
    "torchtitan": torchtitan,
    "megatron": megatron,
    "deepspeed": deepspeed,
    "accelerate": accelerate,
    "lightning": lightning,
    "nanotron": nanotron,
    "ddp": ddp,
    "fsdp2": fsdp2,
}


def export(plan: Plan, to: str) -> Files:
    """The files that make a program run a plan."""
    if to not in EXPORTS:
        raise unknown("program to export a plan to", to, EXPORTS)
    return EXPORTS[to](plan)


__all__ = [
    "EXPORTS",
    "export",
    "read_deepspeed",
    "read_megatron",
    "read_schedule",
    "read_torchtitan",
    "schedule_csv",
    "with_messages",
]
