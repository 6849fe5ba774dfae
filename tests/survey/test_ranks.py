"""Several ranks: who waits for whom, and that the page names the straggler."""

import numpy as np
import pytest

from foretell.advise import Step
from foretell.graph import Builder
from foretell.simulate import simulate
from foretell.survey.ranks import ranks_table, straggler, waits_of
from foretell.survey.survey import survey
from tests.trace.kineto import LAYERS, data_parallel

US = 1e-6


@pytest.fixture(scope="module")
def diagnosis(tmp_path_factory):
    folder = data_parallel(tmp_path_factory.mktemp("ranks"), ranks=4, slow=2, by=1.3)
    return survey([Step.from_file(folder)], advice=False).content.diagnosis


def test_the_slow_rank_is_the_straggler(diagnosis):
    verdict = diagnosis["verdict"]
    assert verdict["bound"] == "straggler-bound"
    assert verdict["ranks"].startswith("Rank 2 is the straggler")
    waited = [r["waited_for_s"] for r in diagnosis["ranks"]]
    assert np.argmax(waited) == 2
    assert waited[0] == waited[1] == waited[3] == 0


def test_what_ranks_do_adds_up_to_the_step(diagnosis):
    for row in diagnosis["ranks"]:
        parts = ("compute_s", "exposed_s", "waits_s", "host_s", "idle_s")
        assert sum(row[key] for key in parts) == pytest.approx(diagnosis["step_s"], rel=0.01)
    assert diagnosis["ranks"][2]["waits_s"] == pytest.approx(0, abs=US)


def test_the_others_lose_what_the_straggler_computes_longer(diagnosis):
    """Twelve layers of 530 µs that take 1.3 times as long, less the all-reduces beside them."""
    fast, slow = (diagnosis["ranks"][k] for k in (0, 2))
    assert slow["compute_s"] / fast["compute_s"] == pytest.approx(1.3, rel=0.01)
    lost = fast["waits_s"] + fast["exposed_s"] - slow["exposed_s"]
    assert lost == pytest.approx(slow["compute_s"] - fast["compute_s"], rel=0.05)
    assert slow["waited_for_s"] == pytest.approx(fast["waits_s"])
    assert LAYERS == 12


def test_gaps_say_that_other_ranks_are_waited_for(diagnosis):
    causes = {c["cause"]: c["seconds"] for c in diagnosis["idle"]["causes"]}
    assert max(causes, key=causes.get) == "other ranks"
    assert causes["other ranks"] == pytest.approx(diagnosis["ranks"][0]["waits_s"], rel=0.01)


def two(first: float, second: float):
    """Two ranks that compute and then reduce together."""
    make = Builder()
    lanes = [make.lane("stream", rank=r, kind="compute") for r in (0, 1)]
    wires = [make.lane("channel", rank=r, kind="comm") for r in (0, 1)]
    work = [
        make.task(kind="kernel", op="mm", rank=r, lane=lanes[r], seconds=s)
        for r, s in enumerate((first, second))
    ]
    make.task(kind="collective", op="all_reduce", lanes=wires, seconds=1.0, after=work, group="0-1")
    return simulate(make.graph())


def test_a_wait_lasts_from_a_ranks_arrival_to_the_start():
    line = two(1.0, 3.0)
    waits = waits_of(line, line.seconds)
    assert (waits.rank.tolist(), waits.late.tolist()) == ([0], [1])
    assert (waits.start.tolist(), waits.end.tolist()) == ([1.0], [3.0])
    rows = ranks_table(line, waits, {})
    assert [r["waits_s"] for r in rows] == [2.0, 0.0]
    assert [r["waited_for_s"] for r in rows] == [0.0, 2.0]
    assert straggler(rows, line.seconds, None).startswith("Rank 1 is the straggler")


def test_even_ranks_have_no_straggler():
    line = two(2.0, 2.0)
    rows = ranks_table(line, waits_of(line, line.seconds), {})
    assert straggler(rows, line.seconds, None) == "No straggler in steady state."


def test_a_rank_late_in_the_profiled_step_alone_is_said_so():
    line = two(2.0, 2.0)
    facts = {"ranks": [0, 1], "balance": {"waited_for_s": [0.0, 1.5]}}
    rows = ranks_table(line, waits_of(line, line.seconds), facts)
    assert "In the one profiled step the others waited 1.5 s for rank 1" in straggler(
        rows, 3.0, 4.0
    )
