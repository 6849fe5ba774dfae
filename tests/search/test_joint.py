"""The joint search: its plan is what `predict` says it is, and no planner of one axis beats it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from foretell.api import plan
from foretell.api.scaling import at_prices
from foretell.cluster import Cluster, load
from foretell.errors import InfeasibleError, InputError
from foretell.plan import Plan
from foretell.plan.check import check
from foretell.pool import opened
from foretell.predict import predict
from foretell.search.joint import Joint, power, price
from foretell.search.kit import in_order, parse, priced, renamed, searcher
from foretell.search.oracle.planner import Oracle
from foretell.search.partition import Partitioner, kinds, meshes, pipelines, rows_of
from foretell.search.placement.planner import PlacementPlanner
from foretell.search.refine import BEYOND, Evaluator, Race, _repeated_cut, descend, neighbours
from foretell.workload import load as load_workload

GPT = load_workload("gpt:layers=8,hidden=1024,heads=16")
BOX = '[[node]]\ncount = {count}\ndevice = "{device}"\ndevices = 4\nnic = "infiniband-hdr"\n'
FAST, SLOW = ({"device": name, "count": n} for name, n in (("a100-80", 1), ("v100-16", 2)))


def _mixed(folder: Path, *boxes: dict[str, object]) -> Cluster:
    path = folder / f"{boxes[0]['device']}.toml"
    path.write_text('name = "mixed"\n' + "".join(BOX.format(**box) for box in boxes))
    return load(str(path))


def test_the_plan_is_priced_as_predict_prices_it_and_beats_the_oracle() -> None:
    cluster = load("dgx-a100:nodes=2")
    found = Joint(evaluations=30).plan(GPT, cluster)
    assert priced(Plan.parse(str(found.plan)), GPT, cluster).step == found.predicted
    assert found.predicted <= Oracle().plan(GPT, cluster).predicted


@pytest.mark.parametrize(("batch", "answers"), [(6, True), (7, False)])
def test_every_method_is_asked_for_the_samples_of_the_question(batch: int, answers: bool) -> None:
    """Fused plans once took the model's own batch, and won against plans of more samples."""
    model, cluster = load_workload("bert:batch=1"), load("a100-80:gpus=2")
    found = Joint(evaluations=12, global_batch=batch).plan(model, cluster)
    assert check(found.plan, model, cluster).global_batch == batch
    fused = [step for name, step in found.baselines.items() if name.startswith("fusion")]
    assert bool(fused) == answers
    with pytest.raises(InfeasibleError, match="divides 7 samples over 2 devices"):
        Joint(evaluations=12, global_batch=7, only="fusion").plan(model, cluster)
    least = predict(Plan.parse(f"dp=2,global_batch={batch - batch % 2}"), model, cluster).step
    assert min(fused, default=least) > 0.6 * least


def test_stages_of_unlike_devices_have_meshes_of_their_own(tmp_path: Path) -> None:
    cluster = _mixed(tmp_path, FAST, SLOW)
    assert [len(ranks) for ranks in kinds(cluster)] == [4, 8]
    offered = pipelines(GPT, cluster, Plan(global_batch=64))
    steps = [predict(plan, GPT, cluster).step for _, plan in offered[:6]]
    texts = [f"dp={dp},pp={12 // dp},micro_batch=1,global_batch=48" for dp in (6, 12)]
    alike = [predict(Plan.parse(text), GPT, cluster).step for text in texts]
    assert min(steps) < min(alike) * 64 / 48


def test_the_order_of_nodes_in_a_file_changes_no_answer(tmp_path: Path) -> None:
    forth, back = _mixed(tmp_path, FAST, SLOW), _mixed(tmp_path, SLOW, FAST)
    small = load_workload("gpt:layers=4,hidden=512,heads=8,seq=256")
    found = [plan(small, cluster, Joint(evaluations=20)) for cluster in (forth, back)]
    assert found[0].predicted == found[1].predicted
    for one, cluster in zip(found, (forth, back), strict=True):
        assert priced(one.plan, small, cluster).step == one.predicted


