"""Pipelines of any shape and order: the gradients and parameters of one process."""

import random

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

from foretell.errors import InputError  # noqa: E402
from foretell.plan.export import schedule_csv, with_messages  # noqa: E402
from foretell.pytorch.deploy.actions import Action, Pipeline, needs, parse  # noqa: E402
from foretell.pytorch.deploy.blocks import Blocks  # noqa: E402
from foretell.pytorch.deploy.collective import copy_in, even, one_more, sum_out  # noqa: E402
from foretell.search.schedule import schedule, shape  # noqa: E402
from foretell.search.schedule.schedule import actions, after, copies  # noqa: E402
from tests.pytorch.deploy.ranks import on_ranks  # noqa: E402
from tests.pytorch.deploy.same import CLOSE, STEPS, off, sgd  # noqa: E402

WIDTH, MICRO = 8, 4
LOSS = nn.functional.mse_loss


class Joined(nn.Sequential):
    """Layers that take the sum of what they are given."""

    def forward(self, *xs):
        return super().forward(sum(xs))


def stage(index):
    torch.manual_seed(index)
    return Joined(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def batches(num):
    made = torch.Generator().manual_seed(7)
    pairs = [torch.randn(2, num, WIDTH, generator=made) for _ in range(STEPS)]
    return [(p[0], p[1]) for p in pairs]


def reference(model, num):
    update = sgd(model)
    for x, y in batches(num):
        update.zero_grad()
        LOSS(model(x), y).backward()
        update.step()
    return model


def trained(run, modules, num):
    """Three steps of a pipeline, each stage's parameters updated where they live."""
    held = nn.ModuleDict({str(s): m for s, m in modules.items()})
    update = sgd(held)
    for x, y in batches(num):
        update.zero_grad()
        run.step((x,), y)
        update.step()
    return held


def in_line(rows, is_two_way=False):
    """Largest difference of this rank's stages after a line of stages."""
    pipeline = Pipeline(parse(rows))
    mine = pipeline.on(dist.get_rank())
    modules = {s: stage(s) for s in mine}
    run = Blocks(pipeline, modules, LOSS)
    if is_two_way:
        run.back = one_more(None)
    trained(run, modules, 8)
    wanted = reference(nn.Sequential(*map(stage, range(pipeline.num_stages))), 8)
    assert [r.action for r in run.ran] == rows[dist.get_rank()]
    return max(off(modules[s], wanted[s]) for s in mine)


def several(cases):
    return [in_line(rows, is_two_way) for rows in cases for is_two_way in (False, True)]


def random_rows(places, seed):
    """A legal order of F and B, or F, I and W, taken at random."""
    chance = random.Random(seed)
    size, num = 1 + max(places), len(places)
    split = {(s, m): chance.random() < 0.6 for s in range(num) for m in range(MICRO)}
    todo = [Action(s, "F", m) for s, m in split]
    todo += [Action(s, k, m) for (s, m), two in split.items() for k in ("IW" if two else "B")]
    line = Pipeline(parse([[f"{s}F0" for s in range(num)]]))
    rows, done = [[] for _ in range(size)], set()
    while todo:
        action = chance.choice([a for a in todo if set(needs(line, a)) <= done])
        todo.remove(action)
        done |= {action, action._replace(kind=action.kind.replace("B", "I"))}
        rows[places[action.stage]].append(str(action))
    return rows


def found(spec, method="search", **options):
    return schedule(shape(spec), micro_batches=MICRO, method=method, **options)


def test_searched_and_random_orders_on_two_ranks():
    specs = [
        ("v:devices=2", "search"),
        ("v:devices=2,split=yes", "search"),
        ("v:devices=2", "1f1b"),
    ]
    specs += [("loop:devices=2", "interleaved"), ("wave:devices=2,split=yes", "zb-v")]
    cases = [[list(row) for row in actions(found(s, m))] for s, m in specs]
    for places in ([0, 1, 0, 1], [0, 1, 1, 0], [0, 0, 1, 1], [0, 1, 1, 0, 1]):
        cases += [random_rows(places, seed) for seed in range(2)]
    for each in on_ranks(2, several, cases):
        assert max(each) <= CLOSE, each


def test_searched_and_random_orders_on_four_ranks():
    cases = [[list(row) for row in actions(found("v:devices=4,split=yes"))]]
    cases += [random_rows([2, 0, 3, 1, 0, 2], 0), random_rows([0, 1, 2, 3, 3, 2, 1, 0], 1)]
    for each in on_ranks(4, several, cases):
        assert max(each) <= CLOSE, each


def shaped(spec, **options):
    result = found(spec, **options)
    problem = result.problem
    return Pipeline(parse(actions(result)), after(problem), copies(problem))


class Wide(nn.Module):
    """Two linear layers split over all ranks: a stage that every rank runs a part of."""

    def __init__(self, seed, is_split):
        super().__init__()
        torch.manual_seed(seed)
        first, second = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH, bias=False)
        size = dist.get_world_size() if is_split else 1
        rank = dist.get_rank() if is_split else 0
        rows = even(2 * WIDTH, size)
        self.is_split = is_split
        self.up = nn.Parameter(first.weight.detach().split(rows)[rank].clone())
        self.shift = nn.Parameter(first.bias.detach().split(rows)[rank].clone())
        self.down = nn.Parameter(second.weight.detach().split(rows, 1)[rank].clone())

    def forward(self, *xs):
        x = sum(xs)
        x = copy_in(x) if self.is_split else x
        y = nn.functional.linear(x, self.up, self.shift).tanh() @ self.down.t()
        return sum_out(y) if self.is_split else y


