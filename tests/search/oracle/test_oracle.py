"""Layouts of a model, their prices, their best, and what limits each strategy."""

import math

import numpy as np
import pytest

from foretell.api import oracle
from foretell.cluster import load as machines
from foretell.errors import InfeasibleError, InputError
from foretell.plan import check, read
from foretell.plan.prices import estimate
from foretell.predict import predict
from foretell.search.oracle import (
    Space,
    choose,
    counts,
    findings,
    layouts,
    limits,
    scaling,
    strategy,
    sweep,
)
from foretell.search.oracle.planner import Oracle, ParaDL
from foretell.search.oracle.scale import front, marginal_gains
from foretell.workload import load

GPT = "gpt:layers=24,hidden=2048,heads=16,seq=2048,vocab=51200,dtype=bf16"


@pytest.fixture(scope="module")
def gpt():
    return load(GPT)


@pytest.fixture(scope="module")
def node():
    return machines("dgx-a100:nodes=1")


class TestSpace:
    @pytest.mark.parametrize("gpus", [1, 6, 8, 48, 100])
    def test_every_layout_is_possible(self, gpt, gpus):
        cluster = machines(f"a100-80:gpus={gpus}")
        found = layouts(gpt, gpus, 4 * gpus, 8, Space())
        assert found
        for plan in found[:: max(1, len(found) // 40)]:
            assert plan.ranks == gpus
            check(plan, gpt, cluster)  # raises where it is not

    def test_no_layout_twice(self, gpt):
        found = layouts(gpt, 16, 64, 8, Space())
        assert len(found) == len({str(p) for p in found})

    def test_a_batch_too_small_for_data_parallel_leaves_the_others(self, gpt):
        found = layouts(gpt, 16, 4, 8, Space())
        assert found
        assert max(p.dp for p in found) == 4

    def test_names_of_strategies(self, gpt):
        names = {strategy(p) for p in layouts(gpt, 8, 32, 8, Space())}
        assert {"data", "zero", "fsdp", "tensor", "pipeline", "data+tensor"} <= names
        images = {strategy(p) for p in layouts(load("resnet50"), 8, 512, 8, Space())}
        assert {"data", "filter", "channel", "spatial", "data+filter", "data+spatial"} <= images


class TestChoice:
    def test_the_best_is_simulated_and_nothing_simulated_is_better(self, gpt, node):
        found = choose(layouts(gpt, 8, 32, 8, Space()), gpt, node)
        assert found.best.fits
        assert all(found.best.step <= p.step for p in found.others)
        assert found.bound <= found.best.step
        again = predict(found.best.plan, gpt, node)
        assert again.step == pytest.approx(found.best.step)

    def test_the_bound_holds_for_every_layout(self, gpt, node):
        plans = layouts(gpt, 8, 16, 8, Space(micro_batch=(1, 2), chunks=(1,)))
        found = choose(plans, gpt, node, most=8)
        swept = sweep(plans, gpt, node)
        for i in np.flatnonzero(swept.fits)[::17]:
            assert predict(plans[int(i)], gpt, node).step >= found.bound * (1 - 1e-9)

    def test_the_answer_is_the_same_twice(self, gpt, node):
        plans = layouts(gpt, 8, 32, 8, Space())
        first, second = (choose(p, gpt, node).best.plan for p in (plans, plans[::-1]))
        assert first == second

    def test_nothing_that_does_not_fit_is_ranked(self):
        big = load("gpt:layers=96,hidden=12288,heads=96,seq=2048,vocab=51200,dtype=bf16")
        with pytest.raises(InfeasibleError, match=r"lacks .* GiB"):
            choose(layouts(big, 8, 8, 8, Space()), big, machines("dgx-a100:nodes=1"))


def test_the_front_has_nothing_that_another_beats(gpt, node):
    swept = sweep(layouts(gpt, 8, 32, 8, Space()), gpt, node)
    front = swept.front()
    assert front[0] == swept.best()
    step, peak = swept.found.step, swept.found.peak
    for i in front:
        beaten = swept.fits & (step <= step[i]) & (peak <= peak[i])
        beaten &= (step < step[i]) | (peak < peak[i])
        assert not beaten.any()


@pytest.mark.parametrize(
    ("text", "found"), [("1..8", [1, 2, 4, 8]), ("1..48", [1, 2, 4, 8, 16, 32, 48]),
                        ("8,12,100", [8, 12, 100]), ("7", [7]), ("4..4", [4])]
)  # fmt: skip
def test_numbers_of_devices(text, found):
    assert counts(text) == found


@pytest.mark.parametrize("text", ["", "a..b", "8..4", "0", "1..", "-3"])
def test_numbers_that_are_none(text):
    with pytest.raises(InputError):
        counts(text)


@pytest.fixture(scope="module")
def rows():
    slow = "nic=ethernet-10g,nics=1"
    return scaling(
        load("vgg16:batch=32"),
        lambda n: machines(f"dgx-1-v100:{slow},gpus={n}"),
        [1, 8, 64],
        lambda n: 32 * n,
    )


class TestScaling:
    def test_every_strategy_that_can_be_has_a_row(self, rows):
        assert {r.strategy for r in rows if r.gpus == 8} >= {"data", "filter", "channel", "spatial"}
        assert [r.strategy for r in rows if r.gpus == 1] == ["serial"]

    def test_parts_make_the_step(self, rows):
        for row in rows:
            assert sum(row.parts.values()) == pytest.approx(row.step, rel=0.02)

    def test_gradient_exchange_is_seen_where_it_is(self, rows):
        (data,) = [r for r in rows if r.gpus == 64 and r.strategy == "data"]
        assert "gradient exchange" in [f.name for f in data.findings]

    def test_layer_wise_collectives_are_seen_where_they_are(self, rows):
        (split,) = [r for r in rows if r.gpus == 8 and r.strategy == "filter"]
        assert "layer-wise collectives" in [f.name for f in split.findings]

    def test_cost_is_printed_by_default(self, rows):
        assert len(marginal_gains(rows)) == 2
        assert "56 more devices (8 → 64) save" in marginal_gains(rows)[1]

    def test_an_epoch(self, rows):
        assert rows[0].epoch(1000) == pytest.approx(1000 * rows[0].step / rows[0].batch)


def test_limits_name_what_ends_a_strategy(gpt):
    found = limits(gpt, 512)
    assert found["tensor"] == (16, "16 heads")
    assert found["pipeline"] == (24, "24 blocks")
    assert found["data"] == (512, "a batch of 512 samples")
    assert limits(load("resnet50"), 64)["filter"][0] == 64


def test_redundant_state_is_reported_with_its_bytes(gpt, node):
    plans = [p for p in layouts(gpt, 8, 32, 8, Space()) if strategy(p) == "data"]
    reported = findings(plans[0], estimate(plans, gpt, node), 0, gpt, node)
    (state,) = [f for f in reported if f.name == "memory redundancy"]
    assert "8 data-parallel ranks" in state.evidence
    assert state.remedy == "zero=1"
    assert 0 < state.share < 1
    assert not math.isnan(state.share)


@pytest.mark.parametrize("batch", [0, -4])
def test_a_step_without_samples_is_refused(gpt, batch):
    with pytest.raises(InputError, match="samples"):
        layouts(gpt, 8, batch, 8, Space())


def test_no_layout_at_all_is_an_error(gpt, node):
    with pytest.raises(InfeasibleError, match="no layout"):
        choose([], gpt, node)


def reported(spec, on, text):
    """Findings of one layout, by name."""
    model, cluster = load(spec), machines(on)
    plan = check(read(text), model, cluster)
    found = findings(plan, estimate([plan], model, cluster), 0, model, cluster)
    return {f.name: f for f in found}


LLAMA = "llama:layers=8,hidden=4096,heads=32,seq=2048,vocab=32000"


@pytest.mark.parametrize(
    ("name", "spec", "on", "text", "words"),
    [
        ("gradient exchange", "vgg16", "abci:nodes=4", "dp=16,global_batch=64", "of the step"),
        ("layer-wise collectives", LLAMA, "a100-80-pcie:gpus=8", "tp=8,global_batch=8", "step"),
        ("halo exchange", "resnet50", "abci:nodes=4", "spatial=4+4,global_batch=64", "images"),
        ("congestion", "vgg16", "abci:nodes=8", "dp=8,filter=4,global_batch=64", "times as long"),
        ("weight update", LLAMA, "h100:gpus=8", "dp=8,global_batch=8", "of the step"),
        ("imbalance", "resnet50", "dgx-a100", "pp=8,micro_batch=8,global_batch=512", "slowest"),
        ("pipeline bubble", LLAMA, "dgx-a100", "pp=8,micro_batch=1,global_batch=8", "of the step"),
        ("redundant compute", "vgg16", "abci:nodes=4", "filter=16,global_batch=64", "beyond 1/16"),
        ("redundant compute", LLAMA, "dgx-a100", "dp=8,global_batch=8,recompute=full", "again"),
        ("memory redundancy", LLAMA, "v100-32:gpus=8", "dp=8,global_batch=8", "GiB of state"),
        ("memory redundancy", "resnet50", "abci:nodes=1", "filter=4,global_batch=256", "GiB kept"),
        (
            "input",
            "cosmoflow:size=512",
            "abci:nodes=4",
            "dp=4,spatial=2+2+1,global_batch=4",
            "GB/s",
        ),
        ("host", "resnet50", "h100:gpus=1", "dp=1,global_batch=1", "of the step"),
        ("small kernels", "resnet50", "h100:gpus=8", "filter=8,global_batch=8", "of the peak rate"),
        ("memory", LLAMA, "v100-16:gpus=8", "dp=8,global_batch=8", "of 16 GiB"),
    ],
)
def test_every_limit_of_the_papers_table_is_seen_where_it_bites(name, spec, on, text, words):
    found = reported(spec, on, text)
    assert name in found, sorted(found)
    assert words in found[name].evidence
    assert found[name].remedy


def test_a_plan_is_compared_with_its_own_simulated_step():
    found = Oracle(batch=96).plan(load(LLAMA), machines("a100-80:gpus=8"))
    assert found.baselines[strategy(found.plan)] == found.predicted
    assert found.predicted >= found.bound * (1 - 1e-9)


def test_borders_and_other_exchanges_are_distinguished():
    found = reported("resnet50", "abci:nodes=4", "spatial=4+4,global_batch=64")
    other = found.get("layer-wise collectives")
    assert found["halo exchange"].share + (other.share if other else 0.0) < 1
    assert other is None or other.share != found["halo exchange"].share


def test_what_helps_shards_is_not_what_helps_split_tensors():
    found = reported("vgg16", "v100-16:gpus=64", "dp=64,zero=3,global_batch=2048")
    assert "shard=" in found["layer-wise collectives"].remedy
    found = reported(LLAMA, "a100-80-pcie:gpus=8", "tp=8,global_batch=8")
    assert "tensor-parallel" in found["layer-wise collectives"].remedy


def test_the_terminal_says_why_and_what_would_help():
    found = oracle("vgg16:batch=32", "dgx-1-v100:nic=ethernet-25g,nics=1", "64")
    assert "gradient exchange on 64 GPUs:" in str(found)
    assert "larger batch per device" in " ".join(str(found).split())


def test_nothing_is_wrong_with_a_plain_step():
    assert not {"congestion", "imbalance", "input", "halo exchange"} & set(
        reported(LLAMA, "dgx-a100", "dp=8,zero=1,global_batch=64,micro_batch=2")
    )


@pytest.fixture(scope="module")
def answer(tmp_path_factory):
    prices = tmp_path_factory.mktemp("prices") / "prices.toml"
    prices.write_text("v100-16 = 0.9\n")
    return oracle("resnet50", "abci", "4,8", epoch=1_280_000, prices=prices).to_dict()


class TestAnswer:
    def test_prices_come_from_a_file(self, answer):
        for row in answer["rows"]:
            assert row["money_per_step"] == pytest.approx(0.9 * row["gpus"] * row["step_s"] / 3600)
            assert row["money_per_epoch"] > 0

    def test_messages_are_reported_by_collective_exposed_and_hidden(self, answer):
        for row in answer["rows"]:
            parts = row["breakdown"]
            waits = parts["comm_s"] + parts["reduce_s"] + parts["send_s"]
            assert row["exposed_s"] == pytest.approx(waits)
            assert sum(row["collectives"].values()) <= row["exposed_s"] + row["hidden_s"] + 1e-9
        data = next(r for r in answer["rows"] if r["strategy"] == "data")
        assert set(data["collectives"]) == {"all_reduce"}
        assert data["hidden_s"] > 0
        sharded = next(r for r in answer["rows"] if r["strategy"] == "fsdp")
        assert set(sharded["collectives"]) == {"all_gather", "reduce_scatter"}

    def test_nothing_on_the_front_is_beaten(self, rows):
        found = front(rows)
        assert found
        marks = [(1 / r.samples, r.peak, r.gpus / r.samples) for r in found]
        for one in marks:
            assert not any(other != one and np.all(np.array(other) <= one) for other in marks)

    def test_a_calibration_slows_every_row(self, answer, tmp_path):
        path = tmp_path / "slow.json"
        path.write_text('{"calibration": {"compute": 2.0, "host": 2.0, "comm": 2.0}}')
        slow = oracle("resnet50", "abci", "8", calibration=path).to_dict()
        fast = {r["strategy"]: r["step_s"] for r in answer["rows"] if r["gpus"] == 8}
        for row in slow["rows"]:
            assert row["step_s"] > 1.5 * fast[row["strategy"]]

    @pytest.mark.parametrize("words", ["v100-16 = -1", "v100-16 = 'much'", "nonsense"])
    def test_files_without_prices_are_refused(self, tmp_path, words):
        path = tmp_path / "prices.toml"
        path.write_text(words)
        with pytest.raises(InputError):
            oracle("resnet50", "abci", "4", prices=path)


def test_paradl_takes_the_best_closed_form_of_its_own_strategies() -> None:
    model, cluster = load("gpt:layers=8,hidden=1024,heads=16"), machines("dgx-a100")
    found = ParaDL().plan(model, cluster)
    assert (found.plan.zero, found.plan.recompute) == (0, "none")
    assert found.alternatives == ()  # one is simulated
    own = ParaDL().own()
    assert own is not None
    assert own.plan(model, cluster).predicted <= found.predicted


def test_a_volume_that_fits_sample_by_sample_alone_is_found() -> None:
    found = Oracle().plan(load("cosmoflow:size=512,batch=1"), machines("dgx-1-v100:gpus=4"))
    assert found.plan.micro_batch == 1
    assert found.plan.spatial
