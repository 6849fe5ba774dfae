"""Tessel's two phases, drawings, the cache, choices, links and the table of all schedules."""

import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from foretell.errors import InfeasibleError, UnmodelledError
from foretell.search.schedule import (
    Block,
    Choice,
    Problem,
    StageCost,
    Wait,
    best_schedule,
    integer_problem,
    schedule,
    shape,
    wrong,
)
from foretell.search.schedule.find import HEADER, choose_options, compare
from foretell.search.schedule.problem import price_messages
from foretell.search.schedule.schedule import cache_folder, svg, text


@pytest.mark.parametrize(
    ("spec", "memory", "period"), [("v", 4, 4), ("v", 3, 8), ("x", 4, 8), ("k", 6, 6), ("m", 6, 6)]
)
def test_tessel_finds_its_published_periods(spec, memory, period):
    found = schedule(shape(spec), 8, memory, method="tessel", work=30)
    assert found.period == period
    assert max(found.peak_memory) <= memory
    ours = schedule(shape(spec), 8, memory)
    assert ours.per_micro_batch <= period
    assert ours.makespan <= found.makespan


def test_tessel_keeps_barriers_between_its_parts():
    """The seams cost time, which the search saves."""
    found = schedule(shape("v"), 8, 4, method="tessel", work=30)
    assert found.makespan > 44
    assert wrong(found.problem, found.starts, found.order) is None


def test_an_interrupt_returns_the_best_so_far():
    seen = []

    def stop(what, value, bound):
        seen.append(value)
        if len(seen) == 3:
            raise KeyboardInterrupt

    found = schedule(shape("nn"), 8, 3, work=1, progress=stop)
    assert found.stopped == "interrupted"
    assert found.makespan <= max(seen)
    assert wrong(found.problem, found.starts, found.order) is None


def test_a_time_limit_that_is_over_at_once_gives_a_schedule_by_rule():
    found = schedule(shape("nn:devices=8"), 16, 8, time_limit=1e-6)
    assert found.stopped == "time"
    assert not found.proven
    assert wrong(found.problem, found.starts, found.order) is None


@pytest.mark.parametrize("devices", [4, 8])
def test_families_of_a_pipeline_as_actions(devices):
    line = [StageCost(d, 1.0, 1.0, 1.0, 2.0, 1.0) for d in range(devices)]
    found = {one.name: one for one in best_schedule(line, 1e9, 2 * devices)}
    assert set(found) == {"gpipe", "1f1b", "zb-h1", "zb-h2"}
    assert found["zb-h2"].makespan <= found["zb-h1"].makespan < found["1f1b"].makespan
    assert max(found["1f1b"].peak_memory) == 2.0 * devices
    assert found["1f1b"].actions[0][:2] == ("0F0", "0F1")
    tight = best_schedule(line, 2.0 * devices, 2 * devices)
    assert {one.name for one in tight} == {"1f1b", "zb-h1"}
    v = [*line, *(replace(s, device=devices - 1 - s.device) for s in line)]
    names = {one.name for one in best_schedule(v, 1e9, 2 * devices)}
    assert {"zb-v", "dualpipev", "v-half", "v-min", "hanayo"} <= names
    with pytest.raises(InfeasibleError, match="no schedule of"):
        best_schedule(line, 0.5, 4)


def test_a_searched_schedule_is_never_behind_the_families():
    line = [StageCost(d, 1.0 + d % 2, 1.0, 1.5, 1.0, send=0.1) for d in range(4)]
    found = best_schedule(line, 4.0, 8, work=0.5)
    searched = min(one.makespan for one in found if one.name == "searched")
    assert searched <= min(one.makespan for one in found) * (1 + 1e-4)


def test_a_schedule_says_what_it_is():
    found = schedule(shape("v"), 8, 4)
    assert str(found) == (
        "v by search: 8 micro-batches in 44 (the least possible), 4 a micro-batch "
        "(the least possible), memory 4, 3, 2, 1, 4 in flight"
    )
    answer = json.loads(json.dumps(found.answer()))
    assert {"period", "per_micro_batch", "makespan", "lower_bound", "proven"} <= set(answer)
    assert {"peak_memory", "search_cpu_s", "blocks"} <= set(answer)
    assert answer["peak_memory"] == [4, 3, 2, 1]
    assert answer["search_cpu_s"] >= 0
    assert len(answer["blocks"]) == 64
    first = {"block": 0, "micro_batch": 0, "start": 0, "devices": [0]}
    assert answer["blocks"][0] | first == answer["blocks"][0]
    assert found.bubble == pytest.approx(12 / 44)
    assert found.idle == 12


