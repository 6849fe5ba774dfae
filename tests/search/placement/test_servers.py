"""Who serves is chosen: as well as by trying all, within memory, and as the plan then says."""

from itertools import product
from math import inf

import pytest

from foretell.cluster import load as machines
from foretell.errors import InputError
from foretell.plan import lower
from foretell.predict import predict
from foretell.search.placement import planner
from foretell.search.placement.planner import BASELINES, plan_of
from foretell.search.placement.problem import (
    ALL_REDUCE,
    EVEN,
    PS,
    SHARDED,
    Action,
    Placement,
    canonical,
    problem,
    text,
    uniform,
)
from foretell.search.placement.search import (
    Evaluator,
    Tree,
    anneal,
    even_chances,
    memory,
    polish,
    settled,
)
from foretell.simulate import simulate
from foretell.workload import load
from tests.search.placement.machines import mixed

HUGE = "gpt:layers=12,hidden=2560,heads=20,vocab=32000,seq=64,dtype=fp32,batch=1"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("clusters")


@pytest.fixture(scope="module")
def vgg(folder):
    """VGG-11 in three groups on two V100 and two P100."""
    return problem(load("vgg11:batch=8"), mixed(folder), most=3)


def named(on, places, **more):
    """All by parameter server on all ranks, group by group by whom."""
    return Placement(tuple(Action(0, PS, place) for place in places), **more)


def test_shares_are_as_good_as_by_trying_all(vgg):
    on = Evaluator(vgg)
    count = len(vgg.groups)
    for fuse in (0.0, 25e6):
        every = [named(vgg, row, fuse=fuse) for row in product(range(4), repeat=count)]
        took = on.many(every)
        assigned = on.seconds(uniform(vgg, Action(0, PS), fuse=fuse))
        assert min(took) <= assigned <= min(took) * 1.01
        assert max(took) > min(took) * 1.005  # it matters who serves


def test_a_slow_server_takes_longer_by_its_update(vgg):
    on, t = Evaluator(vgg), vgg.tables
    fast, slow = (on.seconds(uniform(vgg, Action(0, PS, p), fuse=inf, mode=EVEN)) for p in (0, 3))
    assert slow - fast == pytest.approx(t.update[1].sum() - t.update[0].sum(), rel=1e-6)


def test_strokes_come_to_the_best_server(vgg):
    """From the slow device that serves all: descent and annealing name others."""
    start = uniform(vgg, Action(0, PS, 3), mode=EVEN)
    only = lambda action: action.devices == 0 and action.way == PS  # noqa: E731
    on = Evaluator(vgg)
    _, best = polish(on, start, allowed=only)
    every = [named(vgg, row) for row in product(range(4), repeat=len(vgg.groups))]
    assert best <= min(on.many(every)) * (1 + 1e-9)
    found, took = anneal(Evaluator(vgg), start, 2000, 0)
    assert took < on.seconds(start)
    assert took == Evaluator(vgg).seconds(found)


def test_the_tree_decides_who_serves(vgg):
    start = uniform(vgg, Action(0, PS, 3), mode=EVEN)
    tree = Tree(Evaluator(vgg), [start], even_chances, 1.0, ways=(PS,), steps=False)
    tree.play(60)
    ways_on = {a.server for node in tree.nodes.values() for a in node.now.actions}
    assert len(ways_on - {-1, 3}) >= 2
    assert tree.best[1] < Evaluator(vgg).seconds(start)


def test_all_of_a_small_instance_has_every_server(folder):
    small = problem(load("vgg11:batch=8"), mixed(folder, each=1), most=2)
    some = {p.actions for p in planner.every(small)}
    for row in product((0, 1), repeat=len(small.groups)):
        assert tuple(Action(0, PS, place) for place in row) in some
    seconds = planner.best_baseline(Evaluator(small))[1]
    assert seconds <= Evaluator(small).seconds(uniform(small, Action(0, PS)))


def test_places_that_are_alike_are_one_placement(folder):
    """Ranks of one cell are: which of them serves first is only a name."""
    on = problem(load("vgg11:batch=8"), mixed(folder, each=4), most=3)
    first, second, third = (p for p, c in enumerate(on.tables.cell_of) if c == 1)
    one, other = named(on, (third, second, second)), named(on, (second, third, third))
    assert canonical(on, one) == canonical(on, other) == named(on, (first, second, second))
    apart = canonical(on, named(on, (third, third, third)))
    assert apart == named(on, (first, first, first))
    assert Evaluator(on).seconds(apart) != Evaluator(on).seconds(one)
    alone = next(s for s, n in enumerate(on.tables.size) if n == 1)
    assert canonical(on, uniform(on, Action(alone, PS, 3))).actions[0] == Action(alone, 0)
    slow = on.fleet.group_set((1,))
    assert canonical(on, uniform(on, Action(slow, PS, 0))).actions[0].server == -1  # not there


