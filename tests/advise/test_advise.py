"""What to change first, on small steps and on one that was measured."""

from pathlib import Path

import pytest
from tests.whatif.test_precision import mlp
from tests.whatif.traced import attention

from foretell.advise import Step, advise
from foretell.baseline import unprofiled
from foretell.trace import read

TRUTH = Path(__file__).resolve().parents[2].parent / "shared" / "truth" / "h200"


@pytest.fixture(scope="module")
def found_advice():
    return advise(Step(mlp(), None))


def test_the_best_comes_first(found_advice):
    gains = [a.gain for a in found_advice.ranked]
    assert gains == sorted(gains, reverse=True)
    assert found_advice.ranked[0].changes[0].name in ("amp", "compile")


def test_what_does_not_apply_says_why(found_advice):
    reasons = dict(found_advice.refused)
    assert "no convolution" in reasons["channels-last"]
    assert "optimizer" in reasons["fused-optimizer"]


def test_a_change_that_breaks_ends_nothing(monkeypatch):
    from foretell.whatif.batch import Batch

    def breaks(self, graph, setting):
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(Batch, "apply", breaks)
    found = advise(Step(mlp(), None), ("amp", "batch:times=2"))
    assert [str(a.changes[0]) for a in found.ranked] == ["amp"]
    assert "could not be tried (ZeroDivisionError" in dict(found.refused)["batch:times=2"]


def test_together_is_no_worse_than_the_best_alone(found_advice):
    assert found_advice.best.gain >= found_advice.ranked[0].gain
    names = [c.name for c in found_advice.best.changes]
    assert len(names) == len(set(names))
    assert not {"amp", "tf32"} <= set(names)
    assert found_advice.best.code


def test_more_samples_are_ranked_by_the_time_a_sample_takes():
    found = advise(Step(mlp(), None), ["batch:times=2"])
    (advice,) = found.ranked
    assert advice.seconds > found.seconds
    assert advice.gain == pytest.approx(1 - advice.seconds / 2 / found.seconds)


def test_a_wrong_spec_is_refused_and_the_others_tried():
    found = advise(Step(attention(), None), ["nonsense", "tf32"])
    assert "nonsense" in dict(found.refused)
    assert len(found.ranked) == 1


def test_nothing_helps_an_empty_step():
    from foretell.graph import Builder

    found = advise(Step(Builder().graph(), None))
    assert found.best is None
    assert found.ranked == () or all(a.gain <= 0 for a in found.ranked)


@pytest.mark.truth
@pytest.mark.skipif(not TRUTH.is_dir(), reason=f"no measured data at {TRUTH.name}/")
def test_half_precision_is_recognised_by_what_it_costs():
    """AMP halves vgg16 and does nothing for dlrm, which its host holds up."""
    gains = {}
    for model, real in (("vgg16", 0.114784), ("dlrm", 0.017134)):
        base = unprofiled(read(TRUTH / f"{model}.base.json.gz"), real)
        found = advise(Step(base.graph, None, base), ["amp:dtype=bf16"])
        gains[model] = found.ranked[0].gain
    assert gains["vgg16"] > 0.6
    assert gains["dlrm"] < 0.03


def test_changes_beyond_the_usual_ones_are_combined_too():
    found = advise(Step(mlp(), None), ["tf32", "faster-host:times=2", "faster:op=gelu,times=4"])
    assert len(found.ranked) == 3
    assert found.best.gain >= found.ranked[0].gain


def test_memory_of_a_captured_step_is_unknown_where_its_buffers_do_not_follow():
    from tests.transformer import transformer

    from foretell.advise import peak
    from foretell.whatif import Setting, parse

    graph = transformer(layers=2)
    assert len(graph.buffers.bytes)
    now = peak(graph)
    assert now
    faster = parse("faster-host:times=2").apply(graph, Setting(None))
    assert peak(faster) == now
    with graph.edit("batch:times=2") as edit:
        pass
    assert peak(edit.graph) is None
