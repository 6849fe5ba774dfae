"""Problems from models: cuts, shapes, choices, messages, plans that are played as scheduled."""

import json
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from foretell.cluster import load as load_cluster
from foretell.errors import InfeasibleError, InputError
from foretell.plan import Plan, read, save
from foretell.plan.check import branches
from foretell.plan.stage_placement import (
    Prices,
    StagePlacement,
    acts,
    as_degrees,
    edges,
    peaks,
    placed_stage_cost,
    places,
    room,
)
from foretell.predict import predict
from foretell.search.schedule import schedule, wrong
from foretell.search.schedule.find import solve_model, solve_models
from foretell.search.schedule.model import (
    PartitionRequest,
    PlacementRequest,
    model,
    models,
    partition,
    stages_of_shape,
)
from foretell.workload import Workload, load

SMALL = "gpt:layers=8,hidden=1024,heads=16,seq=1024,vocab=200000"
MT5 = "mt5:layers=4,hidden=512,heads=8,vocab=250112,seq=256,target=256,dtype=fp16"
FLAVA = "flava:layers=6,hidden=512,heads=8"
PLAN = Plan(framework="megatron-core", optimizer="sgd")


@pytest.fixture(scope="module")
def four():
    return load_cluster("v100-16:gpus=4")


@pytest.fixture(scope="module")
def mixed():
    return load_cluster("heterog-8").subset([0, 1, 4, 5])


def prices(spec, cluster, **plan):
    workload = load(spec)
    made = PLAN.but(**{"micro_batch": 1, "global_batch": 8, **plan})
    return Prices(made, workload, cluster)


def test_the_cut_is_the_best_of_all_cuts(four):
    query = prices(SMALL, four)
    line = (0, *(1 for _ in range(8)), 2)
    stages = partition(PartitionRequest(query, line, (0, 1, 2), 8, widths=(1,)))

    def longest(ends):
        runs = [line[a:b] for a, b in zip((0, *ends), (*ends, len(line)), strict=True)]
        r = query.rates((0,))
        both = r.forward + r.inputs + r.weights
        return max(float(sum(both[i] for i in run)) for run in runs)

    every = [longest(ends) for n in (0, 1, 2) for ends in combinations(range(1, len(line)), n)]
    ends = [s.last for s in stages[:-1]]
    times = [(8 + n) * min(
        longest(e) for e in combinations(range(1, len(line)), n)) for n in (0, 1, 2)]  # fmt: skip
    assert (8 + len(ends)) * longest(ends) == pytest.approx(min(times))
    assert min(every) <= longest(ends)


def test_slow_devices_get_fewer_layers(mixed):
    names = [d.name for d in mixed.devices]
    assert len(set(names)) == 2
    query = prices("gpt:layers=24,hidden=512,heads=8,seq=512,vocab=1024", mixed)
    stages = partition(PartitionRequest(query, (1,) * 24, (0, 1, 2, 3), 64, widths=(1,)))
    layers = {s.ranks[0]: s.last - s.first for s in stages}
    r = [float((query.rates((k,)).forward)[1]) for k in range(4)]
    quick, slow = int(np.argmin(r)), int(np.argmax(r))
    assert layers[quick] >= layers[slow]


SHAPES = [
    (SMALL, "v"), (SMALL, "m"), (SMALL, "x"), (SMALL, "tp"), (SMALL, "loop"), (SMALL, "wave"),
    (MT5, "nn"), (MT5, "m"), (FLAVA, "k"), (FLAVA, "v"),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "shape"), SHAPES)
@pytest.mark.parametrize("mode", ["train", "infer"])
def test_the_step_is_simulated_as_it_was_scheduled(spec, shape, mode, four):
    workload = load(spec)
    found = model(workload, four, shape, plan=PLAN, micro_batches=8, mode=mode, recompute="no")
    num = 8 // found.copies
    one = schedule(found.problem, num, work=0.3)
    assert wrong(found.problem, one.starts, one.order) is None
    plan = found.plan(one)
    assert plan.global_batch == 8
    answer = predict(plan, workload, four)
    ends = answer.breakdown["update_s"] + answer.breakdown["reduce_s"]
    # messages from one rank take turns when played, and none in the search
    assert answer.step == pytest.approx(one.makespan + ends, rel=0.05)
    assert answer.step >= one.makespan * (1 - 1e-9)
    assert answer.fits


