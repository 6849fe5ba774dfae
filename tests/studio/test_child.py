"""Work in a process of its own: what it answers, what it may take, and how it ends."""

import threading
import time

import pytest

pytest.importorskip("flask", reason="the studio needs the extra `web`")

from foretell.errors import GraphError, InputError
from foretell.studio.child import Stopped, WorkLimits, call


def double(x):
    return 2 * x


def refused():
    raise GraphError("no such graph", hint="another")


def large():
    return len(bytearray(2 << 30))


def endless(*_):
    while True:
        time.sleep(0.01)


def gone():
    import os

    os._exit(7)


def counted(tell):
    for k in range(3):
        tell(f"at {k}")
    return "done"


def test_what_it_answers():
    assert call(double, 21) == 42
    said = []
    assert call(counted, tell=lambda words, best, found: said.append(words)) == "done"
    assert said == ["at 0", "at 1", "at 2"]


def test_an_error_of_the_user_comes_back():
    with pytest.raises(InputError, match="no such graph") as error:
        call(refused)
    assert error.value.hint == "another"


def test_memory_is_limited():
    with pytest.raises(InputError, match="more memory than the studio gives"):
        call(large, room=WorkLimits(bytes=64 << 20))


def test_time_is_limited():
    with pytest.raises(InputError, match="took too long"):
        call(endless, room=WorkLimits(seconds=0.5))


def test_it_can_be_stopped():
    stop = threading.Event()
    stop.set()
    with pytest.raises(Stopped):
        call(endless, stop=stop)


def test_a_process_that_is_gone_is_an_error():
    with pytest.raises(InputError, match="without an answer"):
        call(gone)
