"""The learned prior: what it sees, that both networks agree, and that it can be trained."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

from foretell.cluster import load as machines
from foretell.errors import InputError
from foretell.search.placement import policy, search
from foretell.search.placement.planner import PlacementPlanner
from foretell.search.placement.policy import GUESS, WAY_ON, feedback, view
from foretell.search.placement.problem import ALL_REDUCE, EVEN, Action, actions, problem, uniform
from foretell.search.placement.search import Evaluator, Expansion, Tree, even_chances
from foretell.workload import load
from foretell_lab.cli import train_policy
from foretell_lab.policy import worlds
from foretell_lab.policy.expert import write
from foretell_lab.policy.judge import evaluated
from foretell_lab.policy.selfplay import game


@pytest.fixture(scope="module", params=["vgg11:batch=4", "bert_small:batch=2,head=mlm"])
def on(request):
    return Evaluator(problem(load(request.param), machines("heterog-8")))


def plain(on):
    return uniform(on.problem, Action(0, ALL_REDUCE), mode=EVEN)


def questions(on):
    """Choices for all groups, and for the heaviest."""
    every, heavy = range(len(on.problem.groups)), on.problem.leaders[0]
    choices = actions(on.problem, heavy)
    return [
        Expansion(plain(on), [plain(on).but(run, a) for a in choices])
        for run in (every, range(heavy, heavy + 1))
    ]


def test_feedback_is_the_simulation(on):
    group, cell, _, seconds = feedback(on.problem, plain(on))
    assert seconds == on.seconds(plain(on))
    assert ((group >= 0) & (group <= 1 + 1e-9))[:, :4].all()
    assert 0 < cell[:, 0].max() <= 1 + 1e-9
    assert (group[:, 2] >= group[:, 1]).all()


def test_what_does_not_fit_says_how_full_it_is():
    big = problem(load("gpt2:dtype=fp32,batch=64"), machines("heterog-8"))
    _, cell, _, seconds = feedback(big, uniform(big, Action(0, ALL_REDUCE), mode=EVEN))
    assert seconds == float("inf")
    assert cell[:, 4].max() > 1


def test_a_guess_puts_ways_on_in_nearly_the_order_of_their_seconds(on):
    one = questions(on)[0]
    seen = view(on.problem).seen(one.now, one.successors)
    took = np.array(on.many(one.successors))
    fits = np.isfinite(took)
    order = [np.argsort(np.argsort(v[fits])) for v in (seen.way_on[:, GUESS], took)]
    assert seen.way_on.shape == (len(one.successors), WAY_ON)
    assert np.corrcoef(*order)[0, 1] > 0.7


def test_numpy_and_pytorch_geometric_say_the_same(on):
    torch = pytest.importorskip("torch")
    pytest.importorskip("torch_geometric")
    from foretell_lab.policy.network import Network, batch

    torch.manual_seed(3)
    network = Network(policy.WIDTHS)
    look = view(on.problem)
    seen = [look.seen(one.now, one.successors) for one in questions(on)]
    with torch.no_grad():
        expected = network(batch(seen)).numpy()
    mine = np.concatenate(policy.scores(network.exported(), seen))
    np.testing.assert_allclose(mine, expected, rtol=1e-4, atol=1e-5)
    assert np.ptp(expected) > 1e-3


def test_chances_follow_their_ways_wherever_they_stand(on):
    one = questions(on)[0]
    learned = policy.shipped()
    straight, turned = learned(on, [one, Expansion(one.now, one.successors[::-1])])
    assert straight.sum() == pytest.approx(1)
    assert straight.min() > 0
    np.testing.assert_allclose(straight, turned[::-1], rtol=1e-4)


def test_the_weights_of_the_package_are_small_and_of_this_version():
    raw = policy.files("foretell.search.placement").joinpath("policy.npz").read_bytes()
    assert len(raw) < 300_000
    assert "score.weight" in policy.read(raw)


def test_weights_of_another_version_are_refused(tmp_path):
    weights = dict(policy.shipped().weights)
    weights["group.weight"] = weights["group.weight"][:, :-1]
    write(tmp_path / "old.npz", weights)
    with pytest.raises(InputError, match="other features"):
        policy.read((tmp_path / "old.npz").read_bytes())


def test_nothing_is_trained_on_what_evaluates():
    assert not set(worlds.TRAINED) & set(worlds.UNSEEN)
    assert not set(worlds.TRAINED_DEVICES) & set(worlds.UNSEEN_DEVICES)
    assert worlds.world(5).name == worlds.world(5).name


def test_a_tree_counts_every_playout_once_and_knows_where_it_was(on):
    tree = Tree(on, [plain(on)], even_chances, on.seconds(plain(on)), seed=1)
    tree.play(60)
    assert tree.root.visits == tree.playouts == len(tree.curve) == 60
    assert tree.root.taken.sum() == 59  # the first one opened it
    assert all(a >= b for a, b in zip(tree.curve, tree.curve[1:], strict=False))
    assert len({(n.depth, n.now) for n in tree.nodes.values()}) == len(tree.nodes)
    tree.play(20)
    assert tree.playouts == 80


def test_a_tree_passes_what_it_has_simulated(on):
    """Ways on that change nothing cost no playout, nor do ends of the tree once played."""
    fresh = Evaluator(on.problem)
    tree = Tree(fresh, [plain(on)], policy.shipped(), on.seconds(plain(on)), seed=0)
    tree.play(40)
    assert len(tree.spent) == 40
    assert tree.spent[-1] == fresh.evaluations >= 36


def test_an_untried_action_is_worth_a_share_of_its_node():
    """The second of two equal ways is tried before the first is followed for ever."""
    node = search.Node(None, 0, visits=2, total=1.0)
    node.children = [search.Node(None, 1, visits=1, total=0.3), search.Node(None, 1)]
    node.chances, node.taken = np.array([0.5, 0.5]), np.array([1.0, 0.0])
    assert node.next() == 1


def test_unseen_models_on_unseen_devices_soon_beat_data_parallelism():
    found = [evaluated(worlds.world(i, unseen=True).on, policy.shipped(), 0, 50) for i in range(4)]
    assert sum(one.better_at <= 50 for one in found) >= 3
    assert all(one.gain >= 1 for one in found)


def test_games_are_the_same_for_a_seed():
    one, other = game(2, None, 24), game(2, None, 24)
    assert one.gain == other.gain >= 1
    assert len(one.examples) == len(other.examples) > 0
    assert all(e.target.sum() == pytest.approx(1, abs=1e-3) for e in one.examples)


@pytest.mark.slow
def test_training_that_was_stopped_goes_on_as_if_it_had_not(tmp_path):
    pytest.importorskip("torch_geometric")

    def trained(name, games, *more):
        words = [
            "-o",
            str(tmp_path / name),
            "--games",
            str(games),
            "--steps",
            "3",
            "--round",
            "1",
            "--json",
        ]
        done = CliRunner().invoke(train_policy.command, [*words, *more], catch_exceptions=False)
        return json.loads(done.stdout)

    assert trained("one.npz", 2)["games"] == 2
    trained("two.npz", 1)
    assert len(trained("two.npz", 2, "--resume")["rounds"]) == 1
    one, two = (policy.read((tmp_path / n).read_bytes()) for n in ("one.npz", "two.npz"))
    assert all((one[name] == two[name]).all() for name in one)


@pytest.mark.slow
def test_workers_run_the_same_games(tmp_path):
    pytest.importorskip("torch_geometric")
    for name, workers in (("one.npz", "1"), ("two.npz", "2")):
        words = ["-o", str(tmp_path / name), "--games", "2", "--steps", "2", "--workers", workers]
        CliRunner().invoke(train_policy.command, words, catch_exceptions=False)
    one, two = (policy.read((tmp_path / n).read_bytes()) for n in ("one.npz", "two.npz"))
    assert all((one[name] == two[name]).all() for name in one)


def test_there_is_nothing_to_resume(tmp_path):
    pytest.importorskip("torch_geometric")
    with pytest.raises(InputError, match="to go on from"):
        CliRunner().invoke(
            train_policy.command, ["-o", str(tmp_path / "x"), "--resume"], catch_exceptions=False
        )


def test_priors_by_name(on):
    with pytest.raises(InputError, match="prior"):
        PlacementPlanner(prior="lerned").plan(on.problem.workload, on.problem.cluster)


SCRIPT = """
from torch import nn, randn, randint
def make():
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    return model, (randn(16, 64), randint(0, 10, (16,))), nn.functional.cross_entropy
"""


def test_a_model_of_ones_own_is_placed(tmp_path):
    pytest.importorskip("torch")
    (tmp_path / "train.py").write_text(SCRIPT)
    planned = PlacementPlanner(playouts=4, strokes=300, polish=100).plan(
        load(f"{tmp_path / 'train.py'}:make", scripts=True), machines("heterog-8")
    )
    assert planned.predicted <= min(planned.baselines.values()) * (1 + 1e-9)
