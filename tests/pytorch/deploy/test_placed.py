"""Plans whose stages are placed freely, on the user's own model: there, back, and forward alone."""

import json
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

from foretell.errors import InputError  # noqa: E402
from foretell.plan import Plan  # noqa: E402
from foretell.plan.unsupported import unsupported  # noqa: E402
from foretell.pytorch.deploy.apply import deploy  # noqa: E402
from foretell.pytorch.deploy.pipelined import placed_stages  # noqa: E402
from foretell.pytorch.deploy.units import trace  # noqa: E402
from foretell.pytorch.deploy.uses import aliases  # noqa: E402
from tests.pytorch.deploy.ranks import on_ranks  # noqa: E402
from tests.pytorch.deploy.same import CLOSE, STEPS, sgd  # noqa: E402

WIDTH, WORDS, MICRO, SAMPLES = 8, 21, 4, 8


class Block(nn.Module):
    """A norm and two layers around which the input goes too."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x, beside=None):
        y = self.norm(x) if beside is None else self.norm(x) + beside.mean(1, keepdim=True)
        return x + self.down(nn.functional.gelu(self.up(y)))


class Words(nn.Module):
    """Words, places, blocks, logits; the logits' weights may be the words'."""

    def __init__(self, tied=False):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(8, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.out.weight = self.words.weight

    def forward(self, x, mask=None):
        at = torch.arange(x.shape[1])
        y = self.words(x) + self.places(at)
        for block in self.h:
            y = block(y)
        return self.out(self.norm(y))


class Two(nn.Module):
    """Two branches that join."""

    def __init__(self):
        super().__init__()
        self.words, self.patch = nn.Embedding(WORDS, WIDTH), nn.Linear(WORDS, WIDTH)
        self.text, self.image = nn.Sequential(Block()), nn.Sequential(Block())
        self.joint = nn.Sequential(Block(), Block())
        self.out = nn.Linear(WIDTH, WORDS)

    def forward(self, x):
        here = self.text(self.words(x))
        there = self.image(self.patch(nn.functional.one_hot(x, WORDS).float()))
        both = torch.cat([here, there], 1).tanh()
        return self.out(self.joint(both))[:, : x.shape[1]]


class There(nn.Module):
    """An encoder whose output every block of a decoder looks at."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Embedding(WORDS, WIDTH), nn.Embedding(WORDS, WIDTH)
        self.enc = nn.ModuleList(Block() for _ in range(2))
        self.dec = nn.ModuleList(Block() for _ in range(2))
        self.out = nn.Linear(WIDTH, WORDS)

    def forward(self, x):
        y = self.first(x)
        for block in self.enc:
            y = block(y)
        z = self.second(x.flip(1))
        for block in self.dec:
            z = block(z, y)
        return self.out(z)


MODELS = {"words": Words, "tied": lambda: Words(tied=True), "two": Two, "there": There}


def make(kind):
    torch.manual_seed(0)
    return MODELS[kind]()


def batch(step):
    x = torch.randint(0, WORDS, (SAMPLES, 7), generator=torch.Generator().manual_seed(step))
    return x[:, :-1], x[:, 1:]


def loss(output, target):
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def plan(stages, back="B", micro=MICRO):
    """Stages of a text, all forwards first; copies of the model take turns."""
    each = [tuple(text.split()) for text in stages.split(" / ")]
    size = 1 + max(int(r) for texts in each for r in texts[0].replace("-", "+").split("+"))
    rows = [[] for _ in range(size)]
    frozen = {s for s, texts in enumerate(each) if "frozen" in texts}
    acts = [(s, "F", m) for m in range(micro) for s in range(len(each))]
    ends = [(s, m) for m in range(micro) for s in reversed(range(len(each))) if s not in frozen]
    acts += [(s, kind, m) for s, m in ends for kind in back]
    named = Plan(stages=tuple(each))
    for s, kind, m in acts:
        for rank in ranks(named, s):
            rows[rank].append(f"{s}{kind}{m}")
    return named.but(actions=tuple(map(tuple, rows)), global_batch=SAMPLES, schedule="actions")


def ranks(named, s):
    first, _, last = named.stages[s][0].partition("-")
    return range(int(first), int(last or first) + 1)


def trained(kind, frozen):
    """The model after three steps on one process, and its outputs."""
    model = make(kind)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(tuple(frozen) or "-"))
    update = sgd(model)
    for step in range(STEPS):
        x, y = batch(step)
        update.zero_grad()
        loss(model(x), y).backward()
        update.step()
    with torch.no_grad():
        return model, model(batch(0)[0])


def differences(cases):
    """Of every case on this rank: how far its parameters and outputs are from one process."""
    return [difference(*case) for case in cases]