@pytest.mark.parametrize("spec", [SMALL, "gpt:layers=4,hidden=512,heads=8,tied=no"])
def test_one_stage_on_all_ranks_is_tensor_parallelism(spec, four):
    workload = load(spec)
    found = model(workload, four, "tp", plan=PLAN, micro_batches=4, recompute="no")
    plan = found.plan(schedule(found.problem, 4, work=0.1))
    placed, split = (
        predict(plan, workload, four),
        predict(as_degrees(plan, workload), workload, four),
    )
    assert (placed.step, placed.peak) == (split.step, split.peak)


def test_shapes_put_layers_where_they_say(four):
    query = PlacementRequest(prices(MT5, four), 8)
    workload = query.workload
    names = {layer.name: i for i, layer in enumerate(workload.layers)}
    for shape, wide in (("m", {"embedding", "head"}), ("nn", {"embedding", "target", "head"})):
        made = stages_of_shape(shape, query)
        on_all = {n for n, i in names.items() for p in made if p.times[i] and len(p.ranks) == 4}
        assert on_all == wide
        assert [sum(p.times[i] for p in made) for i in names.values()] == [1, 4, 1, 4, 1]
    small = PlacementRequest(prices(SMALL, four), 8)
    homes = {
        shape: [p.ranks[0] for p in stages_of_shape(shape, small)] for shape in ("loop", "wave")
    }
    assert homes == {"loop": [0, 1, 2, 3, 0, 1, 2, 3], "wave": [0, 1, 2, 3, 3, 2, 1, 0]}
    flava = PlacementRequest(prices(FLAVA, four), 8)
    made = stages_of_shape("k", flava)
    halves = [{r for p in made if p.times[i] for r in p.ranks} for i in (1, 3)]
    assert not halves[0] & halves[1]
    assert set(made[-1].ranks) == {0, 1, 2, 3}
    two = stages_of_shape("x", PlacementRequest(prices(SMALL, four), 8))
    half = len(two) // 2
    assert [p.ranks for p in two[half:]] == [p.ranks for p in two[:half]][::-1]


def test_branches_do_not_wait_for_each_other(four):
    found = model(load(FLAVA), four, "k", plan=PLAN)
    first = {e.then for e in edges(found.places, load(FLAVA))}
    roots = [s for s in range(len(found.places)) if s not in first]
    assert len(roots) == 2
    assert (
        len([e for e in edges(found.places, load(FLAVA)) if e.then == len(found.places) - 1]) == 2
    )


def test_what_the_encoder_made_travels_with_the_decoder(four):
    workload = load(MT5)
    found = model(workload, four, "v", plan=PLAN, micro_batches=64)
    layers = [layer.name for layer in workload.layers]
    along = [e for e in edges(found.places, workload) if layers.index("decoder") in e.layers]
    between = [e for e in along if found.places[e.then].times[layers.index("decoder")]]
    assert all(layers.index("encoder") in e.layers for e in between)


def test_frozen_parts_have_no_backward_and_no_weight_gradient(four):
    plain = model(load(FLAVA), four, "k", plan=PLAN, split=True)
    fine = ["patches", "image", "words", "text"]
    tuned = model(load(FLAVA), four, "k", plan=PLAN, split=True, frozen=fine)
    kinds = [b.kind for b in tuned.problem.blocks]
    assert kinds.count("I") == kinds.count("W") == 1
    assert kinds.count("F") == len(tuned.places)
    assert sum(tuned.problem.work) < 0.85 * sum(plain.problem.work)
    mixed_ = model(load(FLAVA), four, "v", plan=PLAN, frozen=fine, micro_batches=64)
    is_frozen = ["frozen" in p.ways for p in mixed_.places]
    layers = [layer.name for layer in load(FLAVA).layers]
    named = [{n for n, t in zip(layers, p.times, strict=True) if t} for p in mixed_.places]
    assert is_frozen == [names <= set(fine) for names in named]
    assert all(names <= set(fine) or not names & set(fine) for names in named)
    behind = model(load(SMALL), four, "v", plan=PLAN, split=True, frozen=["block"])
    assert {b.kind for b in behind.problem.blocks} >= {"F", "I", "W"}  # the embedding still learns


