"""Networks by words."""

import pytest

from foretell.errors import InputError
from foretell.pytorch.ranks.wires import network


@pytest.mark.parametrize(
    ("text", "wires", "rates", "delay"),
    [
        ("loopback", "lo", [0.0, 0.0], 0.0),
        ("veth", "veth", [0.0, 0.0], 0.0),
        ("100mbit", "veth", [12.5e6, 12.5e6], 0.0),
        ("1Gbit+100mbit", "veth", [125e6, 12.5e6], 0.0),
        ("2.5gbit~5ms", "tap", [312.5e6, 312.5e6], 0.005),
    ],
)
def test_what_a_text_stands_for(text, wires, rates, delay):
    found = network(text)
    assert (found.wires, found.delay) == (wires, delay)
    assert [found.rate(r) for r in range(2)] == rates


def test_the_last_rate_counts_for_all_that_follow():
    assert network("1gbit+100mbit").rate(7) == 12.5e6


@pytest.mark.parametrize("text", ["", "fast", "100", "100mbit~", "0mbit", "100mbit~5m", "1gbit+"])
def test_what_is_no_network(text):
    if text == "100mbit~":
        assert network(text).delay == 0.0
        return
    with pytest.raises(InputError, match="hint: write loopback"):
        network(text)
