"""Single ops fused and put in order as a plan says: its regions, its order, DDP's gradients."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from foretell.cli.main import foretell  # noqa: E402
from foretell.cluster import load as load_cluster  # noqa: E402
from foretell.errors import InputError  # noqa: E402
from foretell.plan import Plan, read  # noqa: E402
from foretell.plan.plan import given, made_for, named_ops, op_names  # noqa: E402
from foretell.plan.unsupported import unsupported  # noqa: E402
from foretell.pytorch.capture import capture  # noqa: E402
from foretell.pytorch.deploy import deploy  # noqa: E402
from foretell.search.fusion.planner import FusionPlanner  # noqa: E402
from tests.pytorch.deploy.ranks import on_ranks  # noqa: E402

LOSS = nn.functional.cross_entropy
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


class Mixer(nn.Module):
    """Norms with buffers, a residual, a tied weight: what a trace has to keep apart."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(8, 16), nn.LayerNorm(16)
        self.middle, self.batch = nn.Linear(16, 16), nn.BatchNorm1d(16)
        self.last = nn.Linear(16, 8)

    def forward(self, x):
        y = nn.functional.gelu(self.norm(self.first(x)))
        y = y + self.batch(torch.tanh(self.middle(y))) * 0.5
        return nn.functional.linear(torch.sigmoid(self.last(y)), self.first.weight)


def batches(rank, steps=3):
    made = torch.Generator().manual_seed(7 + rank)
    for _ in range(steps):
        yield (
            torch.randn(6, 8, generator=made),
            torch.randint(0, 16, (6,), generator=made),
        )


@pytest.fixture(scope="module")
def graph():
    return capture(Mixer(), next(batches(0)), loss=LOSS, on="cpu")


@pytest.fixture(scope="module")
def plan(graph):
    """What the planner finds, with weight gradients put off and messages in parts besides."""
    found = FusionPlanner(learned=False).plan_graph(graph, load_cluster("disco-a")).plan
    names = [name for bucket in found.buckets for name in bucket]
    buckets = (tuple(names[:4]), tuple(names[4:9]), tuple(names[9:]))
    late = ("mm.3.backward", "mm.5.backward")
    return fitted(graph, found.but(dp=2, buckets=buckets, parts=(1, 3, 2), late=late))


def fitted(graph, plan):
    """The plan with the print of what it speaks of."""
    names = op_names(graph)
    sizes = {name: given(graph, task) for task, name in names.items()}
    rows = [(name, sizes[name]) for name in named_ops(plan.regions, plan.late)]
    return plan.but(model=made_for(plan.model.partition(".")[0], rows))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def as_ddp():
    """Gradients and buffers of each step under plain DistributedDataParallel."""
    model = Mixer()
    ddp, optimizer, found = DistributedDataParallel(model), sgd(model), []
    for x, y in batches(dist.get_rank()):
        optimizer.zero_grad()
        LOSS(ddp(x), y).backward()
        optimizer.step()
        found.append(kept(model))
    return found


def kept(model):
    tensors = {n: p.grad.clone() for n, p in model.named_parameters()}
    return tensors | {n: b.clone() for n, b in model.named_buffers()}


def as_planned(plan, compile_region=None):
    """The same under a plan; with the messages as they left and the regions that were compiled."""
    model, sent, regions = Mixer(), [], []
    deployed = deploy(model, sgd(model), plan, loss=LOSS, device="cpu")

    def noted(graph, inputs):
        ops = [n for n in graph.graph.nodes if "getitem" not in n.name and n.op == "call_function"]
        regions.append(len(ops))
        return compile_region(graph, inputs) if compile_region else graph

    deployed.fused.compile_region = noted
    reduce = dist.all_reduce

    def seen(tensor, *args, **kwargs):
        sent.append(tensor.numel())
        return reduce(tensor, *args, **kwargs)

    dist.all_reduce, found = seen, []
    try:
        for x, y in batches(dist.get_rank()):
            deployed.step((x,), y)
            found.append(kept(model))
    finally:
        dist.all_reduce = reduce
    return found, sent, regions


def compared(plan, compiled=False):
    """Largest difference to DDP, relative; messages of a step; regions compiled."""
    wanted = as_ddp()
    if compiled:
        from foretell.pytorch.deploy.regions import inductor
    found, sent, regions = as_planned(plan, inductor if compiled else None)
    pairs = [(a[n], b[n]) for a, b in zip(found, wanted, strict=True) for n in b]
    same = all(torch.equal(a, b) for a, b in pairs)
    grads = [n for n, _ in Mixer().named_parameters()]
    first = [(found[0][n], wanted[0][n]) for n in grads]  # later the parameters differ too
    off = max((a - b).abs().max() for a, b in first) / max(b.abs().max() for _, b in first)
    return {"same": same, "off": float(off), "sent": sent, "regions": regions}


