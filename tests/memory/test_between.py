"""Between which sizes the peak of a changed step lies."""

import pytest

from foretell.whatif import parse
from foretell.whatif.registry import peak_between


def between(*specs, is_given=False, ran_before=False):
    changes = [parse(spec) for spec in specs]
    return peak_between(1e9, changes, is_given=is_given, ran_before=ran_before)


@pytest.mark.parametrize("spec", ["amp", "batch:times=2", "compile", "channels-last", "checkpoint"])
def test_what_is_predicted_lies_inside(spec):
    for is_given in (False, True):
        low, high = between(spec, is_given=is_given)
        assert low < 1e9 < high


def test_a_measured_peak_tells_more():
    low, high = between("amp")
    least, most = between("amp", is_given=True)
    assert most - least < high - low


def test_what_a_process_ran_before_may_still_be_held():
    assert between("amp", ran_before=True)[1] > between("amp")[1] + 1e8
    assert between("amp", ran_before=True)[0] == between("amp")[0]
    assert between("amp", is_given=True, ran_before=True) == between("amp", is_given=True)


def test_changes_together_are_as_unsure_as_the_least_sure():
    low, high = between("amp", "compile")
    assert low == min(between(spec)[0] for spec in ("amp", "compile"))
    assert high == max(between(spec)[1] for spec in ("amp", "compile"))
