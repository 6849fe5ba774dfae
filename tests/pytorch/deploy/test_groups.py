"""Layers on ranks of their own: trained so, a model ends with the parameters of one process."""

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

from foretell.errors import InputError  # noqa: E402
from foretell.plan import Plan  # noqa: E402
from foretell.plan.unsupported import unsupported  # noqa: E402
from foretell.pytorch.deploy import deploy  # noqa: E402
from foretell.pytorch.deploy.checkpoint import parameters  # noqa: E402
from tests.pytorch.deploy.ranks import on_ranks  # noqa: E402
from tests.pytorch.deploy.same import CLOSE, STEPS, adam, alone, samples, sgd, whole  # noqa: E402

BATCH = 16
BATCHES = [samples(BATCH, step=step) for step in range(STEPS)]


def line():
    torch.manual_seed(0)
    layers = [nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.Tanh()]
    layers += [nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4)]
    return nn.Sequential(*layers)


def wide():
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64))
    return nn.Sequential(body, nn.Tanh(), nn.Linear(64, 4))


def image():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 24, 1), nn.ReLU(), nn.Conv2d(24, 8, 1),
        nn.Flatten(), nn.Linear(32, 4),
    )  # fmt: skip


class Pair(nn.Module):
    """Hands two tensors on, one of them without a gradient; says its layers itself."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = First(), Second()

    def forward(self, x):
        return self.second(*self.first(x))

    def layers(self):
        return {"first": self.first, "second": self.second}


class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 6)

    def forward(self, x):
        return self.inner(x), (x > 0).float()


class Second(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 8)
        self.out = nn.Linear(8, 4)

    def forward(self, y, mask):
        return self.out(self.inner(y) * mask)


def tied():
    made = line()
    made[6].weight = made[2].weight
    return made


def mixing():
    """Its second layer makes one row of two samples."""
    return nn.Sequential(nn.Linear(8, 8), nn.Unflatten(0, (-1, 2)), nn.Flatten(1), nn.Linear(16, 4))


def normed():
    """Norms have no parts: every rank of a split does the same with them."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 12), nn.Linear(12, 12), nn.BatchNorm1d(12), nn.LayerNorm(12),
        nn.Linear(12, 12), nn.Linear(12, 4),
    )  # fmt: skip


