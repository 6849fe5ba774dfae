"""Memory of captured steps: what is held, from when to when, counted by hand."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import foretell
from foretell.cluster import load
from foretell.graph.graph import BufferKind, word_of
from foretell.pytorch.capture import capture
from foretell.pytorch.capture.record import BLOCK
from foretell.simulate.memory import held_by_kind, memory, peak_bytes

ROWS, WIDTH, CLASSES = 256, 512, 16
WORKSPACE = 2 * 32 * 2**20  # cuBLAS, on two threads


def rounded(*elements):
    """Bytes of fp32 tensors as the allocator hands them out."""
    return sum(-(-4 * n // BLOCK) * BLOCK for n in elements)


def step(optimizer, layers=3, **options):
    def model():
        inner = [layer for _ in range(layers) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
        return nn.Sequential(*inner, nn.Linear(WIDTH, CLASSES))

    def batch():
        return torch.randn(ROWS, WIDTH), torch.randint(0, CLASSES, (ROWS,))

    return capture(model, batch, F.cross_entropy, optimizer, **options)


def by_kind(graph):
    kinds = [word_of(BufferKind, k) for k in graph.buffers.kind]
    return {
        k: sum(b for b, w in zip(graph.buffers.bytes, kinds, strict=True) if w == k) for k in kinds
    }


WEIGHTS = rounded(*[WIDTH * WIDTH, WIDTH] * 3, WIDTH * CLASSES, CLASSES)


@pytest.mark.parametrize(
    ("optimizer", "copies"), [(None, 0), ("sgd", 0), ("sgd:momentum=0.9", 1), ("adam", 2)]
)
def test_weights_gradients_and_state(optimizer, copies):
    held = by_kind(step(optimizer))
    assert held["parameter"] == WEIGHTS
    assert held["gradient"] == WEIGHTS
    assert held.get("optimizer", 0.0) == copies * WEIGHTS
    assert held["input"] == rounded(ROWS * WIDTH) + ROWS * 8
    assert held["workspace"] == WORKSPACE


def test_the_peak_of_a_perceptron_is_what_one_counts_by_hand():
    """When the last ReLU's gradient is made: what every ReLU kept, a gradient in and one out."""

    def model():
        inner = [layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.ReLU())]
        return nn.Sequential(*inner, nn.Linear(64, CLASSES))

    def batch():
        return torch.randn(65536, 64), torch.randint(0, CLASSES, (65536,))

    graph = capture(model, batch, F.cross_entropy)
    wide, held = rounded(65536 * 64), by_kind(graph)
    # Outputs of linear layers are gone by then: ReLU saves what it made, which the next layer uses.
    counted = held["parameter"] + held["input"] + WORKSPACE + 8 * wide + 2 * wide
    small = 2 * rounded(*[64 * 64, 64] * 9) + 3 * rounded(65536 * CLASSES)
    assert counted <= graph.facts["peak_bytes"] <= counted + small


def test_simulated_in_time_the_peak_is_that_of_the_order():
    graph = step("adam:kind=loop")
    timeline = foretell.simulate(foretell.price(graph, load("h200")))
    assert peak_bytes(timeline) == pytest.approx(graph.facts["peak_bytes"], rel=0.02)
    (held,) = memory(timeline)
    assert set(held_by_kind(timeline, held)) >= {"parameter", "optimizer", "workspace"}


def test_in_place_needs_less():
    def net(inplace):
        return lambda: nn.Sequential(
            nn.Conv2d(8, 8, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace), nn.Flatten(),
            nn.Linear(8 * 64 * 64, 4),
        )  # fmt: skip

    def batch():
        return torch.randn(8, 8, 64, 64), torch.randint(0, 4, (8,))

    fresh, reused = (by_kind(capture(net(kind), batch, F.cross_entropy)) for kind in (False, True))
    assert fresh["activation"] - reused["activation"] == rounded(8 * 8 * 64 * 64)


def test_half_precision_activations_take_half():
    def activations(graph):
        return by_kind(graph)["activation"]

    # fp32 ReLU outputs against bf16 ones; casts of weights are held besides.
    full, half = step(None, layers=6), step(None, layers=6, autocast="bf16")
    casts = rounded(*[WIDTH * WIDTH // 2, WIDTH // 2] * 6, WIDTH * CLASSES // 2, CLASSES // 2)
    assert activations(half) - casts < 0.75 * activations(full)


def test_every_buffer_is_born_before_it_dies():
    b = step("adam:kind=loop").buffers
    both = (b.born >= 0) & (b.dies >= 0)
    assert both.any()
    assert (b.born[both] <= b.dies[both]).all()
    assert np.isfinite(b.bytes).all()
    assert (b.bytes % BLOCK == 0).all() or (b.bytes[b.bytes % BLOCK != 0] == 0).all()
