"""A budget for a step: limits, the prediction, and whether it stays under them; also for CI.

Verdicts are printed, or written as JUnit's XML and as Markdown for a summary of CI.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape, quoteattr

from foretell.cluster.read import read_cluster as read
from foretell.errors import InputError
from foretell.report import words

Rows = Sequence[tuple[str, bool, str]]  # (name, passed, sentence)
_LEGAL = {chr(c): None for c in range(32) if c not in (9, 10, 13)}  # what XML cannot hold


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


def junit(rows: Rows, suite: str) -> str:
    """The XML that CI servers read."""
    failed = sum(not passed for _, passed, _ in rows)
    name = quoteattr(_legal_xml(suite))
    lines = [
        '<?xml version="1.0" encoding="UTF-8"?>',
        f'<testsuites tests="{len(rows)}" failures="{failed}">',
        f'<testsuite name={name} tests="{len(rows)}" failures="{failed}" errors="0" skipped="0">',
    ]
    for test, passed, sentence in rows:
        text = _legal_xml(sentence)
        body = f"<system-out>{escape(text)}</system-out>"
        if not passed:
            body = f"<failure message={quoteattr(text)}>{escape(text)}</failure>"
        case = f"<testcase classname={name} name={quoteattr(_legal_xml(test))}>"
        lines.append(f"{case}{body}</testcase>")
    return "\n".join([*lines, "</testsuite>", "</testsuites>", ""])


def markdown(rows: Rows, title: str) -> str:
    """A table for a summary."""
    lines = [f"### foretell: {_cell(title)}", "", "| budget | verdict | |", "|---|---|---|"]
    for test, passed, sentence in rows:
        lines.append(
            f"| {_cell(test)} | {'✅ under' if passed else '❌ over'} | {_cell(sentence)} |"
        )
    return "\n".join([*lines, "", ""])


def _legal_xml(text: str) -> str:
    return text.translate(str.maketrans(_LEGAL))  # type: ignore[arg-type]


def _cell(text: str) -> str:
    """Text that cannot leave its cell."""
    plain = escape(_legal_xml(text).replace("\n", " "))
    for sign in "\\`*_[]|":
        plain = plain.replace(sign, f"\\{sign}")
    return plain
