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


FSDP = CORE.but(framework="fsdp", zero=3)


def test_fsdp_keeps_a_half_copy_where_it_gathers_once():
    """4 bytes of each parameter shared by 8 ranks; 2 more, held whole, unless it gathers again."""
    again, once = (parts(FSDP.but(zero=zero))["parameters"] for zero in (3, 2))
    assert again == pytest.approx(4 / 8 * MODEL.parameters, rel=0.001)
    assert once - again == pytest.approx(2 * MODEL.parameters, rel=0.001)


def test_fsdp_in_a_pipeline_adds_gradients_up_unsharded():
    plan = FSDP.but(dp=4, pp=2, micro_batch=1)
    sharded, whole = (
        memory(plan.but(zero=zero, framework=name), MODEL, NODE)[0].parts()["gradients"]
        for zero, name in ((3, "megatron-core"), (3, "fsdp"))
    )
    assert whole == pytest.approx(4 * sharded, rel=0.001)


def test_a_loss_in_fp32_has_three_copies_of_the_logits():
    """Log-probabilities, their gradient and that of the logits, compiled blocks or not."""
    logits = 4 * 1024 * 50257
    for compiled in (False, True):
        assert parts(FSDP.but(compile=compiled))["workspace"] >= 12 * logits
    assert parts(CORE.but(framework="ddp", compile=True))["workspace"] < 7 * logits


def test_pytorch_keeps_the_gathered_inputs_of_split_matmuls():
    plan = FSDP.but(dp=4, tp=2, micro_batch=1, global_batch=4)
    inputs = 2 * 12 * 1024 * 512 * 2  # of queries, keys and values, and of the feed-forward
    torch, core = (
        parts(plan.but(sp=True, framework=name))["activations"]
        for name in ("fsdp", "megatron-core")
    )
    assert torch > inputs
    assert torch - core > 0.9 * inputs


def held(text, model="gpt:layers=8,hidden=1024,heads=8,seq=128,vocab=1024"):
    plan = Plan.parse(f"dp=1,micro_batch=1,global_batch=1,{text}")
    found = memory(plan, load_workload(model), load_cluster("a100-80"))[0]
    return float(found.peak[0]), found.parts()


def test_a_peak_is_reached_in_the_update_where_the_optimizer_holds_more_than_a_batch():
    (foreach, parts), (fused, _) = (
        held(f"precision=bf16-true,framework=ddp,recompute=full,optimizer_kernels={kernels}")
        for kernels in ("foreach", "fused")
    )
    assert foreach == pytest.approx(1.01 * 5 * parts["parameters"], rel=0.01)
    assert foreach - fused == pytest.approx(1.01 * parts["parameters"], rel=0.05)
    assert sum(parts.values()) == pytest.approx(foreach)


def test_deepspeed_casts_and_joins_gradients_of_fp16():
    half, _ = held("dtype=fp16,framework=megatron-deepspeed")
    wide, parts = held("precision=bf16-master,framework=megatron-deepspeed")
    assert half - wide > 4 * parts["parameters"] / 2


def test_a_model_of_one_head_of_keys_trains_with_adam():
    one, many = (
        held("precision=bf16-true,framework=ddp", f"gpt:layers=2,hidden=512,heads=8,groups={n}")[1]
        for n in (1, 8)
    )
    assert one["optimizers"] == pytest.approx(2 * one["parameters"])
    assert many["optimizers"] == pytest.approx(2 * many["parameters"])
