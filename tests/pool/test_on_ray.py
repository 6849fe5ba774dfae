"""The same on a real Ray cluster of this machine, with workers that are killed."""

import importlib
import os

import pytest

from foretell.errors import ForetellError, InputError
from foretell.pool import opened
from tests.pool import work


@pytest.fixture(scope="module")
def pool():
    with opened(on_ray="local") as found:
        yield found


def test_answers_come_in_the_order_of_the_items(pool):
    answer = []
    found = pool.map(work.squared, range(20), lambda *pair: answer.append(pair))
    assert found == [x * x for x in range(20)]
    assert answer == [(k, 20) for k in range(1, 21)]


def test_a_worker_that_kills_itself_is_replaced(pool, tmp_path):
    before = pool.died
    items = [(k, str(tmp_path)) for k in range(12)]
    assert pool.map(work.dies_once, items) == [k * k for k in range(12)]
    assert pool.died == before + 1


def test_work_that_kills_every_worker_ends(pool):
    with pytest.raises(ForetellError, match="3 workers died over the same piece"):
        pool.map(work.dies, [2])


def test_what_work_raises_is_raised(pool):
    with pytest.raises(InputError, match="three is no good"):
        pool.map(work.fails, range(6))
    assert pool.map(work.squared, [3]) == [9]


def test_one_at_a_time_on_a_machine(pool):
    found = pool.map(work.late_first, range(3), by_machine=True)
    assert [x for x, _ in found] == [0, 1, 2]


def test_nothing_is_reported_and_no_port_listens(pool):
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"
    usage = importlib.import_module("ray._common.usage.usage_lib")
    assert not usage.usage_stats_enabled()
    assert {node["NodeManagerAddress"] for node in pool.ray.nodes()} == {"127.0.0.1"}
