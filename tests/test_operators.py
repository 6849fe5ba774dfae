"""The table of operators: traits are known, rules are functions, aliases lead somewhere."""

import pytest

from foretell.cost import aten
from foretell.cost.fused_regions import KINDS, WORDS
from foretell.memory import flow, outputs
from foretell.operators import OPERATORS, PRODUCTS, UNFUSED, having, window

TRAITS = {
    "alias", "word", "inner", "dropout_causal", "work", "steps", "kernel", "flops", "reads",
    "makes", "saves", "parameters", "autocast", "measured", "traced", "fusion", "views", "compiled",
}  # fmt: skip


def test_every_trait_has_a_meaning():
    assert {trait for traits in OPERATORS.values() for trait in traits} == TRAITS
    assert set(having("fusion").values()) == {*KINDS, UNFUSED}
    assert set(having("autocast").values()) == {"half", "fp32", "widens", "table"}
    assert set(having("traced").values()) == {"whole", "free"}


def test_rules_are_functions_and_names_lead_to_operators():
    assert all(map(callable, (*aten.RULES.values(), *outputs.RULES.values())))
    assert all(name in OPERATORS for name in having("alias").values())
    assert all(name in WORDS for name in having("word").values())
    assert PRODUCTS == {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}


def test_what_is_saved_is_read_as_it_is_written():
    assert flow.Kept.read("in 0 4 5, out 0 3, lists") == flow.Kept((0, 4, 5), (0, 3), None, True)
    assert flow.Kept.read("pair 1 2") == flow.Kept(pair=(1, 2))
    assert flow.Kept.read("nothing") == flow.Kept()


def test_a_window_makes_what_torch_makes():
    torch = pytest.importorskip("torch")
    image, kernel = torch.zeros(1, 1, 13, 9), torch.zeros(1, 1, 3, 5)
    options = {"stride": (2, 1), "padding": (1, 2), "dilation": (2, 1)}
    made = torch.nn.functional.conv2d(image, kernel, **options).shape[2:]
    assert window((13, 9), (3, 5), *options.values()) == tuple(made)
    more = {**options, "output_padding": (1, 0)}
    made = torch.nn.functional.conv_transpose2d(image, kernel, **more).shape[2:]
    assert window((13, 9), (3, 5), *more.values(), turned=True) == tuple(made)
    made = torch.nn.functional.max_pool2d(image, 4, 3, 1, ceil_mode=True).shape[2:]
    assert window((13, 9), (4, 4), (3,), (1,), up=True) == tuple(made)
