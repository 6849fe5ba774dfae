"""What people do in loops of their own: the same numbers as one process prints, or refused by name.

All is computed in double precision, so that a difference is one of what is computed.
"""

import io
import math
import os
import sys
import tempfile
import warnings
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.pytorch.deploy.ranks import on_ranks

HEAD = """
import torch, torch.nn as nn, torch.nn.functional as F
torch.manual_seed(3)
X, Y = torch.randn(4, 8, 16), torch.randint(0, 4, (4, 8))
def show(*values):
    print(*(repr(float(v)) for v in values))
model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 4))
"""
SGD = "optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)\n"
END = "\nshow(*(p.square().sum() for p in model.state_dict().values()))\n"
FREE = "model[0].requires_grad_({})\n"


def steps(*more, loss="F.cross_entropy(model(x), y)", data="zip(X, Y)"):
    """A loop with some more lines behind its backward."""
    lines = ["optimizer.zero_grad()", f"loss = {loss}", "loss.backward()", *more]
    lines += ["optimizer.step()", "show(loss)"]
    return "".join([f"for x, y in {data}:\n", *(f"    {line}\n" for line in lines)])


SCALED = """
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for x, y in zip(X, Y):
    optimizer.zero_grad()
    scaler.scale(F.cross_entropy(model(x), y)).backward()
    scaler.unscale_(optimizer)
    show(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
    scaler.step(optimizer)
    scaler.update()
"""
PENALTY = """
for x in X:
    x = x.clone().requires_grad_(True)
    (g,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    loss = (g.norm(dim=1) - 1).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    show(loss)
"""
BY_GRAD = """
for x, y in zip(X, Y):
    grads = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
    for p, g in zip(model.parameters(), grads):
        p.grad = g
    optimizer.step()
"""
WRITES = """
class Halving(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 4)
    def forward(self, x):
        return self.layer(x.mul_(0.5))
model = Halving()
"""
FORMATS = """
class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(16, 8).float(), nn.Linear(8, 4)
    def forward(self, x):
        return self.two(self.one(x.float()).relu().double())
model = Mixed()
"""
SPARSE = """
class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.out = nn.Embedding(50, 16, sparse=True), nn.Linear(16, 4)
    def forward(self, x):
        return self.out(self.words(x).mean(1))
model, X = Words(), torch.randint(0, 50, (4, 8, 5))
"""
AGAIN = """
from torch.utils.checkpoint import checkpoint
class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(16, 16), nn.Linear(16, 4)
    def forward(self, x):
        x = checkpoint(self.one, self.one(x), use_reentrant=True)
        return self.two(checkpoint(self.one, x, use_reentrant=True))
model = Twice()
"""
BLOCKS = """
class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(16, 4)
    def forward(self, x):
        return self.head(self.blocks(x).mean(1))
model, X = Encoder(), torch.randn(4, 8, 6, 16)
"""
RESUMED = """
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "kept.pt")
kept = torch.load("kept.pt")
model.load_state_dict(kept["model"])
optimizer.load_state_dict(kept["optimizer"])
"""
WHOLE = "show(sum(float(p.grad.norm()) for p in model.parameters()), model[0].weight[0, 0].item())"
NOISE = "for p in model.parameters(): p.grad += 0.01 * torch.randn_like(p)"
CUT = "with torch.no_grad(): model[0].weight[:2] = 0.5"
L2 = "F.cross_entropy(model(x), y) + sum(p.square().sum() for p in model.parameters())"

SPLIT = ("dp=2,zero=3", "tp=2")
CASES = {  # what is done, and under which plans
    "numbers": (SGD + steps(WHOLE), SPLIT),
    "own clipping": (SGD + steps("n = sum(p.grad.square().sum() for p in model.parameters())",
                                 "for p in model.parameters(): p.grad /= n.sqrt()"), SPLIT),
    "noise": (SGD + steps(NOISE), SPLIT),
    "written": (SGD + steps(CUT), SPLIT),
    "penalty of parameters": (SGD + steps(loss=L2), SPLIT),
    "scaler": (SGD + SCALED, ("dp=2", "tp=2")),
    "gradient of inputs": (SGD + PENALTY, ("dp=2",)),
    "input written to": (WRITES + SGD + steps() + steps(), ("dp=2",)),
    "two formats": (FORMATS + SGD + steps(), ("dp=2",)),
    "frozen later": (SGD + steps() + FREE.format(False) + steps(), ("dp=2", "dp=2,zero=3")),
    "stages of copies": (BLOCKS + SGD + steps(), ("dp=2,pp=2,micro_batch=2",)),
    "resumed": (SGD + steps() + RESUMED + steps(), SPLIT),
}  # fmt: skip
REFUSED = {
    "gradients by torch.autograd.grad": (SGD + BY_GRAD, "dp=2", "gives the gradient of `0.weight`"),
    "second derivatives": (SGD + PENALTY, "tp=2", "no second derivative"),
    "hooks": ("model[0].weight.register_hook(torch.sign)\n" + SGD + steps(), "dp=2", "inside the"),
    "trained later": (
        FREE.format(False) + SGD + steps() + FREE.format(True) + steps(), "dp=2", "begins to train",
    ),
    "sparse gradients": (SPARSE + SGD + steps(), "dp=2", "`words` makes sparse gradients"),
    "two formats in FSDP": (FORMATS + SGD + steps(), "dp=2,zero=3", "of one format together"),
    "made twice": (AGAIN + SGD + steps(), "dp=2", "makes the gradient of `one"),
}  # fmt: skip


def printed(plan, folder):
    """What a script prints on a rank; why it is refused, where it is."""
    import torch

    from foretell.errors import InputError
    from foretell.plan import Plan
    from foretell.pytorch.deploy.unedited import Training, Wanted
    from foretell.pytorch.intake.child import run, single_rank
    from foretell.pytorch.intake.request import Script

    torch.set_default_dtype(torch.float64)
    os.chdir(folder)
    single_rank(script := Script(f"{folder}/script.py", (), False))
    job = Training(
        Plan.parse(plan) if plan else None, Wanted(is_still=True), scratch=Path(tempfile.mkdtemp())
    )
    try:
        with job.open(), io.StringIO() as sys.stdout, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run(script, job)
            assert job.made or not plan
            return [float(word) for word in sys.stdout.getvalue().split()]
    except InputError as error:
        return error.message
    finally:
        sys.stdout = sys.__stdout__


@cache
def alone(body):
    (found,) = under(body, "")
    return found


def under(body, plan):
    from foretell.plan import Plan

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "script.py").write_text(HEAD + body + END)
        return on_ranks(Plan.parse(plan or "dp=1").ranks, printed, plan, folder)


@pytest.mark.parametrize(
    ("name", "plan"), [(name, plan) for name, (_, plans) in CASES.items() for plan in plans]
)
def test_a_script_prints_what_it_prints_alone(name, plan):
    body = CASES[name][0]
    wanted = alone(body)
    assert len(wanted) >= 8
    for found in under(body, plan):
        assert not isinstance(found, str), found
        assert len(found) == len(wanted)
        off = [abs(a - b) / max(abs(b), 1e-3) for a, b in zip(found, wanted, strict=True)]
        assert max(off) <= (1e-4 if name == "two formats" else 1e-6)  # one is fp32
        assert not any(map(math.isnan, off))


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_wrong_is_refused(name):
    body, plan, words = REFUSED[name]
    for found in under(body, plan):
        assert isinstance(found, str), found
        assert words in found
