"""Captures of models that work things out while they are built, and of images channels last."""

import copy
import gc

import pytest
import torch
from torch import nn

from foretell.graph import verify
from foretell.pytorch.capture import capture
from foretell.workload.captured import from_graph


def test_channels_last_goes_through_convolutions():
    """cuDNN answers in the layout it is asked in; C++ told of another device would not."""

    def model():
        layers = nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3))
        return layers.to(memory_format=torch.channels_last)

    def images():
        return torch.empty(4, 8, 16, 16).to(memory_format=torch.channels_last)

    graph = capture(model, images, loss=lambda m, x: m(x).sum(), optimizer="sgd")
    shapes = [t.shape for t in graph if t.op == "convolution" and t.kind == "kernel"]
    assert len(shapes) >= 2
    assert all("strides=2048x1x128x8" in s or "strides=1568x1x112x8" in s for s in shapes[:2])
    plain = capture(model, lambda: torch.empty(4, 8, 16, 16), loss=lambda m, x: m(x).sum())
    first = next(t for t in plain if t.op == "convolution" and t.kind == "kernel")
    assert first.shape.count("x1x") > 0  # the weight alone asks for channels last


def test_numbers_of_ramps_are_known_while_a_model_is_built():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            rates = [x.item() for x in torch.linspace(0, 0.2, 3)]
            rows = torch.stack(torch.meshgrid(torch.arange(3), torch.arange(3), indexing="ij"))
            apart = (rows.flatten(1)[:, :, None] - rows.flatten(1)[:, None]).permute(1, 2, 0)
            places = torch.unique(apart.reshape(-1, 2), dim=0)
            assert rates == pytest.approx([0, 0.1, 0.2])
            self.layers = nn.Sequential(*(nn.Dropout(rate) for rate in rates))
            self.last = nn.Linear(8, len(places))

        def forward(self, x):
            return self.last(self.layers(x)).sum()

    graph = capture(Net, lambda: torch.empty(4, 8))
    assert graph.facts["parameters"] == 25 * 9  # places of a 3 × 3 window: 5 × 5


def test_layers_made_once_and_copied():
    """Copies used to share what torch keeps for a fake tensor, and ended the process."""
    block = lambda: nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8))  # noqa: E731

    def model():
        one = block()
        return nn.Sequential(*(copy.deepcopy(one) for _ in range(12)))

    for _ in range(3):
        graph = capture(model, lambda: torch.empty(2, 8, 8, 8), loss=lambda m, x: m(x).sum())
        gc.collect()
        assert graph.facts["parameters"] == 12 * (8 * 8 * 9 + 8 + 16)
        verify(graph)


def test_a_copied_parameter_is_one():
    def model():
        one = nn.Linear(8, 8)
        other = copy.deepcopy(one)
        assert isinstance(other.weight, nn.Parameter)
        assert other.weight is not one.weight
        tied = nn.ModuleList([one, one])
        copied = copy.deepcopy(tied)
        assert copied[0].weight is copied[1].weight
        return nn.Sequential(one, other, *copied)

    graph = capture(model, lambda: torch.empty(2, 8), loss=lambda m, x: m(x).sum())
    assert graph.facts["parameters"] == 3 * (64 + 8)


def test_the_batch_is_the_first_side_of_what_a_model_is_given():
    def model():
        inner = nn.TransformerEncoderLayer(64, 8, 128, batch_first=True)
        return nn.Sequential(nn.Linear(16, 64), inner, nn.Linear(64, 10))

    graph = capture(model, lambda: torch.empty(4, 32, 16), loss=lambda m, x: m(x).sum())
    assert graph.facts["batch"] == 4
    workload = from_graph(graph)
    assert workload.batch == 4
    (core,) = [op for layer in workload.layers for op in layer.ops if op.name == "attention"]
    assert core.dims["heads"] == 8


def test_kernels_of_unknown_shape_and_ops_once_a_batch_can_be_planned(tmp_path):
    """`round` has no rule of its own; a sum over the batch has less than one row a sample."""
    from foretell.cluster import load as machines
    from foretell.graph import save
    from foretell.search.fusion.problem import from_workload
    from foretell.workload import load as workload

    class Rounded(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(8, 8))
            self.register_buffer("queue", torch.randn(8, 16))

        def forward(self, x):
            hard = self.weight + (self.weight.round() - self.weight).detach()
            return torch.einsum("nc,ck->nk", x @ hard, self.queue)

    def batch():
        return torch.randn(4, 8), torch.randint(0, 16, (4,))

    graph = capture(Rounded, batch, torch.nn.functional.cross_entropy, "sgd")
    save(graph, tmp_path / "step.graph")
    found = workload(str(tmp_path / "step.graph"))
    assert any(op.name.startswith("round") for layer in found.layers for op in layer.ops)
    assert from_workload(found, machines("h100:gpus=2")) is not None


def test_a_step_with_a_recurrent_layer_can_be_planned():
    from foretell.cluster import load as machines
    from foretell.search.fusion.problem import from_workload

    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.head = nn.LSTM(8, 8), nn.Linear(8, 3)

        def forward(self, x):
            return self.head(self.inner(x)[0][-1])

    def batch():
        return torch.randn(5, 4, 8), torch.randint(0, 3, (4,))

    graph = capture(Recurrent, batch, nn.functional.cross_entropy, "sgd")
    assert from_workload(from_graph(graph), machines("h100:gpus=2")) is not None
