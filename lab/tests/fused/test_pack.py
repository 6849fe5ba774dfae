"""A data set as a small file: nothing is lost, and the plain form is still read."""

from io import BytesIO

import numpy as np
import pytest

from foretell_lab.fused import data as fused_data
from foretell_lab.fused.pack import packed, unpacked


def plain(**changed):
    """Two regions of three nodes and of two, with four edges."""
    nodes = {
        "op": np.array([1, 1, 4, 1, 4], np.uint8),
        "dtype": np.array([0, 0, 1, 0, 1], np.uint8),
        "elements": np.array([8, 4, 8, 8, 0]),
        "looped": np.array([8, 4, 8, 8, 16]),
        "inner": np.ones(5, np.int64),
        "across": np.zeros(5, np.uint8),
        "last": np.array([8, 4, 8, 8, 8]),
        "writes": np.array([0, 0, 32, 0, 7]),
        "flops": np.zeros(5, np.int64),
        "seconds": np.array([np.nan, np.nan, 2e-6, np.nan, 3e-6], np.float32),
    }
    rows = {
        "first": np.array([0, 3, 5], np.int32),
        "edges": np.array([3, 1], np.uint16),
        "source": np.array([1, 0, 0, 0], np.uint16),
        "target": np.array([2, 2, 2, 1], np.uint16),
        "pattern": np.array([1, 0, 2, 0], np.uint8),
        "written": np.array([False, True]),
        "measured": np.array([2e-6, 3e-6], np.float32),
        "spread": np.zeros(2, np.float32),
        "kernels": np.ones(2, np.uint8),
        "family": np.array(["one", "other"]),
        "again": np.array([-1, -1], np.int32),
        "words": np.array(["input", "fresh", "add", "sub", "gelu"]),
    }
    return nodes | rows | changed


def same(one, other):
    return np.array_equal(one, other, equal_nan=np.asarray(one).dtype.kind == "f")


@pytest.mark.parametrize("changed", [{}, {"writes": np.array([0, 0, 31, 9, 5])}])
def test_what_is_packed_comes_back(changed):
    given = plain(**changed)
    found = unpacked(packed(given))
    assert set(found) == set(given)
    assert all(same(given[name], found[name]) for name in given)


def test_a_plain_file_is_read_as_it_is():
    raw = BytesIO()
    np.savez(raw, **plain())
    assert same(unpacked(raw.getvalue())["source"], plain()["source"])


def test_both_forms_are_the_same_data_set():
    raw = BytesIO()
    np.savez_compressed(raw, **plain())
    one, other = fused_data.read(raw.getvalue()), fused_data.read(packed(plain()))
    assert same(one.seconds, other.seconds)
    assert one.family.tolist() == other.family.tolist()
    for name in ("first", "op", "writes", "looped", "source", "target", "pattern", "seconds"):
        assert same(getattr(one.regions, name), getattr(other.regions, name))
