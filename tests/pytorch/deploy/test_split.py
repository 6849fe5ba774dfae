"""Convolutions split by space, filters and channels: the parameters of one process."""

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

from foretell.errors import InputError  # noqa: E402
from foretell.pytorch.deploy.channels import split_channels  # noqa: E402
from foretell.pytorch.deploy.checkpoint import whole_of  # noqa: E402
from foretell.pytorch.deploy.spatial import exchange, spans, split_spatial  # noqa: E402
from tests.pytorch.deploy.ranks import on_ranks  # noqa: E402
from tests.pytorch.deploy.same import CLOSE, STEPS, alone, sgd  # noqa: E402


def pictures(*shape):
    made = torch.Generator().manual_seed(3)
    return [
        (torch.randn(4, *shape, generator=made), torch.randint(0, 4, (4,), generator=made))
        for _ in range(STEPS)
    ]


class Residual(nn.Module):
    """A block with a branch and a stride."""

    def __init__(self, width):
        super().__init__()
        self.one = nn.Conv2d(width, width, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.act = nn.ReLU()
        self.two = nn.Conv2d(width, width, 3, padding=1)
        self.short = nn.Conv2d(width, width, 1, stride=2)

    def forward(self, x):
        return self.act(self.two(self.act(self.norm(self.one(x)))) + self.short(x))


def flat():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 5, padding=2), nn.BatchNorm2d(6), nn.ReLU(),
        nn.MaxPool2d(3, stride=2, padding=1), Residual(6),
        nn.Conv2d(6, 6, 3, padding="same", dilation=2), nn.GELU(), nn.AvgPool2d(2, stride=1),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4),
    )  # fmt: skip


def deep():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv3d(2, 4, 3, padding=1), nn.Tanh(), nn.MaxPool3d(2), nn.Conv3d(4, 4, 3, stride=2),
        nn.Flatten(), nn.Linear(4 * 1 * 3 * 3, 4),
    )  # fmt: skip


MODELS = {"flat": (flat, (3, 21, 18)), "deep": (deep, (2, 8, 16, 14))}


def apart(state, wanted):
    return max(
        ((state[n] - w).abs().max() / w.abs().max().clamp_min(1e-6)).item()
        for n, w in wanted.state_dict().items()
        if w.is_floating_point()
    )


def trained(model, batches):
    update = sgd(model)
    for x, y in batches:
        update.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        update.step()


def spatial(name, parts):
    make, shape = MODELS[name]
    batches, model = pictures(*shape), make()
    split_spatial(model, parts)
    trained(model, batches)
    wanted = alone(make, batches)
    model.eval()
    wanted.eval()
    with torch.no_grad():
        after = (model(batches[0][0]) - wanted(batches[0][0])).abs().max().item()
    return apart(model.state_dict(), wanted), after


def all_spatial(cases):
    return [spatial(*case) for case in cases]


@pytest.mark.parametrize(
    ("size", "cases"),
    [
        (2, [("flat", (2, 1)), ("flat", (1, 2)), ("deep", (1, 2, 1))]),
        (3, [("flat", (3, 1))]),
        (4, [("flat", (2, 2)), ("flat", (4, 1)), ("deep", (1, 2, 2))]),
    ],
)
def test_images_in_parts(size, cases):
    for found in on_ranks(size, all_spatial, cases):
        assert [f for f in found if not max(f) <= CLOSE] == []


def by_channels(name, ways):
    make, shape = MODELS[name]
    batches, model = pictures(*shape), make()
    split_channels(model, ways)
    trained(model, batches)
    state = dict(model.named_buffers())
    state |= {n: whole_of(p, p.detach()) for n, p in model.named_parameters()}
    return apart(state, alone(make, batches))


def all_channels():
    mixed = {"0": "filter", "4.one": "channel", "4.two": "filter", "5": "channel", "10": "filter"}
    return [
        by_channels("flat", dict.fromkeys(["0", "4.one", "4.two", "4.short", "5", "10"], "filter")),
        by_channels("flat", dict.fromkeys(["4.one", "4.two", "4.short", "5", "10"], "channel")),
        by_channels("flat", mixed),
        by_channels("deep", {"0": "filter", "3": "channel", "5": "channel"}),
    ]


@pytest.mark.parametrize("size", [2, 4])
def test_filters_and_channels_in_parts(size):
    for found in on_ranks(size, all_channels):
        assert max(found) <= CLOSE, found


def wide_halo():
    """Rows from beyond the next rank, past the ends, and gradients added up at home."""
    rank, size = dist.get_rank(), dist.get_world_size()
    have = spans([1, 2, 1, 3])
    want = [(-2, 5), (0, 7), (3, 4), (2, 9)]
    whole = torch.arange(7.0).view(1, 7) + 1
    x = whole[:, have[rank][0] : have[rank][1]].clone().requires_grad_()
    y = exchange(x, 1, have, want)
    padded = nn.functional.pad(whole, (2, 2))
    y.sum().backward()
    wanted = [sum(a <= row < b for a, b in want) for row in range(*have[rank])]
    same = torch.equal(y.detach(), padded[:, want[rank][0] + 2 : want[rank][1] + 2])
    return size, same, x.grad[0].tolist() == wanted


def test_rows_change_hands():
    assert on_ranks(4, wide_halo) == [(4, True, True)] * 4


def refused(make, call):
    with pytest.raises(InputError) as error:
        call(make())
    return str(error.value)


def all_refused():
    lstm = lambda: nn.Sequential(nn.LSTM(2, 2))  # noqa: E731
    grouped = lambda: nn.Sequential(nn.Conv2d(4, 4, 3, groups=2))  # noqa: E731
    return [
        refused(lstm, lambda m: split_spatial(m, (1,))),
        refused(
            lambda: nn.Conv2d(1, 1, 3, padding_mode="circular"), lambda m: split_spatial(m, (1,))
        ),
        refused(flat, lambda m: split_spatial(m, (3, 1))),
        refused(grouped, lambda m: split_channels(m, {"0": "filter"})),
        refused(flat, lambda m: split_channels(m, {"1": "filter"})),
        refused(flat, lambda m: split_channels(m, {"0": "rows"})),
    ]


def test_what_cannot_be_split():
    (said,) = on_ranks(1, all_refused)
    words = ["`0` is a LSTM", "pads with circular", "a grid of 3×1 on 1 ranks", "it has 2 groups"]
    words += ["neither linear nor a convolution", "unknown way to split a layer: `rows`"]
    for text, word in zip(said, words, strict=True):
        assert word in text