def test_a_server_needs_room_for_the_state(folder):
    """Adam's moments beside weights and gradients are more than a P100 has."""
    on = problem(load(HUGE), mixed(folder))
    judge = Evaluator(on)
    kinds = [on.fleet.kinds[on.tables.kind[c]].name for c in on.tables.cell_of]
    for place, kind in enumerate(kinds):
        found = uniform(on, Action(0, PS, place))
        assert (judge.seconds(found) < inf) == (kind == "v100-32")
        assert judge.fault(found) == ("" if kind == "v100-32" else "memory")
    assert judge.seconds(uniform(on, Action(0, PS))) < inf
    assigned = uniform(on, Action(0, PS), fuse=inf)  # one message, one server
    assert judge.seconds(assigned) < inf
    assert {kinds[place] for place in settled(on, assigned)[2]} == {"v100-32"}
    held = memory(on, assigned)
    assert all(held[rank] <= on.cluster.devices[rank].memory for rank in held)
    assert "ps by 1 v100-32" in text(on, assigned, settled(on, assigned)[2].tolist())


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("apart", [False, True])
def test_the_plan_names_who_serves_and_is_priced_so(vgg, place, apart):
    on = problem(vgg.workload, vgg.cluster)
    chosen = uniform(on, Action(0, PS, place))
    if apart:  # rows of layers: the last on the slow node, whose second rank serves
        slow = on.fleet.group_set((1,))
        chosen = chosen.but((len(on.groups) - 1,), Action(slow, PS, 3))
    plan = plan_of(on, chosen)
    assert bool(plan.groups) == apart
    wanted = Evaluator(on).seconds(chosen)
    assert predict(plan, vgg.workload, vgg.cluster).step == pytest.approx(wanted, rel=0.005)


def test_the_rank_that_serves_is_busy_in_the_lowered_plan(vgg):
    """Its optimizer takes all the time, that of the others none."""
    place = 3
    plan = plan_of(vgg, uniform(vgg, Action(0, PS, place)))
    graph = lower(plan, vgg.workload, vgg.cluster)
    assert simulate(graph).seconds > 0
    busy = {t.rank: t.seconds for t in graph if t.op == "optimizer"}
    cell = vgg.fleet.cells[vgg.tables.cell_of[place]]
    assert [rank for rank, took in busy.items() if took > 0] == [min(cell.ranks)]


def test_the_order_of_nodes_does_not_matter_to_servers(folder):
    said = []
    for flip in (False, True):
        on = problem(load("vgg11:batch=8"), mixed(folder, flip=flip))
        found = {name: BASELINES[name](Evaluator(on)) for name in ("even-ps", "proportional-ps")}
        answer = [text(on, p, settled(on, p)[2].tolist()) for p, _ in found.values()]
        said.append((answer, [took for _, took in found.values()]))
    assert said[0] == said[1]


def test_a_baseline_of_servers_may_choose_them(vgg):
    on = Evaluator(vgg)
    _, took = BASELINES["even-ps"](on)
    turns = on.many([named(vgg, row, mode=EVEN) for row in product(range(4), repeat=3)])
    assert took <= min(turns) * 1.01


def test_what_others_update_counts_for_who_serves(vgg):
    """Where all but one group is updated everywhere, the quickest device serves the last."""
    chosen = uniform(vgg, Action(0, ALL_REDUCE)).but((0,), Action(0, PS))
    assert vgg.tables.kind[vgg.tables.cell_of[settled(vgg, chosen)[2][0]]] == 0
    shared = uniform(vgg, Action(0, SHARDED)).but((0,), Action(0, PS))
    assert settled(vgg, shared)[2].tolist()[1:] == [-1] * (len(vgg.groups) - 1)


def test_of_equals_the_best_connected_serves(tmp_path):
    """Alike in all but their NIC: prices say the same of both, gloo does not."""
    path = tmp_path / "links.toml"
    row = '[[node]]\ndevice = "v100-32"\ndevices = 1\nnic = "ethernet-{}"\n'
    path.write_text('name = "links"\n' + "".join(row.format(nic) for nic in ("10g", "100g", "25g")))
    on = problem(load("vgg11:batch=8"), machines(str(path)))
    found = settled(on, uniform(on, Action(0, PS), fuse=inf))[2].tolist()
    assert {on.fleet.ranks(0)[place] for place in found} == {1}
    took = [Evaluator(on).seconds(uniform(on, Action(0, PS, place))) for place in range(3)]
    assert len(set(took)) == 1


def test_who_serves_changes_what_is_predicted_as_it_was_found(vgg):
    on = problem(vgg.workload, vgg.cluster)
    judge = Evaluator(on)
    chosen = [uniform(on, Action(0, PS, place), mode=EVEN) for place in (0, 3)]
    found = [predict(plan_of(on, p), on.workload, on.cluster).step for p in chosen]
    wanted = judge.many(chosen)
    assert found[1] - found[0] == pytest.approx(wanted[1] - wanted[0], rel=0.02)
    assert found[1] > found[0]


def test_a_server_that_is_not_there(vgg):
    plan = plan_of(vgg, uniform(vgg, Action(0, PS, 0)))
    for place in ("9", "x", ""):
        wrong = plan.but(sync=tuple((name, f"ps:{place}") for name, _ in plan.sync))
        with pytest.raises(InputError, match="write ps:0 to ps:3"):
            predict(wrong, vgg.workload, vgg.cluster)
