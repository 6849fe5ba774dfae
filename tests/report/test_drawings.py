"""Schedules, layouts, plans, verdicts and notebooks: what a drawing is made of."""

import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest

from foretell.cluster import load
from foretell.errors import InputError
from foretell.graph import Builder
from foretell.plan import Plan
from foretell.report import drawings, layouts
from foretell.report.summary import split
from foretell.search.schedule import schedule, shape
from foretell.simulate import simulate
from foretell.survey.budget import junit, markdown
from tests.transformer import transformer


@pytest.fixture(scope="module")
def answer():
    return schedule(shape("v:devices=4"), micro_batches=8).answer()


def test_a_schedule_is_drawn_whole(answer):
    drawn = drawings.drawn_schedule(answer, "file")
    assert (drawn["devices"], drawn["micro_batches"]) == (4, 8)
    assert len(drawn["blocks"]) == len(answer["blocks"])
    assert max(b["end"] for b in drawn["blocks"]) == drawn["makespan"]
    begin, end = drawn["repetend"]
    assert end - begin == drawn["period"]
    inside = [b for b in drawn["blocks"] if begin <= b["start"] < end]
    assert len(inside) == len({b["block"] for b in drawn["blocks"]})  # every block once


def test_a_schedule_without_ends_gets_some(answer):
    bare = {
        **answer,
        "blocks": [{k: v for k, v in b.items() if k != "end"} for b in answer["blocks"]],
    }
    known = {(b["block"], b["micro_batch"]): b["end"] for b in answer["blocks"]}
    for b in drawings.drawn_schedule(bare, "file")["blocks"]:
        assert b["end"] >= known[b["block"], b["micro_batch"]]


@pytest.mark.parametrize(
    "blocks",
    [[{}], [{"block": 0}], "x", [{"block": 0, "micro_batch": "a", "start": 0, "devices": [0]}]],
)
def test_no_schedule(blocks):
    with pytest.raises(InputError, match="is no schedule"):
        drawings.drawn_schedule({"blocks": blocks, "makespan": 1, "period": 1}, "file")


ROWS = [
    {"gpus": 8, "strategy": "data", "step_s": 2.0, "peak_bytes": 10, "fits": True, "plan": "dp=8"},
    {"gpus": 8, "strategy": "tensor", "step_s": 3.0, "peak_bytes": 5, "fits": True, "plan": "tp=8"},
    {"gpus": 8, "strategy": "bad", "step_s": 4.0, "peak_bytes": 6, "fits": True, "plan": "pp=8"},
    {"gpus": 8, "strategy": "big", "step_s": 1.0, "peak_bytes": 99, "fits": False, "plan": "dp=8"},
]


def test_layouts_and_their_front():
    found = layouts.layouts({"rows": ROWS, "more": ["x"]}, "oracle")
    assert len(found["rows"]) == 4
    assert [r["strategy"] for r in found["front"]] == ["TP", "DDP"]


def test_layouts_of_predictions_are_recognised_by_their_plans():
    (row,) = layouts.rows([{"step_s": 0.5, "peak_bytes": 7, "fits": True, "plan": "dp=4,tp=2"}])
    assert (row["gpus"], row["strategy"]) == (8, "DP + TP")
    assert layouts.layouts({"nothing": [1, 2]}, "x") is None


def standing(plan, cluster=None):
    """Every rank of a drawing, node by node."""
    drawn = drawings.drawn_plan(plan, "p", load(cluster) if cluster else None)["machines"]
    return drawn, [r for node in drawn["nodes"] for r in node["ranks"]]


def test_a_plan_stands_on_its_machines():
    plan = Plan.parse("dp=2,tp=4,pp=2,micro_batch=1,global_batch=8")
    drawn, ranks = standing(plan, "dgx-a100:nodes=2")
    assert [r["stage"] for r in ranks] == [0] * 8 + [1] * 8
    assert [r["copy"] for r in ranks[:8]] == [0] * 4 + [1] * 4
    assert ranks[9]["where"] == "pp rank 1 of 2, dp rank 0 of 2, tp rank 1 of 4"
    assert [len(node["ranks"]) for node in drawn["nodes"]] == [8, 8]


