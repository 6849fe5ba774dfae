"""A budget for a step: limits, the prediction, and whether it stays under them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from foretell.cluster.toml import read
from foretell.errors import InputError
from foretell.report import words


@dataclass(frozen=True)
class Verdict:
    """One limit and the predicted value; None where that is unknown."""

    name: str
    limit: float
    value: float | None
    low: float | None = None
    high: float | None = None

    @property
    def passed(self) -> bool:
        """Whether it stays under the limit; an unknown value does not."""
        return self.value is not None and self.value <= self.limit

    def __str__(self) -> str:
        say = {"step": words.seconds, "memory": words.size}.get(self.name, words.percent)
        if self.value is None:
            return f"{self.name}: unknown; the limit is {say(self.limit)}"
        between = ""
        if self.low is not None and self.high is not None and self.low < self.high:
            between = f" (80 % interval {words.interval(self.low, self.high)})"
        verb = "stays under" if self.passed else "is over"
        return f"{self.name}: {say(self.value)}{between} {verb} {say(self.limit)}"


def limit(text: str, name: str) -> float:
    """The limit a person wrote: `120ms`, `70GiB`, `15%`."""
    unit = {"step": "s", "memory": "B"}.get(name)
    try:
        if unit is None:
            value = float(text.removesuffix("%").strip()) / (100 if text.endswith("%") else 1)
        else:
            value = read(text, unit)
    except ValueError as error:
        example = {"step": "120ms", "memory": "70GiB"}.get(name, "15%")
        raise InputError(f"--{name}-under {error}", hint=f"write it like {example}") from None
    if not math.isfinite(value) or value <= 0:
        raise InputError(f"--{name}-under is `{text}`", hint="a limit is more than zero")
    return value


def verdicts(found: Mapping[str, Any], limits: Mapping[str, float], surely: bool) -> list[Verdict]:
    """Each limit compared with the prediction; `surely` takes the upper end of the step."""
    shares = found["shares"]
    values = {
        "step": found["high_s"] if surely else found["predicted_s"],
        "memory": found["peak_bytes"],
        "exposed": shares.get("exposed communication"),
        "idle": shares.get("idle"),
    }
    return [
        Verdict(name, most, values[name], *_range(found, name)) for name, most in limits.items()
    ]


def _range(found: Mapping[str, Any], name: str) -> tuple[float | None, float | None]:
    return (found["low_s"], found["high_s"]) if name == "step" else (None, None)
