"""The joint search beside every plan there is, and beside planners of other systems."""

import random
from pathlib import Path

import pytest

from foretell.predict import predict
from foretell.search.joint import Joint
from foretell_lab.challenge import Drawer, challenged
from foretell_lab.challenge import drawn as question
from foretell_lab.exhaustive import AXES, compared, drawn, summary
from foretell_lab.rivals import RIVALS

MIXED = 3  # a case of two kinds of device, two of each
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("number", [0])
def test_the_search_is_within_three_per_cent_of_the_best_plan_there_is(
    number: int, tmp_path: Path
) -> None:
    row = compared(number, 60, tmp_path)
    assert row["ratio"] <= 1.03
    assert row["bound_s"] <= min(row["best_s"], row["found_s"])
    assert "1 within 3 %" in summary([row])


def test_no_rival_finds_a_better_plan_than_the_search(tmp_path: Path) -> None:
    workload, cluster, batch, _ = drawn(MIXED, tmp_path)
    assert len(cluster.devices_by_kind()) == 2
    best = Joint(evaluations=80, global_batch=batch, only=f"{AXES},placement").plan(
        workload, cluster
    )
    for kind in RIVALS.values():
        found = kind(evaluations=40, global_batch=batch).plan(workload, cluster)
        assert predict(found.plan, workload, cluster).step == found.predicted
        assert best.predicted <= found.predicted


@pytest.mark.parametrize(("number", "evaluations"), [(20, 200), (45, 60), (53, 60)])
def test_no_plan_drawn_at_random_is_shorter_than_the_answer(
    number: int, evaluations: int, tmp_path: Path
) -> None:
    row = challenged(number, evaluations, 300, tmp_path)
    assert row["drawn_s"]
    assert row["ratio"] <= 1 + 1e-9, row["drawn"]


def test_drawn_plans_have_uneven_shares_on_unlike_devices(tmp_path: Path) -> None:
    workload, cluster, batch, _ = question(7, tmp_path)
    plans = Drawer(workload, cluster, 4 * batch, random.Random(0)).plans(200)
    shares = [plan.shares for plan in plans if plan.shares]
    assert shares
    assert all(sum(some) == 4 * batch and min(some) > 0 for some in shares)
