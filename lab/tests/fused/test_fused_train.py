"""The trained network in torch and in numpy, and the formula in both."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torch_geometric")

from foretell.cluster.read import devices  # noqa: E402
from foretell.cost import fused  # noqa: E402
from foretell.cost.fused import answer, features  # noqa: E402
from foretell.cost.fused_regions import walked  # noqa: E402
from foretell_lab.fused import calibrate  # noqa: E402
from foretell_lab.fused import data as fused_data  # noqa: E402
from foretell_lab.fused.network import Network  # noqa: E402
from foretell_lab.fused.train import batch, folds, of_sort, said, table, train  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
H200 = devices()["h200"]


@pytest.fixture(scope="module")
def measured():
    data = of_sort(fused_data.shipped("h200"), "gpu")
    rows = np.arange(0, len(data), 100)
    return fused_data.Measured(
        data.regions.take(rows), data.seconds[rows], data.spread[rows], data.kernels[rows],
        data.family[rows], np.full(len(rows), -1),
    )  # fmt: skip


def test_numpy_answers_as_torch(measured):
    torch.manual_seed(0)
    made = table(H200, measured)
    net = Network(made.whole[0].shape[1]).eval()
    net.scale(made.node[0], made.whole[0])
    middle, spread, _ = said(net, made, np.arange(len(measured)), 0)
    given = features(H200, measured.regions)
    mine, wide = answer(net.exported(), measured.regions, given)
    np.testing.assert_allclose(mine, middle, atol=2e-5)
    np.testing.assert_allclose(wide, spread, rtol=1e-4)


def test_training_lowers_the_error(measured):
    torch.set_num_threads(1)
    made, rows = table(H200, measured), np.arange(len(measured))
    before, after = (train(made, rows, 0, seconds) for seconds in (1e-6, 8.0))
    errors = [np.abs(np.subtract(*said(net, made, rows, 0)[::2])).mean() for net in (before, after)]
    assert errors[1] < 0.85 * errors[0]


def test_training_goes_on_from_weights_of_fewer_features(measured):
    made = table(H200, measured)
    old = Network(made.whole[0].shape[1] - 4).eval()
    net = Network(made.whole[0].shape[1])
    net.begin_from(old.exported())
    for name, value in net.exported().items():
        np.testing.assert_array_equal(
            value[..., : old.exported()[name].shape[-1]], old.exported()[name]
        )
    assert np.all(net.exported()["first.weight"][:, -4:] == 0)


def test_hidden_times_are_hidden(measured):
    made = table(H200, measured)
    (_, node, *_), _ = batch(made, np.arange(8), np.ones(8, int))
    assert torch.all(node[:, 8] == 0)  # `own time known`


def test_families_are_left_out_whole():
    data = of_sort(fused_data.shipped("h200"), "kernel")
    assert np.all(data.regions.is_written)
    rows = np.flatnonzero(~data.held_out)
    parts = folds(data, rows)
    for out in parts:
        kept = np.setdiff1d(rows, out)
        left = set(data.family[out]) - {"drawn"}
        assert left
        assert not left & set(data.family[kept])
        assert not np.any(data.held_out[out])


def test_the_formula_on_tensors_is_the_formula(measured):
    c = fused.constants_by_sort()["gpu"]["constants"]
    values = torch.log(torch.tensor([c[name] for name in calibrate.GUESS], dtype=torch.float64))
    walk = walked(measured.regions, 132.0, fused.weights("gpu"))
    counts = calibrate.places_by_op(measured.regions, H200)
    work = torch.tensor(counts @ fused.weights("gpu"))
    mine = calibrate._seconds(H200, torch.tensor(walk.region), work, values)
    shipped = fused.fused_price(measured.regions, H200, learned=False).seconds
    np.testing.assert_allclose(mine.numpy(), shipped, rtol=1e-3)


def test_a_fit_finds_what_made_the_times(measured):
    rows = np.arange(len(measured))
    constants, weights = calibrate.fit(H200, measured, rows, steps=60)
    assert set(constants) == set(calibrate.GUESS)
    assert 0.3 <= constants["stream"] <= 1.0
    assert all(value > 0 for value in weights.values())