def test_the_drawing_of_a_known_schedule():
    found = schedule(shape("v:devices=2,backward=2"), 3, 2, method="1f1b")
    assert text(found).splitlines() == [
        "0 01··AA2BB·CC",
        "1 ·0AA1BB2CC··",
        "a column is 1; 0-9 forward, A-J backward, a-j weight gradient, · idle",
    ]


@pytest.mark.parametrize(
    "spec", ["v", "m:devices=12", "v:forward=0.013,backward=0.0371", "v:split=yes"]
)
@pytest.mark.parametrize("num", [1, 8, 200])
def test_drawings_fit_their_width(spec, num):
    found = schedule(shape(spec), num, work=0.2)
    for width in (80, 40):
        lines = text(found, width).splitlines()
        assert max(map(len, lines)) <= width
        assert len(lines) > found.problem.num_devices


def test_a_drawing_without_time():
    found = schedule(Problem((Block(0, "F", (0,), 0.0),)), 2)
    assert text(found).startswith("0 ·")
    ET.fromstring(svg(found))


def test_the_svg_has_a_bar_for_every_block_on_every_device():
    problem = replace(shape("m"), name="a < b")
    found = schedule(problem, 4, 6)
    root = ET.fromstring(svg(found))
    bars = root.findall(".//{http://www.w3.org/2000/svg}rect")
    assert len(bars) == 4 * sum(len(b.devices) for b in problem.blocks)
    right = max(float(b.get("x")) + float(b.get("width")) for b in bars)
    assert right <= float(root.get("viewBox").split()[2])
    assert re.search(r"a &lt; b: makespan \d+", svg(found))


def test_the_cache_gives_back_what_was_found(tmp_path):
    first = schedule(shape("m"), 8, 3, work=0.3, cache=tmp_path)
    again = schedule(shape("m"), 8, 3, work=0.3, cache=tmp_path)
    assert not first.is_cached
    assert again.is_cached
    assert replace(again, is_cached=False) == first
    assert [f.suffix for f in tmp_path.iterdir()] == [".json"]
    other = schedule(shape("m"), 8, 4, work=0.3, cache=tmp_path)
    assert not other.is_cached


@pytest.mark.parametrize("broken", ["", "[]", '{"starts": [[0]], "order": []}', "illegal"])
def test_a_broken_or_illegal_file_counts_as_missing(tmp_path, broken):
    schedule(shape("v"), 8, 4, cache=tmp_path)
    file = next(tmp_path.iterdir())
    if broken == "illegal":
        kept = json.loads(file.read_text())
        kept["starts"][0][1] = kept["starts"][0][0]
        broken = json.dumps(kept)
    file.write_text(broken)
    assert not schedule(shape("v"), 8, 4, cache=tmp_path).is_cached
    assert schedule(shape("v"), 8, 4, cache=tmp_path).is_cached