def test_a_drawing_names_links_and_switches():
    drawn, ranks = standing(Plan(dp=16), "dgx-a100:nodes=2")
    assert [node["inside"] for node in drawn["nodes"]] == ["nvswitch 300 GB/s"] * 2
    assert drawn["nodes"][0]["out"] == "infiniband 192 GB/s"
    assert drawn["tiers"] == [{"name": "leaf", "groups": [[0, 1]], "up": [""]}]
    assert {r["device"] for r in ranks} == {"a100-80"}


def test_switches_of_switches_are_drawn_too():
    drawn, _ = standing(Plan(dp=320), "dgx-h100:nodes=40")
    leaf, spine = drawn["tiers"]
    assert [len(group) for group in leaf["groups"]] == [32, 8]
    assert spine["groups"] == [list(range(40))]
    assert leaf["up"][0].endswith("GB/s")


def test_a_placed_plan_is_drawn_where_it_is():
    _, ranks = standing(Plan(dp=2, placement=(3, 1)), "dgx-a100:nodes=1")
    assert [(r["rank"], r["copy"], r["place"]) for r in ranks] == [(1, 1, 1), (0, 0, 3)]


def test_without_a_cluster_nodes_have_eight():
    drawn, _ = standing(Plan(dp=12, shares=(3,) * 12))
    assert [len(node["ranks"]) for node in drawn["nodes"]] == [8, 4]
    assert drawn["tiers"] == []
    assert drawn["nodes"][0]["ranks"][0]["where"] == "dp rank 0 of 12, 3 samples"


def test_a_mix_of_nodes_is_drawn_node_by_node():
    """Layers on ranks of their own: a grid says who runs them, and kinds of device have a hue."""
    groups = (("a", "b", "all-reduce", "0:3", "6:1"), ("c", "c", "factors", "7:4"))
    plan = Plan(groups=groups, global_batch=4)
    drawn, ranks = standing(plan, "heterog-8")
    assert [len(node["ranks"]) for node in drawn["nodes"]] == [2, 2, 2, 2]
    assert len({r["stage"] for r in ranks}) == 3
    assert drawings.drawn_plan(plan, "p")["grid"] == [
        {"name": "a … b", "way": "all-reduce", "cells": {"0": 3, "6": 1}},
        {"name": "c", "way": "factors", "cells": {"7": 4}},
    ]


def test_messages_have_their_bytes_where_they_are_known():
    plan = Plan(dp=2, buckets=(("a", "b"), ("c",)))
    result = drawings.drawn_plan(plan, "p", sizes={"a": 1.0, "b": 2.0})["buckets"]
    assert result == [{"names": ["a", "b"], "bytes": 3.0}, {"names": ["c"], "bytes": 0.0}]


def test_a_plan_that_is_too_large_for_its_cluster():
    with pytest.raises(InputError, match="needs 16 ranks"):
        drawings.drawn_plan(Plan(dp=16), "p", load("dgx-a100:nodes=1"))


def test_actions_run_as_early_as_they_can():
    plan = Plan(pp=2, actions=(("F0", "F1", "B0", "B1"), ("F0", "B0", "F1", "B1")))
    drawn = drawings.drawn_plan(plan, "p")["schedule"]
    ends = {(b["kind"], b["block"], b["micro_batch"]): b["end"] for b in drawn["blocks"]}
    assert ends["F", 1, 0] == 2
    assert ends["B", 0, 0] == 6  # after the second stage's backward, 2 to 4
    assert drawn["makespan"] == 9
    assert len(drawn["blocks"]) == 8


