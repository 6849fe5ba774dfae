"""What frameworks do their own way: gradients over micro-batches, ZeRO, attention, adapters."""

import numpy as np
import pytest

from foretell.cluster import load as load_cluster
from foretell.plan import Plan
from foretell.plan.framework import profiles, running
from foretell.predict import Prediction, predict
from foretell.workload import load

GPT = "gpt:layers=8,hidden=4096,heads=32,seq=2048"
LLAMA = "llama:layers=32,hidden=4096,heads=32,inner=11008,seq=2048"


def predicted(model: str, on: str, plan: str) -> Prediction:
    return predict(Plan.parse(plan), load(model), load_cluster(on))


def a_micro_batch(plan: str) -> float:
    """Seconds that a further micro-batch takes."""
    some, more = (
        predicted(GPT, "a100-80", f"dp=1,micro_batch=1,global_batch={n},{plan}").step
        for n in (4, 8)
    )
    return (more - some) / 4


def test_gradients_of_later_micro_batches_are_added_up() -> None:
    weights = 8 * 12 * 4096**2 + 2 * 51200 * 4096  # of words, both times
    half = a_micro_batch("framework=megatron-deepspeed,precision=fp16-master")
    wide = a_micro_batch("framework=megatron-deepspeed,precision=bf16-master")
    pace = load_cluster("a100-80").devices[0].memory_bandwidth
    assert 1.0 < (wide - half) / (12 * weights / pace) < 1.3


@pytest.mark.parametrize(
    ("plan", "moved"),
    [
        ("framework=megatron-core,precision=bf16-master", 0.0),
        ("framework=megatron-deepspeed,precision=bf16-master", 18.0),
        ("framework=megatron-deepspeed,precision=fp16-master", 6.0),
        ("framework=ddp,precision=bf16-mixed", 12.0),
        ("framework=ddp,precision=bf16-true", 6.0),
    ],
)
def test_bytes_that_adding_a_gradient_moves(plan: str, moved: float) -> None:
    assert (
        running(Plan.parse(f"dp=1,micro_batch=1,global_batch=1,{plan}")).accumulation_bytes == moved
    )


def test_sharded_gradients_are_added_up_where_they_are_reduced() -> None:
    plan = "dp=2,zero=3,micro_batch=1,global_batch=16,framework=ddp,precision=bf16-true"
    alone = predicted(GPT, "a100-80:gpus=2", plan.replace("=16", "=2")).step
    assert predicted(GPT, "a100-80:gpus=2", plan).step <= 8 * alone


def test_tensors_that_one_rank_updates_are_broadcast_one_by_one() -> None:
    plan = "dp=512,micro_batch=2,global_batch=4096,precision=bf16-master,zero=1,framework="
    flat, whole = (
        predicted(LLAMA, "dgx-a100:gpus=512", plan + name).breakdown["reduce_s"]
        for name in ("megatron-core", "internevo")
    )
    assert whole > 2 * flat
    small = plan.replace("512", "64").replace("4096", "512") + "internevo"
    assert predicted(LLAMA, "dgx-a100:gpus=64", small).breakdown["reduce_s"] < whole


def test_gathers_inside_a_node_have_all_of_its_bandwidth() -> None:
    plan = "dp=8,zero=3,micro_batch=1,global_batch=8,precision=bf16-master,framework="
    inside, across = (
        predicted(LLAMA, f"dgx-a100:nodes={nodes},gpus=8", plan + "deepspeed-zero3").step
        for nodes in (1, 2)
    )
    assert across > 3 * inside


def test_the_host_gathers_every_module_of_deepspeed() -> None:
    plan = "dp=1,zero={},micro_batch=1,global_batch=1,precision=bf16-master,framework=deepspeed"
    model = "llama:layers=24,hidden=512,heads=8,seq=128,vocab=1024"
    alone, gathered = (predicted(model, "a100-80", plan.format(zero)).step for zero in (0, 3))
    modules = 24 * sum(bool(op.weights) for op in load(model).layers[1].works())
    least = 2 * modules * profiles()["deepspeed"].fetch
    assert least * 0.7 < gathered - alone < least * 1.5


def test_attention_written_out_keeps_its_scores_and_takes_longer() -> None:
    plan = "dp=1,micro_batch=8,global_batch=8,precision=bf16-mixed,framework="
    fused, apart = (predicted(GPT, "a100-80", plan + name) for name in ("ddp", "ddp-unfused"))
    scores = 8 * 8 * 32 * 2048**2  # of all layers
    assert apart.memory["activations"] - fused.memory["activations"] > 5 * scores
    assert apart.step > 1.2 * fused.step


def test_adapters_beside_one_matmul_alone() -> None:
    plan = "dp=1,micro_batch=1,global_batch=1,precision=bf16-master,framework=ddp"
    every, one = (
        predicted(f"{LLAMA},lora=32{more}", "a100-80", plan) for more in ("", ",lora_on=qkv")
    )
    assert one.step < every.step
    trained = [
        sum(w.elements(op.dims) for op in layer.works() for w in op.weights if not w.frozen)
        for layer in load(f"{LLAMA},lora=32,lora_on=qkv").layers
    ]
    assert trained == [0, 32 * (4096 + 3 * 4096), 0]


def test_profiles_have_known_ways() -> None:
    for profile in profiles().values():
        assert profile.zero1 in ("flat", "tensors")
        assert np.all(np.array(list(profile.accumulate.values())) >= 0)


def test_a_compiled_loss_keeps_no_logits_in_fp32() -> None:
    text = "dp=8,zero=3,micro_batch=2,global_batch=16,compile=yes,precision=bf16-master,framework="
    model = "llama:layers=4,hidden=4096,heads=32,inner=14336,seq=8192,vocab=128256"
    apart, whole = (predicted(model, "h100:gpus=8", text + name) for name in ("fsdp", "torchtitan"))
    logits = 2 * 8192 * 128256
    assert apart.peak - whole.peak == pytest.approx(6 * logits, rel=0.1)
    assert whole.step < apart.step


def test_a_loss_over_a_split_vocabulary_holds_a_tensor_more() -> None:
    def moment(ranks: int, words: int) -> float:
        model = f"llama:layers=2,hidden=512,heads=8,inner=1024,seq=8192,vocab={words}"
        text = f"tp={ranks},global_batch=1,precision=bf16-master,framework=fsdp"
        found = predicted(model, f"h100:gpus={ranks}", text)
        return found.memory["workspace"] / (8192 * words / ranks)

    # of each number: its logarithm and two gradients in fp32, a third where the vocabulary is split
    assert moment(2, 256000) - moment(1, 256000) == pytest.approx(4.0, rel=0.1)