def test_recompute_is_decided_by_stage_where_memory_is_short(four):
    workload = load("gpt:layers=16,hidden=2048,heads=16,seq=2048,vocab=50000")
    plan = PLAN.but(micro_batch=2, framework="megatron-core-unfused")
    short = model(workload, four, "v", plan=plan, micro_batches=8)
    assert {c.name.split()[0] for c in short.problem.choices} == {"recompute"}
    free = short.problem.choosing(()).limited(None)
    small = replace(short, problem=short.problem.limited(
        [0.55 * c for c in schedule(free, 8, work=0.5).peak_memory]
    ))  # fmt: skip
    found = solve_model(small, 8, work=0.3)
    assert found.taken
    assert len(found.taken) <= len(small.problem.choices)
    ways = [p.ways for p in found.model.places]
    assert sum("recompute" in w for w in ways) == len(found.taken)
    kept = places(found.plan, workload, 4)
    assert [p.ways for p in kept] == ways


def test_offloading_frees_memory_and_costs_time_where_the_bus_is_slow(four):
    workload = load(SMALL)
    found = model(workload, four, "v", plan=PLAN, recompute="no", offload="auto")
    plain, other = found.problem, found.problem.choosing([c.name for c in found.problem.choices])
    always = model(workload, four, "v", plan=PLAN, recompute="no", offload="yes")
    assert not always.problem.choices
    assert [b.memory for b in always.problem.blocks] == [b.memory for b in other.blocks]
    for a, b in zip(plain.blocks, other.blocks, strict=True):
        assert b.time >= a.time
        if a.kind == "F" and a.memory > 0:
            assert b.change <= a.change
    assert sum(b.change for b in other.blocks if b.kind == "F") < sum(
        b.change for b in plain.blocks if b.kind == "F"
    )


@pytest.mark.parametrize("overlap", ["beside", "link", "stop"])
def test_messages_are_priced_by_link(overlap, four):
    workload = load(SMALL)
    found = model(workload, four, "v", plan=PLAN, micro_batches=64, overlap=overlap, recompute="no")
    one = schedule(found.problem, 4, work=0.3)
    assert wrong(found.problem, one.starts, one.order) is None
    stages = len(found.places)
    messages = [b for b in found.problem.blocks if b.kind == "C"]
    lags = [w.lag for w in found.problem.waits if w.lag]
    assert len(messages) == (0 if overlap == "beside" else 2 * (stages - 1))
    assert len(lags) == (2 * (stages - 1) if overlap == "beside" else 0)
    if overlap == "link":
        assert {len(b.devices) for b in messages} == {1}
        assert min(b.devices[0] for b in messages) >= len(found.ranks)
    answer = predict(found.plan(one), workload, four)
    assert answer.step > 0


def test_stopping_for_messages_is_never_quicker(four):
    workload = load(SMALL)
    times = [
        schedule(
            model(workload, four, "v", plan=PLAN, overlap=o, recompute="no").problem, 4, work=1
        ).makespan
        for o in ("beside", "link", "stop")
    ]
    assert times[0] <= times[1] * (1 + 1e-9)
    assert times[0] < times[2]


def test_memory_of_the_schedule_is_that_of_the_plan(four):
    workload = load(SMALL)
    for split in (False, True):
        found = model(workload, four, "m", plan=PLAN, split=split, recompute="no")
        one = schedule(found.problem, 8, work=0.3)
        plan = found.plan(one)
        stages = places(plan, workload, 4)
        held = peaks(found.prices, stages, acts(plan, stages))
        for device, ranks in enumerate(found.ranks):
            free = found.problem.capacity[device]
            there = room(found.prices, ranks[0]) - free + one.peak_memory[device]
            assert held[ranks[0]] == pytest.approx(there, rel=1e-6)


def test_the_best_shape_wins_and_is_saved(tmp_path, four):
    workload = load(SMALL)
    every = solve_models(models(workload, four, plan=PLAN, recompute="no"), 8, work=0.3)
    assert {s.model.shape for s in every} >= {"v", "m", "x", "tp"}
    assert [s.per_sample for s in every] == sorted(s.per_sample for s in every)
    save(every[0].plan, tmp_path / "best.plan")
    again = read(str(tmp_path / "best.plan"))
    assert again == every[0].plan
    assert predict(again, workload, four).step == every[0].prediction.step
    assert Plan.parse(str(again)) == again
    assert json.loads((tmp_path / "best.plan").read_text())["stages"]


