"""Steps in the field: one factor for a framework on some devices, and none on measured machines."""

import math

import pytest

from foretell.cluster import Calibration
from foretell.cluster import load as load_cluster
from foretell.plan import Plan, estimate, lower
from foretell.plan.check import settled
from foretell.plan.framework import field_slowdowns, slowdown
from foretell.predict import predict
from foretell.simulate import simulate
from foretell.workload import load

GPT = "gpt:layers=4,hidden=1024,heads=16,seq=1024,vocab=50304"
PLANS = (
    "dp=8,global_batch=64", "dp=4,tp=2,global_batch=64,micro_batch=2",
    "tp=2,pp=4,global_batch=64", "dp=2,tp=2,pp=2,global_batch=64,recompute=full",
)  # fmt: skip


def times(text, on, model=GPT):
    plan, cluster = settled(Plan.parse(text), load(model), load_cluster(on))
    return slowdown(plan, cluster)


@pytest.mark.parametrize(
    ("framework", "on", "kinds"),
    [
        ("megatron-deepspeed", "a100-80:gpus=8", ()),  # its own table
        ("megatron-deepspeed", "v100-16:gpus=8", ("field",)),  # two tables, which set no price
        ("megatron-deepspeed", "h100:gpus=8", ("field", "arch")),
        ("megatron-core", "h100:gpus=8", ()),
        ("fsdp", "h100:gpus=8", ("field",)),
    ],
)
def test_steps_are_slower_where_no_whole_steps_were_measured(framework, on, kinds):
    wanted = math.exp(sum(field_slowdowns()[kind] for kind in kinds))
    assert times(f"dp=8,global_batch=8,framework={framework}", on) == pytest.approx(wanted)


@pytest.mark.parametrize("text", PLANS)
def test_all_of_a_step_takes_so_many_times_as_long(text, monkeypatch):
    plan = Plan.parse(f"{text},framework=megatron-lm")
    model, cluster = load(GPT), load_cluster("v100-32:gpus=8")
    graph, found = lower(plan, model, cluster), predict(plan, model, cluster)
    rough = float(estimate([plan], model, cluster).step[0])
    factor = times(str(plan), "v100-32:gpus=8")
    assert factor > 1.02
    monkeypatch.setattr(
        "foretell.plan.framework.field_slowdowns", lambda: dict.fromkeys(field_slowdowns(), 0.0)
    )
    plain = lower(plan, model, cluster)
    assert graph.seconds == pytest.approx(factor * plain.seconds, rel=1e-12)
    assert found.step == pytest.approx(factor * simulate(plain).seconds, rel=1e-12)
    assert rough == pytest.approx(factor * float(estimate([plan], model, cluster).step[0]))


def test_plans_of_one_framework_keep_their_order():
    known = {times(f"{text},framework=megatron-lm", "v100-32:gpus=8") for text in PLANS}
    assert len(known) == 1


def test_a_machine_that_was_measured_is_as_it_was_measured():
    model, cluster = load(GPT), load_cluster("v100-32:gpus=8")
    plan = Plan.parse("dp=8,global_batch=8,framework=megatron-lm")
    plain, fitted = predict(plan, model, cluster), cluster.calibrated(Calibration())
    found = predict(plan, model, fitted)
    assert found.step * times(str(plan), "v100-32:gpus=8") == pytest.approx(plain.step)
    assert "field" not in found.away
    assert fitted.fingerprint() == cluster.fingerprint()
