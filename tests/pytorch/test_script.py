"""What a script says of a step, in every spelling, to everyone who asks."""

import json
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from foretell.errors import ForetellError, InputError  # noqa: E402
from foretell.pytorch.capture import capture  # noqa: E402
from foretell.pytorch.capture.step import find  # noqa: E402
from foretell.pytorch.script import ask, ordered, prepared, share, takes_part  # noqa: E402

X = torch.arange(24.0).reshape(12, 2)


def whole():
    return X, X[:, 0]


def parted(rank, size):
    return tuple(t.chunk(size)[rank] for t in whole())


def stepped(rank, size, step):
    return tuple(t + step for t in parted(rank, size))


def optional(rank=0, size=1):
    return parted(rank, size)


def otherwise(r, n):
    return parted(r, n)


def by_step(step=0, rank=0, size=1):
    return stepped(rank, size, step)


SPELLINGS = (whole, parted, stepped, optional, otherwise, by_step)


@pytest.mark.parametrize("batch", SPELLINGS)
def test_every_spelling_gives_the_whole_and_the_parts(batch):
    found = ordered(ask(batch))
    assert torch.equal(found.inputs[0], X)
    parts = [share(batch, rank, 3) for rank in range(3)]
    assert torch.equal(torch.cat([p.inputs[0] for p in parts]), X)
    assert torch.equal(torch.cat([p.target for p in parts]), X[:, 0])
    assert takes_part(batch) == (batch is not whole)


def test_uneven_shares_are_cut_from_the_whole():
    parts = [share(parted, rank, 2, shares=(8, 4)) for rank in range(2)]
    assert [len(p.inputs[0]) for p in parts] == [8, 4]
    with pytest.raises(InputError, match=r"shares \[8, 8\] are not of the 12 samples"):
        share(whole, 0, 2, shares=(8, 8))


def test_the_step_is_reported():
    assert share(stepped, 0, 2, step=5).inputs[0][0, 0] == 5
    assert share(by_step, 0, 2, step=5).inputs[0][0, 0] == 5


def test_samples_and_options_reach_the_script():
    def sized(batch=4, wide=2):
        return torch.zeros(batch, wide), torch.zeros(batch)

    assert ask(sized, samples=3, wide=5)[0].shape == (3, 5)
    with pytest.raises(ForetellError, match="unknown option of `sized`"):
        ask(sized, width=5)
    with pytest.raises(InputError, match="a batch of 3 is requested, but `whole` takes none"):
        ask(whole, samples=3)


def test_what_is_not_given():
    def greedy(rank, size, seed):
        return rank, size, seed

    with pytest.raises(InputError, match="`batch` needs `seed`"):
        ask(greedy)
    with pytest.raises(InputError, match="takes 4 arguments"):
        ask(lambda a, b, c, d: None)


@pytest.mark.parametrize(
    ("made", "num", "has_target"),
    [
        ((X, X[:, 0]), 1, True),
        (((X, X), X[:, 0]), 2, True),
        ((X, X, X[:, 0]), 2, True),
        ((X, None), 1, False),
        ({"x": X, "y": X}, 2, False),
        (X, 1, False),
    ],
)
def test_batches_in_any_form(made, num, has_target):
    found = ordered(made)
    assert len(found.inputs) == num
    assert (found.target is not None) == has_target


def test_a_batch_that_is_none():
    with pytest.raises(InputError, match="`batch` gave int, not"):
        ordered(3)


class Own(nn.Module):
    """Gives its own loss."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 1)

    def forward(self, x, y):
        return (self.inner(x).squeeze(-1) - y).square().mean()


def test_a_model_that_takes_its_target_and_one_that_takes_names():
    model = Own()
    found = prepared(model, ordered(whole()), None)
    assert found.target is None
    by_name = prepared(model, ordered({"y": X[:, 0], "x": X}), None)
    assert by_name.names == ()
    assert model(*by_name.inputs).item() == pytest.approx(Own.forward(model, *found.inputs).item())


def test_a_loss_of_the_whole_model_does_not_run_on_ranks():
    with pytest.raises(InputError, match="a loss of model and batch has no parts"):
        prepared(Own(), ordered(whole()), lambda model, batch: model(*batch))


SCRIPT = """
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

def batch({}):
    x = torch.zeros(12, 8)
    return {}
"""
FORMS = {
    "whole": ("", "x, x[:, :4]"),
    "parts": ("rank, size", "x.chunk(size)[rank], x[:, :4].chunk(size)[rank]"),
    "nested": ("rank, size, step", "(x.chunk(size)[rank],), x[:, :4].chunk(size)[rank]"),
}


@pytest.mark.parametrize("form", FORMS)
def test_one_script_is_captured(form, tmp_path):
    """No loss, any spelling: the graph is the same."""
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.format(*FORMS[form]))
    parts = find(str(path))
    graph = capture(parts.model, parts.batch, parts.loss, parts.optimizer, device="cpu")
    assert graph.facts["parameters"] == 8 * 16 + 16 + 16 * 4 + 4
    assert len(graph.select(phase="backward", kind="kernel"))


@pytest.mark.slow
def test_the_same_script_runs(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.format(*FORMS["parts"]))
    command = [sys.executable, "-m", "foretell", "run", str(path), "--plan", "dp=2"]
    options = ["--steps", "1", "--warmup", "0", "--device", "cpu", "--json"]
    done = subprocess.run([*command, *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ranks"] == 2