def test_a_pipeline_of_one_rank_a_stage_agrees_with_the_usual_lowering(four):
    """The same 1F1B written as degrees and as placed stages: two ways to one step."""
    workload = load("gpt:layers=8,hidden=1024,heads=16,seq=1024,vocab=50000,tied=no")
    usual = Plan.parse("pp=4,micro_batch=1,global_batch=8,stack=ddp")  # which hides messages
    stages = (
        ("0", "embedding", "block*2"),
        ("1", "block*2"),
        ("2", "block*2"),
        ("3", "block*2", "head"),
    )
    rows = [[f"{s}F{m}" for m in range(min(4 - s, 8))] for s in range(4)]
    for s, row in enumerate(rows):
        for m in range(8):
            row.append(f"{s}B{m}")
            if m + 4 - s < 8:
                row.append(f"{s}F{m + 4 - s}")
    placed = Plan(micro_batch=1, global_batch=8, framework="ddp", stages=stages,
                  actions=tuple(map(tuple, rows)))  # fmt: skip
    one, other = (predict(p, workload, four) for p in (usual, placed))
    assert (other.step, other.peak) == (one.step, one.peak)


def _moved(stages):
    """One block of the first stage moved to the second."""
    return (
        (*stages[0][:2], "block*5", *stages[0][3:]),
        ("1", "block*7", *stages[1][2:]),
        *stages[2:],
    )


def test_a_plain_pipeline_is_written_in_degrees(four):
    workload = load("gpt:layers=24,hidden=1024,heads=16,seq=1024,vocab=2048")
    found = model(workload, four, "v", plan=PLAN, micro_batches=64, recompute="yes")
    one = schedule(found.problem, 8, work=0.3)
    placed = found.plan(one)
    plain = as_degrees(placed, workload)
    assert plain is not None
    assert not plain.stages
    assert plain.pp * plain.tp == 4
    assert not plain.layers or sum(plain.layers) == 24
    assert plain.recompute == "full"
    assert as_degrees(placed.but(stages=_moved(placed.stages)), workload).layers == (5, 7, 6, 6)
    answer = predict(plain, workload, four).step
    assert answer == pytest.approx(predict(placed, workload, four).step, rel=0.02)
    for shape, more in (("m", {}), ("x", {}), ("v", {"split": True}), ("v", {"mode": "infer"})):
        other = model(workload, four, shape, plan=PLAN, micro_batches=64, **more)
        rows = schedule(other.problem.choosing(()), 4, work=0.3)
        assert as_degrees(other.plan(rows), workload) is None


BAD = {
    "unknown shape": ({"shape": "w"}, "unknown placement shape of a model: `w`"),
    "no middle": ({"shape": "nn"}, "has nothing in its middle"),
    "no branches": ({"shape": "k"}, "has no branches that join"),
    "unknown layer": ({"shape": "v", "frozen": ["blok"]}, "unknown frozen layer: `blok`"),
    "degrees": ({"shape": "v", "plan": Plan(tp=2)}, "the plan says tp=2"),
    "overlap": ({"shape": "v", "overlap": "never"}, "unknown way to overlap messages"),
}


@pytest.mark.parametrize(("options", "message"), BAD.values(), ids=BAD)
def test_what_cannot_be_asked_is_refused(options, message, four):
    with pytest.raises(InputError, match=message):
        model(load(SMALL), four, **{"plan": PLAN, **options})


def test_too_little_memory_is_reported(four):
    large = load("gpt:layers=96,hidden=12288,heads=96,seq=2048")
    with pytest.raises(InfeasibleError, match="fits into 15 GiB each"):
        model(large, four, "v", plan=PLAN)
    with pytest.raises(InfeasibleError, match=r"rank 0 would hold .* GiB of weights"):
        model(large, four, "tp", plan=PLAN)
    with pytest.raises(InfeasibleError, match="no placement of"):
        models(large, four, plan=PLAN)


@pytest.mark.parametrize("gpus", [1, 2, 8])
def test_odd_sizes_of_clusters(gpus):
    workload = load("gpt:layers=2,hidden=256,heads=4,seq=128,vocab=1000")
    cluster = load_cluster(f"v100-16:gpus={gpus}")
    for found in models(workload, cluster, plan=PLAN, micro_batches=2):
        one = solve_model(found, 2, work=0.3)
        assert one.prediction.step > 0
    with pytest.raises(InputError, match="cannot be shared by 2 copies"):
        solve_model(model(workload, load_cluster("v100-16:gpus=2"), "x", plan=PLAN), 3)


WRONG_PLANS = {
    "layer missing": ((("0", "embedding"), ("1", "block*8")), "`head` 0 times"),
    "layer unknown": ((("0", "embeding"),), "unknown layer of stage 0"),
    "rank unknown": ((("9", "embedding", "block*8", "head"),), "stage 0 is on ranks 9"),
    "no layers": ((("0", "recompute"),), "stage 0 has no layers"),
}


