"""Which ops share a kernel, as data."""

import pytest

from foretell.cost.fused_regions import (
    KIND_CODE,
    KIND_OF,
    KINDS,
    WORDS,
    codes_of,
    is_fusible,
    kind_of,
    may_fuse,
    word_of,
)


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("aten::_softmax", "softmax"),
        ("aten._softmax.default", "softmax"),
        ("aten::native_layer_norm_backward", "layer_norm_backward"),
        ("aten._to_copy.default", "cast"),
        ("cudnn_batch_norm", "batch_norm"),
        ("aten.add.Tensor", "add"),
    ],
)
def test_names_become_words(name, word):
    assert word_of(name) == word
    assert word in KIND_OF


def test_every_word_has_a_kind_and_a_number():
    assert len(set(WORDS)) == len(WORDS) == len(KIND_CODE)
    assert {KINDS[k] for k in KIND_CODE} <= set(KINDS)
    assert codes_of(["add", "nobody knows"]).tolist() == [WORDS.index("add"), WORDS.index("other")]


def test_an_unknown_op_is_not_fused():
    assert kind_of("mystery") == "extern"
    assert not is_fusible("extern")


@pytest.mark.parametrize(
    ("producer", "consumer", "sizes", "legal"),
    [
        ("pointwise", "pointwise", (64, 64, 64), True),
        ("pointwise", "pointwise", (8, 64, 64), True),  # read broadcast
        ("pointwise", "pointwise", (64, 8, 8), False),
        ("pointwise", "reduction", (64, 64, 8), True),
        ("reduction", "pointwise", (8, 64, 64), True),  # used again over the same places
        ("reduction", "pointwise", (8, 8, 64), True),  # row by row
        ("reduction", "pointwise", (8, 32, 64), False),
        ("norm", "pointwise", (64, 64, 64), True),
        ("template", "pointwise", (64, 64, 64), False),
        ("pointwise", "template", (64, 64, 64), False),
        ("pointwise", "extern", (64, 64, 64), False),
        ("scatter", "pointwise", (64, 64, 64), False),
        ("view", "reduction", (64, 64, 8), True),
    ],
)
def test_pairs(producer, consumer, sizes, legal):
    made, looped, rows = sizes
    assert may_fuse(producer, consumer, made=made, looped=looped, rows=rows) is legal


def test_products_take_consumers_where_the_compiler_writes_them():
    assert may_fuse("template", "pointwise", made=64, looped=64, rows=64, template=True)
    assert not may_fuse("template", "norm", made=64, looped=64, rows=8, template=True)
