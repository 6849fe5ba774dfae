"""Whole compiled steps: priced from their kernels, and plans put in order."""

from foretell.validate.fused_steps import Step, lines, order, steps


def test_every_shipped_step_is_priced():
    found = steps()
    assert found
    for step in found:
        assert 0 < step.priced < 10 * step.measured
        assert step.kernels > 0


def test_order_counts_pairs_of_one_model_that_really_differ():
    made = [
        Step("a", "x", 1, 1.0, 1.1), Step("a", "y", 1, 2.0, 1.9), Step("a", "z", 1, 2.01, 1.0),
        Step("b", "x", 1, 5.0, 1.0),
    ]  # fmt: skip
    assert order(made) == (1, 2)  # x before y is told, x before z is not, y and z are a tie
    assert lines(made).__next__().startswith("step a")
    assert list(lines(made))[-1].endswith("1 of 2 pairs in order")


def test_no_steps_no_lines():
    assert list(lines([])) == []
