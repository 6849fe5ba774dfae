"""Laws of the one evaluator, over random models, plans and clusters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell.cluster import load as load_cluster
from foretell.errors import ForetellError
from foretell.graph.show import span
from foretell.plan import Plan, lower
from foretell.plan.check import units
from foretell.plan.plan import blocks_of, load, predicted, save
from foretell.plan.program import order
from foretell.predict import predict
from foretell.search.fusion.fused_step import eager_plan
from foretell.search.joint import Joint
from foretell.search.kit import priced
from foretell.search.oracle import scaling
from foretell.search.oracle.planner import Oracle
from foretell.search.partition import resolved_common
from foretell.simulate import simulate
from foretell.simulate.memory import peak_bytes
from foretell.workload import load as load_workload

MODELS = ("gpt:layers=4,hidden=512,heads=8", "llama:layers=6,hidden=1024,heads=8", "bert:batch=4")
CLUSTERS = ("dgx-a100", "h100:gpus=16", "dgx-1-v100")

plans = st.builds(
    lambda **fields: fields,
    tp=st.sampled_from([1, 2, 4]),
    pp=st.sampled_from([1, 2]),
    zero=st.sampled_from([0, 1, 3]),
    micro_batch=st.sampled_from([1, 2, 4]),
    recompute=st.sampled_from(["none", "selective", "full"]),
    schedule=st.sampled_from(["1f1b", "gpipe"]),
    overlap=st.sampled_from([None, True, False]),
)


def _plan(fields: dict[str, Any], ranks: int, batch: int) -> Plan:
    dp = ranks // fields["tp"] // fields["pp"]
    return Plan(dp=dp, global_batch=batch, sp=fields["tp"] > 1, **fields)


@settings(max_examples=12)
@given(st.sampled_from(MODELS), st.sampled_from(CLUSTERS), plans, st.sampled_from([0.25, 2.0, 8.0]))
def test_scaling_every_price_scales_the_step(
    model: str, on: str, fields: dict[str, Any], times: float
) -> None:
    workload, cluster = load_workload(model), load_cluster(on)
    try:
        graph = lower(_plan(fields, cluster.size, cluster.size * 8), workload, cluster)
    except ForetellError:
        return
    with graph.edit() as edit:
        edit.set(np.arange(len(graph)), seconds=graph.seconds * times)
    assert simulate(edit.graph).seconds == pytest.approx(simulate(graph).seconds * times, rel=1e-12)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("way", ["all-reduce", "sharded", "split"])
def test_a_plan_is_the_same_step_in_every_syntax(model: str, way: str) -> None:
    workload, cluster = load_workload(model), load_cluster("dgx-a100")
    n, each, batch = cluster.size, 4, 4 * cluster.size
    degrees = {
        "all-reduce": Plan(dp=n, global_batch=batch, framework="ddp"),
        "sharded": Plan(dp=n, zero=1, global_batch=batch, framework="ddp"),
        "split": Plan(tp=n, global_batch=batch, framework="ddp"),
    }[way]
    names = [unit.name for unit in units(workload)]
    assigned = [f"{rank}:{batch if way == 'split' else each}" for rank in range(n)]
    rows = (names[0], names[2], way, *assigned), (names[3], names[-1], way, *assigned)
    same = [Plan(groups=rows, global_batch=batch), Plan(groups=rows, framework="ddp")]
    if way == "all-reduce":
        same.append(degrees.but(shares=(each,) * n))
        same.append(degrees.but(dp=1, segments=((str(workload.num_blocks), f"0-{n - 1}"),)))
    wanted = priced(degrees, workload, cluster)
    for plan in same:
        found = priced(plan, workload, cluster)
        assert (found.step, found.low, found.peak) == (wanted.step, wanted.low, wanted.peak)


@settings(max_examples=12)
@given(
    st.sampled_from(MODELS[:2]), st.sampled_from(["dgx-a100", "dgx-1-v100", "heterog-8"]),
    st.sampled_from([1, 2, 4]), st.sampled_from(["none", "full"]), st.sampled_from([0, 1]),
)  # fmt: skip
def test_a_pipeline_in_stages_is_the_one_in_degrees(
    model: str, machines: str, tp: int, recompute: str, uneven: int
) -> None:
    workload, cluster = load_workload(model), load_cluster(machines)
    pp = cluster.size // tp if cluster.size // tp <= workload.num_blocks else 2
    cluster = cluster.subset(range(pp * tp))
    counts = blocks_of(Plan(pp=pp), workload)
    if counts[-1] > 1 and uneven:
        counts = (counts[0] + 1, *counts[1:-1], counts[-1] - 1)
    wanted = Plan(
        tp=tp, pp=pp, layers=counts, micro_batch=1, global_batch=8, recompute=recompute,
        optimizer="adam",
    )  # fmt: skip
    ways = ["recompute"] * (recompute == "full")
    ends = {0: ["embedding"], pp - 1: ["head"]}
    stages = tuple(
        (
            f"{s * tp}-{s * tp + tp - 1}" if tp > 1 else str(s),
            *(ends.get(s, []) if s == 0 else []), f"block*{n}",
            *(ends[s] if s == pp - 1 else []), *ways,
        )
        for s, n in enumerate(counts)
    )  # fmt: skip
    rows = [
        tuple(f"{s}{'FB'[way]}{m}" for way, _, m in zip(*map(np.ndarray.tolist, turn), strict=True))
        for s, turn in enumerate(order(wanted, 8).turns)
    ]
    placed = wanted.but(
        tp=1, pp=1, layers=(), recompute="none", stages=stages,
        actions=tuple(rows[rank // tp] for rank in range(pp * tp)),
    )  # fmt: skip
    one, other = (predict(plan, workload, cluster) for plan in (wanted, placed))
    assert (one.step, one.low, one.high) == (other.step, other.low, other.high)
    assert (one.peak, one.memory, one.breakdown) == (other.peak, other.memory, other.breakdown)


@pytest.mark.parametrize("model", [*MODELS, "vgg11:batch=8"])
@pytest.mark.parametrize("micro_batch", [4, 16])
def test_layers_on_one_rank_take_what_they_take_alone(model: str, micro_batch: int) -> None:
    workload, cluster = load_workload(model), load_cluster("heterog-8")
    names, batch = [unit.name for unit in units(workload)], 16
    rows = ((names[0], names[-1], "all-reduce", f"2:{batch}"),)
    among = Plan(groups=rows, global_batch=batch, micro_batch=micro_batch, framework="ddp")
    alone = Plan(global_batch=batch, micro_batch=micro_batch, framework="ddp")
    one, other = predict(among, workload, cluster), predict(alone, workload, cluster.subset([2]))
    assert one.step == pytest.approx(other.step, rel=1e-12)
    assert one.peak == pytest.approx(other.peak, rel=1e-12)


@settings(max_examples=12)
@given(st.sampled_from(MODELS), plans)
def test_a_plan_as_text_as_a_file_and_as_fields_is_one_plan(
    model: str, fields: dict[str, Any]
) -> None:
    workload, cluster = load_workload(model), load_cluster("dgx-a100")
    plan = _plan(fields, cluster.size, 64)
    try:
        found = predict(plan, workload, cluster)
    except ForetellError:
        return
    assert Plan.parse(str(plan)) == plan
    assert predict(found.plan, workload, cluster) == found  # resolved, it is still the same plan


@pytest.mark.parametrize("ending", ["plan", "toml"])
def test_a_file_carries_its_prediction_and_the_plan_stays_the_same(
    tmp_path: Path, ending: str
) -> None:
    plan, path = Plan.parse("dp=4,tp=2,sp=yes,global_batch=64"), tmp_path / f"best.{ending}"
    save(plan, path, {"step_s": 0.25, "model": "a"})
    assert load(path) == plan
    assert predicted(path) == {"step_s": 0.25, "model": "a"}


@pytest.mark.parametrize("model", MODELS[:2])
def test_no_plan_of_the_space_that_predict_accepts_beats_the_search(model: str) -> None:
    workload, cluster = load_workload(model), load_cluster("dgx-a100")
    batch = workload.batch * cluster.size
    best = Joint(evaluations=80).plan(workload, cluster)
    assert priced(best.plan, workload, cluster).step == best.predicted

    @settings(max_examples=25)
    @given(plans)
    def holds(fields: dict[str, Any]) -> None:
        try:
            other = predict(_plan(fields, cluster.size, batch), workload, cluster)
        except ForetellError:
            return
        assert not other.fits or best.predicted <= other.step * (1 + 1e-9)

    holds()


def _holds_what_is_predicted(plan: Plan, model: str, on: str) -> None:
    """The buffers of the lowered graph peak at the memory that is predicted, part by part."""
    workload, cluster = load_workload(model), load_cluster(on)
    found = predict(plan, workload, cluster)
    assert sum(found.memory.values()) == pytest.approx(found.peak, rel=1e-9)
    assert peak_bytes(simulate(lower(plan, workload, cluster))) == pytest.approx(
        found.peak, rel=1e-9
    )


@settings(max_examples=25)
@given(
    st.sampled_from([*MODELS, "moe:layers=4", "resnet50:batch=8", "t5"]),
    st.sampled_from(CLUSTERS), plans, st.sampled_from(["", "ddp", "fsdp", "megatron-core"]),
    st.booleans(),
)  # fmt: skip
def test_the_graph_of_a_plan_holds_what_is_predicted(
    model: str, on: str, fields: dict[str, Any], framework: str, offload: bool
) -> None:
    ranks = load_cluster(on).size
    plan = _plan(fields, ranks, ranks * 8).but(framework=framework, offload=offload)
    try:
        predict(plan, load_workload(model), load_cluster(on))
    except ForetellError:
        return
    _holds_what_is_predicted(plan, model, on)


@pytest.mark.parametrize(
    "plan",
    [
        "groups=embedding+block.1+all-reduce+0:8+1:8/block.2+head+ps+2:10+3:6,global_batch=16",
        "segments=2+0-3+tp:2+recompute:full/2+4-7+zero:3,micro_batch=4,global_batch=32",
        "stages=0+embedding+block*2+offload/1+block*2+head+recompute,"
        "actions=0F0+0F1+0B0+0B1/1F0+1B0+1F1+1B1,micro_batch=1,global_batch=2",
        "stages=0+embedding+block*2+frozen/1+block*2+head,"
        "actions=0F0+0F1/1F0+1I0+1F1+1W0+1I1+1W1,micro_batch=4,global_batch=8,"
        "framework=megatron-core",
        "stages=0+embedding+block*4+head,actions=0F0+0F1,micro_batch=1,global_batch=2",
    ],
)
def test_the_graph_of_a_placed_plan_holds_what_is_predicted(plan: str) -> None:
    _holds_what_is_predicted(Plan.parse(plan), MODELS[0], "dgx-a100")


@pytest.mark.parametrize(
    ("model", "on"),
    [("gpt:layers=4,hidden=512,heads=8", "dgx-a100"), ("swin_t", "a100-80:gpus=4")],
)
def test_every_row_of_the_oracle_is_what_predict_says(model: str, on: str) -> None:
    workload, cluster = load_workload(model), load_cluster(on)
    n = cluster.size
    rows = scaling(workload, lambda _: cluster, [n], lambda _: workload.batch * n)
    for row in rows:
        found = priced(row.plan, workload, cluster)
        assert (row.step, row.low, row.high) == (found.step, found.low, found.high)
        assert (row.peak, row.missing, row.utilisation) == (
            found.peak, found.missing, found.utilisation,
        )  # fmt: skip
        assert sum(row.parts.values()) == pytest.approx(row.step, rel=1e-9)
    steps = {row.strategy: row.step for row in rows if not row.missing}
    planned = Oracle().plan(workload, cluster)
    assert planned.baselines.keys() == steps.keys()
    assert all(planned.baselines[name] <= step for name, step in steps.items())


def test_the_change_that_would_fit_takes_what_predict_says() -> None:
    workload, cluster = load_workload("llama:layers=32,hidden=4096,heads=32"), load_cluster("h100")
    found = predict(Plan(micro_batch=4, global_batch=4), workload, cluster)
    changes, _, rest = found.advice.partition(" fits and takes ")
    again = predict(Plan.parse("micro_batch=4,global_batch=4").changed(changes), workload, cluster)
    assert again.fits
    assert rest == f"{span(again.step)} a step"


@pytest.mark.parametrize("model", [*MODELS, "llama:layers=4,hidden=512,heads=1", "resnet50"])
def test_a_search_trains_with_the_optimizer_that_predict_takes(model: str) -> None:
    workload, cluster = load_workload(model), load_cluster("a100-80:gpus=4")
    usual = predict(Plan(dp=4, framework="ddp"), workload, cluster).plan
    fused = eager_plan(workload)
    assert (fused.optimizer, fused.precision, fused.dtype) == (
        usual.optimizer, usual.precision, usual.dtype,
    )  # fmt: skip
    assert resolved_common(Plan(), workload).optimizer == usual.optimizer
