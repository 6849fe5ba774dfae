"""A placement written as a plan and lowered takes as long as the search said."""

import random
from dataclasses import replace
from functools import cache
from math import inf

import pytest

from foretell.cluster import load as machines
from foretell.predict import predict
from foretell.search.placement.planner import plan_of
from foretell.search.placement.problem import (
    ALL_REDUCE,
    EVEN,
    FACTORS,
    Action,
    Placement,
    actions,
    problem,
    uniform,
)
from foretell.search.placement.search import Evaluator
from foretell.workload import load

MODELS = ("vgg11:batch=8", "bert:layers=4,batch=2", "flava:batch=4")
CLOSE = 0.02


@cache
def posed(model):
    return problem(load(model), machines("tag"), single=True)  # samples of every rank apart


def drawn(on, seed):
    """A placement with up to four runs of groups, each on a set and in a way of its own."""
    made = random.Random(seed)
    cuts = sorted(made.sample(range(1, len(on.groups)), made.randrange(4)))
    chosen = []
    for first, last in zip([0, *cuts], [*cuts, len(on.groups)], strict=True):
        action = made.choice(actions(on, first))
        plain = Action(action.devices, ALL_REDUCE)
        chosen += [action if action in actions(on, g) else plain for g in range(first, last)]
    micros, fuse = made.choice((1, 2, 4, 8)), made.choice((1e6, 25e6, 1e9))
    return Placement(tuple(chosen), micros, fuse, made.randrange(3))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("seed", range(8))
def test_a_found_plan_is_predicted_as_it_was_found(model, seed):
    on = posed(model)
    placement = drawn(on, seed)
    plan, wanted = plan_of(on, placement), Evaluator(on).seconds(placement)
    found = predict(plan, on.workload, on.cluster)
    assert found.fits == (wanted < inf)
    if found.fits and (plan.groups or plan.sync or plan.shares):
        assert found.step == pytest.approx(wanted, rel=CLOSE)


def test_what_has_no_factors_is_reduced_with_its_neighbours():
    """A way that says nothing of a group's gradients cuts no message in two."""
    on = posed(MODELS[0])
    some = uniform(on, Action(0, FACTORS))
    ways = [FACTORS if on.tables.factors[0, g] > 0 else ALL_REDUCE for g in range(len(on.groups))]
    assert set(ways) == {FACTORS, ALL_REDUCE}
    said = replace(some, actions=tuple(Action(0, way) for way in ways))
    assert Evaluator(on).seconds(some) == Evaluator(on).seconds(said)
    assert plan_of(on, some) == plan_of(on, said)


def test_factors_are_predicted_as_they_were_found():
    on = posed(MODELS[0])
    everywhere = on.fleet.sets.index(tuple(range(len(on.fleet.cells))))
    plain = uniform(on, Action(everywhere, ALL_REDUCE))
    head = len(on.groups) - 1
    steps = []
    for placement in (plain, plain.but((head,), Action(everywhere, FACTORS))):
        plan = plan_of(on, placement)
        wanted = Evaluator(on).seconds(placement)
        steps.append(predict(plan, on.workload, on.cluster).step)
        assert steps[-1] == pytest.approx(wanted, rel=CLOSE)
    assert any(way == "factors" for _, way in plan.sync)
    assert steps[1] < steps[0]


@pytest.mark.parametrize(
    "model",
    [
        "transformer:batch=8",  # words and logits are one matrix, whose gradient comes last
        "gpt2:dtype=fp32,batch=1",
        "bert:layers=4,hidden=1024,heads=16,vocab=60000,head=mlm,batch=2",
        "vgg11:batch=8",
    ],
)
@pytest.mark.parametrize("cluster", ["tag", "v100-32:gpus=4"])
def test_plain_data_parallelism_is_predicted_as_the_search_prices_it(model, cluster):
    workload, where = load(model), machines(cluster)
    on = problem(workload, where)
    placement = uniform(on, Action(0, ALL_REDUCE), mode=EVEN)
    plan, wanted = plan_of(on, placement), Evaluator(on).seconds(placement)
    assert (plan.groups, plan.sync, plan.shares) == ((), (), ())
    assert predict(plan, workload, where).step == pytest.approx(wanted, rel=0.05)
