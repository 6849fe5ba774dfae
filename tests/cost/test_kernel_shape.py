"""Shapes as text."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretell.cost.kernel import parse_shape as parse
from foretell.cost.kernel import shape_columns as columns
from foretell.cost.kernel import write_shape as write
from foretell.errors import InputError

keys = st.sampled_from(["b", "m", "n", "k", "heads", "stride"])
values = st.one_of(st.integers(0, 10**9), st.floats(0, 1e9).filter(lambda x: x == x))


@given(st.dictionaries(keys, values, min_size=1))
def test_a_shape_reads_back(shape):
    assert dict(parse(write(shape))) == {k: float(v) for k, v in shape.items()}


def test_words_are_numbers():
    assert dict(parse("causal=yes,direction=bwd,math=no")) == {
        "causal": 1,
        "direction": 1,
        "math": 0,
    }


def test_a_missing_key_is_nan_and_spaces_are_forgiven():
    found = columns(["m=1, n=2", "m=3", ""], 3)
    np.testing.assert_array_equal(found["m"], [1, 3, np.nan])
    np.testing.assert_array_equal(found["n"], [2, np.nan, np.nan])


def test_columns_are_broadcast():
    found = columns({"m": [1, 2], "n": 5}, 2)
    np.testing.assert_array_equal(found["n"], [5, 5])


@pytest.mark.parametrize("text", ["m=one", "m", "m=1,n="])
def test_what_is_no_number_is_said_with_its_place(text):
    with pytest.raises(InputError, match="is not `key=number`"):
        parse(text)
