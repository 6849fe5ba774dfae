"""The compiled evaluator against the readable engine, hand-made sums, and other rooms."""

from functools import cache

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from foretell.cluster import load as machines
from foretell.plan import Plan
from foretell.plan import memory as plan_memory
from foretell.predict import predict
from foretell.search.placement import lowering, search
from foretell.search.placement.planner import drawn, every
from foretell.search.placement.problem import (
    ALL_REDUCE,
    EVEN,
    MICROS,
    PS,
    SHARDED,
    SPLIT,
    Action,
    Placement,
    actions,
    canonical,
    problem,
    uniform,
)
from foretell.search.placement.search import Evaluator, bound, graph, memory
from foretell.search.placement.search import shares as dealt_out
from foretell.simulate import simulate
from foretell.workload import load

SLOW = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture(scope="module")
def vgg():
    return problem(load("vgg11:batch=4"), machines("heterog-8"))


@pytest.fixture(scope="module")
def bert():
    spec = "bert:layers=3,hidden=256,heads=4,vocab=3000,head=mlm,batch=2"
    return problem(load(spec), machines("heterog-8"))


def placements(on):
    choices = [st.sampled_from(actions(on, g)) for g in range(len(on.groups))]
    return st.builds(
        Placement,
        st.tuples(*choices),
        st.sampled_from(MICROS[:3]),
        st.sampled_from([0.0, 4e6, 25e6, float("inf")]),
        st.integers(0, 2),
    )


@SLOW
@given(st.data())
def test_the_readable_engine_says_the_same_to_the_last_bit(vgg, bert, data):
    on = data.draw(st.sampled_from([vgg, bert]))
    placement = data.draw(placements(on))
    seconds = Evaluator(on).seconds(placement)
    if seconds < float("inf"):
        tasks = graph(on, placement)
        assert simulate(tasks, engine="readable").seconds == seconds
        assert simulate(tasks, engine="compiled").seconds == seconds


@SLOW
@given(st.data())
def test_no_step_is_below_the_bound_or_above_the_memory(vgg, bert, data):
    on = data.draw(st.sampled_from([vgg, bert]))
    placement = data.draw(placements(on))
    seconds = Evaluator(on).seconds(placement)
    if seconds < float("inf"):
        assert seconds >= bound(on)
        for rank, held in memory(on, placement).items():
            assert held <= on.cluster.devices[rank].memory


@SLOW
@given(st.data())
def test_every_sample_is_somewhere(vgg, data):
    placement = data.draw(placements(vgg))
    share = dealt_out(vgg, placement)
    for action in placement.actions:
        if action.way != SPLIT and Evaluator(vgg).seconds(placement) < float("inf"):
            assert (share[action.devices] * vgg.tables.ranks).sum() >= vgg.batch
            assert share[action.devices][list(vgg.fleet.sets[action.devices])].min() >= 1


def test_one_device_does_one_thing_after_another(vgg):
    t = vgg.tables
    s = next(s for s, n in enumerate(t.size) if n == 1)
    k = t.kind[vgg.fleet.sets[s][0]]
    alone = t.forward[k, -1, -1] + t.backward[k, -1, -1] + t.update[k].sum()
    assert Evaluator(vgg).seconds(uniform(vgg, Action(s, ALL_REDUCE))) == pytest.approx(alone)


