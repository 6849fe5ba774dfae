"""Captured models whose layers do not simply follow one another."""

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from foretell.cluster import load as cluster  # noqa: E402
from foretell.pytorch.capture import capture  # noqa: E402
from foretell.search.schedule.model import model as problem_of  # noqa: E402
from foretell.workload.captured import from_graph  # noqa: E402

WIDTH = 16


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x, beside=None):
        y = self.norm(x if beside is None else x + beside)
        return x + self.down(self.up(y).relu())


class Two(nn.Module):
    """Two branches that join."""

    def __init__(self):
        super().__init__()
        self.words, self.patch = nn.Embedding(50, WIDTH), nn.Linear(12, WIDTH)
        self.text = nn.Sequential(Block(), Block())
        self.image = nn.Sequential(Block(), Block())
        self.joint = nn.Sequential(Block(), Block())
        self.out = nn.Linear(WIDTH, 5)

    def forward(self, x, pixels):
        both = torch.cat([self.text(self.words(x)), self.image(self.patch(pixels))], 1)
        return self.out(self.joint(both)).mean(1)


class There(nn.Module):
    """An encoder whose output every block of the decoder reads."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Embedding(50, WIDTH), nn.Embedding(50, WIDTH)
        self.enc = nn.ModuleList(Block() for _ in range(2))
        self.dec = nn.ModuleList(Block() for _ in range(2))
        self.out = nn.Linear(WIDTH, 50)

    def forward(self, x, y):
        for block in (seen := self.first(x), self.enc)[1]:
            seen = block(seen)
        made = self.second(y)
        for block in self.dec:
            made = block(made, seen)
        return self.out(made)


def layers(model, batch, loss):
    made = from_graph(capture(model, batch, loss, device="cpu"))
    return made, {layer.name: layer for layer in made.layers}


@pytest.fixture(scope="module")
def two():
    batch = (torch.zeros(4, 6, dtype=torch.long), torch.zeros(4, 6, 12), torch.zeros(4).long())
    return layers(Two(), batch, nn.functional.cross_entropy)


@pytest.fixture(scope="module")
def there():
    words = torch.zeros(4, 6, dtype=torch.long)

    def loss(output, target):
        return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())

    return layers(There(), (words, words, words), loss)


def test_a_second_branch_begins_with_the_batch_and_joins(two):
    _, found = two
    assert list(found) == ["input", "text.0", "text.1", "patch", "image.0", "image.1",
                           "joint.0", "joint.1", "head"]  # fmt: skip
    assert found["patch"].after == ("",)
    assert not found["patch"].is_block
    assert found["joint.0"].after == ("text.1", "image.1")
    assert any("cat" in op.name for op in found["joint.0"].works())
    assert found["text.0"].after == found["joint.1"].after == ()


def test_a_decoder_reads_the_encoder_in_every_block(there):
    _, found = there
    assert found["second"].after == ("",)
    assert found["dec.0"].after == ("enc.1", "second")
    assert found["dec.1"].after == ("enc.1", "dec.0")


def test_a_chain_stays_a_chain():
    class Chain(nn.Module):
        def __init__(self):
            super().__init__()
            self.h = nn.ModuleList(Block() for _ in range(3))
            self.out = nn.Linear(WIDTH, 5)

        def forward(self, x):
            for block in self.h:
                x = block(x)
            return self.out(x)

    x = torch.zeros(4, 6, WIDTH)
    made, found = layers(Chain(), (x, x[..., :5]), nn.functional.mse_loss)
    assert not any(layer.after for layer in made.layers)
    assert found["h.1"].times == 2  # the first one's input has no gradient


@pytest.mark.parametrize("shape", ["k", "nn"])
def test_shapes_for_branches_come_from_captured_models(two, there, shape):
    for made, _ in (two, there):
        found = problem_of(made, cluster("v100:gpus=4"), shape, micro_batches=4, recompute="no")
        wide = [place for place in found.places if len(place.ranks) == 4]
        assert wide
        joins = [b for b in found.problem.after if len(b) > 1]
        assert joins  # what waits for two
