"""Questions answered by processes of their own, those that fail among them."""

import os
import signal
import time

import pytest

from foretell_lab.workers import answers


def _work(item: int) -> dict[str, int]:
    if item == 1:
        raise ValueError("one")
    if item == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if item == 9:
        time.sleep(60)
    return {"found": item, "pid": os.getpid()}


@pytest.mark.parametrize("workers", [1, 3])
def test_a_question_that_fails_is_answered_by_its_error_and_the_others_go_on(workers: int) -> None:
    found = dict(answers(_work, [0, 1, 2, 3], workers))
    assert found[0]["found"] == 0
    assert found[3]["found"] == 3
    assert found[0]["pid"] != found[3]["pid"] != os.getpid()
    assert found[1]["error"] == "ValueError: one"
    assert found[2]["error"] == "its process ended with -9"


def test_what_is_not_answered_in_time_is_left() -> None:
    began = time.monotonic()
    assert [item for item, _ in answers(_work, [0, 9, 3], 1, seconds=2.0)] == [0]
    assert time.monotonic() - began < 30
