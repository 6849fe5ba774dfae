"""Workloads: sizes, splits and what a spec stands for."""

import numpy as np
import pytest

from foretell.errors import InputError
from foretell.workload import Exchange, Layer, Op, Tensor, Workload, load
from foretell.workload.workload import calls, holds

GPT3 = "gpt:layers=96,hidden=12288,heads=96,seq=2048,vocab=51200"


def test_gpt_counts_as_megatron_does():
    """Narayanan et al. 2021, equations 2 and 3 (without the second forward: 72 for 96).

    Of the scores only those count that the causal mask leaves: (s + 1) / 2 of s.
    """
    model, layers, h, s, v = load(GPT3), 96, 12288, 2048, 51200
    expected = 12 * layers * h**2 * (1 + 13 / (12 * h) + (v + s) / (12 * layers * h))
    assert model.parameters == pytest.approx(expected, rel=1e-6)
    flops = 72 * s * layers * h**2 * (1 + (s + 1) / (12 * h) + v / (12 * layers * h))
    assert model.flops() == pytest.approx(flops, rel=1e-9)


def test_llama_has_the_published_parameters():
    assert load("llama").parameters == 6_738_415_616


def test_grouped_queries_make_fewer_weights():
    all_heads, grouped = load("llama"), load("llama:groups=8")
    assert grouped.parameters == all_heads.parameters - 32 * 2 * 4096 * (4096 - 1024)
    assert grouped.most("tp") == 8


def test_sizes_are_split_and_rounded_up():
    op = Op("x", "matmul", {"tokens": 10, "in": 8, "out": 30}, {"tp": "out", "cp": "tokens"})
    sizes = op.sizes({"tp": 4.0, "cp": 3.0}, 2.0)
    assert sizes == {"batch": 2.0, "tokens": 4.0, "in": 8.0, "out": 8.0}


def test_vocabulary_is_padded_on_every_rank():
    head = load("gpt:layers=2,hidden=64,heads=4,vocab=50257").layers[-1]
    logits = next(op for op in head.works() if op.name == "logits")
    assert logits.sizes({})["out"] == 50304
    assert logits.sizes({"tp": 4.0})["out"] * 4 == 50688


def test_degrees_may_be_arrays():
    op = Op("x", "matmul", {"tokens": 16, "in": 8, "out": 32}, {"tp": "out"})
    sizes = op.sizes({"tp": np.array([1.0, 2.0, 4.0])}, np.array([1.0, 2.0, 3.0]))
    assert sizes["out"].tolist() == [32, 16, 8]
    forward, backward = calls(op, sizes)
    assert forward[0].shape["m"].tolist() == [16, 32, 48]
    assert len(backward) == 2


def test_kept_bytes_are_korthikanti_s():
    """34·s·b·h + 5·a·s²·b bytes a layer in 16 bits (arXiv 2205.05198, equation 1)."""
    s, h, a, b = 1024, 512, 8, 4
    block = load(f"gpt:layers=12,hidden={h},heads={a},seq={s}").layers[1]
    kept = 0.0
    for op in block.works():
        if holds(op.when, frozenset({"fused"})):
            sizes = op.sizes({}, float(b))
            kept += sum(
                t.bytes(sizes, "fp16") for t in op.saved if holds(t.when, frozenset({"fused"}))
            )
    assert kept == 34 * s * b * h + 5 * a * s * s * b


def test_an_exchange_counts_the_whole_tensor():
    exchange = Exchange("g", "tp", "all_reduce", "", {"tokens": 8, "hidden": 4}, {"cp": "tokens"})
    assert exchange.bytes({"tp": 4.0, "cp": 2.0}, 3.0, "fp16") == 3 * 4 * 4 * 2


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("gtp:layers=2", "unknown workload: `gtp`"),
        ("gpt:layers=2,hidden=64", "needs `heads`"),
        ("gpt:layers=2,hidden=64,heads=0", "heads"),
        ("gpt:layers=0,hidden=64,heads=4", "layers=0"),
        ("gpt:layers=two,hidden=64,heads=4", "not a whole number"),
        ("gpt:layers=2,hidden=64,heads=4,deep=3", "unknown option"),
    ],
)
def test_bad_specs_are_refused(text, match):
    with pytest.raises(InputError, match=match):
        load(text)


def test_an_unknown_kind_says_so():
    with pytest.raises(InputError, match="unknown kind of op: `matmull`"):
        calls(Op("x", "matmull", {"in": 2}), {"in": 2.0, "batch": 1.0})


def test_it_prints_itself():
    text = str(load("gpt:layers=24,hidden=1024,heads=16"))
    assert "24 × block: norm.attention qkv" in text
    assert "355,788,800 parameters" in text


def test_the_fingerprint_is_of_what_matters():
    one, same = load("gpt:layers=2,hidden=64,heads=4"), load("gpt:hidden=64,heads=4,layers=2")
    assert one.fingerprint() == same.fingerprint()
    assert one.fingerprint() != load("gpt:layers=3,hidden=64,heads=4").fingerprint()


def test_a_hand_made_workload():
    op = Op("fc", "matmul", {"in": 4, "out": 6}, weights=(Tensor("w", ("in", "out")),))
    layer = Layer("fc", (op,), Tensor("y", ("batch", "out")), {"out": 6}, times=3)
    model = Workload("hand", (layer,), batch=2)
    assert (model.parameters, model.num_blocks, model.most("tp")) == (72, 3, 1)
    assert model.flops(2) == 2 * 3 * 3 * 2 * 24
