"""Intervals: where measured steps lie, by how far a question is from what was measured."""

import math

import pytest

from foretell.cluster import load as load_cluster
from foretell.plan import Plan
from foretell.predict import predict
from foretell.predict.predict import EIGHTY_PERCENT, Distance, interval, shipped_distances
from foretell.workload import load

MODEL = "llama:layers=4,hidden=1024,heads=8,seq=1024,vocab=32000"


def query(text, on="h100:gpus=8", model=MODEL):
    return predict(Plan.parse(text), load(model), load_cluster(on))


def test_means_add_up_and_widths_as_squares():
    fitted = {"any": Distance(0.1, 0.3), "arch": Distance(0.2, 0.4)}
    low, high = interval(2.0, {"any": 1.0, "arch": 1.0}, fitted)
    assert high == pytest.approx(2 * math.exp(0.3 + EIGHTY_PERCENT * 0.5))
    assert low == pytest.approx(2 * math.exp(0.3 - EIGHTY_PERCENT * 0.5))


def test_the_prediction_lies_in_its_own_interval():
    low, high = interval(1.0, {"any": 1.0}, {"any": Distance(0.5, 0.1)})
    assert low == 1.0 < high


def test_every_distance_is_fitted_and_none_makes_steps_faster():
    assert "any" in shipped_distances()
    assert all(0 <= d.slow < 1 and 0 < d.width < 1 for d in shipped_distances().values())


@pytest.mark.parametrize(
    ("name", "plan", "on", "model"),
    [
        ("arch", "dp=8", "v100-16:gpus=8", MODEL),
        ("amd", "dp=8", "mi300x:gpus=8", MODEL),
        ("fp8", "dp=8,precision=fp8", "h100:gpus=8", MODEL),
        ("context", "dp=4,cp=2", "h100:gpus=8", MODEL),
        ("images", "dp=8", "h100:gpus=8", "resnet50"),
        ("experts", "dp=8", "h100:gpus=8", "mixtral-8x7b:layers=2,hidden=512,heads=8"),
    ],
)
def test_a_question_knows_how_far_it_is(name, plan, on, model):
    near, far = query("dp=8,zero=3,framework=fsdp"), query(plan, on, model)
    assert far.away[name] == 1.0
    assert name not in near.away


def test_distance_widens_and_moves_whatever_the_syntax():
    near = interval(1.0, {"any": 1.0})
    far = interval(1.0, {"any": 1.0, "arch": 1.0, "scale": 1.0})
    assert far[1] / far[0] > near[1] / near[0]
    assert far[1] > near[1]
    even = query("dp=2,global_batch=4,framework=ddp", "h100:gpus=2")
    uneven = query("dp=2,shares=3+1,global_batch=4,framework=ddp", "h100:gpus=2")
    assert uneven.away.keys() == even.away.keys()
