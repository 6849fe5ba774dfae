"""Models of many kinds under plans of every kind train as one process does, or are refused.

A part of the matrix, spread over models; the whole is `python -m tests.pytorch.deploy.matrix`.
"""

import pytest

pytest.importorskip("torch")

from tests.pytorch.deploy import matrix, zoo
from tests.pytorch.deploy.ranks import on_ranks

FACTORS = "first.weight+factors/first.bias+factors"
PAIRS = {  # what has been wrong before, besides a model or two for each plan
    2: [
        ("tied", "pp=2,micro_batch=2"),
        ("tied", "dp=2,zero=3"),
        ("moe", "dp=2,zero=1"),
        ("moe", "dp=2,zero=2"),
        ("cnn", "dp=2"),
        ("cnn", "pp=2,micro_batch=2"),
        ("unused", "dp=2"),
        ("gpt", "tp=2,sp=yes"),
        ("frozen", "pp=2,micro_batch=2,schedule=zb-h1"),
        ("twice", "pp=2,micro_batch=2"),  # a module in two places was run once
        ("twice", "tp=2"),
        ("mlp", "pp=2,micro_batch=2,dtype=fp16"),
        ("gpt", "tp=2,dtype=fp16"),  # split gradients beside whole ones
        ("twice", "dp=2,zero=3,dtype=fp8"),
        ("transposed", "tp=2"),  # a weight used outside its layer
        ("wnorm", "tp=2"),
        ("skips", "tp=2"),  # an output changed in place
        ("scalar", "dp=2,zero=3"),
        ("mha", "tp=2,sp=yes"),
        ("changing", "pp=2,micro_batch=2,recompute=selective"),
        ("changing", "pp=2,micro_batch=2,schedule=zb-h1"),  # weights used twice, backward in two
        (
            "mlp",
            "dp=2,zero=3,shares=6+2,micro_batch=2",
        ),  # ranks gathered different numbers of times
        ("buffered", "dp=2,shares=6+2,micro_batch=2"),  # ranks waited for each other's buffers
        ("moe", "groups=@+factors+0:4+1:4/@+factors+0:5+1:3"),  # ranks hung: rows by values
        ("transposed", f"dp=2,sync={FACTORS}"),  # a weight used beside its layer
        ("transposed", f"dp=2,dtype=bf16,sync={FACTORS}"),
        ("moe", "pp=2,micro_batch=2,whatifs=fused-optimizer"),  # experts first used later
    ],
    4: [
        ("tied", "dp=2,pp=2,micro_batch=2"),
        ("gpt", "cp=2,tp=2,sp=yes"),
        ("mlp", "dp=2,pp=2,micro_batch=2,shares=2+6,zero=2"),
        ("skips", "dp=2,pp=2,micro_batch=2,shares=6+2,zero=3"),  # sharded stages that are no line
        ("gpt", "segments=?+0-1/?+2-3+tp:2,micro_batch=4"),  # tied, other replicas each
        ("cnn", "segments=?+0/?+1-2+zero:3/?+3,micro_batch=2"),
        ("cnn", "segments=?+0-1+shares:6x2/?+2-3+zero:3+shares:2x6,micro_batch=4"),
        ("dropout", "segments=?+0-1+tp:2+sp:yes/?+2-3+zero:2+recompute:full,micro_batch=4"),
        ("moe", "tp=2,pp=2"),  # routes by what shapes are tried with
        ("gpt", "dp=2,tp=2,placement=1+0+2+3"),  # parts were those of another rank
        ("cnn", "dp=2,filter=2,placement=1+0+2+3"),
        ("grucell", "dp=4,zero=3,shard=2,placement=0+1+3+2"),
    ],
}


def some(size, every):
    """One plan of `every`, each with one of the models in turn."""
    names = list(zoo.MODELS)
    spread = [
        (names[place % len(names)], plan)
        for place, plan in enumerate(matrix.PLANS[size])
        if place % every == 0
    ]
    return list(dict.fromkeys(PAIRS[size] + spread))


def bad(found):
    return {pair: words for pair, (kind, words) in found.items() if kind in ("wrong", "crash")}


@pytest.mark.parametrize(("size", "every"), [(2, 4), (4, 8)])
def test_a_part_of_the_matrix(size, every):
    found = matrix.run(size, some(size, every))
    assert not bad(found)
    assert sum(kind == "equal" for kind, _ in found.values()) > len(found) / 2


def apart(steps):
    """A loss that no split of the batch keeps, verified: the first tensor that is off."""
    from torch import nn

    from foretell.plan import Plan
    from foretell.pytorch.deploy.verify import Case, verify

    def loss(output, target):
        return nn.functional.cross_entropy(output, target) + output.std()

    case = Case(
        lambda: zoo.make("mlp"), matrix.optimizer, lambda step: zoo.parts("mlp", [4, 4], step), loss
    )
    found = verify(case, Plan.parse("dp=2"), steps)
    return found.is_equal, {d.what for d in found.differences}, found.gradient_off


def test_a_plan_that_trains_differently_is_reported():
    for is_equal, whats, off in on_ranks(2, apart, 1):
        assert not is_equal
        assert "gradient" in whats
        assert off > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("size", list(matrix.PLANS))
def test_the_whole_matrix(size):
    found = matrix.run(size, [(m, p) for p in matrix.PLANS[size] for m in zoo.MODELS])
    assert not bad(found)
