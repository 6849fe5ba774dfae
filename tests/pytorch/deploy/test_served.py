"""Servers that the placement search names: they update, nobody else does, and all is as alone."""

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

from foretell.plan import Plan  # noqa: E402
from foretell.pytorch.capture import capture  # noqa: E402
from foretell.pytorch.deploy.apply import deploy  # noqa: E402
from foretell.pytorch.deploy.checkpoint import parameters  # noqa: E402
from foretell.search.placement import Action, plan_of, problem  # noqa: E402
from foretell.search.placement.problem import ALL_REDUCE, PS, Placement, uniform  # noqa: E402
from foretell.workload import from_graph  # noqa: E402
from tests.pytorch.deploy.ranks import on_ranks  # noqa: E402
from tests.pytorch.deploy.same import CLOSE, STEPS, adam, alone, mlp, samples, whole  # noqa: E402
from tests.search.placement.machines import mixed  # noqa: E402

BATCH = 16
BATCHES = [samples(BATCH, step=step) for step in range(STEPS)]


@pytest.fixture(scope="module")
def on(tmp_path_factory):
    """The model on two V100 and two P100, priced."""
    graph = capture(mlp, BATCHES[0], nn.functional.cross_entropy, "adam")
    return problem(from_graph(graph), mixed(tmp_path_factory.mktemp("clusters")), BATCH)


def train(text):
    """How far a plan ends from one process, and whose parameters this rank has a state of."""
    plan = Plan.parse(text)
    model = mlp()
    update = adam(model)
    deployed = deploy(model, update, plan, samples=BATCH // max(plan.dp, 1))
    shares = list(plan.shares) or [BATCH // plan.dp] * plan.dp
    for x, y in BATCHES:
        if plan.groups:
            deployed.step((x,), y)
        else:
            place = deployed.places.at["dp"]
            deployed.step((x.split(shares)[place],), y.split(shares)[place])
    found = dict(parameters(deployed))
    wanted = dict(alone(mlp, BATCHES, adam).named_parameters())
    off = [
        ((whole(p) - wanted[n]).abs().max() / wanted[n].abs().max()).item()
        for n, p in found.items()
    ]
    return max(off, default=0.0), len(update.state), dist.get_rank()


SLOW = [pytest.param(place, marks=pytest.mark.slow) for place in range(3)]


@pytest.mark.parametrize("place", [*SLOW, 3])
def test_the_named_server_updates_for_all(on, place):
    plan = plan_of(on, uniform(on, Action(0, PS, place)))
    server = on.fleet.ranks(0)[place]
    alike = {r for cell in on.fleet.cells if server in cell.ranks for r in cell.ranks}
    found = on_ranks(4, train, str(plan))
    assert max(off for off, _, _ in found) <= CLOSE
    assert [rank for _, states, rank in found if states] == [min(alike)]  # of those alike the first
    assert sum(states for _, states, _ in found) == 6


def test_a_server_for_each_group_beside_layers_apart(on):
    fast, slow = (on.fleet.group_set((g,)) for g in (0, 1))
    first, second = [p for p in range(4) if on.tables.member[slow][on.tables.cell_of[p]]]
    chosen = [Action(0, PS, first), Action(fast, ALL_REDUCE), Action(slow, PS, second)]
    chosen += chosen[2:] * (len(on.groups) - len(chosen))  # the loss
    plan = plan_of(on, Placement(tuple(chosen), micros=2))
    assert plan.groups
    assert dict(plan.sync) == {
        "0/addmm.weight": f"ps:{first}", "0/addmm.bias": f"ps:{first}",
        "4/addmm.weight": "ps:1", "4/addmm.bias": "ps:1",
    }  # fmt: skip
    found = on_ranks(4, train, str(plan))
    assert max(off for off, _, _ in found) <= CLOSE
