"""Quantities: what people write, and that writing and reading are inverses."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretell.cluster import read


@pytest.mark.parametrize(
    ("text", "unit", "value"),
    [
        ("25 GB/s", "B/s", 25e9),
        ("200 Gb/s", "B/s", 25e9),
        ("200Gbit/s", "B/s", 25e9),
        ("80 GiB", "B", 80 * 2**30),
        ("80 GB", "B", 80e9),
        ("0.6 us", "s", 0.6e-6),
        ("0.6 µs", "s", 0.6e-6),
        ("90 ns", "s", 90e-9),
        ("312 Tflop/s", "flop/s", 312e12),
        ("1.41 GHz", "Hz", 1.41e9),
        ("32.77 $/h", "$/h", 32.77),
        ("1e9", "B/s", 1e9),
        (12, "B/s", 12.0),
    ],
)
def test_reads_what_people_write(text: object, unit: str, value: float) -> None:
    assert read.read_cluster(text, unit) == value


@pytest.mark.parametrize(
    "text", ["25 GB", "25 gigabytes", "", "fast", "25 25 GB/s", "GB/s", "1 KiHz", "1.4.5 GB/s"]
)
def test_refuses_other_units(text: str) -> None:
    with pytest.raises(ValueError, match="is `"):
        read.read_cluster(text, "B/s")


@pytest.mark.parametrize("value", [True, None, [1], {"a": 1}])
def test_refuses_other_types(value: object) -> None:
    with pytest.raises(ValueError, match="not a quantity"):
        read.read_cluster(value, "B/s")


@given(
    st.floats(min_value=1e-12, max_value=1e18, allow_nan=False),
    st.sampled_from(["B", "B/s", "s", "Hz", "W", "flop/s", "$/h"]),
)
def test_writing_and_reading_are_inverses(value: float, unit: str) -> None:
    assert read.read_cluster(read.write(value, unit), unit) == value


def test_nan_and_infinity_are_read_so_that_they_can_be_named() -> None:
    assert math.isnan(read.read_cluster("nan", "B/s"))
    assert math.isinf(read.read_cluster("inf", "B/s"))


def test_short_is_for_reading() -> None:
    assert read.short(2039e9, "B/s") == "2.04 TB/s"
    assert read.short(2.73e-6, "s") == "2.73 us"