@pytest.mark.parametrize(("stages", "message"), WRONG_PLANS.values(), ids=WRONG_PLANS)
def test_stages_that_are_no_model_are_refused(stages, message, four):
    plan = Plan(micro_batch=1, global_batch=1, stages=stages, actions=(("0F0",),))
    with pytest.raises(InputError, match=message):
        predict(plan, load(SMALL), four)


def test_actions_that_cannot_run_are_refused(four):
    stages = (("0", "embedding", "block*4"), ("1", "block*4", "head"))
    made = Plan(micro_batch=1, global_batch=1, stages=stages)
    for rows, message in {
        (("0F0", "0B0"), ("1B0", "1F0")): "waits for ever before `",
        (("1F0",), ("1F0",)): "rank 0 runs `1F0`, and has no stage 1",
        (("0F0",), ()): "rank 1 has a stage and no actions",
        (("F0",), ("1F0",)): "`F0` is no action of a placed stage",
    }.items():
        with pytest.raises(InputError, match=message):
            predict(made.but(actions=rows), load(SMALL), four)
    with pytest.raises(InputError, match="stages without actions"):
        predict(made, load(SMALL), four)
    with pytest.raises(InputError, match="pp=2 beside stages"):
        predict(made.but(pp=2, actions=(("0F0",), ("1F0",))), load(SMALL), four)


def test_wider_stages_are_quicker_and_hold_less(four):
    query = prices(SMALL, four)
    workload = query.workload
    times = tuple(layer.times for layer in workload.layers)
    one, two = (placed_stage_cost(query, StagePlacement(tuple(range(n)), times)) for n in (1, 2))
    assert two.forward < one.forward
    assert two.kept < one.kept
    again = placed_stage_cost(query, StagePlacement((0,), times, ("recompute",)))
    assert again.kept < one.kept
    assert again.backward > one.backward
    assert again.inputs + again.weights == again.backward
    assert 0.2 < one.weights / one.backward < 0.6  # products make half of their gradients each


def branching(**reads):
    """A model of like layers, each behind those that it reads."""
    one = load("gpt:layers=1,hidden=256,heads=4,seq=64").layers[1]
    layers = [replace(one, name=name, after=tuple(after.split())) for name, after in reads.items()]
    return Workload("branching", tuple(replace(x, after=x.after or ("",)) for x in layers))


@pytest.mark.parametrize(
    ("reads", "wanted"),
    [
        ({"a": "", "b": "", "c": "a b"}, ([], [[0], [1]], [2])),  # two towers
        (  # a stem, two branches of unlike length, more behind them
            {"stem": "", "a": "stem", "b": "stem", "b2": "b", "c": "a b2", "d": "c"},
            ([0], [[1], [2, 3]], [4, 5]),
        ),
        ({"a": "", "b": "a", "c": "a b"}, ([], [], [0, 1, 2])),  # a way around
        ({"a": "", "b": "a", "c": "b"}, ([], [], [0, 1, 2])),  # a chain
        (  # of two joins the one with more beside each other
            {"s": "", "a": "s", "b": "s", "j": "a b", "c": "j", "c2": "c", "d": "j", "d2": "d",
             "k": "c2 d2"},
            ([0, 1, 2, 3], [[4, 5], [6, 7]], [8]),
        ),
    ],
)  # fmt: skip
def test_a_branch_is_what_one_input_of_a_join_needs_alone(reads, wanted):
    assert branches(branching(**reads)) == wanted


def test_branches_with_a_stem_go_side_by_side_on_ranks_of_their_own():
    work = branching(stem="", a="stem", a2="a", b="stem", b2="b", join="a2 b2")
    found = model(work, load_cluster("dgx-a100:gpus=4"), "y", micro_batches=2)
    names = ("stem", "a", "a2", "b", "b2", "join")
    homes = {
        name: place.ranks
        for place in found.places
        for name, count in zip(names, place.times, strict=True)
        if count
    }
    assert homes["a"] == homes["a2"]
    assert homes["b"] == homes["b2"]
    assert len({homes[name] for name in ("stem", "a", "b", "join")}) == 4
    with pytest.raises(InputError, match="begin behind other layers"):
        model(work, load_cluster("dgx-a100:gpus=4"), "k", micro_batches=2)