class Words(nn.Module):
    """Looks numbers up, as words."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 6)

    def forward(self, x):
        return self.table((x * 3).long().clamp(-5, 5) + 5).mean(1)


def words():
    torch.manual_seed(0)
    return nn.Sequential(Words(), nn.Linear(6, 9), nn.Linear(9, 4))


MODELS = {
    "mixing": mixing, "line": line, "wide": wide, "image": image, "pair": Pair, "tied": tied,
    "normed": normed, "words": words,
}  # fmt: skip


def run(groups, fields, name="line", optimizer=sgd):
    """How far three steps of a plan end from training on one process, on this rank."""
    rows = tuple(tuple(row.split()) for row in groups.split("/"))
    plan = Plan(groups=rows, global_batch=BATCH, **fields)
    with torch.random.fork_rng():
        model = MODELS[name]()
        if dist.get_rank():  # starts differ: the first rank's counts
            for parameter in model.parameters():
                nn.init.ones_(parameter)
    update = optimizer(model)
    deployed = deploy(model, update, plan)
    losses = [deployed.step((x,), y) for x, y in BATCHES]
    wanted = dict(alone(MODELS[name], BATCHES, optimizer).named_parameters())
    if name == "tied":
        wanted["6.weight"] = wanted["2.weight"]
    found = {n: p for n, p in parameters(deployed) if n in wanted}
    off = [
        ((whole(p) - wanted[n]).abs().max() / wanted[n].abs().max()).item()
        for n, p in found.items()
    ]
    return max(off, default=0.0), len(found), losses[0] is None


PLANS = {
    "two runs on ranks of their own": ("0 2 all-reduce 0:16 / 4 8 all-reduce 1:16", 2, {}),
    "a pipeline": (
        "0 2 all-reduce 0:16 / 4 4 all-reduce 1:16 / 6 8 all-reduce 2:16", 3, {"micro_batch": 4},
    ),
    "two runs on two ranks each": ("0 2 all-reduce 0:8 1:8 / 4 8 all-reduce 2:12 3:4", 4, {}),
    "nested": ("0 2 all-reduce 0:6 1:5 2:5 / 4 8 all-reduce 0:9 1:7", 3, {}),
    "the same ranks dealt out another way": (
        "0 2 all-reduce 0:13 1:3 / 4 8 all-reduce 1:10 0:6", 2, {"micro_batch": 6},
    ),
    "a rank that has few samples": (
        "0 4 all-reduce 0:15 1:1 / 6 8 factors 1:1 0:15", 2, {"micro_batch": 4},
    ),
    "servers": ("0 2 ps 0:10 1:6 / 4 8 ps 1:8 2:8", 3, {}),
    "sharded": ("0 2 sharded 0:10 2:6 / 4 8 sharded 0:4 1:8 2:4", 3, {"optimizer": "adam"}),
    "a mixture": (
        "0 0 ps 0:8 1:5 2:3 / 2 2 sharded 0:8 1:8 / 4 6 factors 0:4 1:4 2:4 3:4 / "
        "8 8 all-reduce 3:16", 4, {"micro_batch": 8},
    ),
    "small buckets": ("0 4 all-reduce 0:12 1:4 / 6 8 all-reduce 0:16", 2, {"bucket_mb": 0.0002}),
    "the loss elsewhere": ("0 8 all-reduce 0:8 1:8 / head head all-reduce 0:16", 2, {}),
    "a rank without work": ("0 2 all-reduce 0:16 / 4 8 all-reduce 0:8 2:8", 3, {}),
    "recomputed": (
        "0 2 all-reduce 0:16 / 4 8 all-reduce 1:16", 2, {"recompute": "full", "micro_batch": 8},
    ),
    "a way for one parameter": (
        "0 2 all-reduce 0:12 1:4 / 4 8 all-reduce 1:8 0:8", 2,
        {"sync": (("2/addmm.weight", "ps:1"), ("2/addmm.bias", "ps:0"), ("8.weight", "sharded"))},
    ),
    "split, then apart": ("0 4 split 0:16 1:16 / 6 8 all-reduce 0:5 1:4 2:7", 3, {}),
    "apart, then split": ("0 2 all-reduce 0:10 1:6 / 4 8 split 1:16 0:16", 2, {"micro_batch": 5}),
    "split in between": (
        "0 0 all-reduce 2:16 / 2 6 split 0:16 1:16 / 8 8 ps 1:8 2:8", 3, {"micro_batch": 4},
    ),
    "split here and there": (
        "0 2 split 0:16 1:16 / 4 6 split 2:16 3:16 1:16 / 8 8 sharded 0:9 3:7", 4,
        {"micro_batch": 4, "optimizer": "adam"},
    ),
    "ranks of a split that do other things": (
        "0 0 all-reduce 0:16 / 2 2 split 0:16 1:16 / 4 4 all-reduce 1:16 / 6 6 split 1:16 0:16 / "
        "8 8 all-reduce 0:11 1:5", 2, {"micro_batch": 2},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANS)
def test_layers_on_ranks_of_their_own_train_as_one_process(name):
    groups, size, fields = PLANS[name]
    found = on_ranks(size, run, groups, fields, "line", adam if "sharded" in groups else sgd)
    assert max(off for off, _, _ in found) < CLOSE
    assert sum(held for _, held, _ in found) >= 10  # every parameter is somewhere


@pytest.mark.parametrize(
    ("name", "groups", "size", "micro_batch"),
    [
        ("wide", "0.0 0.0 factors 0:4 1:12 / 0.2 2 factors 0:8 1:8", 2, 0),
        ("wide", "0.0 0.2 factors 0:4 1:12 / 2 2 all-reduce 1:16", 2, 4),
        ("image", "1 1 factors 0:8 1:8 / 3 5 all-reduce 0:3 1:13", 2, 0),
        ("pair", "first first all-reduce 0:9 1:7 / second second ps 1:4 2:12", 3, 8),
        ("tied", "0 2 all-reduce 0:6 1:10 / 4 4 all-reduce 0:16 / 6 8 ps 0:10 1:6", 2, 8),
        ("tied", "0 0 all-reduce 0:6 1:10 / 2 6 split 0:16 1:16 / 8 8 all-reduce 0:16", 2, 8),
        ("image", "1 3 split 0:16 1:16 2:16 / 5 5 all-reduce 0:3 1:13", 3, 0),
        ("pair", "first first split 0:16 1:16 / second second ps 1:4 2:12", 3, 8),
        ("normed", "0 0 all-reduce 0:6 1:10 / 1 4 split 0:16 1:16 / 5 5 all-reduce 0:16", 2, 0),
        ("words", "0 1 split 0:16 1:16 / 2 2 all-reduce 0:5 1:11", 2, 4),
    ],
)
def test_other_models(name, groups, size, micro_batch):
    found = on_ranks(size, run, groups, {"micro_batch": micro_batch}, name)
    assert max(off for off, _, _ in found) < CLOSE


def averaging():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 4))


def with_statistics(groups):
    """How far a model with batch norms is from one process that takes the same micro-batches."""
    rows = tuple(tuple(row.split()) for row in groups.split("/"))
    model, wanted = averaging(), averaging()
    made = deploy(model, sgd(model), Plan(groups=rows, global_batch=BATCH, micro_batch=8))
    update = sgd(wanted)
    for x, y in BATCHES:
        made.step((x,), y)
        update.zero_grad()
        for inputs, target in zip(x.chunk(2), y.chunk(2), strict=True):
            (nn.functional.cross_entropy(wanted(inputs), target) / 2).backward()
        update.step()
    there = dict(wanted.named_parameters())
    return max(
        ((p - there[n]).abs().max() / there[n].abs().max()).item() for n, p in parameters(made)
    )


def test_batch_norms_see_the_samples_of_all_ranks_of_their_run():
    found = on_ranks(2, with_statistics, "0 1 all-reduce 0:8 1:8 / 3 3 all-reduce 1:16")
    assert max(found) < CLOSE


def test_a_name_stands_for_all_layers_inside_it():
    """Plans that are made from a capture name blocks, which are Sequential themselves."""
    found = on_ranks(2, run, "0 0 all-reduce 0:4 1:12 / 2 head all-reduce 0:16", {}, "wide")
    assert max(off for off, _, _ in found) < CLOSE


def held(groups):
    """Numbers that this rank keeps of the second run, and what norms of it are after some steps."""
    plan = Plan(groups=tuple(tuple(row.split()) for row in groups.split("/")), global_batch=BATCH)
    torch.manual_seed(0)
    split = [nn.Linear(16, 64), nn.Dropout(0.5), nn.LayerNorm(64), nn.Linear(64, 4)]
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), *split)
    deployed = deploy(model, sgd(model), plan)
    torch.manual_seed(dist.get_rank())  # what was drawn before differs
    for x, y in BATCHES:
        deployed.step((x,), y)
    second = deployed.pipeline.modules[1]
    return sum(p.numel() for p in second.parameters()), second.get_parameter("4.weight").tolist()


def test_ranks_of_a_split_keep_parts_and_draw_the_same():
    found = on_ranks(2, held, "0 0 all-reduce 0:6 1:10 / 2 5 split 0:16 1:16")
    norm, layers = 2 * 64, 16 * 64 + 64 + 64 * 4 + 4
    assert [size for size, _ in found] == [norm + layers // 2] * 2
    assert found[0][1] == found[1][1]
    assert found[0][1] != [1.0] * 64  # they have learned something


def sent_as_factors(groups):
    plan = Plan(groups=tuple(tuple(row.split()) for row in groups.split("/")), global_batch=BATCH)
    model = wide()
    deployed = deploy(model, sgd(model), plan)
    deployed.step((BATCHES[0][0],), BATCHES[0][1])
    return sorted(deployed.pipeline.syncs[0].factors.parameters)


def test_factors_are_sent_where_they_are_fewer_bytes():
    # 16 rows × (64 + 64) < 2 × 64 × 64, but 16 × (8 + 64) > 2 × 8 × 64
    found = on_ranks(2, sent_as_factors, "0.0 2 factors 0:8 1:8")
    assert found == [["0.2.bias", "0.2.weight"]] * 2


def losses(groups, micro_batch):
    plan = Plan(
        groups=tuple(tuple(row.split()) for row in groups.split("/")), global_batch=BATCH,
        micro_batch=micro_batch,
    )  # fmt: skip
    model = line()
    deployed = deploy(model, sgd(model), plan)
    value = deployed.step((BATCHES[0][0],), BATCHES[0][1])
    return (None if value is None else value.item()), deployed.share


def test_the_loss_is_that_of_the_ranks_that_have_it():
    found = on_ranks(3, losses, "0 4 all-reduce 0:16 / 6 8 all-reduce 1:12 2:4", 5)
    assert found[0] == (None, 0.0)
    mean = sum(value * share for value, share in found[1:]) / BATCH
    x, y = BATCHES[0]
    assert mean == pytest.approx(nn.functional.cross_entropy(line()(x), y).item(), rel=1e-6)


def refused(groups, name="line", size=BATCH):
    plan = Plan(groups=tuple(tuple(row.split()) for row in groups.split("/")))
    model = MODELS[name]() if name in MODELS else nn.Bilinear(2, 2, 2)
    x, y = samples(size)
    try:
        deploy(model, sgd(model), plan).step((x,), y)
    except InputError as error:
        return error.message
    return ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("0 2 all-reduce 0:16 / 5x 8 all-reduce 1:16",), "layer in the plan's groups"),
        (("0 4 ps 0:16 / 6 8 ps 1:16 / 4 4 ps 0:16",), "another order"),
        (("0 8 all-reduce 0:8 1:8", "none"), "cannot be cut into runs"),
        (("0 8 all-reduce 0:8 1:8", "line", 12), "12 samples for a plan of 16"),
        (("0 4 all-reduce 0:16 / 6 8 all-reduce 1:16", "tied"), "share a parameter"),
        (("0 4 split 0:16 1:16 / 6 8 ps 0:8 1:8", "tied"), "is split and shares a parameter"),
        (("0 0 ps 0:16 / 4 8 ps 1:16",), "no ranks for layer `2`"),
        (("2 4 ps 0:16 / 6 8 ps 1:16",), "no ranks for layer `0`"),
        (("0 4 ps 0:16 / 6 6 ps 1:16",), "no ranks for layer `8`"),
        (("0 4 ps 0:16 / 4 8 ps 1:16",), "another order"),
        (("0 2 ps 0:16 / 3 3 ps 1:16", "mixing"), "2 samples have become (1, 16)"),
        (("0 2 all-reduce 0:8 1:8 / 4 8 all-reduce 0:16",), ""),
    ],
)
def test_what_cannot_be_cut_is_refused(arguments, words):
    found = on_ranks(2, refused, *arguments)
    assert all(words in message for message in found)
    assert bool(words) == all(found)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("groups=a+b+split+0:16+1:8", "has 8 and 16 samples; the batch has"),
        ("groups=a+b+all-reduce+0:16,dp=2", "groups beside dp=2"),
        ("groups=a+b+all-reduce+0:16,zero=1", "groups beside zero=1"),
        ("groups=a+b+alreduce+0:16", "way in the row"),
        ("groups=a+b+all-reduce+0:0", "does not deal samples out"),
        ("groups=a+b+all-reduce+0:8+0:8", "does not deal samples out"),
        ("groups=a+b+all-reduce", "has 3 parts"),
        ("groups=a+a+ps+0:16/b+b+ps+0:8,global_batch=16", "8 samples; the batch has 16"),
    ],
)
def test_what_cannot_run_is_refused_before_it_is_launched(text, words):
    assert any(words in why for why in unsupported(Plan.parse(text)))


def test_a_plan_of_groups_needs_ranks_up_to_the_highest():
    assert Plan.parse("groups=a+b+ps+0:8+3:8").ranks == 4
