"""Sets of ranks as short text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretell.errors import InputError
from foretell.graph.graph import group_text, ranks_of


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([], ""),
        ([3], "3"),
        ([0, 1], "0-1"),
        (range(8), "0-7"),
        (range(0, 64, 8), "0-56/8"),
        ([0, 3, 5], "0+3+5"),
        ([0, 1, 2, 3, 8, 9, 10, 11], "0-3+8-11"),
        ([0, 2], "0+2"),
        ([0, 2, 4], "0-4/2"),
        ([3, 2, 1], "3+2+1"),
        ([5, 5], "5+5"),
    ],
)
def test_groups_as_people_write_them(ranks, text):
    assert group_text(ranks) == text
    assert ranks_of(text) == tuple(ranks)


@given(st.lists(st.integers(0, 40), max_size=12))
def test_any_ranks_in_any_order_read_back(ranks):
    assert ranks_of(group_text(ranks)) == tuple(ranks)


@pytest.mark.parametrize(
    "text",
    ["x", "1-", "-1", "1-2-3", "0-8/0", "0-8/00", "5-2", "0++1", "+", "0+", " 1", "１", "1.5"],
)
def test_what_names_no_ranks(text):
    with pytest.raises(InputError, match="names no ranks") as error:
        ranks_of(text)
    assert "write 0-7" in error.value.hint


@pytest.mark.parametrize("text", ["0-99999999", "0-999999999/2", "0-999999+0-999999"])
def test_more_ranks_than_any_machine_has(text):
    with pytest.raises(InputError, match="names too many ranks"):
        ranks_of(text)
    with pytest.raises(InputError, match="names no ranks"):
        ranks_of("0-99999999999999")
