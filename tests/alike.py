"""Printed text compared with recorded text: the same words, numbers as near as they are told."""

import re

NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")
NEAR = 5e-3  # share of a number that another library's rounding may move it by


# CPU time is measured: whatever it is, it is no part of what a page says.
MEASURED = re.compile(r"[\d.]+ (?:µs|ms|s) of CPU time")


def alike(found, recorded):
    """The first line that differs, or nothing."""
    lines, wanted = (MEASURED.sub("of CPU time", x).splitlines() for x in (found, recorded))
    for line, other in zip(lines, wanted, strict=False):
        if _words(line) != _words(other) or not all(map(_near, _numbers(line), _numbers(other))):
            return f"found    {line}\nrecorded {other}"
    return "" if len(lines) == len(wanted) else f"{len(lines)} lines, {len(wanted)} recorded"


def _words(line):
    return re.sub(r"[\s─━]+", " ", NUMBER.sub("#", line)).strip()


def _numbers(line):
    return NUMBER.findall(line)


def _near(found, recorded):
    digits = len(recorded.partition(".")[2].partition("e")[0])
    step = 1.01 * 10.0**-digits if "." in recorded else 0.0
    return abs(float(found) - float(recorded)) <= max(NEAR * abs(float(recorded)), step)