def test_data_parallel_is_compute_then_what_is_left_of_the_messages(vgg):
    """One message for all gradients: nothing overlaps, so the parts add up."""
    t = vgg.tables
    each = -(-vgg.batch // 8)
    slowest = (t.forward[:, -1, each] + t.backward[:, -1, each]).max()
    message = lowering.law(t.laws[0, 0], t.gradient.sum())
    fused = uniform(vgg, Action(0, ALL_REDUCE), fuse=float("inf"), mode=EVEN)
    expected = slowest + message + t.update.sum(axis=1).max()
    assert Evaluator(vgg).seconds(fused) == pytest.approx(expected, rel=1e-6)


def test_small_messages_hide_behind_the_backward(vgg):
    on = Evaluator(vgg)
    whole, parts = (uniform(vgg, Action(0, ALL_REDUCE), fuse=f) for f in (float("inf"), 25e6))
    assert on.seconds(parts) < on.seconds(whole)


def test_cells_of_one_device_say_the_same(vgg):
    fine = problem(vgg.workload, vgg.cluster, single=True)
    for way in (ALL_REDUCE, PS, SHARDED):
        for mode in range(3):
            one, other = (
                Evaluator(p).seconds(uniform(p, Action(0, way), mode=mode)) for p in (vgg, fine)
            )
            assert one == pytest.approx(other, rel=0.02)


def test_memory_is_what_the_plan_room_says():
    model, cluster = load("vgg11:batch=8"), machines("v100-32:gpus=4")
    on = problem(model, cluster)
    mine = max(memory(on, uniform(on, Action(0, ALL_REDUCE), mode=EVEN)).values())
    plan = Plan(dp=4, global_batch=32, framework="ddp")
    said = plan_memory(plan, model, cluster)[0]
    assert mine == pytest.approx(float(said.peak[0]) / 1.01, rel=0.1)


@pytest.mark.parametrize("spec", ["vgg19:batch=8", "resnet101:batch=8"])
@pytest.mark.parametrize("cluster", ["p3.16xlarge:nodes=2", "v100-32:gpus=4"])
def test_data_parallelism_is_what_predict_says(spec, cluster):
    model, machine = load(spec), machines(cluster)
    on = problem(model, machine)
    mine = Evaluator(on).seconds(uniform(on, Action(0, ALL_REDUCE), mode=EVEN))
    plan = Plan(dp=machine.size, global_batch=on.batch, framework="ddp")
    assert mine == pytest.approx(predict(plan, model, machine).step, rel=0.05)


def test_what_does_not_fit_has_no_seconds():
    on = problem(load("gpt2:dtype=fp32,batch=64"), machines("heterog-8"))
    found = Evaluator(on)
    everywhere = uniform(on, Action(0, ALL_REDUCE))
    assert found.seconds(everywhere) == float("inf")
    assert found.fault(everywhere) in ("memory", "samples")


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=2, max_size=4), st.integers(6, 40), st.data())
def test_whole_samples_are_shared_as_well_as_can_be(ranks, batch, data):
    """Against all ways to deal out: no rank of the best is later than ours."""
    slopes = [data.draw(st.integers(1, 9)) for _ in ranks]
    if sum(ranks) > batch:
        return
    share = shares(ranks, slopes, batch)
    took = max(s * n for s, n in zip(slopes, share, strict=True))
    assert sum(n * r for n, r in zip(share, ranks, strict=True)) >= batch
    caps = [int((took - 1e-9) // s) for s in slopes]  # anything quicker has fewer on each
    assert sum(min(c, batch) * r for c, r in zip(caps, ranks, strict=True)) < batch or took == max(
        slopes
    )
    lines = (np.zeros(len(ranks)), np.array(slopes, float), np.array(ranks, float))
    _, least = search.ratios(*lines, batch)
    assert least <= took + 1e-6


@cache
def any_tables():
    return problem(load("vgg11:batch=4"), machines("heterog-8")).tables


def shares(ranks, slopes, batch):
    """`evaluate.balanced` on cells of their own kind each, with seconds that are lines."""
    n = len(ranks)
    t = any_tables()._replace(
        member=np.ones((1, n), bool), size=np.array([sum(ranks)]), kind=np.arange(n),
        ranks=np.array(ranks), batch=batch,
    )  # fmt: skip
    cost = np.outer(np.array(slopes, float), np.arange(batch + 1))
    return search.balanced(t, 0, cost, np.full(n, batch)).tolist()


def test_what_was_simulated_is_not_simulated_again(vgg):
    on, many = Evaluator(vgg), drawn(vgg, 1000, seed=3)
    found = on.many(many)
    assert on.evaluations == len({canonical(vgg, p) for p in many})
    assert (on.many(many), on.evaluations) == (found, len(on.seen))


def test_all_placements_of_a_small_instance_are_different(bert):
    first = [p for p, _ in zip(every(bert), range(500), strict=False)]
    assert len(set(first)) == 500
