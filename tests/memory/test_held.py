"""What a graph that was changed holds."""

import pytest

from foretell.graph import Builder
from foretell.memory.read import tape_of
from foretell.memory.tape import FACT, encode
from foretell.memory.tape import peak_bytes as of_tape
from foretell.whatif import WHATIFS, peak_bytes
from tests.memory.steps import ADAM, step

TAPE = tape_of(step(6, ADAM))


def graph(**facts):
    builder = Builder()
    lane = builder.lane("stream", kind="compute")
    builder.task(kind="kernel", op="mm", phase="forward", lane=lane, seconds=1e-3)
    return builder.graph(**facts)


def changed(made, *specs):
    for spec in specs:
        with made.edit(spec) as edit:
            pass
        made = edit.graph
    return made


def test_a_graph_without_a_tape_tells_nothing():
    assert peak_bytes(graph()) is None


def test_history_decides():
    made = graph(**{FACT: encode(TAPE)})
    assert peak_bytes(made) == of_tape(TAPE)
    twice = changed(made, "unprofiled", "batch:times=2.0")
    assert peak_bytes(twice) == of_tape(WHATIFS["batch"](times=2.0).hold(TAPE))
    assert peak_bytes(changed(twice, "batch:times=0.5")) == of_tape(TAPE)


def test_a_measured_peak_moves_the_answer():
    made = graph(**{FACT: encode(TAPE)})
    twice = changed(made, "batch:times=2.0")
    more = peak_bytes(twice, real=of_tape(TAPE) + 1e6) - peak_bytes(twice)
    assert more == pytest.approx(1e6)
    answer = changed(graph(**{FACT: encode(TAPE), "peak_bytes": of_tape(TAPE) + 1e6}), "unprofiled")
    assert peak_bytes(answer) == pytest.approx(of_tape(TAPE) + 1e6)


@pytest.mark.parametrize("name", ["amp", "batch", "checkpoint", "compile", "channels-last", "tf32",
                                  "foreach-optimizer", "fused-optimizer"])  # fmt: skip
def test_what_ifs_that_change_what_is_held_say_so(name):
    change = WHATIFS[name]
    assert "hold" in vars(change)
    assert of_tape(change().hold(TAPE)) > 0