def test_the_planner_fuses_ops_and_says_for_what(graph, plan):
    assert len(plan.regions) >= 3
    assert any(name.endswith("*") for region in plan.regions for name in region)
    assert "." in plan.model


def test_regions_order_and_parts_run_with_the_gradients_of_ddp(plan):
    sizes = {n: p.numel() for n, p in Mixer().named_parameters()}
    totals = [sum(sizes[n] for n in bucket) for bucket in plan.buckets]
    for found in on_ranks(2, compared, plan):
        assert found["same"]  # two ranks: the order of a sum does not matter
        assert len(found["regions"]) == len(plan.regions)
        step = found["sent"][: len(found["sent"]) // 3]
        assert found["sent"] == step * 3
        assert len(step) <= sum(plan.parts) + 1  # behind the gradients: statistics of batch norms
        ends = [sum(plan.parts[:k]) for k in range(4)]
        assert [sum(step[a:b]) for a, b in pairwise(ends)] == totals


def test_copies_that_read_copies_run_with_the_gradients_of_ddp(plan):
    deep = (
        ("sum.0.backward", "sigmoid.0*", "sigmoid_backward.0.backward*"),
        ("native_layer_norm_backward.0.backward", "add.0.backward*", "gelu_backward.0.backward*"),
    )
    for found in on_ranks(2, compared, plan.but(regions=deep, late=(), model="")):
        assert found["same"]
        assert len(found["regions"]) == 2
        assert min(found["regions"]) >= 3  # with views between them


def by_message(plan, optimizer):
    """Parameters of three steps updated bucket by bucket, and together."""
    found = []
    for way in ("by-message", "together"):
        model = Mixer()
        made = deploy(
            model, optimizer(model.parameters(), lr=0.1), plan.but(update=way), loss=LOSS,
            device="cpu",
        )  # fmt: skip
        for x, y in batches(dist.get_rank()):
            made.step((x,), y)
        found.append([p.detach().clone() for p in model.parameters()])
        found[-1] += [p.grad.clone() for p in model.parameters()]
    return all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_buckets_updated_as_they_come_end_where_all_at_once_end(plan, optimizer):
    messages = plan.but(regions=(), late=(), model="")
    assert on_ranks(2, by_message, messages, optimizer) == [True, True]


def gradients_in_order(plan):
    model, order = Mixer(), []
    deployed = deploy(model, sgd(model), plan, loss=LOSS, device="cpu")
    deployed.fused.compile_region = lambda graph, _: graph
    deployed.fused.ready = lambda name, _: order.append(name)
    x, y = next(batches(0))
    deployed.fused((x,), y).backward()
    return order


def test_gradients_that_are_put_off_come_last(plan):
    early, late = (
        on_ranks(1, gradients_in_order, plan.but(dp=1, buckets=(), parts=(), **more))[0]
        for more in ({"late": (), "model": ""}, {})
    )
    assert sorted(early) == sorted(late)
    assert set(late[-2:]) == {"last.weight", "middle.weight"}
    assert not set(early[-2:]) & {"last.weight", "middle.weight"}


def accumulated(plan):
    """Two micro-batches a step: what is sent is their sum."""
    model, wanted = Mixer(), Mixer()
    plan = replace(plan, micro_batch=3, global_batch=12, model="")
    deployed = deploy(model, sgd(model), plan, loss=LOSS, device="cpu")
    deployed.fused.compile_region = lambda graph, _: graph
    ddp = DistributedDataParallel(wanted)
    x, y = next(batches(dist.get_rank()))
    with ddp.no_sync():
        (LOSS(ddp(x[:3]), y[:3]) / 2).backward()
    (LOSS(ddp(x[3:]), y[3:]) / 2).backward()
    deployed.step((x,), y)
    pairs = zip(model.parameters(), wanted.parameters(), strict=True)
    return all(torch.equal(a.grad, b.grad) for a, b in pairs)


def test_accumulated_gradients_are_those_of_ddp(plan):
    assert on_ranks(2, accumulated, plan) == [True, True]


@pytest.mark.slow
def test_compiled_regions_are_close_to_ddp(plan):
    few = plan.but(regions=plan.regions[:2], model="")
    for found in on_ranks(2, compared, few, True, limit=300):
        assert found["off"] <= 1e-6
        assert len(found["regions"]) == 2


def refused(plan, width=8):
    model = Mixer() if width == 8 else nn.Linear(8, 16)
    x, y = torch.randn(6, 8), torch.randint(0, 16, (6,))
    with pytest.raises(InputError) as caught:
        deploy(model, sgd(model), plan, loss=LOSS, device="cpu", example=((x,), y))
    return caught.value.message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"regions": (("gelu.0", "gelu.7"),), "model": ""}, "unknown op in the plan: `gelu.7`"),
        ({"regions": (("gelu.0", "gelu_backward.0.backward"),), "model": ""}, "spans forward and"),
        ({"regions": (("gelu.0",), ("gelu.0", "add.0")), "model": ""}, "in several regions"),
        ({"regions": (("gelu.0", "sigmoid.0"),), "model": ""}, "waits for itself by way"),
        ({"regions": (("tanh.0", "gelu.0*"),), "model": ""}, "reads it"),
        ({"late": ("mm.9.backward",), "model": ""}, "unknown op in the plan: `mm.9.backward`"),
        ({"late": (), "regions": (("gelu.0", "add.0"),)}, "given other sizes here"),
        ({"buckets": (("nobody",),), "parts": (), "model": ""}, "unknown parameter in the plan"),
    ],
)
def test_what_does_not_fit_the_model_is_refused_before_a_step(plan, changes, words):
    alone = plan.but(**{"dp": 1, "buckets": (), "parts": (), "late": (), **changes})
    assert words in on_ranks(1, refused, alone)[0]