def difference(kind, query, frozen):
    model = make(kind)
    made = deploy(model, sgd(model), query, loss=loss, samples=SAMPLES)
    for step in range(STEPS):
        x, y = batch(step)
        if made.trains:
            made.step((x,), y)
    wanted, outputs = trained(kind, frozen) if made.trains else (make(kind), None)
    if outputs is None:
        with torch.no_grad():
            outputs = wanted(batch(0)[0])
    there = dict(wanted.named_parameters())
    off = [_off(p.detach(), there[n].detach()) for n, p in made.here.items()]
    found = made.infer((batch(0)[0],))
    off += [_off(y, outputs.chunk(_parts(made))[k]) for k, y in found.items()]
    return max(off), sorted(found)


def _parts(made):
    pipeline = made.pipeline.pipeline
    return pipeline.micro_batches * len(set(pipeline.lines))


def _off(mine, whole):
    """Relative; of a tensor that is split, the part that is this rank's."""
    if mine.shape != whole.shape:
        size, rank = dist.get_world_size(), dist.get_rank()
        rows = [len(whole) // size + (r < len(whole) % size) for r in range(size)]
        whole = whole.split(rows)[rank]
    return ((mine - whole).abs().max() / whole.abs().max().clamp_min(1e-6)).item()


ON_TWO = {
    "a line": ("words", plan("0 input h.0*2 / 1 h.0*2 head"), ()),
    "and split": ("words", plan("0 input h.0*2 / 1 h.0*2 head", "IW"), ()),
    "ends on all ranks": ("words", plan("0-1 input / 0 h.0*2 / 1 h.0*2 / 0-1 head"), ()),
    "and split too": ("words", plan("0-1 input / 0 h.0*2 / 1 h.0*2 / 0-1 head", "IW"), ()),
    "all on all": ("words", plan("0-1 input h.0*4 head"), ()),
    "several stages a rank": (
        "words", plan("0 input h.0*1 / 1 h.0*1 / 1 h.0*1 / 0 h.0*1 head"), ()),
    "two directions": (
        "words", plan("0 input h.0*3 / 1 h.0*1 head / 1 input h.0*3 / 0 h.0*1 head", micro=2), ()),
    "tied, on all ranks": ("tied", plan("0-1 input / 0 h.0*2 / 1 h.0*2 / 0-1 head"), ()),
    "tied, on two": ("tied", plan("0 input h.0*2 / 1 h.0*2 head"), ()),
    "tied, two directions": (
        "tied", plan("0 input h.0*2 / 1 h.0*2 head / 1 input h.0*2 / 0 h.0*2 head", micro=4), ()),
    "branches": (
        "two", plan("0 input text.0 / 1 patch image.0 / 0-1 joint.0*2 head"), ()),
    "an encoder and a decoder": (
        "there", plan("0 input enc.0*2 / 1 second dec.0*1 / 0 dec.0*1 / 0-1 head"), ()),
    "recompute": ("words", plan("0 input h.0*2 recompute / 1 h.0*2 head recompute"), ()),
    "recompute, split": (
        "words", plan("0 input h.0*2 recompute / 0-1 h.0*2 head recompute", "IW"), ()),
    "offload": ("words", plan("0 input h.0*2 offload / 1 h.0*2 head offload"), ()),
    "frozen": (
        "words", plan("0 input frozen / 0 h.0*2 / 1 h.0*2 head"), ("words", "places")),
    "frozen on all": (
        "words", plan("0-1 input frozen / 0 h.0*2 / 1 h.0*2 / 0-1 head"), ("words", "places")),
    "forward alone": ("words", plan("0-1 input / 0 h.0*2 / 1 h.0*2 / 0-1 head", ""), ()),
    "forward, two directions": (
        "words", plan("0 input h.0*2 / 1 h.0*2 head / 1 input h.0*2 / 0 h.0*2 head", "", 2), ()),
}  # fmt: skip


@pytest.fixture(scope="module")
def on_two():
    rows = zip(*on_ranks(2, differences, list(ON_TWO.values())), strict=True)
    return dict(zip(ON_TWO, rows, strict=True))


@pytest.mark.parametrize("case", ON_TWO)
def test_the_parameters_and_outputs_of_one_process(on_two, case):
    off = [rank[0] for rank in on_two[case]]
    assert max(off) <= CLOSE, off


def test_where_outputs_are(on_two):
    assert [rank[1] for rank in on_two["and split"]] == [[], [0, 1, 2, 3]]
    assert [rank[1] for rank in on_two["forward, two directions"]] == [[1, 3], [0, 2]]


def test_four_ranks():
    wide = "0-1 input h.0*2 / 2-3 h.0*2 head"
    both = f"{wide} / 2-3 input h.0*2 / 0-1 h.0*2 head"
    cases = [("words", plan("0-3 input / 0 h.0*1 / 1 h.0*1 / 2 h.0*1 / 3 h.0*1 / 0-3 head"), ())]
    cases.append(("two", plan("0 input / 1 text.0 / 2 patch / 3 image.0 / 0-3 joint.0*2 head"), ()))
    for each in on_ranks(4, differences, cases):
        assert max(off for off, _ in each) <= CLOSE, each
    for each in on_ranks(4, halves, [plan(wide), plan(both, micro=2)]):
        assert max(each) <= CLOSE, each


def halves(plans):
    """Stages on two ranks each: how far what is not split is from one process."""
    found = []
    for query in plans:
        model = make("words")
        made = deploy(model, sgd(model), query, loss=loss, samples=SAMPLES)
        for step in range(STEPS):
            x, y = batch(step)
            made.step((x,), y)
        wanted = dict(trained("words", ())[0].named_parameters())
        whole = {n: p for n, p in made.here.items() if p.shape == wanted[n].shape}
        found.append(max(_off(p.detach(), wanted[n].detach()) for n, p in whole.items()))
    return found


def test_what_belongs_to_which_layer():
    """Joins go with whoever reads them, what is behind a module with the module."""
    traced = trace(make("two"), ["text.0", "patch", "image.0", "joint.0", "input", "head"])
    homes = {n.name: home for n, home in traced.home.items()}
    assert traced.units == ["text.0", "patch", "image.0", "joint.0", "joint.1"]
    assert homes["words"] == "input"
    assert homes["cat"] == homes["tanh"] == "joint.0"
    assert homes["out"] == homes["output"] == "head"
    assert {n.name for n in traced.free} >= {"one_hot", "float_1"}


@pytest.mark.parametrize(
    ("kind", "stages", "words"),
    [
        ("words", "0 input g.0*2 / 0 head", "unknown layer of the plan among the model's modules"),
        ("words", "0 input h.0*6 / 0 head", "`h.0` 6 times, the model 4 modules like it"),
        ("words", "0 h.0*4 head / 0 input", "stage 0 of the plan would read from stage 1"),
        ("tied", "0 input / 0-1 h.0*4 head", r"`words.weight` is in stages on ranks \[0\] and"),
    ],
)
def test_plans_that_are_not_of_this_model(kind, stages, words):
    model = make(kind)
    with pytest.raises(InputError, match=words):
        placed_stages(model, plan(stages), aliases(model), 0)


class Fickle(nn.Module):
    """Its own forward looks at values."""

    def __init__(self):
        super().__init__()
        self.h = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        return self.h[1](x) if x.sum() > 0 else self.h[0](x)


def test_a_forward_that_cannot_be_traced():
    with pytest.raises(InputError, match="forward of Fickle cannot be traced"):
        trace(Fickle(), ["h.0"])


def test_what_cannot_be_beside_stages():
    good = plan("0 input h.0*2 / 1 h.0*2 head")
    assert good.ranks == 2
    assert unsupported(good) == []
    reported = unsupported(good.but(dp=2, zero=1, actions=()))
    assert len(reported) == 3
    assert unsupported(good.but(dtype="fp16")) == []
    assert any("dp=2 beside stages" in why for why in reported)
    assert any("stages without actions" in why for why in reported)


SCRIPT = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
    def forward(self, x):
        return x + self.down(self.up(x).tanh())

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.h = nn.Embedding(40, 16), nn.ModuleList(Block() for _ in range(4))
        self.out = nn.Linear(16, 40)
    def forward(self, x):
        x = self.words(x)
        for block in self.h:
            x = block(x)
        return self.out(x)

def model():
    torch.manual_seed(0)
    return Model()

def batch(step):
    x = torch.randint(0, 40, (8, 7), generator=torch.Generator().manual_seed(step))
    return x[:, :-1], x[:, 1:]

def loss(output, target):
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())

