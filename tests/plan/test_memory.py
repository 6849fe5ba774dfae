"""Memory: what is held, what is shared, what would help."""

import pytest

from foretell.cluster import load as load_cluster
from foretell.plan import Plan, estimate, memory
from foretell.workload import load as load_workload

MODEL = load_workload("gpt:layers=12,hidden=512,heads=8,seq=1024,vocab=50257,dtype=bf16")
NODE = load_cluster("dgx-a100:nodes=1")
CORE = Plan(dp=8, micro_batch=4, global_batch=32, framework="megatron-core")


def parts(plan):
    return memory(plan, MODEL, NODE)[-1].parts()


def test_eighteen_bytes_a_parameter():
    """bf16 weights, fp32 gradients, fp32 copy and two moments: 2 + 4 + 12."""
    found = parts(CORE)
    held = found["parameters"] + found["gradients"] + found["optimizers"]
    assert held == pytest.approx(18 * MODEL.parameters, rel=0.001)


@pytest.mark.parametrize(("zero", "bytes"), [(0, 18), (1, 7.5), (2, 4), (3, 2.25)])
def test_zero_shares_one_more_thing_at_each_stage(zero, bytes):
    found = parts(CORE.but(zero=zero))
    held = found["parameters"] + found["gradients"] + found["optimizers"]
    assert held == pytest.approx(bytes * MODEL.parameters, rel=0.01)


def test_recompute_keeps_less():
    kept = [
        parts(CORE.but(recompute=r, framework="megatron-core-unfused"))["activations"]
        for r in ("none", "selective", "full")
    ]
    assert kept[0] > 2 * kept[1] > 4 * kept[2] > 0


def test_earlier_stages_hold_more_micro_batches():
    plan = CORE.but(dp=2, pp=4, micro_batch=1)
    held = [m.parts()["activations"] for m in memory(plan, MODEL, NODE)]
    assert held[0] > held[1] > held[2] > held[3]


def test_gpipe_holds_all_of_them():
    plan = CORE.but(dp=2, pp=4, micro_batch=1)
    assert memory(plan.but(schedule="gpipe"), MODEL, NODE)[2].activations > (
        memory(plan, MODEL, NODE)[2].activations
    )


def test_offload_leaves_no_state():
    assert parts(CORE.but(offload=True))["optimizers"] == 0


def test_what_does_not_fit_says_by_how_much():
    big = load_workload("gpt:layers=48,hidden=8192,heads=64,seq=2048")
    assert estimate([Plan(dp=8, micro_batch=1, global_batch=8)], big, NODE).missing[0] > 500e9
