"""`deploy`: a model trained as a plan says ends with the parameters of one process."""

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

from foretell.errors import InputError  # noqa: E402
from foretell.plan import Plan  # noqa: E402
from foretell.plan.unsupported import unsupported  # noqa: E402
from foretell.pytorch.deploy import deploy  # noqa: E402
from foretell.pytorch.deploy.checkpoint import whole_of  # noqa: E402
from tests.pytorch.deploy.ranks import on_ranks  # noqa: E402
from tests.pytorch.deploy.same import CLOSE, STEPS, alone, samples, sgd  # noqa: E402
from tests.pytorch.deploy.tokens import Words, encoder, in_a_row  # noqa: E402

BATCH = 16
BATCHES = [samples(BATCH, step=step) for step in range(STEPS)]
PICTURES = [(x.repeat(1, 24).view(BATCH, 3, 8, 8), y) for x, y in BATCHES]


def line():
    torch.manual_seed(0)
    layers = [nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.Tanh()]
    layers += [nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4)]
    return nn.Sequential(*layers)


def image():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
    )  # fmt: skip


class Attention(nn.Module):
    """One block with heads; says how it splits."""

    tensor_layout = {"q": "colwise", "k": "colwise", "v": "colwise", "out": "rowwise"}  # noqa: RUF012

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        tokens = x.unsqueeze(1) * torch.arange(1.0, 4).view(1, 3, 1)
        q, k, v = (
            layer(tokens).unflatten(-1, (-1, 2)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.head(self.out(mixed.transpose(1, 2).flatten(2)).mean(1))


MODELS = {"line": (line, BATCHES), "image": (image, PICTURES), "attention": (Attention, BATCHES)}
MODELS |= {"words": (Words, BATCHES), "row": (in_a_row, BATCHES), "encoder": (encoder, BATCHES)}


def run(text, name="line"):
    """How far three steps of a plan end from training on one process."""
    make, batches = MODELS[name]
    plan, rank = Plan.parse(text), dist.get_rank()
    with torch.random.fork_rng():
        model = make()
        if rank:  # starts differ: the first rank's counts
            for parameter in model.parameters():
                nn.init.ones_(parameter)
    update = sgd(model)
    deployed = deploy(model, update, plan, samples=BATCH // plan.dp)
    place = deployed.places.at["dp"]
    shares = list(plan.shares) or [BATCH // plan.dp] * plan.dp
    for x, y in batches:
        deployed.step((x.split(shares)[place],), y.split(shares)[place])
    return _off(deployed, alone(make, batches))


def _off(deployed, wanted):
    state = {n: whole_of(p, p.detach()) for n, p in deployed.model.named_parameters()}
    there = dict(wanted.named_parameters())
    assert set(state) <= set(there)
    return max(((state[n] - there[n]).abs().max() / there[n].abs().max()).item() for n in state)


def runs(cases):
    return {case: run(*case) for case in cases}


NAMES = [n for n, _ in line().named_parameters()]
BUCKETS = "/".join("+".join(NAMES[i::3]) for i in range(3))
SYNC = "/".join(
    f"{n}+{w}" for n, w in zip(NAMES[:4], ["factors", "factors", "ps:1", "sharded"], strict=True)
)
TWO = [
    (f"dp=2,buckets={BUCKETS}",),
    (f"dp=2,sync={SYNC},micro_batch=4",),
    ("dp=2,zero=1",),
    ("dp=2,zero=2,micro_batch=2",),
    ("dp=2,zero=3,shares=10+6",),
    ("dp=2,shares=10+6,overlap=no",),
    ("tp=2",),
    ("tp=2", "attention"),
    ("tp=2,sp=yes", "words"),
    ("tp=2,sp=yes,recompute=full", "row"),
    ("tp=2,sp=yes", "encoder"),
    ("cp=2", "words"),
    ("cp=2,micro_batch=4,recompute=full", "row"),
    ("cp=2", "encoder"),
    ("cp=2,zero=3", "encoder"),
    ("pp=2,micro_batch=4",),
    ("pp=2,schedule=gpipe,micro_batch=4,layers=4+5,recompute=full",),
    ("pp=2,schedule=interleaved,chunks=2,micro_batch=4,layers=2+3",),
    ("pp=2,actions=F0+F1+B1+B0/F0+B0+F1+I1+W1",),
    ("pp=2,actions=0F0+2F0+2B0+0I0+0W0/1F0+1B0",),
    ("spatial=2", "image"),
    ("spatial=1+2", "image"),
    ("filter=2", "image"),
    ("channel=2", "image"),
    ("dp=2,recompute=full",),
    ("dp=2,recompute=selective", "attention"),
    ("dp=2,placement=1+0,whatifs=foreach-optimizer",),
    ("dp=2,placement=1+0,shares=10+6",),
    (f"dp=2,placement=1+0,shares=10+6,sync={SYNC}",),
    ("pp=2,placement=1+0,micro_batch=4",),
]
FOUR = [
    ("dp=2,tp=2,zero=3",),
    ("dp=2,tp=2,sp=yes", "row"),
    ("dp=2,cp=2,shares=12+4", "row"),
    ("dp=2,cp=2,zero=2,micro_batch=4", "words"),
    ("dp=4,zero=3,shard=2",),
    ("tp=2,pp=2,micro_batch=4,layers=4+5",),
    (f"dp=2,pp=2,micro_batch=4,buckets={BUCKETS}",),
    ("spatial=2+2", "image"),
    ("dp=2,filter=2", "image"),
    ("dp=4,micro_batch=1,grad_dtype=fp32",),
    ("dp=2,pp=2,placement=3+0+1+2,shares=12+4,micro_batch=2",),
    ("dp=2,pp=2,zero=3,micro_batch=4,schedule=interleaved,chunks=2,layers=2+3",),
    ("dp=2,pp=2,zero=2,actions=F0+F1+B0+B1/F0+B0+F1+I1+W1",),
]
MORE = [  # the same axes, paired once more
    ("dp=2,tp=2",),
    ("dp=2,cp=2,zero=1", "words"),
    ("dp=2,cp=2,zero=3", "row"),
    ("dp=2,tp=2,sp=yes,zero=3", "words"),
    ("tp=2,sp=yes,pp=2,micro_batch=4", "encoder"),
    ("dp=2,pp=2,micro_batch=2,shares=12+4",),
    ("dp=2,spatial=2", "image"),
    ("dp=2,spatial=2,placement=2+0+3+1", "image"),
    ("dp=2,pp=2,zero=1,micro_batch=2",),
    ("dp=2,pp=2,zero=2,micro_batch=2",),
    ("dp=2,pp=2,zero=3,micro_batch=2,schedule=gpipe",),
]


@pytest.mark.parametrize(
    ("size", "cases"),
    [
        (1, [("dp=1,micro_batch=4",)]),
        (2, TWO),
        (4, FOUR),
        pytest.param(4, MORE, marks=pytest.mark.slow),
    ],
)
def test_every_plan_trains_as_one_process(size, cases):
    for found in on_ranks(size, runs, cases):
        assert {case: off for case, off in found.items() if not off <= CLOSE} == {}


def low_precision(text):
    """Parameters after a plan in bf16, against one process in bf16 as well."""
    plan = Plan.parse(text)
    model = line()
    deployed = deploy(model, sgd(model), plan, samples=BATCH // plan.dp)
    at = deployed.places.at["dp"]
    for x, y in BATCHES:
        deployed.step((x.chunk(plan.dp)[at],), y.chunk(plan.dp)[at])
    wanted = line()
    update = sgd(wanted)
    for x, y in BATCHES:
        update.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(wanted(x), y)
        loss.backward()
        update.step()
    return _off(deployed, wanted), deployed.model[0].weight.dtype == torch.float32 or plan.pp > 1


def all_low_precision():
    texts = [
        "dp=2,dtype=bf16",
        "dp=2,zero=3,dtype=bf16",
        "pp=2,dtype=bf16",
        "dp=2,whatifs=amp:dtype=bf16",
    ]
    return [low_precision(t) for t in texts]


def test_mixed_precision():
    """bf16 keeps 8 bits: sums in another order differ by units of 2⁻⁸, times the rate."""
    for found in on_ranks(2, all_low_precision):
        assert [f for f in found if not (f[0] < 5e-3 and f[1])] == []


def plain_loop():
    """A loop that knows nothing of plans: hooks do the rest."""
    model = line()
    update = sgd(model)
    deployed = deploy(model, update, Plan.parse(f"dp=2,buckets={BUCKETS}"))
    for x, y in BATCHES:
        update.zero_grad()
        nn.functional.cross_entropy(
            deployed.model(x.chunk(2)[dist.get_rank()]), y.chunk(2)[dist.get_rank()]
        ).backward()
        update.step()
    return _off(deployed, alone(line, BATCHES))


def test_a_plain_loop():
    assert max(on_ranks(2, plain_loop)) <= CLOSE


def odd_rank(what):
    model = line() if what == "plan" or dist.get_rank() != 2 else image()
    plan = Plan.parse("dp=3" if what != "plan" or dist.get_rank() != 1 else "dp=3,bucket_mb=1")
    with pytest.raises(InputError) as error:
        deploy(model, sgd(model), plan)
    return str(error.value)


@pytest.mark.parametrize(("what", "rank"), [("plan", 1), ("model", 2)])
def test_ranks_that_differ_are_named(what, rank):
    for said in on_ranks(3, odd_rank, what):
        assert f"rank {rank} has another {what}" in said


def refused(text, name="line"):
    model = MODELS[name][0]()
    update = sgd(model)
    with pytest.raises(InputError) as error:
        deploy(model, update, Plan.parse(text))
    return str(error.value)


def stepped_before(text):
    """Parameters after a step alone and one deployed, and after two steps alone."""
    found = []
    for plan in ("", text):
        model = MODELS["line"][0]()
        update = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step, (x, _) in enumerate(BATCHES[:2]):
            if step and plan:
                deploy(model, update, Plan.parse(plan))
            update.zero_grad()
            model(x).square().mean().backward()
            update.step()
        found.append(torch.cat([_whole(p).flatten() for p in model.parameters()]))
    return float((found[0] - found[1]).abs().max())


def _whole(p):
    return (p.full_tensor() if hasattr(p, "full_tensor") else p).detach()


@pytest.mark.parametrize("plan", ["tp=2", "dp=2,zero=3"])
def test_the_state_of_an_optimizer_that_has_stepped_is_split_too(plan):
    assert max(on_ranks(2, stepped_before, plan)) < 1e-6


def all_refused(cases):
    return [refused(*case) for case, _ in cases]


REFUSED = [
    (("dp=4",), "needs 4 ranks, there are 2"),
    (("dp=2,sync=9.weight+factors",), "unknown parameter in the plan: `9.weight`"),
    (("dp=2,sync=1.weight+factors",), "unknown parameter in the plan: `1.weight`"),
    (("pp=2",), "how many samples a rank has"),
    (("pp=2,global_batch=16,layers=1+1",), "layers=1+1 for 2 stages"),
    (("dp=2,regions=0+2",), "not one row of modules"),
    (("pp=2,schedule=zigzag,global_batch=16",), "unknown schedule"),
    (("tp=2,sp=yes",), "sp: no block of Sequential is known"),
    (("cp=2",), "cp: no block of Sequential is known"),
]


def test_what_the_model_does_not_allow():
    for said, (_, words) in zip(on_ranks(2, all_refused, REFUSED)[0], REFUSED, strict=True):
        assert words in said


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("cp=2,spatial=2", "cp=2 beside height=2"),
        ("ep=2,dp=2,filter=2", "ep=2"),
        ("dp=2,offload=yes", "offload"),
        ("dp=2,pp=2,zero=3,actions=F0+B0/F0+I0+W0", "zero=2 keeps them"),
        ("dp=2,dtype=fp4", "dtype=fp4"),
        ("tp=2,dtype=fp8", "no nn.Linear"),
        ("dp=2,whatifs=cuda-graph", "cuda-graph beside dp=2"),
        ("dp=2,whatifs=loader:workers=4", "what-if `loader:workers=4`"),
        ("spatial=2,tp=2", "images are split beside tensors"),
    ],
)
def test_what_is_refused_before_launch(text, words):
    assert any(words in reason for reason in unsupported(Plan.parse(text)))


def test_what_can_run_has_no_reason_against_it():
    cases = TWO + FOUR + MORE
    assert [unsupported(Plan.parse(case[0])) for case in cases] == [[] for _ in cases]
