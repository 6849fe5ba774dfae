"""Strategies that split images, filters and channels: what a plan makes of a network of images."""

from itertools import pairwise

import pytest

from foretell.cluster import load as load_cluster
from foretell.errors import InfeasibleError
from foretell.plan import Plan, estimate, lower
from foretell.plan.check import check
from foretell.plan.costs import alike, costs
from foretell.plan.layer_cost import layers_of
from foretell.predict import predict
from foretell.simulate import simulate
from foretell.workload import load

RESNET = load("resnet50:image=224")
NODE = load_cluster("abci:nodes=1")
TWO = load_cluster("abci:nodes=2")


def reported(cluster=NODE, workload=RESNET, **fields):
    return predict(Plan(**fields, framework="ddp"), workload, cluster)


STRATEGIES = {
    "data": {"dp": 4, "global_batch": 64},
    "filter": {"filter": 4, "global_batch": 64},
    "channel": {"channel": 4, "global_batch": 64},
    "height": {"spatial": (4,), "global_batch": 64},
    "width": {"spatial": (1, 4), "global_batch": 64},
    "both": {"spatial": (2, 2), "global_batch": 64},
    "pipeline": {"pp": 4, "global_batch": 64, "micro_batch": 8},
    "data+filter": {"dp": 2, "filter": 2, "global_batch": 64},
    "data+spatial": {"dp": 2, "spatial": (2,), "global_batch": 64},
    "spatial+filter": {"spatial": (2,), "filter": 2, "global_batch": 64},
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_lowers_and_is_predicted_alike_in_closed_form(name):
    plan = Plan(**STRATEGIES[name], framework="ddp")
    graph = lower(plan, RESNET, NODE)
    seconds = simulate(graph).seconds
    assert seconds == pytest.approx(float(estimate([plan], RESNET, NODE).step[0]), rel=0.15)
    assert seconds > 0


def test_split_filters_do_not_shrink_compute_by_as_many():
    """The shape that is left is priced, not work ÷ ranks."""
    one = reported(load_cluster("abci:gpus=1"), global_batch=64).breakdown["compute_s"]
    four = reported(filter=4, global_batch=64).breakdown["compute_s"]
    assert one / 4 < four < one


def test_halos_are_exchanged_and_filters_exchange_more():
    spatial = reported(spatial=(1, 4), global_batch=64).breakdown["exchange_s"]
    split = reported(filter=4, global_batch=64).breakdown["exchange_s"]
    assert 0 < spatial < split
    assert reported(dp=4, global_batch=64).breakdown["exchange_s"] == 0


def test_gradients_are_reduced_between_all_that_share_an_image():
    assert alike(Plan(dp=2, spatial=(2, 2))) == (8, 1)
    assert alike(Plan(dp=2, filter=4)) == (2, 4)  # each filter's owners are four ranks apart
    assert alike(Plan(dp=4, tp=2, cp=2)) == (8, 2)
    within = reported(spatial=(1, 4), global_batch=64)
    assert within.breakdown["reduce_s"] > 0


def test_splitting_an_image_splits_what_is_kept():
    whole = reported(load_cluster("abci:gpus=1"), global_batch=64).memory["activations"]
    split = reported(spatial=(2, 2), global_batch=64).memory["activations"]
    filters = reported(filter=4, global_batch=64).memory["activations"]
    assert split == pytest.approx(whole / 4, rel=0.1)
    assert filters == pytest.approx(whole, rel=0.1)  # every rank has all of every image


def test_sixty_four_filters_are_the_limit():
    with pytest.raises(InfeasibleError, match="64 ways"):
        reported(load_cluster("abci:nodes=32"), load("vgg16"), filter=128, global_batch=32)


def test_three_dimensions():
    cosmoflow = load("cosmoflow:size=128")
    cube = predict(Plan(spatial=(2, 2, 2), global_batch=1, framework="ddp"), cosmoflow, TWO)
    line = predict(Plan(spatial=(8,), global_batch=1, framework="ddp"), cosmoflow, TWO)
    assert cube.breakdown["exchange_s"] > 0
    assert line.peak == pytest.approx(cube.peak, rel=0.2)


def test_uneven_sides_take_the_longest_share():
    """A side of 7 over 4 ranks leaves two rows to the busiest."""
    plans = [check(Plan(spatial=(n,), global_batch=8, framework="ddp"), RESNET, c) for n, c in
             ((2, load_cluster("abci:gpus=2")), (4, NODE))]  # fmt: skip
    last = [costs([p], RESNET, c).layers[-2].forward.kernels[0] for p, c in
            zip(plans, (load_cluster("abci:gpus=2"), NODE), strict=True)]  # fmt: skip
    assert last[1] > last[0] / 2


def test_stages_have_their_own_blocks_in_a_row():
    plan = Plan(pp=4)
    split = [layers_of(plan, RESNET, stage) for stage in range(4)]
    assert [sum(column) for column in zip(*split, strict=True)] == [x.times for x in RESNET.layers]
    names = [[x.name for x, n in zip(RESNET.layers, row, strict=True) if n] for row in split]
    assert names[0][0] == "stem"
    assert names[3][-1] == "head"
    assert all(set(one) & set(two) <= {one[-1]} for one, two in pairwise(names))


def test_uneven_stages_wait_for_the_slowest():
    """Four stages of four blocks each: the last ones of a ResNet-50 have less to do."""
    reported = predict(
        Plan(pp=4, micro_batch=8, global_batch=256, framework="ddp"), load("resnet50"), NODE
    )
    whole = predict(
        Plan(global_batch=8, framework="ddp"), load("resnet50"), load_cluster("abci:gpus=1")
    )
    assert reported.step > 1.1 * 32 * whole.step / 4