def test_a_cache_that_cannot_be_written_is_left_alone(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    found = schedule(shape("v"), 8, 4, cache=tmp_path / "file" / "below")
    assert found.makespan == 44
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "foretell" / "schedules"


def recomputing(problem, extra):
    """For each stage the choice to hold nothing and run forward again in backward."""
    choices = []
    for forward in [b for b in problem.blocks if b.kind == "F"]:
        back = next(b for b in problem.blocks if b.kind == "B" and b.devices == forward.devices)
        light = replace(forward, memory=0.25)
        again = replace(back, memory=-0.25, time=back.time + extra)
        choices.append(Choice(f"recompute {forward.devices[0]}", (light, again)))
    return replace(problem, choices=tuple(choices))


def test_recompute_is_chosen_only_where_memory_needs_it():
    problem = recomputing(shape("v:backward=2"), extra=1.0)

    assert choose_options(problem.limited(4), 8) == ()
    taken = choose_options(problem.limited(1), 8)
    found, alone = (schedule(problem.limited(1).choosing(t), 8, work=0.5) for t in (taken, ()))
    assert taken
    assert found.makespan < alone.makespan
    with pytest.raises(InfeasibleError, match="no combination of recompute 0"):
        choose_options(problem.limited(0.1), 8)


def test_messages_cost_time_beside_the_compute_or_instead_of_it():
    problem = shape("v:devices=2")
    beside = price_messages(problem, lambda first, then: 0.5)
    assert schedule(beside, 8).makespan == 8 * 4 + 4 + 2 * 0.5
    instead = price_messages(problem, lambda first, then: 0.5, overlap=False)
    assert [b.kind for b in instead.blocks].count("C") == 2
    assert max(instead.work) == 5
    found = schedule(instead, 8)
    assert found.per_micro_batch == 5
    assert wrong(instead, found.starts, found.order) is None
    free = price_messages(problem, lambda first, then: 0.0, overlap=False)
    assert free == problem


def test_a_message_needs_no_link_where_the_receiver_has_it():
    sharded = price_messages(shape("m:devices=2"), lambda first, then: 1.0)
    lags = {(w.on, w.block): w.lag for w in sharded.waits}
    assert lags[0, 1] == 0.0  # from the block on all devices
    assert lags[1, 2] == 1.0
    assert lags[4, 5] == 1.0  # to the block on all devices


def test_the_table_has_a_row_for_each_schedule_that_applies():
    rows = {row.method: row for row in compare(shape("v"), 8, 4, work=5)}
    assert set(rows) == {"search", "tessel", "gpipe", "1f1b"}
    assert rows["1f1b"].schedule.makespan == 44
    assert rows["gpipe"].schedule is None
    assert "holds 5 of 4" in rows["gpipe"].cells()[-1]
    assert rows["1f1b"].cells() == ("1f1b", "4", "27.3 %", "44", "4", "4", "least")
    assert all(len(row.cells()) == len(HEADER) for row in rows.values())


def test_without_the_solver_fixed_schedules_still_run(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ortools.sat.python", None)
    assert schedule(shape("v"), 8, 4, method="1f1b").makespan == 44
    assert schedule(shape("v"), 8, 4).makespan == 44  # found at the bound without the solver
    with pytest.raises(UnmodelledError, match="needs OR-tools") as caught:
        integer_problem.solver()
    assert "foretell[solve]" in caught.value.hint


def test_memory_given_back_out_of_order_is_scheduled_too():
    """A block that frees before what took it is due: no pairs, so levels are counted instead."""
    blocks = (
        Block(0, "F", (0,), 1.0, 2.0),
        Block(1, "F", (0,), 1.0, 1.0),
        Block(2, "B", (0,), 2.0, -3.0),
        Block(3, "F", (1,), 1.0),
    )
    problem = Problem(blocks, (Wait(2, 3), Wait(3, 0)))
    found = schedule(problem, 5, 6, work=1)
    assert wrong(problem.limited(6), found.starts, found.order) is None
    assert found.per_micro_batch == 4


def test_a_plan_takes_a_searched_order_as_its_actions():
    """Priced by the plan's own lowering: no longer than the best fixed order."""
    from foretell.cluster import load as load_cluster
    from foretell.plan import Plan
    from foretell.predict import predict
    from foretell.search.schedule.find import with_searched_order
    from foretell.workload import load as load_workload

    model = load_workload("gpt:layers=14,hidden=1024,heads=16,seq=512")
    node = load_cluster("dgx-a100:gpus=4")
    plan = Plan(pp=4, layers=(2, 4, 4, 4), micro_batch=1, global_batch=10)
    found = with_searched_order(plan, model, node, work=0.5)
    assert found is not None
    assert found.schedule == "actions"
    said = predict(found, model, node)
    assert said.fits
    fixed = [predict(plan.but(schedule=s), model, node).step for s in ("1f1b", "zb-h1", "zb-h2")]
    assert said.step <= min(fixed) * (1 + 1e-6)
    assert with_searched_order(plan.but(global_batch=100_000), model, node, work=0.5) is None