class Whole(nn.Module):
    """All stages in one process, wired as the pipeline is."""

    def __init__(self, pipeline):
        super().__init__()
        self.pipeline = pipeline
        self.stages = nn.ModuleList(
            Wide(s, False) if len(r) > 1 else stage(s) for s, r in enumerate(pipeline.ranks)
        )

    def forward(self, x):
        made = {}
        for s, befores in enumerate(self.pipeline.after):
            made[s] = self.stages[s](*([made[b] for b in befores] or [x]))
        return made[len(made) - 1]


def branched(pipeline):
    """Differences of this rank's stages, and of its parts of wide ones."""
    mine = pipeline.on(dist.get_rank())
    modules = {s: Wide(s, True) if len(pipeline.ranks[s]) > 1 else stage(s) for s in mine}
    firsts = sum(1 for a in pipeline.after if not a)
    held = nn.ModuleDict({str(s): m for s, m in modules.items()})
    update = sgd(held)
    run = Blocks(pipeline, modules, LOSS)
    for x, y in batches(8):
        update.zero_grad()
        run.step((x,) * firsts, y)
        update.step()
    wanted = reference(Whole(pipeline), 8)
    return {s: _apart(modules[s], wanted.stages[s]) for s in mine}


def _apart(module, wanted):
    if not isinstance(module, Wide):
        return off(module, wanted)
    rank, rows = dist.get_rank(), even(2 * WIDTH, dist.get_world_size())
    parts = [wanted.up.split(rows)[rank], wanted.shift.split(rows)[rank]]
    parts.append(wanted.down.split(rows, 1)[rank])
    mine = [module.up, module.shift, module.down]
    pairs = zip(mine, parts, strict=True)
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)


def all_branched(pipelines):
    return [branched(p) for p in pipelines]


@pytest.mark.parametrize("size", [2, 4])
def test_sharded_stages_and_branches(size):
    pipelines = [shaped(f"{s}:devices={size}") for s in ("m", "nn", "k")]
    if size == 4:
        pipelines.append(shaped("m:devices=4,split=yes"))
    for each in on_ranks(size, all_branched, pipelines):
        assert max(o for one in each for o in one.values()) <= CLOSE, each


def diamond():
    """A stage that two follow and one that follows two, on two ranks; and a way around it."""
    each = range(MICRO)
    back = ((1, "I"), (1, "W"), (0, "B"))
    rows = [
        [f"{s}F{m}" for m in each for s in (0, 1)] + [f"{s}{k}{m}" for m in each for s, k in back],
        [f"{s}F{m}" for m in each for s in (2, 3)] + [f"{s}B{m}" for m in each for s in (3, 2)],
    ]
    return Pipeline(parse(rows), ((), (0,), (0,), (0, 1, 2)))


def test_a_fork_and_a_join():
    for each in on_ranks(2, all_branched, [diamond()]):
        assert max(o for one in each for o in one.values()) <= CLOSE, each


