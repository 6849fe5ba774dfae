"""Durations, intervals and strategies as people write them."""

import pytest

from foretell.report import words


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.01234, "12.3 ms"), (90, "90 s"), (119.9, "120 s"), (120, "2 min"), (125, "2 min 5 s"),
        (3599.9, "1 h"), (5400, "1 h 30 min"), (848036, "9 d 20 h"), (86400 * 1500, "1,500 d"),
        (-7200, "-2 h"), (0, "0 s"),
    ],
)  # fmt: skip
def test_seconds_for_people(value, text):
    assert words.seconds(value) == text


def test_an_interval_names_its_unit_once():
    assert words.interval(0.022, 0.0256) == "22 to 25.6 ms"
    assert words.interval(0.0009, 0.0012) == "900 µs to 1.2 ms"
    assert words.interval(100, 7200) == "100 s to 2 h"


def test_speedups_and_strategies():
    assert [words.speedup(x) for x in (2.0, 0.5, 1.0)] == [
        "2.00 × faster", "2.00 × slower", "no faster",
    ]  # fmt: skip
    assert words.strategy("oracle: zero+tensor+pipeline") == "oracle: ZeRO-1 + TP + PP"
