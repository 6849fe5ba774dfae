"""Data parallel with layouts, shares and ways to synchronize: the parameters of one process."""

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

from foretell.errors import InputError  # noqa: E402
from foretell.pytorch.deploy.buckets import Layout, of_parameters  # noqa: E402
from foretell.pytorch.deploy.sync import synchronize  # noqa: E402
from tests.pytorch.deploy.ranks import on_ranks  # noqa: E402
from tests.pytorch.deploy.same import CLOSE, STEPS, adam, alone, mlp, off, part, samples, sgd  # noqa: E402

ODD = Layout((("4.weight", "0.bias", "2.bias"), ("4.bias", "0.weight"), ("2.weight",)), (2, 1, 3))
BATCHES = [samples(step=step) for step in range(STEPS)]
LINEAR = {f"{i}.{p}": "factors" for i in (0, 2, 4) for p in ("weight", "bias")}
WAYS = {
    "as DDP": {},
    "odd layout": {"layout": ODD},
    "one bucket a parameter": {"layout": 1.0},
    "factors": {"choices": LINEAR},
    "server": {"choices": {n: f"ps:{i % 2}" for i, n in enumerate(LINEAR)}},
    "sharded": {"choices": dict.fromkeys(LINEAR, "sharded")},
    "mixed": {
        "choices": {
            "0.weight": "factors", "0.bias": "factors", "2.weight": "ps:1", "2.bias": "sharded"
        },
        "layout": Layout((("4.weight",), ("4.bias",))),
    },
}  # fmt: skip


def plain_loop(shares=None, optimizer=sgd, every=1, **options):
    """How far three steps of an ordinary loop end from training on one process."""
    model = mlp(seed=dist.get_rank())  # starts differ: the first rank's counts
    update = optimizer(model)
    sync = synchronize(model, update, shares=shares, **options)
    for x, y in BATCHES:
        update.zero_grad()
        pieces = list(zip(part(x, shares).chunk(every), part(y, shares).chunk(every), strict=True))
        with sync.no_sync():
            for a, b in pieces[:-1]:
                (nn.functional.cross_entropy(model(a), b) / every).backward()
        a, b = pieces[-1]
        (nn.functional.cross_entropy(model(a), b) / every).backward()
        update.step()
    return off(model, alone(mlp, BATCHES, optimizer))


def every_way(shares=None, every=1, names=WAYS):
    found = {}
    for name in names:
        for optimizer in (sgd, adam):
            found[name, optimizer.__name__] = plain_loop(shares, optimizer, every, **WAYS[name])
    return found


@pytest.mark.parametrize(
    ("size", "shares", "every"),
    [(2, None, 1), (3, None, 2), (3, [6, 4, 2], 1), (4, [2, 4, 4, 2], 2)],
)
def test_equal_to_one_process(size, shares, every):
    for found in on_ranks(size, every_way, shares, every):
        assert {way: o for way, o in found.items() if not o <= CLOSE} == {}


def beside_ddp(layouts=(None, ODD, 1.0)):
    """Gradients of our reducer and of DDP, after the same backward."""
    x, y = map(part, BATCHES[0])
    ours, theirs = mlp(), mlp()
    wrapped = nn.parallel.DistributedDataParallel(theirs)  # kept: its reducer dies with it
    nn.functional.cross_entropy(wrapped(x), y).backward()
    equal = []
    for layout in layouts:
        ours.zero_grad()
        sync = synchronize(ours, layout=layout)
        nn.functional.cross_entropy(ours(x), y).backward()
        sync.finish()
        sync.remove()
        pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
        equal.append([torch.equal(a.grad, b.grad) for a, b in pairs])
    return equal


def test_bitwise_as_ddp_on_two_ranks():
    for found in on_ranks(2, beside_ddp):
        assert all(all(row) for row in found)


def test_bitwise_as_ddp_on_four_ranks_with_the_same_buckets():
    """DDP's first backward has all of this model in one bucket, in the order of parameters."""
    one = Layout((tuple(name for name, _ in mlp().named_parameters()),))
    for found in on_ranks(4, beside_ddp, [one]):
        assert all(all(row) for row in found)


