"""Types of the `--json` answers of `schedule`, `oracle`, `predict` and `plan`.

An answer is checked once, here, where it is read; what draws it can rely on every field.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from foretell.errors import InputError

MOST_DEVICES = 1 << 16  # of a schedule that is drawn
Time = Annotated[float, Meta(ge=-1e18, le=1e18)]
Amount = Annotated[float, Meta(ge=0, le=1e30)]
Count = Annotated[int, Meta(ge=0, le=1 << 31)]
Device = Annotated[int, Meta(ge=0, lt=MOST_DEVICES)]
T = TypeVar("T")


class BlockAnswer(msgspec.Struct):
    """One block of one micro-batch in a schedule; without an end it lasts until the next."""

    block: int | str
    micro_batch: Count
    start: Time
    devices: list[Device]
    end: Time | None = None
    kind: str = ""


class ScheduleAnswer(msgspec.Struct):
    """The answer of `foretell schedule`."""

    blocks: list[BlockAnswer]
    makespan: Time
    period: Time
    unroll: Count = 1
    micro_batches: Count = 0
    name: str | None = None
    peak_memory: list[Time] = []
    proven: bool = False
    per_micro_batch: Time | None = None
    bubble: Time | None = None


class LayoutAnswer(msgspec.Struct):
    """One row of what `foretell oracle`, `plan` or `predict` print."""

    step_s: Annotated[float, Meta(gt=0, le=1e18)]
    plan: str | dict[str, Any] = ""
    gpus: Amount | None = None
    devices: Amount | None = None
    ranks: Amount | None = None
    strategy: str | None = None
    samples_per_s: Amount | None = None
    samples_s: Amount | None = None
    batch: Amount | None = None
    global_batch: Amount | None = None
    peak_bytes: Amount | None = None
    missing_bytes: Amount | None = None
    fits: bool | None = None
    advice: Any = None
    findings: Any = None
    limits: Any = None


class PlanAnswer(msgspec.Struct):
    """The answer of `foretell plan`."""

    predicted_s: Time | None = None
    baselines: dict[str, Time | None] | None = None
    baseline_s: Time | None = None
    bound_s: Time | None = None


class RunAnswer(msgspec.Struct):
    """The answer of `foretell run`: measured and predicted step."""

    measured_s: Amount
    predicted_s: Amount


_NOUN: dict[Any, str] = {
    ScheduleAnswer: "schedule",
    LayoutAnswer: "layout",
    PlanAnswer: "answer of `plan`",
    RunAnswer: "answer of `run`",
}


def of(value: Any, kind: type[T], name: str) -> T:
    """A value as one of these types, or an error that says what is wrong with it."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise InputError(
            f"`{name}` is no {_NOUN[kind]}: {error}", hint="give what a command prints with --json"
        ) from None
