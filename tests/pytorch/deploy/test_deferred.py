"""Models made without values get the values that one process gives them, tensor by tensor."""

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from foretell.pytorch.deploy.deferred import Deferred, NotDeferred, deferred, deferred_of, placed
from tests.pytorch.deploy import matrix, zoo
from tests.pytorch.deploy.ranks import on_ranks


def made(make, kind=Deferred):
    """A model and the values that are made for it, by name."""
    torch.manual_seed(3)
    model = deferred(make)
    noted = deferred_of(model)
    noted = kind(noted.state, noted.ops)
    held = dict(model.named_parameters()) | dict(model.named_buffers())
    wanted = {}
    for name, tensor in held.items():
        if tensor.is_meta:
            wanted.setdefault(placed(tensor).key, []).append((name, placed(tensor)))
    values = {n: t.detach() for n, t in held.items() if not t.is_meta}
    for rows, storage in noted.values(wanted):
        values |= {name: place.on(storage).clone() for name, place in rows}
    return model, values, noted


def same(make):
    """Whether all values, and the random numbers behind them, are those of one process."""
    torch.manual_seed(3)
    wanted = make()
    state = torch.get_rng_state()
    _, values, noted = made(make)
    there = dict(wanted.named_parameters()) | dict(wanted.named_buffers())
    assert values.keys() == there.keys()
    assert torch.equal(noted.ends, state)
    return all(torch.equal(values[name], there[name].detach()) for name in there)


@pytest.mark.parametrize("name", zoo.EVERY)
def test_values_are_those_of_one_process(name):
    assert same(zoo.EVERY[name][0])


class Seeded(nn.Module):
    """Seeds in between, draws once more, and moves its parameters."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)
        torch.manual_seed(11)
        self.b = nn.Linear(4, 4)
        torch.manual_seed(11)
        self.c = nn.Linear(4, 4)
        nn.init.orthogonal_(self.a.weight)
        nn.init.trunc_normal_(self.b.weight, std=0.02)
        with torch.no_grad():
            self.c.weight[1:3].copy_(self.b.weight[:2])
            self.c.weight[0] *= torch.tensor(0.5)
        self.scale = nn.Parameter(torch.tensor([0.7, 0.9]))
        self.register_buffer("mask", torch.ones(4, 4).tril())
        self.double()


def test_seeds_views_and_moves_are_followed():
    assert same(Seeded)


def test_buffers_without_random_numbers_have_values_at_once():
    torch.manual_seed(0)
    model = deferred(Seeded)
    assert torch.equal(model.mask, torch.ones(4, 4).double().tril())
    assert model.a.weight.is_meta


def reads():
    layer = nn.Linear(4, 4)
    layer.extra = float(layer.weight.sum())
    return layer


class Careful(nn.Module):
    """Asks where its tensors are, and makes others there."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(6, 6, device="cpu"))
        if self.weight.device.type != "meta":
            nn.init.sparse_(self.weight, 0.5)
        more = torch.randn(6, 6, device=self.weight.device).to("cpu", torch.float64)
        self.more = nn.Parameter(more.to(self.weight.dtype).cpu())


def test_models_that_ask_where_they_are_go_on_as_on_the_cpu():
    assert same(Careful)


def generated():
    return nn.Parameter(torch.randn(4, generator=torch.Generator().manual_seed(1)))


def set_back():
    with torch.random.fork_rng(devices=[]):
        return nn.Linear(4, 4)


def read():
    layer = nn.Linear(64, 64)
    layer.load_state_dict({"weight": torch.tensor([[0.5] * 64] * 64), "bias": torch.ones(64)})
    return layer


@pytest.mark.parametrize("make", [reads, generated, set_back, read])
def test_what_cannot_be_made_again_is_refused(make):
    before = torch.get_rng_state()
    with pytest.raises(NotDeferred):
        deferred(make)
    assert torch.equal(torch.get_rng_state(), before)


class Counting(Deferred):
    most = 0

    def _run(self, op, made):
        super()._run(op, made)
        self.most = max(self.most, sum(s.nbytes() for s in made.values()))


def filled_again():
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(12)))
    return model.apply(lambda m: isinstance(m, nn.Linear) and nn.init.normal_(m.weight))


def test_no_more_than_a_few_tensors_are_held():
    _, values, noted = made(filled_again, Counting)
    each = max(t.numel() * t.element_size() for t in values.values())
    assert len(values) == 24
    assert noted.most <= 3 * each


def trained(names):
    from foretell.plan import Plan
    from foretell.pytorch.deploy.verify import Case, verify

    found = {}
    for name in names:
        case = Case(
            lambda name=name: deferred(lambda: zoo.make(name)),
            matrix.optimizer,
            lambda step, name=name: zoo.parts(name, [4, 4], step),
            zoo.EVERY[name][2],
            whole=lambda name=name: zoo.make(name),
        )
        found[name] = verify(case, Plan.parse("dp=2,zero=3"), 2).is_equal
    return found


def test_ranks_that_make_their_parts_train_as_one_process():
    names = ("gpt", "moe", "buffered", "scalar", "norms", "tied")
    for rank in on_ranks(2, trained, names):
        assert rank == dict.fromkeys(names, True)