def test_a_plan_for_another_model_is_refused(plan):
    assert "made for parameters" in on_ranks(1, refused, plan.but(dp=1), 0)[0]


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (Plan(dp=2, regions=(("conv1/relu", "conv1/pool"),)), "is an op of a workload"),
        (Plan(dp=2, tp=2, late=("mm.0.backward",)), "ops beside tp=2"),
        (Plan(dp=2, late=("mm.0.backward",), dtype="bf16"), "ops beside dtype=bf16"),
        (Plan(dp=2, regions=(("a.0", "b.0"),), model="0.1", zero=1), "ops beside zero"),
        (Plan(dp=2, late=("mm.0.backward",), whatifs=("checkpoint",)), "ops beside checkpoint"),
        (Plan(dp=2, buckets=(("a",),), parts=(1, 2)), "parts=1+2 for 1 buckets"),
        (Plan(dp=2, zero=1, update="by-message"), "update=by-message beside zero"),
    ],
)
def test_what_has_no_runtime_is_refused_before_the_launch(plan, words):
    assert any(words in why for why in unsupported(plan))


def test_a_capture_of_another_batch_is_refused(plan):
    small = capture(Mixer(), (torch.randn(3, 8), torch.randint(0, 16, (3,))), loss=LOSS, on="cpu")
    smaller = fitted(small, plan.but(dp=1, buckets=(), parts=()))
    assert "given other sizes here" in on_ranks(1, refused, smaller)[0]


SCRIPT = """
import torch
from torch import nn

def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4))

def batch(rank, size, step):
    made = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(8 // size, 8, generator=made), torch.zeros(8 // size, dtype=torch.long)

loss = nn.functional.cross_entropy

def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1)
"""


@pytest.mark.slow
def test_a_script_is_captured_planned_and_run_as_planned(tmp_path):
    script, graph, best = (tmp_path / n for n in ("train.py", "step.graph", "best.plan"))
    script.write_text(SCRIPT)
    done = []
    for words in (
        ["capture", script, "--ranks", 2, "--kernels-of", "cpu", "-o", graph],
        ["plan", graph, "--on", "dgx-a100:gpus=2", "--with", "fusion:learned=no", "-o", best],
        ["run", script, "--plan", best, "--steps", 2, "--device", "cpu", "-o", tmp_path / "a"],
        ["run", script, "--plan", "dp=2", "--steps", 2, "--device", "cpu", "-o", tmp_path / "b"],
    ):
        query = [*map(str, words), "--json"]
        done.append(json.loads(CliRunner().invoke(foretell, query, catch_exceptions=False).stdout))
    assert read(str(best)).regions
    assert done[2]["losses"] == pytest.approx(done[3]["losses"], rel=1e-6)
    script.write_text(SCRIPT.replace("32", "33"))
    query = ["run", str(script), "--plan", str(best), "--device", "cpu", "-o", str(tmp_path / "c")]
    with pytest.raises(InputError, match="made for parameters"):
        CliRunner().invoke(foretell, query, catch_exceptions=False)
