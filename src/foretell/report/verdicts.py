"""Verdicts for machines that gather tests: JUnit's XML, and Markdown for a summary of CI."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape, quoteattr

Rows = Sequence[tuple[str, bool, str]]  # (name, passed, sentence)
_LEGAL = {chr(c): None for c in range(32) if c not in (9, 10, 13)}  # what XML cannot hold


def junit(rows: Rows, suite: str) -> str:
    """The XML that CI servers read."""
    failed = sum(not passed for _, passed, _ in rows)
    name = quoteattr(_clean(suite))
    lines = [
        '<?xml version="1.0" encoding="UTF-8"?>',
        f'<testsuites tests="{len(rows)}" failures="{failed}">',
        f'<testsuite name={name} tests="{len(rows)}" failures="{failed}" errors="0" skipped="0">',
    ]
    for test, passed, sentence in rows:
        text = _clean(sentence)
        body = f"<system-out>{escape(text)}</system-out>"
        if not passed:
            body = f"<failure message={quoteattr(text)}>{escape(text)}</failure>"
        case = f"<testcase classname={name} name={quoteattr(_clean(test))}>"
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


def _clean(text: str) -> str:
    return text.translate(str.maketrans(_LEGAL))  # type: ignore[arg-type]


def _cell(text: str) -> str:
    """Text that cannot leave its cell."""
    plain = escape(_clean(text).replace("\n", " "))
    for sign in "\\`*_[]|":
        plain = plain.replace(sign, f"\\{sign}")
    return plain