class Sometimes(nn.Module):
    """A model with a branch that only some ranks take, and one that nobody takes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.always, self.never = nn.Linear(8, 4), nn.Linear(8, 4)
        self.branch = nn.Linear(8, 4)

    def forward(self, x):
        y = self.always(x)
        return y + self.branch(x) if dist.get_rank() == 0 else y


def unused():
    x, y = map(part, BATCHES[0])
    ours, theirs = Sometimes(), Sometimes()
    sync = synchronize(ours)
    nn.functional.cross_entropy(ours(x), y).backward()
    sync.finish()
    wrapped = nn.parallel.DistributedDataParallel(theirs, find_unused_parameters=True)
    nn.functional.cross_entropy(wrapped(x), y).backward()
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    same = all(
        (a.grad is None and b.grad is None) or torch.allclose(a.grad, b.grad) for a, b in pairs
    )
    return same, ours.never.weight.grad is None


def unused_shards():
    """Gradients of sharded parameters that some ranks used, and that no rank did."""
    from torch.distributed.device_mesh import init_device_mesh

    from foretell.pytorch.deploy.shard import Usage, local, shard

    x, y = map(part, BATCHES[0])
    ours, theirs = Sometimes(), Sometimes()
    shard(ours, init_device_mesh("cpu", (2,)))
    usage = Usage([ours], dist.group.WORLD)
    wrapped = nn.parallel.DistributedDataParallel(theirs, find_unused_parameters=True)
    found = []
    for _ in range(2):
        for model in (ours, wrapped):
            model.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
        usage.finish()
        pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
        found += [
            a.grad is None
            if b.grad is None
            else torch.allclose(local(a.grad), b.grad.chunk(2)[dist.get_rank()])
            for a, b in pairs
        ]
    return found


def test_sharded_parameters_that_no_rank_used_keep_no_gradient():
    assert on_ranks(2, unused_shards) == [[True] * 12] * 2


def test_unused_parameters_as_in_ddp():
    assert on_ranks(2, unused) == [(True, True)] * 2


def pixels():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 1), nn.ReLU(), nn.Conv2d(6, 4, 1, stride=2), nn.Flatten(), nn.Linear(16, 4)
    )


def convolution_factors():
    made = torch.Generator().manual_seed(1)
    batches = [
        (torch.randn(6, 3, 4, 4, generator=made), torch.randint(0, 4, (6,), generator=made))
        for _ in range(STEPS)
    ]
    model = pixels()
    update = sgd(model)
    choices = {f"{i}.{p}": "factors" for i in (0, 2) for p in ("weight", "bias")}
    synchronize(model, update, choices=choices, shares=[4, 2])
    for x, y in batches:
        update.zero_grad()
        nn.functional.cross_entropy(model(part(x, [4, 2])), part(y, [4, 2])).backward()
        update.step()
    return off(model, alone(pixels, batches))


def test_factors_of_convolutions():
    assert max(on_ranks(2, convolution_factors)) <= CLOSE


class Heads(nn.Module):
    """Three linear layers that read one input."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.out = nn.Linear(8, 12), nn.Linear(12, 4)
        self.query, self.key, self.value = (nn.Linear(12, 12) for _ in range(3))

    def forward(self, x):
        x = self.first(x).tanh()
        return self.out(self.query(x).tanh() * self.key(x) + self.value(x))


def shared_input():
    made = torch.Generator().manual_seed(1)
    batches = [
        (torch.randn(6, 8, generator=made), torch.randint(0, 4, (6,), generator=made))
        for _ in range(STEPS)
    ]
    model = Heads()
    update, names = sgd(model), ("first", "query", "key", "value")
    choices = {f"{n}.{p}": "factors" for n in names for p in ("weight", "bias")}
    sync = synchronize(model, update, choices=choices, shares=[4, 2])
    gathered = []
    for x, y in batches:
        update.zero_grad()
        nn.functional.cross_entropy(model(part(x, [4, 2])), part(y, [4, 2])).backward()
        gathered.append((len(sync.factors._inputs), len(sync.factors._sent)))
        update.step()
    return off(model, alone(Heads, batches)), gathered


def test_an_input_that_several_layers_read_is_gathered_once():
    for far, gathered in on_ranks(2, shared_input):
        assert far <= CLOSE
        # behind the first backward ranks count their rows; later ones send as they go
        assert gathered == [(0, 0)] + [(2, 4)] * (STEPS - 1)


