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
    Wait,
    integer_problem,
    schedule,
    shape,
    wrong,
)
from foretell.search.schedule.best import choose
from foretell.search.schedule.cache import folder
from foretell.search.schedule.find import HEADER, compare
from foretell.search.schedule.formats import svg, text
from foretell.search.schedule.problem import linked


@pytest.mark.parametrize(
    ("spec", "memory", "period"), [("v", 4, 4), ("v", 3, 8), ("x", 4, 8), ("k", 6, 6), ("m", 6, 6)]
)
def test_tessel_finds_its_published_periods(spec, memory, period):
    found = schedule(shape(spec), 8, memory, method="tessel", time_limit=30)
    assert found.period == period
    assert max(found.peak_memory) <= memory
    ours = schedule(shape(spec), 8, memory)
    assert ours.per_micro_batch <= period
    assert ours.makespan <= found.makespan


def test_tessel_keeps_barriers_between_its_parts():
    """The seams cost time, which the search saves."""
    found = schedule(shape("v"), 8, 4, method="tessel", time_limit=30)
    assert found.makespan > 44
    assert wrong(found.problem, found.starts, found.order) is None


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
    found = schedule(shape(spec), num, time_limit=0.2)
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
    first = schedule(shape("m"), 8, 3, time_limit=0.3, cache=tmp_path)
    again = schedule(shape("m"), 8, 3, time_limit=0.3, cache=tmp_path)
    assert not first.is_cached
    assert again.is_cached
    assert replace(again, is_cached=False) == first
    assert [f.suffix for f in tmp_path.iterdir()] == [".json"]
    other = schedule(shape("m"), 8, 4, time_limit=0.3, cache=tmp_path)
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
    assert folder() == tmp_path / "foretell" / "schedules"


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

    def find(one):
        return schedule(one, 8, time_limit=0.5)

    taken, found = choose(problem.limited(4), find)
    assert taken == ()
    assert found.makespan == (8 + 3) * 3
    taken, found = choose(problem.limited(1), find)
    alone = schedule(problem.limited(1).choosing([]), 8, time_limit=0.5)
    assert taken
    assert found.makespan < alone.makespan
    with pytest.raises(InfeasibleError, match="no combination of recompute 0"):
        choose(problem.limited(0.1), find)


def test_messages_cost_time_beside_the_compute_or_instead_of_it():
    problem = shape("v:devices=2")
    beside = linked(problem, lambda first, then: 0.5)
    assert schedule(beside, 8).makespan == 8 * 4 + 4 + 2 * 0.5
    instead = linked(problem, lambda first, then: 0.5, overlap=False)
    assert [b.kind for b in instead.blocks].count("C") == 2
    assert max(instead.work) == 5
    found = schedule(instead, 8)
    assert found.per_micro_batch == 5
    assert wrong(instead, found.starts, found.order) is None
    free = linked(problem, lambda first, then: 0.0, overlap=False)
    assert free == problem


def test_a_message_needs_no_link_where_the_receiver_has_it():
    sharded = linked(shape("m:devices=2"), lambda first, then: 1.0)
    lags = {(w.on, w.block): w.lag for w in sharded.waits}
    assert lags[0, 1] == 0.0  # from the block on all devices
    assert lags[1, 2] == 1.0
    assert lags[4, 5] == 1.0  # to the block on all devices


def test_the_table_has_a_row_for_each_schedule_that_applies():
    rows = {row.method: row for row in compare(shape("v"), 8, 4, time_limit=5)}
    assert set(rows) == {"search", "tessel", "gpipe", "1f1b"}
    assert rows["1f1b"].schedule.makespan == 44
    assert rows["gpipe"].schedule is None
    assert "holds 5 of 4" in str(rows["gpipe"])
    assert str(rows["1f1b"]).split() == ["1f1b", "4", "27.3", "%", "44", "4", "4"]
    assert len(HEADER) <= 80


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
    found = schedule(problem, 5, 6, time_limit=1)
    assert wrong(problem.limited(6), found.starts, found.order) is None
    assert found.per_micro_batch == 4
