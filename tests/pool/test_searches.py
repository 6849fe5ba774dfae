"""Sweeps and searches shared out: the answer of one process, also when workers are killed.

Both pools are real: processes of this machine, and a Ray cluster started here.
"""

import json
import sys

import numpy as np
import pytest
from click.testing import CliRunner

from foretell.api import plan
from foretell.cli.main import foretell
from foretell.cluster import load as machines
from foretell.errors import InputError
from foretell.pool import opened
from foretell.search.kit import parse
from foretell.search.oracle import Space, choose, layouts, scaling, sweep
from foretell.workload import load
from tests.pool.work import Killing

RAY = pytest.param("ray", marks=pytest.mark.slow)  # the pool itself: `test_on_ray`


@pytest.fixture(scope="module", params=["processes", RAY])
def workers(request):
    options = {"jobs": 2} if request.param == "processes" else {"on_ray": "local"}
    with opened(**options) as pool:
        yield pool


@pytest.fixture
def pool(workers, tmp_path):
    return Killing(workers, tmp_path)


@pytest.fixture(scope="module")
def model():
    return load("gpt:layers=8,hidden=1024,heads=16,seq=512,vocab=8192")


def test_a_sweep_is_the_same_to_the_bit(model, pool, monkeypatch):
    monkeypatch.setattr(sys.modules["foretell.search.oracle.space"], "LEAST", 16)
    cluster = machines("dgx-a100:nodes=2")
    plans = layouts(model, 16, 256, 8, Space())
    result = []
    died = pool.pool.died
    shared = sweep(plans, model, cluster, lambda *pair: result.append(pair), pool)
    alone = sweep(plans, model, cluster)
    assert np.array_equal(shared.found.step, alone.found.step)
    assert np.array_equal(shared.found.peak, alone.found.peak)
    assert pool.pool.died == died + 1
    assert len(result) > 4
    assert result[-1] == (len(plans), len(plans))


def test_the_oracle_chooses_the_same(model, pool):
    cluster = machines("dgx-a100:nodes=1")
    plans = layouts(model, 8, 64, 8, Space())
    shared = choose(plans, model, cluster, most=8, pool=pool)
    assert shared == choose(plans, model, cluster, most=8)
    assert pool.killed == 2  # once in the sweep, once among those simulated


def test_scales_are_the_same(model, pool):
    args = (model, lambda n: machines(f"a100-80:gpus={n}"), [2, 4], lambda n: 8 * n)
    result = []
    assert scaling(*args, progress=result.append, pool=pool) == scaling(*args)
    assert result[0].startswith("2 devices: 0 of")


def assert_same_best(pool, model, planner, cluster):
    chosen, on = parse(planner), machines(cluster)
    shared = plan(model, on, chosen, pool=pool, seeds=2)
    alone = plan(model, on, chosen, seeds=2)
    assert shared.plan == alone.plan
    assert shared.predicted == alone.predicted
    assert shared.evaluations == alone.evaluations
    assert "best of 2 seeds" in shared.notes[-1]
    assert pool.killed == 1


def test_seeds_of_a_fusion_find_the_same_best(model, pool):
    planner = "fusion:evaluations=30,seconds=1000,learned=no"
    assert_same_best(pool, model, planner, "a100-80:gpus=8")


@pytest.mark.parametrize("workers", [RAY], indirect=True)
def test_seeds_of_a_placement_find_the_same_best(model, pool):
    planner = "placement:strokes=300,polish=100,playouts=2,groups=4"
    assert_same_best(pool, model, planner, "a100-80:gpus=2")


def test_a_planner_that_draws_nothing_needs_no_seeds(model):
    with pytest.raises(InputError, match="`oracle` draws nothing"):
        plan(model, "a100-80:gpus=4", "oracle", seeds=2)


@pytest.mark.parametrize(
    ("command", "where"),
    [
        (["oracle", "--gpus", "2,4"], ["--jobs", "2"]),
        pytest.param(
            ["plan", "--with", "oracle:simulate=4"], ["--on-ray", "local"], marks=pytest.mark.slow
        ),
    ],
)
def test_commands_share_their_work_out(command, where):
    query = [command[0], "resnet50:batch=16", "--on", "a100-80:gpus=4", "--json", *command[1:]]
    shared, alone = (CliRunner().invoke(foretell, [*query, *more]) for more in (where, []))
    assert shared.exit_code == 0, shared.output
    found = [json.loads(r.stdout) for r in (shared, alone)]
    for one in found:
        one.pop("search_cpu_s", None)
    assert found[0] == found[1]