def test_a_plan_for_machines_in_order_is_one_for_the_file(tmp_path: Path) -> None:
    cluster = _mixed(tmp_path, SLOW, FAST)
    ranks = in_order(cluster)
    assert ranks == (8, 9, 10, 11, *range(8))
    for text in (
        "segments=3+0-3/5+4-11,micro_batch=8,global_batch=64",
        "dp=3,pp=4,micro_batch=1,global_batch=48",
    ):
        plan = Plan.parse(text)
        there = predict(plan, GPT, cluster.subset(ranks))
        here = predict(renamed(plan, ranks, cluster), GPT, cluster)
        assert here.step == there.step


@pytest.mark.parametrize(
    "text",
    [
        "dp=4,pp=4,micro_batch=1,global_batch=64",
        "segments=3+0-7/5+8-15+tp:2,micro_batch=8,global_batch=64",
    ],
)
def test_a_descent_ends_where_no_move_it_tried_is_better(text: str) -> None:
    cluster = load("dgx-a100:nodes=2")
    on = Evaluator(GPT, cluster, budget=60)
    start = on.of([Plan.parse(text)])[0]
    end = descend([start], on)
    assert end.step <= start.step
    assert all(one is None or not one.fits or one.step >= end.step for one in on.known.values())
    assert on.evaluations <= 60
    assert len({str(p) for p in neighbours(start.plan, GPT, cluster)}) > 10


def test_stages_change_places_and_one_replica_may_run_under_fsdp() -> None:
    cluster = load("dgx-a100:gpus=4")
    rows = "3+0-1+tp:2+sp:yes", "5+2-3+tp:2+sp:yes"
    query = Plan.parse(f"segments={'/'.join(rows)},micro_batch=1,global_batch=4")
    found = list(neighbours(query, GPT, cluster))
    swapped = Plan.parse(f"segments={'/'.join(rows[::-1])},micro_batch=1,global_batch=4")
    assert swapped.segments in [plan.segments for plan in found]
    for start in (query, Plan.parse("tp=2,pp=2,sp=yes,micro_batch=1,global_batch=4")):
        fsdp = [p for p in neighbours(start, GPT, cluster) if p.framework == "fsdp" and p.compile]
        assert predict(fsdp[0], GPT, cluster).step < predict(start, GPT, cluster).step


def test_only_what_runs_is_offered_where_that_is_asked() -> None:
    from foretell.plan.unsupported import in_own_loop, unsupported

    for own_loop in (False, True):
        asked = Joint(evaluations=40, runnable=True, own_loop=own_loop)
        found = asked.plan(GPT, load("dgx-a100"))
        assert not unsupported(found.plan)
        assert not (own_loop and in_own_loop(found.plan))


SMALL = load_workload("gpt:layers=4,hidden=512,heads=8")


def test_only_and_fix_hold_what_they_name() -> None:
    cluster = load("dgx-a100:gpus=4")
    found = Joint(evaluations=12, only="dp,tp", fix="tp=2,micro_batch=1").plan(SMALL, cluster)
    p = found.plan
    assert (p.tp, p.dp, p.pp, p.zero, p.recompute, p.compile) == (2, 2, 1, 0, "none", False)
    assert p.micro_batch == 1
    with pytest.raises(InputError, match="axis of a search"):
        Joint(only="dp,colour").plan(SMALL, cluster)
    with pytest.raises(InputError, match="do not divide"):
        Joint(fix="tp=3").plan(SMALL, cluster)


def test_a_search_that_goes_on_ends_like_one_that_never_stopped(tmp_path: Path) -> None:
    cluster, kept = load("dgx-a100:gpus=2"), tmp_path / "search.json"
    query = {"only": "dp,tp,zero,recompute", "resume": str(kept)}
    first = Joint(evaluations=6, **query).plan(SMALL, cluster)
    again = Joint(evaluations=20, **query).plan(SMALL, cluster)
    whole = Joint(evaluations=20, only=query["only"]).plan(SMALL, cluster)
    assert again.plan == whole.plan
    assert again.predicted == whole.predicted <= first.predicted
    with pytest.raises(InputError, match="another search"):
        Joint(**query).plan(SMALL, load("dgx-a100:gpus=4"))


def test_energy_may_leave_devices_out_and_no_plan_is_below_the_bound() -> None:
    cluster = load("dgx-1-v100:gpus=4")
    query = {"evaluations": 20, "only": "dp,tp,zero,placement"}
    fast = Joint(**query, fix="sync=").plan(SMALL, cluster)
    frugal = Joint(**query, fix="sync=", objective="energy").plan(SMALL, cluster)
    joules = [one.predicted * power(one.plan, cluster) for one in (frugal, fast)]
    assert joules[0] <= joules[1]
    assert 0 < fast.bound <= min(fast.predicted, *(p.step for p in fast.alternatives))


