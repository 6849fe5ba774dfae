"""Regions compiled one by one: as many calls as the plan has regions, and the same gradients."""

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from foretell.errors import InputError  # noqa: E402
from foretell.pytorch.deploy.recompute import recompute  # noqa: E402
from foretell.pytorch.deploy.regions import compile_regions  # noqa: E402
from foretell.pytorch.deploy.units import cut_line, units  # noqa: E402
from tests.pytorch.deploy.same import mlp, samples  # noqa: E402

# Dynamo looks at the gradients of tensors that have none, and hides the warning only where
# warnings are not errors.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


class Counted:
    """A backend that runs what it is given and notes how many ops each call has."""

    def __init__(self):
        self.regions = []

    def __call__(self, graph, inputs):
        self.regions.append(
            sum(n.op in ("call_function", "call_module") for n in graph.graph.nodes)
        )
        return graph.forward


def gradients(model):
    x, y = samples()
    model.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize(
    ("regions", "ops"), [([("0", "1"), ("2", "3", "4")], [2, 3]), ([("1",), ("2", "3")], [1, 2])]
)
def test_each_region_is_one_call(regions, ops):
    model, backend = mlp(), Counted()
    wanted = gradients(mlp())
    compile_regions(model, regions, backend=backend)
    assert all(torch.equal(a, b) for a, b in zip(gradients(model), wanted, strict=True))
    assert backend.regions == ops
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_regions_on_inductor():
    model = mlp()
    compile_regions(model, [("0", "1"), ("2", "3")])
    pairs = zip(gradients(model), gradients(mlp()), strict=True)
    assert max((a - b).abs().max().item() for a, b in pairs) < 1e-6
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("region", "words"),
    [
        (("9",), "names `9`, which is no module"),
        (("0", "2"), "not one row of modules"),
        (("0.a", "1"), "names `0.a`"),
    ],
)
def test_regions_that_cannot_be(region, words):
    with pytest.raises(InputError, match=words):
        compile_regions(mlp(), [region])


def test_a_model_in_units_and_stages():
    model = mlp()
    assert list(units(model)) == ["0", "2", "4"]
    assert list(units(nn.Linear(2, 2))) == [""]
    inner = nn.Sequential(nn.Linear(2, 2), nn.ModuleList([nn.Linear(9, 9), nn.Linear(9, 9)]))
    assert list(units(nn.ModuleDict({"a": inner}))) == ["a.0", "a.1"]
    stages = cut_line(model, 3)
    assert [[n for n, _ in s.named_children()] for s in stages] == [["0", "1"], ["2", "3"], ["4"]]
    assert [len(s) for s in cut_line(model, 2, (2, 3))] == [2, 3]
    assert [len(s) for s in cut_line(model, 2, (1, 2))] == [2, 3]
    with pytest.raises(InputError, match="3 layers with parameters for 4 stages"):
        cut_line(model, 4)


def test_recompute_keeps_gradients_and_less_memory():
    kept = {}
    for name, options in (("none", None), ("full", {}), ("selective", {"selective": True})):
        model = mlp()
        if options is not None:
            recompute(units(model), **options)
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, to=saved: to.append(t.numel()) or t, lambda t: t
        ):
            found = gradients(model)
        kept[name] = found, sum(saved)
    assert all(
        torch.equal(a, b) for n in kept for a, b in zip(kept[n][0], kept["none"][0], strict=True)
    )
    assert kept["full"][1] < kept["none"][1]
