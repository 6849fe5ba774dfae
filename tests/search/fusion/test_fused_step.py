"""A fused plan costs in `foretell predict` what it cost in the search, or is refused."""

import json

import pytest
from click.testing import CliRunner

from foretell.cli.main import foretell
from foretell.cluster import load as machines
from foretell.errors import InputError
from foretell.graph import load as load_graph
from foretell.plan import Plan, lower, save
from foretell.predict import predict
from foretell.search.fusion.fused_step import fuses
from foretell.search.fusion.planner import FusionPlanner
from foretell.search.kit import priced
from foretell.simulate import simulate
from foretell.workload import load

MODEL = "bert:layers=2,hidden=256,heads=4,seq=64,vocab=4096,head=mlm,batch=8"
A = machines("disco-a")


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"reorder": True},
        {"sharded": True},
        {"update": "by-message"},
        {"batch": 4},
        {"epilogue": True},
        {"method": "backtrack", "patience": 60},
        {"runs": True},
    ],
)
def test_a_plan_is_predicted_as_it_was_found(asked):
    found = FusionPlanner(**asked).plan(load(MODEL), A)
    assert fuses(found.plan)
    answer = priced(found.plan, load(MODEL), A)
    assert answer.step == pytest.approx(found.predicted, rel=1e-6)
    assert sum(answer.breakdown.values()) == pytest.approx(answer.step, rel=1e-6)
    assert answer.fits
    assert answer.low < answer.step < answer.high


def test_the_command_prices_the_plan_that_the_planner_wrote(tmp_path):
    path = tmp_path / "best.plan"
    found = FusionPlanner().plan(load(MODEL), A)
    save(found.plan, path)
    graph = tmp_path / "step.graph"
    words = ["predict", MODEL, "--on", "disco-a", "--plan", str(path), "--json", "-o", str(graph)]
    answer = json.loads(CliRunner().invoke(foretell, words, catch_exceptions=False).stdout)
    assert answer["step_s"] == pytest.approx(found.predicted, rel=1e-6)
    assert simulate(load_graph(graph)).seconds == pytest.approx(answer["step_s"], rel=1e-9)
    assert answer["breakdown"]["compute_s"] > 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tp": 2, "dp": 6}, "beside tp=2"),
        ({"recompute": "selective"}, "beside recompute=selective"),
        ({"dp": 4}, "dp=4 makes 4 ranks; `disco-a` has 12"),
        ({"model": "f" * 16}, "was made for model ffff"),
    ],
)
def test_what_has_no_price_is_refused(changes, words):
    plan = FusionPlanner(evaluations=12).plan(load(MODEL), A).plan
    with pytest.raises(InputError, match=words):
        priced(plan.but(**changes), load(MODEL), A)


def test_fused_ops_are_never_ignored():
    plan = Plan(dp=12, regions=(("a", "b"),))
    for call in (lower, predict):
        with pytest.raises(InputError, match="fuses or orders single ops"):
            call(plan, load(MODEL), A)
