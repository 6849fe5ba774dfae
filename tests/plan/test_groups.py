"""Layers on ranks of their own, lowered: what a search said of them, order, samples, bad input."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell.cluster import load as machines
from foretell.errors import ForetellError, InfeasibleError, InputError
from foretell.plan import Plan, check, estimate, lower
from foretell.plan.check import GROUP_METHODS, layer_groups, rank_samples, torch_names, units
from foretell.plan.layer_ranges import orders
from foretell.predict import predict
from foretell.simulate import simulate
from foretell.workload import load


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(1, 6))
def test_every_sample_is_on_one_rank(each, batches):
    samples = dict(enumerate(each))
    found = rank_samples(samples, batches)
    whole = sum(each)
    assert Counter({r: sum(b[r] for b in found) for r in samples}) == Counter(samples)
    assert [sum(b.values()) for b in found] == [
        (m + 1) * whole // batches - m * whole // batches for m in range(batches)
    ]


@settings(deadline=None)
@given(
    st.lists(st.sets(st.integers(0, 3), min_size=1).map(sorted), min_size=1, max_size=5),
    st.integers(1, 5),
)
def test_every_rank_does_its_runs_in_an_order_that_ends(where, batches):
    found = orders(where, batches)
    at, done = dict.fromkeys(found, 0), set()
    while any(at[r] < len(found[r]) for r in found):
        moved = False
        for rank, acts in found.items():
            while at[rank] < len(acts) and _is_ready(acts[at[rank]], where, done):
                done.add((acts[at[rank]], rank))
                at[rank] += 1
                moved = True
        assert moved, "ranks wait for each other"
    assert {(rank, len(acts)) for rank, acts in found.items()} == {
        (rank, 2 * batches * sum(rank in ranks for ranks in where)) for rank in found
    }


def _is_ready(act, where, done):
    if act.kind == "F":
        return not act.run or all(
            (act._replace(run=act.run - 1), r) in done for r in where[act.run - 1]
        )
    if act.run + 1 == len(where):
        return True
    return all((act._replace(run=act.run + 1), r) in done for r in where[act.run + 1])


def test_a_workloads_weight_has_a_name_in_pytorch():
    assert "2.weight" in torch_names("2/addmm.weight")
    assert "1.linear1.bias" in torch_names("1/linear1.addmm.bias")


def test_ways_are_those_of_the_search():
    from foretell.search.placement.problem import WAYS as searched

    assert searched == GROUP_METHODS


def group(text, **fields):
    return Plan(groups=tuple(tuple(row.split()) for row in text.split("/")), **fields)


def test_a_step_on_two_ranks_of_their_own_is_both_and_the_messages():
    model, cluster = load("vgg11:batch=8"), machines("v100-32:gpus=2")
    whole = group("conv1.1 head all-reduce 0:8")
    apart = group("conv1.1 conv5.2 all-reduce 0:8 / head head all-reduce 1:8")
    one, two = (simulate(lower(p, model, cluster)) for p in (whole, apart))
    sends = [t for t in two.graph if t.kind == "send"]
    assert len(sends) == 2
    assert sends[0].comm_bytes == sends[1].comm_bytes > 0
    update = max(t.seconds for t in one.graph if t.op == "optimizer")
    assert one.seconds - update < two.seconds < one.seconds + sum(t.seconds for t in sends)


def test_micro_batches_overlap():
    model, cluster = load("vgg11:batch=8"), machines("v100-32:gpus=2")
    rows = "conv1.1 conv4.2 all-reduce 0:64 / conv5.1 head all-reduce 1:64"
    steps = [simulate(lower(group(rows, micro_batch=m), model, cluster)).seconds for m in (64, 16)]
    assert steps[1] < steps[0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("conv1.1 conv5.2 ps 0:8 / head head ps 4:8", "names rank 4"),
        ("conv1.1 conv5.2 ps 0:8 / tail tail ps 1:8", "`tail` to `tail` are not in"),
        ("conv1.1 conv5.2 ps 0:8", "no ranks for `head`"),
        ("conv2.1 head ps 0:8", "goes on with `conv1.1`"),
        ("conv1.1 conv5.2 ps 0:8 / head head ps 1:6", "6 samples; the batch has 8"),
    ],
)
def test_plans_that_cannot_be_are_refused(text, words):
    with pytest.raises(ForetellError, match=words):
        lower(group(text), load("vgg11:batch=8"), machines("v100-32:gpus=4"))


def test_a_plan_for_others_is_refused():
    model, cluster = load("vgg11:batch=8"), machines("v100-32:gpus=2")
    plan = group("conv1.1 head all-reduce 0:8 1:8")
    for field, words in (("cluster", "another cluster"), ("model", "another model")):
        with pytest.raises(InputError, match=words):
            check(plan.but(**{field: "0123"}), model, cluster)
    with pytest.raises(InputError, match="groups beside dp=2"):
        check(plan.but(dp=2), model, cluster)
    with pytest.raises(InputError, match="no closed form"):
        estimate([plan], model, cluster)


def test_factors_make_the_step_shorter_where_they_pay():
    model, cluster = load("vgg11:batch=8"), machines("v100-32:nodes=2,gpus=2")
    plain = Plan(dp=2, global_batch=8)
    names = [f"head/fc{n}.{w}" for n in (2, 9) for w in ("weight", "bias")]
    sent = plain.but(sync=tuple((name, "factors") for name in names))
    steps = [predict(plan, model, cluster).step for plan in (plain, sent)]
    assert steps[1] < 0.8 * steps[0]


@pytest.mark.parametrize(
    ("sync", "words"),
    [
        ((("head/fc3.weight", "factors"),), "parameter in the plan's `sync`"),
        ((("conv1.1/conv0.weight", "factors"),), "has no factors"),
        ((("head/fc2.weight", "ps:2"),), "served by rank 2"),
    ],
)
def test_odd_ways_are_refused(sync, words):
    with pytest.raises(InputError, match=words):
        predict(Plan(dp=2, sync=sync), load("vgg11:batch=8"), machines("v100-32:gpus=2"))


def test_more_samples_on_a_faster_rank_is_a_shorter_step():
    model, cluster = load("vgg11:batch=8"), machines("tag")
    even = Plan(dp=16, global_batch=320, shares=(20,) * 16)
    fast = Plan(dp=16, global_batch=320, shares=(38,) * 4 + (14,) * 12)
    assert predict(fast, model, cluster).step < predict(even, model, cluster).step


def test_what_does_not_fit_is_said():
    model, cluster = load("vgg11:batch=8"), machines("tag")
    found = predict(group("conv1.1 head all-reduce 8:4000"), model, cluster)
    assert not found.fits
    assert found.missing > 0
    assert "fewer samples" in found.advice
    assert predict(group("conv1.1 head all-reduce 8:8"), model, cluster).fits


def test_splits_wider_than_a_node_are_infeasible():
    with pytest.raises(InfeasibleError, match="inside one node"):
        lower(group("conv1.1 head split 0:8 4:8"), load("vgg11:batch=8"), machines("tag"))


def test_rows_read_back():
    plan = group("conv1.1 head all-reduce 0:8 3:4", global_batch=12)
    assert layer_groups(Plan.parse(str(plan))) == layer_groups(plan)
    assert next(u.name for u in units(load("vgg11"))) == "conv1.1"


@pytest.mark.parametrize("model", ["gpt:layers=4,hidden=512,heads=8", "vgg11:batch=8"])
@pytest.mark.parametrize("way", ["all-reduce", "sharded"])
def test_the_optimizer_takes_as_long_however_the_plan_is_written(model, way):
    workload, cluster = load(model), machines("h100:gpus=4")
    layers = [(unit.name, workload.layers[unit.layer]) for unit in units(workload)]
    names = [f"{n}/{w.name}" for n, x in layers for op in x.works() for w in op.weights]
    plain = Plan(dp=4, global_batch=4 * workload.batch, framework="ddp", zero=int(way == "sharded"))
    sync = tuple((name, way) for name in names)
    one, other = (predict(p, workload, cluster) for p in (plain, plain.but(zero=0, sync=sync)))
    assert one.breakdown["update_s"] == pytest.approx(other.breakdown["update_s"], rel=1e-6)
    assert one.step == pytest.approx(other.step, rel=0.02)
