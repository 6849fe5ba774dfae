"""Several what-ifs: one answer whatever order they are written in, or one refusal."""

from functools import cache
from itertools import combinations

import pytest

from foretell.cluster import load
from foretell.errors import InputError
from foretell.graph.build import verify
from foretell.simulate import simulate
from foretell.whatif import WHATIFS, DoesNotApply, Setting, applied, ordered, parse
from foretell.whatif.registry import EXCLUSIVE, ORDER
from tests.whatif.ddp import hosted
from tests.whatif.test_every import EXAMPLES
from tests.whatif.traced import attention, convnet

STEPS = {"hosted": hosted, "convnet": convnet, "attention": attention}


PARTS = {"hosted": (0, 1, 2), "convnet": (0,), "attention": (1,)}  # thirds of all pairs


@pytest.fixture(scope="module", params=sorted(STEPS))
def step(request):
    return STEPS[request.param]()


@cache
def machines():
    return load("dgx-a100:nodes=2")


def answer(step, specs):
    """The step's history and time, or the words of a refusal."""
    try:
        after = applied([parse(s) for s in specs], step, Setting(machines()))
    except InputError as error:
        return error.message
    return after.history, simulate(verify(after)).seconds


def test_every_change_has_its_place():
    assert sorted(ORDER) == sorted(WHATIFS)


def commute(step, first, parts):
    names = sorted(EXAMPLES)
    k = names.index(first)
    for m in range(k + 1, len(names)):
        if (k + m) % 3 in parts:
            pair = EXAMPLES[first], EXAMPLES[names[m]]
            assert answer(step, pair) == answer(step, pair[::-1]), pair


@pytest.mark.parametrize("first", sorted(EXAMPLES))
def test_any_two_commute(request, step, first):
    commute(step, first, PARTS[request.node.callspec.params["step"]])


@pytest.mark.slow
@pytest.mark.parametrize("first", sorted(EXAMPLES))
def test_all_pairs_commute(step, first):
    commute(step, first, (0, 1, 2))


@pytest.mark.parametrize("count", [3, 5])
def test_any_order_of_several(step, count):
    specs = [EXAMPLES[n] for n in ("amp", "batch", "compile", "cuda-graph", "data-parallel")]
    for some in combinations(specs, count):
        assert answer(step, some) == answer(step, some[::-1]) == answer(step, sorted(some))


def test_those_of_one_kind_too(step):
    pair = ["batch:times=2", "batch:times=3"]
    assert answer(step, pair) == answer(step, pair[::-1])


@pytest.mark.parametrize("group", [group for group, _ in EXCLUSIVE])
def test_what_excludes_each_other_is_refused(group):
    with pytest.raises(InputError, match="exclude each other"):
        applied([parse(name) for name in group], hosted())


def test_a_refusal_says_behind_what():
    with pytest.raises(DoesNotApply, match=r"`tf32` behind `amp`: the step has no fp32 matmul"):
        applied([parse("tf32"), parse("amp")], convnet())


def test_a_scaler_hides_neither_optimizer_nor_gradients():
    changes = [parse(s) for s in ("amp:dtype=fp16", "fused-optimizer", "data-parallel:ranks=4")]
    after = applied(changes, hosted(), Setting(load("dgx-a100")))
    assert after.history[-3:] == tuple(str(c) for c in ordered(changes))


def test_casts_of_parameters_do_not_grow_with_the_batch():
    one, two = (
        applied([parse(s) for s in specs], hosted()) for specs in (["amp"], ["amp", "batch"])
    )
    tasks = one.select(op="cast_weight", kind="kernel")
    assert len(tasks)
    assert (one.seconds[tasks] == two.seconds[tasks]).all()


def test_changes_that_cannot_be_made_are_listed_beside_those_that_can():
    from foretell.whatif import tried

    step = hosted()
    changes = [parse("fused-optimizer"), parse("remove:select=op=nothing_is_called_so")]
    after, made, refused = tried(changes, step)
    assert [str(c) for c in made] == ["fused-optimizer"]
    assert [spec for spec, _ in refused] == ["remove:select=op=nothing_is_called_so"]
    assert simulate(after).seconds == simulate(applied([parse("fused-optimizer")], step)).seconds
    with pytest.raises(DoesNotApply):
        tried(changes[1:], step)
