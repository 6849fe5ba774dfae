"""What every planner keeps: the same answer twice, a plan that checks, and honest comparisons."""

import json

import pytest
from click.testing import CliRunner

from foretell.cli.main import foretell
from foretell.cluster import load as machines
from foretell.errors import InputError
from foretell.plan import check, read
from foretell.search.kit import PLANNERS, Planner, parse, planners
from foretell.workload import load

MODEL = "gpt:layers=4,hidden=512,heads=8,seq=512,vocab=5120,dtype=bf16,batch=4"


@pytest.mark.parametrize("name", sorted(PLANNERS))
def test_every_planner_is_one(name):
    kind = planners()[name]
    assert issubclass(kind, Planner)
    assert kind.name == name
    assert parse(str(kind())) == kind()


def test_an_unknown_planner():
    with pytest.raises(InputError, match="oracle"):
        parse("orakel")


def test_the_oracle_finds_a_plan_that_can_be():
    model, cluster = load(MODEL), machines("h100:gpus=8")
    first, second = (parse("oracle").plan(model, cluster) for _ in range(2))
    assert first.plan == second.plan
    check(first.plan, model, cluster)
    assert first.predicted <= min(first.baselines.values()) * 1.05
    assert first.bound <= first.predicted
    assert first.plan.model == model.fingerprint()


def test_the_plan_is_written_and_reads_back(tmp_path):
    path = tmp_path / "best.plan"
    words = ["plan", MODEL, "--on", "h100:gpus=4", "-o", str(path), "--json"]
    done = CliRunner().invoke(foretell, words, catch_exceptions=False)
    found = json.loads(done.stdout)
    assert str(read(str(path))) == found["plan"]
    assert found["evaluations"] > 10


@pytest.mark.parametrize("method", ["disco:evaluations=60", "tag:playouts=40,proposals=50"])
def test_a_published_method_has_our_own_search_beside_it_with_the_same_budget(method):
    words = ["plan", MODEL, "--on", "h100:gpus=4", "--with", method]
    found = json.loads(CliRunner().invoke(foretell, [*words, "--json"]).stdout)
    own = found["own"]
    assert own["predicted_s"] > 0
    assert own["evaluations"] > 0
    assert own["search_cpu_s"] > 0
    assert "our search of the same space" in CliRunner().invoke(foretell, words).stdout


def test_our_own_searches_have_none_beside_them():
    done = CliRunner().invoke(foretell, ["plan", MODEL, "--on", "h100:gpus=4", "--json"])
    assert "own" not in json.loads(done.stdout)


@pytest.mark.parametrize("method", ["schedule:work=0.2", "tessel:work=0.2"])
def test_a_searched_schedule_is_never_longer_than_a_fixed_one(method):
    found = parse(method).plan(load(MODEL), machines("dgx-1-v100"))
    assert found.baselines
    assert found.predicted <= min(found.baselines.values())
