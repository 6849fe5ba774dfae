"""Pages of plans: the step as its planner simulates it, and numbers equal to `predict`'s."""

import json

import pytest
from click.testing import CliRunner

from foretell.cli.main import foretell
from foretell.cluster import load as machines
from foretell.errors import InputError
from foretell.graph import save
from foretell.plan import Plan
from foretell.predict import predict
from foretell.search.kit import parse
from foretell.simulate import simulate
from foretell.survey.planned import gradient_bytes, model_of, page_of, steps_of
from foretell.workload import load
from tests.transformer import transformer

MODEL = "gpt:layers=4,hidden=512,heads=8,seq=256,vocab=1000"


@pytest.fixture(scope="module")
def fused():
    """A plan of the fusion planner, with what it said of it."""
    model, cluster = load("vgg19:batch=8"), machines("disco-a")
    return model, cluster, parse("fusion:evaluations=60").plan(model, cluster)


def test_a_plain_plan_is_one_step():
    cluster = machines("dgx-a100:gpus=4")
    ((name, graph),) = steps_of(Plan(dp=2, pp=2, micro_batch=1, global_batch=8),
                                model_of(MODEL), cluster)  # fmt: skip
    assert name == "under the plan"
    assert simulate(graph).seconds > 0
    assert gradient_bytes(Plan(dp=2), model_of(MODEL), cluster) == {}


def test_a_fused_plan_is_simulated_as_it_was_found(fused):
    model, cluster, found = fused
    (_, usual), (_, best) = steps_of(found.plan, model, cluster)
    assert simulate(best).seconds == pytest.approx(found.predicted, rel=1e-9)
    assert simulate(usual).seconds == pytest.approx(found.baselines["ddp"], rel=1e-9)
    assert set(usual.texts("source")) == {"formula"}
    assert set(best.texts("source")) == {"formula", "learned"}


def test_every_message_has_a_size(fused):
    model, cluster, found = fused
    sizes = gradient_bytes(found.plan, model, cluster)
    assert {name for bucket in found.plan.buckets for name in bucket} == set(sizes)
    assert min(sizes.values()) > 0


def test_uneven_groups_show_the_step_that_is_predicted():
    model, cluster = model_of(MODEL), machines("heterog-8")
    row = ("embedding", "head", "all-reduce", "0:3", "1:1")
    plan = Plan(groups=(row,), global_batch=4)
    ((_, graph),) = steps_of(plan, model, cluster)
    assert simulate(graph).seconds == predict(plan, model, cluster).step


def test_a_captured_step_cannot_be_divided(tmp_path):
    path = tmp_path / "step.graph"
    save(transformer(ranks=1, layers=1), path)
    with pytest.raises(InputError, match="divides a model"):
        page_of(Plan(dp=2), model_of(str(path)), machines("dgx-a100:gpus=2"))


def test_the_page_shows_the_step_under_a_plan(tmp_path):
    plan = tmp_path / "best.plan"
    plan.write_text('{"dp": 2, "tp": 2, "micro_batch": 1, "global_batch": 8}')
    words = ["report", str(plan), "--on", "dgx-a100:gpus=4", "--of", MODEL]
    answer = CliRunner().invoke(foretell, [*words, "--json", "-o", str(tmp_path / "page.html")])
    assert answer.exit_code == 0, answer.output
    found = json.loads(answer.stdout)
    assert [line["name"] for line in found["timelines"]] == ["best.plan: under the plan"]
    assert found["split"][0]["values"]["compute"] > 0
    assert found["figures"][0]["seconds"] == found["timelines"][0]["step_s"]
    again = predict(Plan.parse("dp=2,tp=2,micro_batch=1,global_batch=8"), load(MODEL),
                    machines("dgx-a100:gpus=4"))  # fmt: skip
    assert found["figures"][0]["seconds"] == again.step
    assert found["memory"][0]["peak"] == pytest.approx(again.peak, rel=1e-9)
    assert (tmp_path / "page.html").stat().st_size > 10_000


def test_a_model_without_machines(tmp_path):
    plan = tmp_path / "best.plan"
    plan.write_text('{"dp": 2}')
    answer = CliRunner().invoke(foretell, ["report", str(plan), "--of", MODEL])
    assert isinstance(answer.exception, InputError)
    assert "--on" in answer.exception.hint