def both_ways(pipeline):
    """Two pipelines in opposite directions over one set of parameters."""
    rank = dist.get_rank()
    same = {s: k for k, stages in enumerate(pipeline.copies) for s in stages}
    held = {k: stage(k) for k in {same[s] for s in pipeline.on(rank)}}
    modules = {s: held[same[s]] for s in pipeline.on(rank)}
    trained(Blocks(pipeline, modules, LOSS), {k: held[k] for k in held}, 16)
    wanted = reference(nn.Sequential(*map(stage, range(len(pipeline.copies)))), 16)
    return max(off(held[k], wanted[k]) for k in held)


@pytest.mark.parametrize("spec", ["x:devices=2", "x:devices=3,split=yes", "x:devices=4"])
def test_two_directions(spec):
    size = int(spec.split("devices=")[1][0])
    assert max(on_ranks(size, both_ways, shaped(spec))) <= CLOSE


def own_line(rows):
    """A line of stages runs on our executor as well."""
    pipeline = Pipeline(parse(rows))
    modules = {s: stage(s) for s in pipeline.on(dist.get_rank())}
    trained(Blocks(pipeline, modules, LOSS), modules, 8)
    wanted = reference(nn.Sequential(*map(stage, range(pipeline.num_stages))), 8)
    return max(off(m, wanted[s]) for s, m in modules.items())


def test_a_line_on_our_own_executor():
    assert max(on_ranks(2, own_line, random_rows([0, 1, 1, 0], 5))) <= CLOSE


def test_actions_that_cannot_run():
    with pytest.raises(
        InputError, match="wait for each other for ever: rank 0 at 0B0, rank 1 at 1F1"
    ):
        Pipeline(parse([["0F0", "0B0", "0F1", "0B1"], ["1F1", "1F0", "1B0", "1B1"]]))
    with pytest.raises(InputError, match="micro-batch 1 as `F`"):
        Pipeline(parse([["0F0", "0B0", "0F1"]]))
    with pytest.raises(InputError, match="runs 0F0 twice"):
        Pipeline(parse([["0F0", "0F0", "0B0"]]))
    with pytest.raises(InputError, match="`0X0` of rank 0 is not stage"):
        parse([["0X0"]])
    with pytest.raises(InputError, match="without actions"):
        Pipeline(())


def test_actions_round_trip():
    rows = random_rows([0, 1, 1, 0], 3)
    pipeline = Pipeline(parse(rows))
    assert [[str(action) for action in order] for order in pipeline.orders] == rows
    assert pipeline.ranks == ((0,), (1,), (1,), (0,))


def verbatim(cases):
    """Gradients on torch's runtime as it comes, from lists that have their messages in them."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    found = []
    for path, num, mine in cases:
        rank = dist.get_rank()
        modules = {s: stage(s) for s in mine[rank]}
        stages = [PipelineStage(m, s, num, torch.device("cpu")) for s, m in modules.items()]
        run = _PipelineScheduleRuntime(stages, MICRO, loss_fn=LOSS)
        run._load_csv(path, format="compute_comms")
        x, y = batches(8)[0]
        is_last = num - 1 in modules
        run.step(*((x,) if 0 in modules else ()), target=y if is_last else None)
        whole = nn.Sequential(*map(stage, range(num)))
        LOSS(whole(x), y).backward()
        pairs = [
            (p, q)
            for s, module in modules.items()
            for p, q in zip(module.parameters(), whole[s].parameters(), strict=True)
        ]
        found.append(max(((p.grad - q.grad).abs().max()).item() for p, q in pairs))
    return found


def test_lists_with_messages_run_on_torch_unchanged(tmp_path):
    cases = []
    for k, (spec, method) in enumerate(
        [
            ("v:devices=2", "1f1b"),
            ("v:devices=2,split=yes", "search"),
            ("loop:devices=2", "interleaved"),
            ("wave:devices=2,split=yes", "zb-v"),
        ]
    ):
        rows = actions(found(spec, method))
        path = tmp_path / f"{k}.csv"
        path.write_text(schedule_csv(with_messages(rows)))
        mine = [sorted({int(cell[0]) for cell in row}) for row in rows]
        cases.append((str(path), 1 + max(map(max, mine)), mine))
    for each in on_ranks(2, verbatim, cases):
        assert max(each) <= 1e-6, each