def test_actions_that_wait_for_each_other_are_left_out():
    plan = Plan(pp=2, actions=(("B0", "F0"), ("F0", "B0")))
    assert drawings.drawn_plan(plan, "p")["schedule"]["blocks"] == []


def test_baselines_of_a_plan():
    given = {"predicted_s": 1.0, "baseline_s": 2.0, "bound_s": 0.5}
    given |= {"baselines": {"slow": 3.0, "dp": 2.0}}
    found = drawings.drawn_plan(Plan(), "p", answer=given)["baselines"]
    result = [("this plan", 1.0), ("dp", 2.0), ("slow", 3.0), ("lower bound", 0.5)]
    assert [(b["name"], b["seconds"]) for b in found] == result
    bare = drawings.drawn_plan(Plan(), "p", answer={"predicted_s": 1.0, "baseline_s": 2.0})[
        "baselines"
    ]
    assert [b["name"] for b in bare] == ["this plan", "baseline"]


def test_the_bubble_is_apart_from_idling():
    make = Builder()
    a, b = (make.lane("stream", rank=r) for r in range(2))
    first = make.task(kind="kernel", op="x", rank=0, lane=a, seconds=3.0)
    make.task(kind="kernel", op="x", rank=1, lane=b, seconds=1.0, after=[first])
    found = split("s", simulate(make.graph()))
    assert found["values"] == {
        "compute": 2.0,
        "exposed communication": 0,
        "host": 0,
        "bubble": 2.0,
        "idle": 0,
    }


ROWS_JUDGED = [
    ("step <b>", True, "step: 1 ms & fine"),
    ("memory", False, 'it is "over"\x00 | *much*'),
]


def test_junit_is_xml_that_counts():
    root = ElementTree.fromstring(junit(ROWS_JUDGED, 'a "suite" <x>'))
    assert (root.get("tests"), root.get("failures")) == ("2", "1")
    cases = root.findall(".//testcase")
    assert [c.get("name") for c in cases] == ["step <b>", "memory"]
    assert cases[0].find("failure") is None
    assert cases[1].find("failure").get("message") == 'it is "over" | *much*'


def test_markdown_keeps_its_cells():
    lines = markdown(ROWS_JUDGED, "x|y").splitlines()
    assert lines[0] == "### foretell: x\\|y"
    assert "❌ over" in lines[5]
    assert lines[5].replace("\\|", "").count("|") == 4
    assert "&lt;b&gt;" in lines[4]


@pytest.mark.parametrize("ranks", [1, 2, 32])
def test_what_a_notebook_shows(ranks):
    graph = transformer(ranks=ranks, layers=1)
    line = simulate(graph)
    for thing in (graph, line, Plan.parse("dp=2,tp=4"), graph.lanes, graph.buffers):
        html = thing._repr_html_()
        ElementTree.fromstring(html)  # closed, escaped
        assert "<script" not in html
        assert len(html) < 60_000
    assert "critical path" in line._repr_html_()
    assert "tp" in Plan.parse("tp=4")._repr_html_()


def test_a_notebook_escapes_names():
    make = Builder()
    make.task(kind="kernel", op="<b>", name="<i>", lane=make.lane("<script>"), seconds=1.0)
    html = simulate(make.graph())._repr_html_()
    assert "&lt;script&gt;" in html
    assert "<script>" not in html


def test_a_notebook_shows_nothing_of_nothing():
    graph = Builder().graph()
    for thing in (graph, simulate(graph), graph.lanes, Plan()):
        ElementTree.fromstring(thing._repr_html_())


def test_showing_a_graph_loads_nothing_heavy():
    code = """
import sys, foretell
make = foretell.Builder()
make.task(kind="kernel", op="gemm", seconds=1.0)
assert "gemm" not in make.graph()._repr_html_() and "kernel" in make.graph()._repr_html_()
print([m for m in ("numba", "torch", "rich", "dash", "plotly") if m in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