def test_money_may_leave_nodes_out_and_needs_their_prices(tmp_path: Path) -> None:
    cheap, dear = {**FAST, "device": "v100-16"}, {**FAST, "device": "a100-80"}
    plain = _mixed(tmp_path, cheap, dear)
    with pytest.raises(InputError, match="the price of"):
        Joint(evaluations=12, objective="money").plan(GPT, plain)
    listed = at_prices(plain, None, {"v100-16": 1.0, "a100-80": 40.0})
    found = Joint(evaluations=24, objective="money", only="dp,tp,pp,zero,placement").plan(
        GPT, listed
    )
    fast = Joint(evaluations=24, only="dp,tp,pp,zero,placement").plan(GPT, listed)
    assert price(found.plan, listed) * found.predicted < price(fast.plan, listed) * fast.predicted
    assert found.bound is None
    assert any("cents a step" in note for note in found.notes)


def test_blocks_and_recompute_are_split_by_stage_where_memory_is_short() -> None:
    workload = load_workload("llama:layers=32,hidden=4096,heads=32")
    cluster = load("a100-40:gpus=8")
    plan = Plan.parse("tp=2,pp=4,sp=yes,micro_batch=4,global_batch=64")
    guess, split = Partitioner(workload, cluster).best(meshes(rows_of(plan, workload)), plan)
    found = predict(split, workload, cluster)
    alike = [predict(plan.but(recompute=r), workload, cluster) for r in ("none", "full")]
    assert not alike[0].fits
    assert found.fits
    assert found.step < alike[1].step
    assert abs(guess / found.step - 1) < 0.1


def test_one_device_and_one_sample_are_answered() -> None:
    alone = load_workload("gpt:layers=2,hidden=256,heads=4")
    for planner in (Joint(evaluations=20), PlacementPlanner()):
        found = planner.plan(alone, load("h100"))
        assert found.plan.ranks == 1
        assert priced(found.plan, alone, load("h100")).fits


def test_layers_on_ranks_of_their_own_are_not_moved_to_fsdp() -> None:
    rows = "embedding+block.3+sharded+0:4+1:4/block.4+head+split+2:8+3:8"
    plan, cluster = Plan.parse(f"global_batch=8,framework=ddp,groups={rows}"), load("h100:gpus=4")
    moves = list(neighbours(plan, GPT, cluster))
    assert moves
    assert all(move.zero == 0 and move.framework == "ddp" for move in moves)
    with pytest.raises(InputError, match="groups beside zero=3"):
        predict(plan.but(zero=3), GPT, cluster)


def test_sharded_parameters_are_also_tried_with_the_kernels_of_who_splits_such_a_model() -> None:
    model, cluster = load_workload("gpt:layers=40,hidden=5120,heads=40"), load("dgx-a100:nodes=8")
    found = Joint(evaluations=40).plan(model, cluster)
    rival = predict(
        Plan.parse("dp=64,zero=3,micro_batch=1,framework=megatron-deepspeed"), model, cluster
    )
    assert found.predicted <= rival.step * (1 + 1e-9)


def test_stages_of_unlike_devices_are_tried_the_other_way_round(tmp_path: Path) -> None:
    cluster = _mixed(tmp_path, FAST, {"device": "v100-16", "count": 1})
    plan = Plan.parse("dp=4,pp=2,micro_batch=2,global_batch=64,schedule=zb-h1,framework=fsdp")
    turned = {
        (move.segments[0][1], move.micro_batch)
        for move in neighbours(plan, GPT, cluster)
        if move.segments
    }
    assert turned >= {("4-7", 8), ("4-7", 4)}
    assert not [m for m in neighbours(plan, GPT, load("dgx-a100")) if m.segments]


def test_a_plan_in_two_ways_is_one_evaluation() -> None:
    on = Evaluator(GPT, load("dgx-a100"), budget=10)
    degrees = Plan.parse("dp=4,pp=2,micro_batch=1,global_batch=32,layers=4+4")
    rows = Plan.parse("segments=4+0-3/4+4-7,micro_batch=4,global_batch=32")
    one, other = on.of([degrees, rows])
    assert one.step == other.step
    assert on.evaluations == 1
    again = on.of([rows, rows.but(micro_batch=8)])
    assert again[0].step == one.step
    assert on.evaluations == 2