def refused(choices=None, layout=None, shares=None):
    model = pixels()
    with pytest.raises(InputError) as error:
        synchronize(model, choices=choices, layout=layout, shares=shares)
    return str(error.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"choices": {"0.weight": "factors"}}, "`0.weight` is sent as factors and `0.bias` is not"),
        ({"choices": {"0.weight": "ps:3"}}, "served by rank 3, there are 1"),
        ({"choices": {"0.weight": "gossip"}}, "unknown way to synchronize `0.weight`"),
        ({"choices": {"9.weight": "ps:0"}}, "unknown parameter"),
        ({"shares": [1, 2]}, "the shares of 1 ranks are"),
        ({"layout": Layout((("0.weight",),))}, "are not in any bucket"),
    ],
)
def test_what_cannot_be(options, words):
    assert words in on_ranks(1, refused_with, options)[0]


def refused_with(options):
    return refused(**options)


def test_layouts_that_cannot_be():
    with pytest.raises(InputError, match="one part or more"):
        Layout((("a",),), (0,))
    with pytest.raises(InputError, match="`a` is in several buckets"):
        Layout((("a",), ("a",))).check(["a"])


def test_buckets_by_size_are_those_of_ddp():
    parameters = {f"p{i}": torch.empty(100_000) for i in range(6)}
    made = of_parameters(parameters, 1_000_000)
    assert made.buckets == (("p5", "p4", "p3"), ("p2", "p1", "p0"))


def test_a_bucket_has_parameters_of_one_format():
    formats = [torch.float32, torch.float64, torch.float32, torch.float64]
    parameters = {f"p{i}": torch.empty(4, dtype=f) for i, f in enumerate(formats)}
    assert of_parameters(parameters).buckets == (("p3", "p1"), ("p2", "p0"))


def apart(mine, wanted):
    return ((mine - wanted).abs().max() / wanted.abs().max().clamp_min(1e-6)).item()


def filled(plan):
    """How far three steps end from one process where the second rank made a model without values.

    A batch norm: buffers are filled too.
    """
    from foretell.plan import Plan
    from foretell.pytorch.deploy.apply import deploy
    from foretell.pytorch.deploy.checkpoint import buffers, parameters
    from tests.pytorch.deploy import matrix, zoo

    whole = zoo.make("norms")
    start = {n: p.detach().clone() for n, p in whole.named_parameters()}
    with torch.device("meta" if dist.get_rank() else "cpu"):
        model = zoo.make("norms")
    made = deploy(model, matrix.optimizer(model), Plan.parse(plan), device="cpu")
    first = max(apart(p, start[n]) for n, p in parameters(made))
    update = matrix.optimizer(whole)
    for step in range(STEPS):
        ((inputs, target),) = zoo.parts("norms", [zoo.BATCH], step)
        update.zero_grad()
        nn.functional.cross_entropy(whole(*inputs), target).backward()
        update.step()
        made.step(*zoo.parts("norms", [zoo.BATCH // 2] * 2, step)[dist.get_rank()])
    known = {n: p.detach() for n, p in whole.named_parameters()}
    held = max(apart(p, known[n]) for n, p in parameters(made))
    there = {n: b for n, b in buffers(made).items() if b.is_floating_point()}
    return first, held, max(apart(b, whole.get_buffer(n)) for n, b in there.items())


@pytest.mark.parametrize("plan", ["dp=2,zero=3", "dp=2,zero=2"])
def test_ranks_are_given_their_parts_of_a_model_they_never_hold(plan):
    for first, held, kept in on_ranks(2, filled, plan):
        assert first == 0
        assert held < CLOSE
        assert kept < CLOSE


def empty_without_parts():
    from foretell.plan import Plan
    from foretell.pytorch.deploy.apply import deploy

    with torch.device("meta"):
        model = mlp(seed=0)
    with pytest.raises(InputError, match="meta device"):
        deploy(model, sgd(model), Plan.parse("dp=2"), device="cpu")
    return True


def test_a_model_without_values_is_refused_where_nothing_is_sharded():
    assert on_ranks(2, empty_without_parts) == [True, True]
