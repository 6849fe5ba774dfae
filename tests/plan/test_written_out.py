"""What frameworks run without a kernel of its own: scores, masks, losses, messages."""

from dataclasses import replace

import numpy as np
import pytest

from foretell.cluster import load as cluster
from foretell.cost import kernel
from foretell.plan import Plan, framework
from foretell.plan.framework import running
from foretell.plan.prices import estimate
from foretell.predict import predict
from foretell.workload import load
from foretell.workload.workload import calls

GPT = load("gpt:layers=4,hidden=1024,heads=16,seq=2048,vocab=50304,dropout=no")
ATTENTION = next(op for op in GPT.layers[1].works() if op.kind == "attention")
LOSS = next(op for op in GPT.layers[-1].works() if op.kind == "loss")
ONE = cluster("v100-32")


def _flags(name: str, precision: str) -> frozenset[str]:
    return running(Plan(framework=name, precision=precision)).flags


def _moved(op, name: str, precision: str) -> tuple[float, float]:
    """Bytes over scores or logits, forward and backward, beside matmuls and softmax."""
    ways = calls(op, op.sizes({}, 1.0), _flags(name, precision))
    return tuple(sum(float(c.bytes * c.times) for c in way) for way in ways)


def test_megatron_masks_scores_by_operators_in_fp32_alone():
    scores = 16 * 2048**2
    there, back = _moved(ATTENTION, "megatron-lm", "tf32")
    assert there == pytest.approx(2 * 2 * scores)  # in halves: a pass reads or writes a score
    assert back == pytest.approx(13 * 2 * scores)
    assert _moved(ATTENTION, "megatron-lm", "fp16-master") == (0.0, 0.0)


def test_attention_written_out_scales_and_masks_and_keeps_its_scores():
    assert _moved(ATTENTION, "ddp-unfused", "fp32")[0] > 0
    plan = Plan(micro_batch=4, global_batch=4, precision="fp32", framework="ddp")
    fused, apart = (predict(plan.but(framework=f), GPT, ONE) for f in ("ddp", "ddp-unfused"))
    scores = 4 * 16 * 2048**2 * 4.0 * 4  # batch, heads, queries and keys, bytes, blocks
    assert apart.peak - fused.peak == pytest.approx(scores, rel=0.1)


def test_autocast_keeps_probabilities_in_fp32():
    plan = Plan(micro_batch=4, global_batch=4, framework="ddp-unfused")
    wide, narrow = (predict(plan.but(precision=p), GPT, ONE) for p in ("fp16-mixed", "fp16-true"))
    assert wide.memory["activations"] > 1.2 * narrow.memory["activations"]


def test_megatron_lm_writes_its_loss_out():
    kinds = [
        c.op for c in calls(LOSS, LOSS.sizes({}, 1.0), _flags("megatron-lm", "bf16-master"))[0]
    ]
    assert (kinds.count("elementwise"), kinds.count("reduce")) == (4, 2)
    fused = calls(LOSS, LOSS.sizes({}, 1.0), _flags("megatron-core", "bf16-master"))[0]
    assert [c.op for c in fused] == ["softmax"]


@pytest.mark.parametrize(
    ("precision", "reduced"), [("fp16-master", "fp16"), ("bf16-master", "fp32")]
)
def test_megatron_widens_gradients_of_bf16_alone(precision, reduced):
    assert running(Plan(framework="megatron-lm", precision=precision)).grad_dtype == reduced


def _rate(board: str, dtype: str, ta: float, tb: float) -> float:
    side = np.array([8192.0])
    shape = {
        "b": side / side,
        "m": side,
        "n": side,
        "k": side,
        "ta": side * 0 + ta,
        "tb": side * 0 + tb,
    }
    took = kernel.seconds(cluster(board).devices[0], "gemm", dtype, shape).seconds[0]
    return 2 * 8192.0**3 / float(took)


def test_tf32_on_hopper_wants_its_operands_along_k():
    upright, one, both = (_rate("h200", "tf32", *t) for t in ((0, 1), (0, 0), (1, 0)))
    assert 0.5 * upright < both < 0.65 * upright < one < 0.95 * upright
    assert _rate("h200", "bf16", 1, 0) == pytest.approx(_rate("h200", "bf16", 0, 1), rel=0.02)
    assert _rate("a100-80", "tf32", 1, 0) == pytest.approx(_rate("a100-80", "tf32", 0, 1), rel=0.02)


def test_stages_of_megatron_wait_for_what_they_send(monkeypatch):
    slow = cluster("v100-32:gpus=16,nic=ethernet-10g")
    plan = Plan(dp=8, pp=2, micro_batch=1, global_batch=64, framework="megatron-lm", dtype="fp16")
    waits = predict(plan, GPT, slow).step
    assert estimate([plan], GPT, slow).step[0] == pytest.approx(waits, rel=0.05)
    hides = replace(framework.profiles()["megatron-lm"], sends_wait=False)
    monkeypatch.setitem(framework.profiles(), "megatron-lm", hides)
    framework.clear_cache()
    assert waits > 1.05 * predict(plan, GPT, slow).step
    framework.clear_cache()