def test_a_plan_that_cannot_be_costs_no_evaluation() -> None:
    on = Evaluator(GPT, load("dgx-a100"), budget=1)
    assert not on.of([Plan.parse("dp=3,micro_batch=1,global_batch=8")])
    assert on.evaluations == 0
    assert on.of([Plan.parse("dp=8,micro_batch=1,global_batch=8")])
    assert on.is_spent


def test_a_schedule_that_needs_more_micro_batches_is_offered_with_smaller_ones() -> None:
    plan = Plan.parse("dp=4,pp=2,micro_batch=4,global_batch=32")
    found: dict[str, set[int]] = {}
    for move in neighbours(plan, GPT, load("dgx-a100")):
        if move.but(schedule="1f1b", chunks=1, micro_batch=4) == plan and move.chunks == 1:
            found.setdefault(move.schedule, set()).add(move.micro_batch)
    assert (found["zb-h1"], found["zb-v"], found["dualpipev"]) == ({4, 2}, {2, 1}, {2, 1})


def test_moves_are_tried_by_the_closed_form_and_those_far_beyond_come_last() -> None:
    on = Evaluator(GPT, load("dgx-a100:nodes=2"), budget=10)
    start = on.of([Plan.parse("dp=4,pp=4,micro_batch=1,global_batch=64")])
    offered = on.estimated(on.new(on.neighbours(start[0].plan)))
    race, least = Race(start, on, None, {}), min(guess.cost for guess in offered.values())
    race.best, race.lead = start[0]._replace(cost=least), least
    near, limit = race.ordered(start[0].plan, least, offered), BEYOND * least
    assert near
    assert race.late
    assert all(offered[p].cost <= limit for p in near)
    assert all(offered[p].cost > limit for p in race.late)
    left_out = offered.keys() - set(near) - race.late.keys()
    assert left_out
    assert all(offered[p].least >= least for p in left_out)
    guesses = [offered[p].cost for p in race._few_postponed()]
    assert guesses == sorted(guesses)


def test_a_race_gives_every_start_a_turn_that_is_not_far_behind() -> None:
    on = Evaluator(GPT, load("dgx-a100:nodes=2"), budget=60)
    texts = "dp=16", "dp=16,zero=1", "tp=16"
    more = "micro_batch=4,global_batch=64,compile=yes,optimizer_kernels=fused"
    starts = on.of([Plan.parse(f"{text},{more}") for text in texts])
    first, near, far = starts
    assert first.step < near.step < BEYOND * first.step < far.step
    end = descend(starts, on)
    assert end.step <= first.step
    assert on.is_expanded(near.plan)
    assert not on.is_expanded(far.plan)
    assert on.evaluations <= 60


@pytest.mark.parametrize("number", range(12))
def test_no_plan_is_simulated_below_the_bound_that_leaves_plans_out(number: int) -> None:
    draw = random.Random(number)
    heads, gpus = draw.choice((4, 12, 16)), draw.choice((2, 4, 6, 8))
    model = load_workload(
        f"gpt:layers={draw.choice((2, 3, 5))},hidden={64 * heads},heads={heads},"
        f"seq={draw.choice((256, 1024))},vocab={draw.choice((1000, 32768))}"
    )
    nodes = draw.choice(("a100-80", "h100", "a100-40"))
    cluster = load(f"{nodes}:gpus={gpus}")
    on = Evaluator(model, cluster, budget=24)
    start = Plan(dp=gpus, micro_batch=1, global_batch=gpus * draw.choice((1, 4)))
    plans = [start]
    for _ in range(60):  # a walk of random moves
        near = [p for p in on.neighbours(draw.choice(plans)) if on.is_seen(p)]
        plans.append(draw.choice(near))
    new = on.new(plans)
    guess = on.estimated(draw.sample(new, min(len(new), on.budget)))
    on.of(list(guess))
    simulated = {p: on.known[str(p)] for p in guess if on.known.get(str(p))}
    assert len(simulated) > 8
    for other, one in simulated.items():
        assert guess[other].least <= one.step, other


