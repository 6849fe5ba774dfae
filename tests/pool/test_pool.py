"""Pools of processes: the same answers, whoever gives them."""

import os
import sys

import pytest

from foretell.errors import ForetellError, InputError
from foretell.pool import Alone, opened
from tests.pool import work


@pytest.fixture(scope="module")
def pool():
    with opened(jobs=2) as found:
        yield found


def test_answers_come_in_the_order_of_the_items(pool):
    assert pool.map(work.squared, range(20)) == [x * x for x in range(20)]
    found = pool.map(work.late_first, range(4))
    assert [x for x, _ in found] == [0, 1, 2, 3]
    assert os.getpid() not in {pid for _, pid in found}


def test_what_is_done_is_reported(pool):
    answer = []
    pool.map(work.squared, range(5), lambda done, all_: answer.append((done, all_)))
    assert answer == [(k, 5) for k in range(1, 6)]
    assert pool.map(work.squared, []) == []


def test_what_work_raises_is_raised(pool):
    with pytest.raises(InputError, match="three is no good") as error:
        pool.map(work.fails, range(6))
    assert error.value.hint == "four"


def test_a_worker_that_dies_is_replaced(pool, tmp_path):
    before = pool.died
    items = [(k, str(tmp_path)) for k in range(12)]
    assert pool.map(work.dies_once, items) == [k * k for k in range(12)]
    assert pool.died == before + 1


def test_work_that_kills_every_worker_ends(pool):
    with pytest.raises(ForetellError, match="3 workers died over the same piece"):
        pool.map(work.dies, [2])


def test_one_at_a_time_for_the_whole_machine(pool):
    found = pool.map(work.late_first, range(3), by_machine=True)
    assert [x for x, _ in found] == [0, 1, 2]


def test_no_process_stays():
    with opened(jobs=2) as pool:
        pids = {pid for _, pid in pool.map(work.late_first, range(6))}
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_alone_there_is_no_process():
    answer = []
    with opened() as pool:
        assert isinstance(pool, Alone)
        found = pool.map(work.late_first, [1, 2], lambda *pair: answer.append(pair))
    assert {pid for _, pid in found} == {os.getpid()}
    assert answer == [(1, 2), (2, 2)]


def test_jobs_beside_a_cluster_are_refused():
    with pytest.raises(InputError, match="4 jobs beside a Ray cluster"), opened(4, "local"):
        pass


def test_without_ray_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match="Ray is not installed") as error, opened(on_ray="local"):
        pass
    assert "foretell[ray]" in error.value.hint


def test_a_cluster_that_is_not_there():
    pytest.importorskip("ray")
    expected = pytest.raises(InputError, match=r"no Ray cluster answers at `127\.0\.0\.1:9`")
    with expected as error, opened(on_ray="127.0.0.1:9"):
        pass
    assert "ray start" in error.value.hint
