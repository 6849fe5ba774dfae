"""Segments: one way to write a plan down, whatever syntax it came in; meshes of their own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell.cluster import Cluster
from foretell.cluster import load as load_cluster
from foretell.errors import InputError
from foretell.plan import Plan, check, lower
from foretell.plan.plan import plan_of_segments, segments
from foretell.plan.unsupported import unsupported
from foretell.predict import predict
from foretell.search.refine import neighbours
from foretell.workload import load

WORKLOAD = load("gpt:layers=12,hidden=1024,heads=16")
EIGHT = load_cluster("dgx-a100:nodes=2")


def _rows(pp: int, each: int, tp: int, blocks: tuple[int, ...]) -> str:
    return "/".join(
        f"{n}+{s * each}-{(s + 1) * each - 1}+tp:{tp}" for s, n in enumerate(blocks[:pp])
    )


@settings(max_examples=12)
@given(
    tp=st.sampled_from([1, 2, 4]),
    pp=st.sampled_from([1, 2, 4]),
    zero=st.sampled_from([0, 1]),
    again=st.sampled_from(["none", "selective", "full"]),
    schedule=st.sampled_from(["1f1b", "gpipe"]),
    uneven=st.booleans(),
)
def test_the_same_plan_in_degrees_and_in_segments_is_the_same_graph(
    tp: int, pp: int, zero: int, again: str, schedule: str, uneven: bool
) -> None:
    dp, blocks = 16 // tp // pp, [12 // pp] * pp
    if uneven and pp > 1:
        blocks[0], blocks[-1] = blocks[0] + 1, blocks[-1] - 1
    common = f"zero={zero},recompute={again},schedule={schedule},global_batch={dp * 8}"
    layers = f",layers={'+'.join(map(str, blocks))}" if pp > 1 else ""
    one = Plan.parse(f"dp={dp},tp={tp},pp={pp},micro_batch=2,{common}{layers}")
    rows = _rows(pp, 16 // pp, tp, tuple(blocks))
    other = Plan.parse(f"segments={rows},micro_batch={2 * dp},{common}")
    a, b = (lower(plan, WORKLOAD, EIGHT) for plan in (one, other))
    assert np.array_equal(a.seconds, b.seconds)
    assert predict(one, WORKLOAD, EIGHT) == predict(other, WORKLOAD, EIGHT)


def test_a_plan_with_segments_survives_its_text() -> None:
    text = "segments=4+0-7+tp:4+recompute:full/8+8-15+zero:1,micro_batch=8,global_batch=64"
    plan = Plan.parse(text)
    assert Plan.parse(str(plan)) == plan
    checked = check(plan, WORKLOAD, EIGHT)
    found = segments(checked, WORKLOAD)
    assert [(one.plan.dp, one.plan.tp, one.plan.micro_batch) for one in found] == [
        (2, 4, 4),
        (8, 1, 1),
    ]
    assert segments(plan_of_segments(checked, found), WORKLOAD) == found


def test_a_segment_costs_what_its_own_mesh_and_memory_cost() -> None:
    plain = "segments=6+0-7+tp:2/6+8-15+tp:2+recompute:{},micro_batch=8,global_batch=64"
    kept, again = (
        predict(Plan.parse(plain.format(word)), WORKLOAD, EIGHT) for word in ("selective", "full")
    )
    assert again.step > kept.step
    graph = lower(Plan.parse(plain.format("full")), WORKLOAD, EIGHT)
    assert sorted(set(graph.rank.tolist())) == [0, 8]


def test_blocks_of_a_stage_run_again_in_part_cost_time_and_keep_memory_in_part() -> None:
    texts = ("none", "full,recompute_layers=2", "full,recompute_layers=6", "full")
    found = [
        predict(
            Plan.parse(f"dp=8,pp=2,micro_batch=1,global_batch=64,recompute={text}"), WORKLOAD, EIGHT
        )
        for text in texts
    ]
    assert [p.step for p in found] == sorted(p.step for p in found)
    assert found[0].peak > found[1].peak > found[3].peak
    assert found[2].step == found[3].step  # all six of a stage
    assert found[2].peak == found[3].peak


@pytest.mark.parametrize(
    "text",
    [
        "segments=6+0-7/5+8-15",
        "segments=6+0-7/6+7-15",
        "segments=6+0-7+tp:3/6+8-15",
        "segments=6+0-7/6+8-15,micro_batch=3,global_batch=64",
        "segments=6+0-7/6+8-15,dp=2",
        "segments=6+0-7/6+8-15,schedule=interleaved",
        "segments=6+0-7+color:red/6+8-15",
        "segments=six+0-7/6+8-15",
        "segments=6+0-7/6+8-99",
    ],
)
def test_segments_that_cannot_be_are_refused_by_name(text: str) -> None:
    with pytest.raises(InputError):
        predict(Plan.parse(text), WORKLOAD, EIGHT)


def test_segments_of_images_split_filters_channels_and_space_their_own_way() -> None:
    model, machines = load("cosmoflow"), load_cluster("dgx-1-v100")
    common = "micro_batch=4,global_batch=8"
    alike = Plan.parse(f"segments=4+0-3+spatial:2x2x1/3+4-7+spatial:2x2x1,{common}")
    degrees = Plan.parse(f"pp=2,layers=4+3,spatial=2+2+1,{common}")
    assert predict(alike, model, machines) == predict(degrees, model, machines)
    for row, dp in (("filter:2", 2), ("channel:4", 1), ("spatial:2x1x1", 2)):
        plan = Plan.parse(f"segments=4+0-3+{row}/3+4-7,{common}")
        assert Plan.parse(str(plan)) == plan
        checked = check(plan, model, machines)
        found = segments(checked, model)
        assert [one.plan.dp for one in found] == [dp, 4]
        assert segments(plan_of_segments(checked, found), model) == found
        assert predict(plan, model, machines).step > 0
        assert {move for move in neighbours(plan, model, machines) if move.segments} - {plan}
    splits = {row for move in neighbours(plan, model, machines) for row in move.segments}
    assert {("4", "0-3", "spatial:2x2x1"), ("3", "4-7", "filter:2")} <= splits


@pytest.mark.parametrize("row", ["spatial:2x2x2", "filter:3", "filter:0", "spatial:0x1x1"])
def test_splits_of_a_segment_that_cannot_be_are_refused(row: str) -> None:
    plan = Plan.parse(f"segments=4+0-3+{row}/3+4-7,micro_batch=4,global_batch=8")
    with pytest.raises(InputError, match="ranks of a segment"):
        predict(plan, load("cosmoflow"), load_cluster("dgx-1-v100"))


MIXED = """
name = "mixed"
[[node]]
device = "a100-80"
devices = 4
nic = "infiniband-hdr"
[[node]]
device = "v100-32"
devices = 4
nic = "infiniband-hdr"
"""


@pytest.fixture
def mixed(tmp_path: Path) -> Cluster:
    """Four A100 and four V100."""
    path = tmp_path / "mixed.toml"
    path.write_text(MIXED)
    return load_cluster(str(path))


def test_replicas_of_a_segment_may_have_unlike_samples(mixed: Cluster) -> None:
    rows = "6+0-1%2B4-5{}/6+2-3%2B6-7{}"
    even = Plan.parse(f"segments={rows.format('', '')},micro_batch=8,global_batch=32")
    own = "+shares:12x12x4x4"
    uneven = Plan.parse(f"segments={rows.format(own, own)},micro_batch=8,global_batch=32")
    assert Plan.parse(str(uneven)) == uneven
    degrees = Plan.parse("dp=4,pp=2,shares=12+12+4+4,micro_batch=3,global_batch=32")
    degrees = degrees.but(placement=(0, 1, 4, 5, 2, 3, 6, 7))
    found = predict(uneven, WORKLOAD, mixed)
    assert found.step < 0.9 * predict(even, WORKLOAD, mixed).step
    assert found.step == predict(degrees, WORKLOAD, mixed).step
    half = Plan.parse(f"segments={rows.format(own, '')},micro_batch=8,global_batch=32")
    assert found.step < predict(half, WORKLOAD, mixed).step


def test_a_segment_waits_for_its_slowest_replica_and_holds_what_its_fullest_holds(
    mixed: Cluster,
) -> None:
    common = "tp=2,global_batch=32,zero=1"
    fast, slow, both = (
        predict(Plan.parse(f"dp=4,{common},shares={'+'.join(map(str, some))}"), WORKLOAD, mixed)
        for some in ((15, 15, 1, 1), (1, 1, 15, 15), (12, 12, 4, 4))
    )
    assert both.step < fast.step < slow.step
    assert fast.peak > both.peak
    assert fast.peak == pytest.approx(slow.peak, rel=0.01)  # fifteen samples of the same layers


@pytest.mark.parametrize(
    ("row", "word"),
    [
        ("12+0-7+shares:4x4", "8 multiples of 4"),
        ("12+0-7+shares:9x7x4x4x2x2x2x2", "8 multiples of 4"),
        ("12+0-7+tp:2+shares:12x12x4x8", "add up to global_batch=32"),
    ],
)
def test_shares_of_a_segment_that_cannot_be_are_refused(
    row: str, word: str, mixed: Cluster
) -> None:
    with pytest.raises(InputError) as caught:
        predict(Plan.parse(f"segments={row},micro_batch=8,global_batch=32"), WORKLOAD, mixed)
    assert word in f"{caught.value.message} {caught.value.hint}"


@pytest.mark.parametrize("batch", ["", ",global_batch=8"])
def test_segments_with_uneven_shares_can_be_run(batch: str) -> None:
    plan = Plan.parse(f"segments=6+0-1+shares:5x3/6+2-3,micro_batch=8{batch}")
    assert unsupported(plan) == []
    assert any("shares" in why for why in unsupported(plan.but(global_batch=16)))


def test_samples_of_replicas_go_by_speed_as_one_move(mixed: Cluster) -> None:
    plan = Plan.parse("dp=4,tp=2,zero=1,micro_batch=8,global_batch=32")
    some = [move for move in neighbours(plan, WORKLOAD, mixed) if move.shares]
    steps = {move.shares: predict(move, WORKLOAD, mixed).step for move in some}
    assert len(steps) == 1
    ((shares, step),) = steps.items()
    assert sum(shares) == 32
    assert shares[0] == shares[1] > shares[2] == shares[3]
    assert step < predict(plan, WORKLOAD, mixed).step
    more = {move.shares for move in neighbours(some[0], WORKLOAD, mixed)}
    assert () in more
    assert (shares[0] + 1, shares[1] + 1, shares[2] - 1, shares[3] - 1) in more