def test_a_plan_that_fits_is_not_asked_to_run_more_again() -> None:
    plan = Plan.parse("dp=8,micro_batch=1,global_batch=8,recompute=selective")
    words = {move.recompute for move in neighbours(plan, GPT, load("dgx-a100"))}
    assert words == {"none", "selective"}
    away = [move.recompute for move in neighbours(plan, GPT, load("dgx-a100")) if move.offload]
    assert away == ["none"]  # state on the host is there to recompute less


def test_ddp_shards_no_parameters_and_fsdp_nothing_less() -> None:
    on = Evaluator(GPT, load("dgx-a100"), budget=10)
    plan = Plan.parse("dp=8,zero=3,micro_batch=1,global_batch=8,framework=fsdp")
    assert on.is_valid(plan)
    assert not on.is_valid(plan.but(zero=1))
    assert not on.is_valid(plan.but(framework="ddp"))
    assert on.is_valid(plan.but(dp=1, tp=8, zero=0))  # one replica has nothing to share
    rows = "segments=4+0-3+tp:4/4+4-7+tp:4+zero:3,micro_batch=1,global_batch=8"
    assert not on.is_valid(Plan.parse(rows))  # one stage under FSDP alone
    found = {m.zero: m.framework for m in neighbours(plan, GPT, on.cluster) if m.zero < 3}
    assert found == dict.fromkeys((0, 1, 2), "")


def test_a_replica_under_ddp_is_one_move_from_fsdp_that_shards_nothing() -> None:
    plan = Plan.parse("dp=4,pp=2,micro_batch=2,global_batch=16,framework=ddp,compile=yes")
    near = set(neighbours(plan, GPT, load("dgx-a100")))
    other = plan.but(framework="fsdp", zero=3, shard=1, optimizer_kernels="fused")
    assert other in near
    assert plan in set(neighbours(other, GPT, load("dgx-a100")))


def test_a_pipeline_of_unlike_stages_is_guessed_before_it_is_simulated(tmp_path: Path) -> None:
    cluster = _mixed(tmp_path, FAST, {"device": "v100-16", "count": 1})
    plan = Plan.parse("dp=4,pp=2,micro_batch=2,global_batch=64,layers=5+3,framework=megatron-core")
    on = Evaluator(GPT, cluster, budget=1)
    assert not on.is_seen(plan)
    assert on.is_seen(plan.but(dp=2, placement=(0, 1, 2, 3)))
    took = predict(plan, GPT, cluster).step
    assert 0.7 * took < Partitioner(GPT, cluster).guess(plan) < 1.3 * took


def test_branches_of_a_model_go_to_ranks_of_their_own_where_that_is_shorter(
    tmp_path: Path,
) -> None:
    flava = load_workload("flava:batch=4")
    cluster = _mixed(tmp_path, {"device": "v100-32", "count": 4, "devices": 1})
    query = {"evaluations": 30, "only": "dp,pp,schedule,placement,batch,fusion"}
    apart = Joint(**query).plan(flava, cluster)
    chain = Joint(**query, fix="stages=").plan(flava, cluster)
    assert apart.plan.stages
    assert apart.predicted < 0.97 * chain.predicted
    assert apart.predicted == predict(apart.plan, flava, cluster).step
    homes = {row[0] for row in apart.plan.stages if any("text" in text for text in row)}
    assert homes.isdisjoint(row[0] for row in apart.plan.stages if "image" in " ".join(row[1:]))


def test_a_plan_of_placed_stages_is_renamed_with_its_orders(tmp_path: Path) -> None:
    cluster = _mixed(tmp_path, SLOW, FAST)
    ranks = in_order(cluster)
    plan = Plan.parse("micro_batch=1,global_batch=2,schedule=actions,framework=ddp").but(
        stages=(("0", "embedding", "block*4"), ("11", "block*4", "head")),
        actions=(("0F0", "0F1", "0B0", "0B1"), *[()] * 10, ("1F0", "1B0", "1F1", "1B1")),
    )
    there = predict(plan, GPT, cluster.subset(ranks))
    here = predict(renamed(plan, ranks, cluster), GPT, cluster)
    assert here.step == there.step
    assert [row[0] for row in renamed(plan, ranks, cluster).stages] == [
        str(ranks[0]),
        str(ranks[11]),
    ]


def test_the_answer_is_not_among_its_own_baselines() -> None:
    found = Joint(evaluations=12).plan(SMALL, load("dgx-a100:gpus=2"))
    name = next(note for note in found.notes if note.startswith("found by")).split()[-1]
    assert found.baselines
    assert name not in found.baselines


