"""A checkpoint saved under one plan goes on under another as if training had never stopped."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from foretell.errors import InputError  # noqa: E402
from foretell.plan import Plan  # noqa: E402
from foretell.pytorch.deploy import deploy  # noqa: E402
from foretell.pytorch.deploy.apply import parallelize  # noqa: E402
from foretell.pytorch.deploy.checkpoint import INDEX, latest, load, parameters, save, whole  # noqa: E402  # noqa: E402
from foretell.pytorch.deploy.optimizer import gradient_norm, total_norm  # noqa: E402
from tests.pytorch.deploy import zoo  # noqa: E402
from tests.pytorch.deploy.ranks import on_ranks  # noqa: E402
from tests.pytorch.deploy.same import mlp, samples, sgd  # noqa: E402

MODEL, STEPS, CLIP, EMA = "tied", 2, 0.5, 0.9
PLANS = ["dp=2", "dp=2,zero=1", "dp=2,zero=3", "tp=2", "pp=2,micro_batch=2", "filter=2"]


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.02)


def deployed(text):
    plan = Plan.parse(text)
    model = zoo.make(MODEL)
    loss = zoo.MODELS[MODEL][2]
    samples = zoo.BATCH // plan.dp
    return deploy(model, adam(model), plan, loss=loss, samples=samples, max_norm=CLIP, ema=EMA)


def train(made, first, last):
    shares = [zoo.BATCH // made.plan.dp] * made.plan.dp
    for step in range(first, last):
        made.step(*zoo.parts(MODEL, shares, step)[made.places.at["dp"]])


def alone(steps):
    model, kept = zoo.make(MODEL), {}
    update, loss = adam(model), zoo.MODELS[MODEL][2]
    kept = {n: p.detach().clone() for n, p in model.named_parameters()}
    for step in range(steps):
        ((x,), y), *_ = zoo.parts(MODEL, [zoo.BATCH], step)
        update.zero_grad()
        loss(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        update.step()
        for n, p in model.named_parameters():
            kept[n].lerp_(p.detach(), 1 - EMA)
    return dict(model.named_parameters()), kept


def off(mine, wanted):
    return max(float((t - wanted[n]).abs().max() / wanted[n].abs().max()) for n, t in mine.items())


def across(folder):
    """Each plan saves, and the next goes on."""
    found = {}
    wanted, averages = alone(2 * STEPS)
    for place, text in enumerate(PLANS):
        made = deployed(text)
        train(made, 0, STEPS)
        path = save(made, Path(folder) / str(place), STEPS)
        other = PLANS[(place + 1) % len(PLANS)]
        made = deployed(other)
        assert load(made, path)["step"] == STEPS
        train(made, STEPS, 2 * STEPS)
        kept = {id(p): made.ema.kept[n] for n, p in made.here.items()}
        mine = dict(whole(made, lambda p, kept=kept: kept[id(p)]))
        found[text, other] = off(dict(parameters(made)), wanted), off(mine, averages)
    return found


def test_what_one_plan_saves_another_goes_on_with(tmp_path):
    for found in on_ranks(2, across, str(tmp_path)):
        assert max(max(pair) for pair in found.values()) < 1e-4, found
    names = {path.name for path in (tmp_path / "0" / f"step-{STEPS}").iterdir()}
    assert INDEX in names
    assert ".metadata" not in names  # torch's own is a pickle


def norms():
    found = []
    for text in PLANS:
        made = deployed(text)
        made.max_norm = 0.0
        train(made, 0, 1)
        found.append(float(gradient_norm(made)))
    return found


def test_the_norm_of_gradients_is_that_of_the_whole_model():
    for found in on_ranks(2, norms):
        assert found == pytest.approx([found[0]] * len(PLANS), rel=1e-5)


OWN = ["dp=4", "dp=2,tp=2", "dp=4,zero=3,shard=2", "dp=2,tp=2,zero=3", "dp=4,zero=1"]


def own_norms():
    """Norms of the same gradients in a loop of one's own: both kinds, under every plan."""
    found = []
    for text in OWN:
        model, (x, y) = mlp(), samples()
        made, _ = parallelize(model, sgd(model), text, device="cpu")
        at, size = made.foretell.places.at["dp"], made.foretell.plan.dp
        nn.functional.cross_entropy(made(x.chunk(size)[at]), y.chunk(size)[at]).backward()
        found.append([float(total_norm(made.parameters(), kind)) for kind in (2.0, float("inf"))])
    return found


def test_norms_of_gradients_that_are_split_over_two_axes_are_those_of_one_process():
    for found in on_ranks(4, own_norms):
        assert found == [pytest.approx(found[0], rel=1e-5)] * len(OWN)


def spoiled(folder):
    made = deployed("dp=1")
    train(made, 0, 1)
    path = save(made, Path(folder), 1)
    index = json.loads((path / INDEX).read_text())
    answer = []
    for change in ({"parts": [{**index["parts"][0], "file": "../x"}]}, {"tensors": 3}):
        (path / INDEX).write_text(json.dumps(index | change))
        with pytest.raises(InputError) as error:
            load(made, path)
        answer.append(error.value.message)
    (path / INDEX).unlink()
    return answer, latest(Path(folder))


def test_a_checkpoint_that_cannot_be_written_says_why_and_which_is_whole(tmp_path, monkeypatch):
    from torch.distributed.checkpoint.api import CheckpointException

    from foretell.pytorch.deploy import checkpoint

    def full(*_, **__):
        raise CheckpointException("", {1: (OSError(28, "No space left on device"), None)})

    (tmp_path / "step-2").mkdir()
    (tmp_path / "step-2" / checkpoint.INDEX).write_text("{}")
    monkeypatch.setattr(checkpoint.dcp, "save", full)
    made = SimpleNamespace(whole=None, plan="dp=2", here={}, ema=None)
    made.modules = [torch.nn.Identity()]
    with pytest.raises(InputError, match="No space left on device") as error:
        checkpoint.save(made, tmp_path, 4)
    assert "step-2 is whole" in error.value.hint


def test_a_checkpoint_that_is_none(tmp_path):
    ((answer, last),) = on_ranks(1, spoiled, str(tmp_path))
    assert "outside the folder" in answer[0]
    assert "is no checkpoint" in answer[1]
    assert last is None