def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1)
"""


@pytest.mark.slow
def test_from_a_script_to_its_schedule_to_its_run(tmp_path, monkeypatch):
    """Captured, placed, scheduled, written, run: the losses of one process, and inference too."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    names = {}
    exec(compile(SCRIPT, "train.py", "exec"), names)
    model = names["model"]()
    update, wanted = names["optimizer"](model.parameters()), []
    for step in range(3):
        x, y = names["batch"](step)
        update.zero_grad()
        wanted.append(names["loss"](model(x), y))
        wanted[-1].backward()
        update.step()
    query = ["schedule", script, "--on", "v100:gpus=2", "-n", "4", "--plan", "micro_batch=2"]
    reported(*query, "--shape", "m", "-o", tmp_path / "m.plan")
    reported(*query, "--shape", "m", "--infer", "-o", tmp_path / "i.plan")
    some = ["--steps", "3", "--warmup", "0", "--device", "cpu", "--json"]
    found = json.loads(reported("run", script, "--plan", tmp_path / "m.plan", *some))
    assert found["losses"] == pytest.approx([loss.item() for loss in wanted], rel=1e-5)
    found = json.loads(reported("run", script, "--plan", tmp_path / "i.plan", *some))
    assert found["losses"] == [None] * 3
    assert found["step_s"] > 0


def reported(*words):
    command = [sys.executable, "-m", "foretell", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout
