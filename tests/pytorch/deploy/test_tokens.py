"""Tokens dealt out over ranks (sp, cp): each has its part, and what mixes them is found out."""

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from foretell.errors import InputError  # noqa: E402
from foretell.plan import Plan  # noqa: E402
from foretell.pytorch.deploy import deploy  # noqa: E402
from foretell.pytorch.deploy.tensor import blocks, named, rows  # noqa: E402
from tests.pytorch.deploy.ranks import on_ranks  # noqa: E402
from tests.pytorch.deploy.same import samples, sgd  # noqa: E402
from tests.pytorch.deploy.tokens import Block, Words, encoder, in_a_row  # noqa: E402


def seen(text):
    """How many tokens a norm in a block and one behind the blocks see."""
    model, found = in_a_row(), {}
    deployed = deploy(model, sgd(model), Plan.parse(text))
    for name in ("blocks.1.then", "norm"):
        module = model.get_submodule(name)
        module.register_forward_pre_hook(lambda _, a, n=name: found.update({n: held(a[0])}))
    x, y = samples()
    deployed.step((x,), y)
    return found


def held(x):
    return getattr(x, "to_local", lambda: x)().shape[1]


def both_seen():
    return [seen("tp=2,sp=yes"), seen("cp=2"), seen("tp=2")]


def test_each_rank_has_half_of_the_tokens_in_blocks_alone():
    whole, half = {"blocks.1.then": 6, "norm": 6}, {"blocks.1.then": 3, "norm": 6}
    for found in on_ranks(2, both_seen):
        assert found == [half, half, whole]


class Summing(Block):
    """Tokens meet outside of attention."""

    def forward(self, x):
        return super().forward(x.cumsum(1))


class Masked(nn.Module):
    """Encoder layers that are given a mask of all tokens."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        x = x.unsqueeze(1) * torch.linspace(0.5, 2.0, 6).view(1, 6, 1)
        mask = nn.Transformer.generate_square_subsequent_mask(6)
        return self.head(self.layer(x, src_mask=mask, is_causal=True).mean(1))


def reported(make, text):
    model = make()
    deployed = deploy(model, sgd(model), Plan.parse(text))
    x, y = samples()
    try:
        wanted = nn.functional.cross_entropy(make()(x), y).item()
        return deployed.step((x,), y).item(), wanted
    except InputError as error:
        return error.message


def summing():
    model = in_a_row()
    model.blocks[1].__class__ = Summing
    return model


def odd_tokens():
    model = in_a_row()
    model.tokens = 5
    return model


def all_reported():
    return [
        reported(summing, "cp=2"),
        reported(odd_tokens, "cp=2"),
        reported(odd_tokens, "tp=2,sp=yes"),
        reported(Masked, "cp=2"),
    ]


def test_what_cannot_be_sharded_is_refused_and_masks_are():
    for mixing, *odd, (loss, wanted) in on_ranks(2, all_reported):
        assert "gives another result when each rank has some of the tokens" in mixing
        assert odd == [f"{w}: 5 tokens, which 2 ranks cannot share evenly" for w in ("cp", "sp")]
        assert loss == pytest.approx(wanted, rel=1e-6)


def test_blocks_are_those_whose_layers_are_all_known():
    def found(model):
        return sorted(blocks(model, named(model, getattr(model, "tensor_layout", None))))

    assert found(Words()) == ["blocks.0", "blocks.1", "blocks.2"]
    assert found(encoder()) == ["2", "3", "4"]
    partly = Words()
    partly.blocks[1].extra = nn.Linear(8, 8)
    assert found(partly) == ["blocks.0", "blocks.2"]


@pytest.mark.parametrize(("make", "lengths"), [(Words, [1, 1, 1]), (in_a_row, [3]), (encoder, [3])])
def test_blocks_of_a_sequential_stand_in_a_row(make, lengths):
    model = make()
    known = blocks(model, named(model, getattr(model, "tensor_layout", None)))
    assert [len(row) for row in rows(model, known)] == lengths