def test_micro_batches_change_to_the_next_that_divides_the_share() -> None:
    plan = Plan.parse("pp=4,micro_batch=3,global_batch=12")
    near = [m for m in neighbours(plan, GPT, load("dgx-a100:gpus=4")) if not m.segments]
    assert {m.micro_batch for m in near if m.schedule == "1f1b"} >= {1, 2, 4, 6, 12}
    assert {m.micro_batch for m in near if m.schedule == "zb-h1"} == {2, 3}


def test_a_placement_without_a_micro_batch_is_changed_too(tmp_path: Path) -> None:
    cluster = _mixed(tmp_path, FAST, SLOW)
    on = Evaluator(GPT, cluster, budget=20)
    shares = (10,) * 4 + (3,) * 8
    start = on.of([Plan(dp=12, global_batch=64, shares=shares, framework="ddp")])
    assert descend(start, on).step <= start[0].step


def test_a_cut_that_paid_is_moved_on_first() -> None:
    before, after = (Plan(pp=3, micro_batch=1, layers=cut) for cut in ((5, 5, 6), (4, 6, 6)))
    assert [p.layers for p in _repeated_cut(before, after)] == [(3, 7, 6), (2, 8, 6)]
    assert not list(_repeated_cut(before, after.but(schedule="gpipe")))
    assert not list(_repeated_cut(before.but(layers=(2, 8, 6)), after.but(layers=(1, 9, 6))))


def test_experts_that_tensor_parallel_ranks_do_not_split_are_among_the_first_layouts() -> None:
    moe, cluster = load_workload("qwen3-30b-a3b:layers=4"), load("dgx-a100:nodes=2")
    query = {"evaluations": 24, "only": "dp,tp,ep,zero,batch", "fix": "tp=4"}
    free = Joint(**query).plan(moe, cluster)
    split = Joint(**query | {"fix": "tp=4,etp=0"}).plan(moe, cluster)
    assert free.plan.etp == 1
    assert free.predicted < split.predicted


def test_a_chain_that_lacks_memory_is_known_to_before_it_is_simulated() -> None:
    workload, cluster = (
        load_workload("llama:layers=32,hidden=4096,heads=32"),
        load("a100-40:gpus=8"),
    )
    on = Evaluator(workload, cluster, budget=8)
    rows = [f"8+{2 * s}-{2 * s + 1}+tp:2+sp:yes+recompute:full+recompute_layers:{n}"
            for s, n in enumerate((8, 7, 5, 1))]  # fmt: skip
    much = Plan.parse(f"segments={'/'.join(rows)},micro_batch=4,global_batch=64")
    texts = [text.replace("+recompute:full", "").partition("+recompute_layers")[0] for text in rows]
    none = Plan.parse(f"segments={'/'.join(texts)},micro_batch=4,global_batch=64")
    for other in (much, none):
        assert on.chains.fits(other) == predict(other, workload, cluster).fits
    guess = on.estimated(on.new([much, none]))
    assert [guess[plan].fits for plan in (much, none)] == [True, False]


def test_fsdp_inside_stages_may_shard_again() -> None:
    plan = Plan.parse("dp=4,pp=2,zero=3,shard=1,micro_batch=1,global_batch=8,framework=fsdp")
    assert plan.but(shard=0) in set(neighbours(plan, GPT, load("dgx-a100")))


@pytest.mark.parametrize("seconds", [-3.0, float("nan")])
def test_a_time_limit_that_is_no_time_is_refused(seconds: float) -> None:
    with pytest.raises(InputError, match="time limit is"):
        Joint(seconds=seconds).plan(GPT, load("dgx-a100"))


def test_workers_share_the_predictions_and_change_no_answer() -> None:
    cluster, planner = load("dgx-a100:gpus=4"), Joint(evaluations=24, only="dp,tp,pp,zero")
    alone = planner.plan(GPT, cluster)
    with opened(jobs=2) as pool:
        shared = searcher(planner, GPT, pool)(GPT, cluster)
        with pytest.raises(InputError, match="`schedule` searches in one process"):
            searcher(parse("schedule"), GPT, pool)
    assert (shared.plan, shared.predicted) == (alone.plan, alone.predicted)
    assert (shared.bound, shared.evaluations) == (alone.bound, alone.evaluations)
    assert shared.alternatives == alone.alternatives
