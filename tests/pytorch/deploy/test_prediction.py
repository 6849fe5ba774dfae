"""Prices timed on the machine at hand: ops, collectives, what runs teach, and what `run` says."""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from torch import nn

from foretell.cli.run import _prediction_rows, _prediction_text
from foretell.cluster import Calibration
from foretell.cluster.node import Message
from foretell.cluster.read import load, loads
from foretell.cluster.write import text as cluster_file
from foretell.cost import collective, kernel
from foretell.cost.price import TimedOp, TimedOps
from foretell.plan import Plan
from foretell.predict import predict
from foretell.pytorch import timed
from foretell.pytorch.deploy import dry_run, machine, op_times, script_rank, worker
from foretell.pytorch.deploy.collective import all_gather
from foretell.pytorch.deploy.op_times import PricedOp
from foretell.workload import load as workload
from tests.pytorch.deploy.ranks import on_ranks

GEMM = {"m": 64.0, "n": 64.0, "k": 64.0}


def gemm(**sizes):
    return TimedOp("gemm", "fp32", tuple(sorted((GEMM | sizes).items())))


def seconds_of(ops, **sizes):
    shape = {k: np.array([v]) for k, v in (GEMM | sizes).items()}
    return float(ops.price("gemm", "fp32", shape, np.array([np.nan]))[0])


def test_what_was_timed_is_its_price_and_what_lies_between_is_interpolated():
    ops = TimedOps({gemm(): 1e-4, gemm(m=256.0): 3e-4}, load=2.0)
    assert seconds_of(ops) == pytest.approx(2e-4)
    assert 2e-4 < seconds_of(ops, m=128.0) < 6e-4
    assert seconds_of(ops, m=1024.0) == pytest.approx(4 * 6e-4)  # large ones grow as their work
    assert list(ops.queried) == [gemm(m=128.0), gemm(m=1024.0)]
    assert math.isnan(float(ops.price("conv", "fp32", {}, np.array([1.0]))[0]))


def test_a_device_with_timed_ops_costs_what_they_took():
    device = replace(load("cpu").devices[0], timed=TimedOps({gemm(): 7e-4}))
    shape = {k: np.array([v]) for k, v in GEMM.items()}
    assert float(kernel.seconds(device, "gemm", "fp32", shape).seconds[0]) == pytest.approx(7e-4)


@pytest.mark.parametrize(
    ("op", "shape"),
    [
        ("gemm", GEMM | {"tb": 1.0}),
        ("gemm", GEMM | {"b": 3.0, "ta": 1.0}),
        *((op, {"n": 2.0, "c": 3.0, "h": 8.0, "w": 8.0, "k": 4.0, "r": 3.0, "s": 3.0, "pad": 1.0})
          for op in ("conv", "conv_dgrad", "conv_wgrad")),
        ("attention", {"b": 2.0, "heads": 2.0, "sq": 8.0, "sk": 8.0, "d": 4.0, "direction": 1.0}),
        *((op, {"rows": 16.0, "cols": 8.0})
          for op in ("norm", "norm_backward", "softmax", "softmax_backward", "embedding",
                     "embedding_backward", "layer_norm")),
        *((op, {"n": 1024.0, "bytes": 12288.0})
          for op in ("elementwise", "gelu", "copy", "reduce", "pool", "pool_backward",
                     "batch_norm", "batch_norm_backward")),
    ],
)  # fmt: skip
def test_every_class_of_op_can_be_timed(op, shape):
    found = timed.seconds(TimedOp(op, "fp32", tuple(sorted(shape.items()))))
    assert found is not None
    assert found > 0


def test_what_cannot_be_timed_is_said():
    assert timed.seconds(TimedOp("route", "fp32", (("n", 8.0),))) is None
    assert timed.seconds(TimedOp("gemm", "fp8", tuple(sorted(GEMM.items())))) is None
    assert timed.seconds(gemm(m=1e9)) is None  # too large


def test_measured_messages_take_the_place_of_formulas():
    machines = load("dgx-a100:gpus=2").calibrated(
        Calibration(comm=2.0, messages=(Message("all_reduce", 2, 1e-3, 1e-9),))
    )
    found = collective.price("all_reduce", 1e6, machines.levels([0, 1]))
    assert found.seconds == pytest.approx(2 * (1e-3 + 1e-3))
    other = collective.price("all_gather", 1e6, machines.levels([0, 1]))
    assert other.seconds < 1e-3


def test_families_of_ops_are_read_written_and_priced():
    cluster = load("h200").calibrated(Calibration(families=(("gemm", 3.0),)))
    again = loads(cluster_file(cluster))
    assert again.calibration == cluster.calibration
    plain, slow = (
        predict(Plan.parse("dp=1"), workload("llama-3.1-8b:seq=2048"), one).breakdown["compute_s"]
        for one in (load("h200"), again)
    )
    assert slow > 1.3 * plain


def test_a_machine_is_kept_and_another_begins_anew(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    facts = {"cpu": "one", "cores": 2, "load": 3.0}
    new = machine.load_machine(facts, 2, 1)
    assert new.seconds == {}
    machine.save_machine(new.with_ops({gemm(): 1e-4}, 2e-6).with_run({"gemm": 1.5, "host": -1.0}))
    kept = machine.load_machine(facts | {"load": 9.0}, 2, 1)
    assert kept.seconds == {gemm(): 1e-4}
    assert 1.2 < kept.factor("gemm") < 1.5  # one run, and what was thought before it
    assert kept.factor("host") == 1.0
    assert machine.load_machine(facts | {"cores": 4}, 2, 1).seconds == {}
    kept.path.write_text("{")
    assert machine.load_machine(facts, 2, 1).seconds == {}


def test_what_is_found_from_a_small_part_of_a_step_counts_for_less():
    sure, unsure = (machine.Learned().with_run(2.0, share).value(0.2) for share in (1.0, 0.1))
    assert 1.0 < unsure < 1.05 < sure < 2.0


def test_the_first_op_that_differs_is_named():
    ops = [PricedOp(f"{i}/addmm", "addmm", "gemm", True, 1e-3) for i in range(3)]
    seen = [("aten::addmm", 1.1e-3), ("aten::addmm", 3e-3), ("aten::addmm", 9e-3)]
    assert op_times.first_apart(ops, seen) == {
        "op": "1/addmm", "predicted_s": 1e-3, "measured_s": 3e-3
    }  # fmt: skip
    assert op_times.first_apart(ops, seen[:1] * 3) is None


def test_what_a_run_says_of_its_prediction():
    answer = {"low_s": 1e-3, "high_s": 3e-3, "load": 1.0, "load_during": 2.5}
    found = {"prediction": answer, "predicted_s": 2e-3, "step_s": 4e-3, "error": -0.5}
    assert (
        _prediction_text(found)
        == ", 2 ms predicted (-50.0 %; outside the 80 % interval, 1 to 3 ms)"
    )
    (_, load), then = _prediction_rows(found)
    assert load.startswith("busy")
    assert then == ("at that load", "5 ms predicted")
    ((_, load),) = _prediction_rows(found | {"prediction": answer | {"load_during": 1.0}})
    assert load.startswith("idle")
    assert _prediction_rows(found | {"prediction": {"why": "no"}}) == [("predicted", "no: no")]


OWN_LOOP = """import torch
from torch import nn
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    x, y = torch.randn(16, 64), torch.randn(16, 4)
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
"""


def test_an_unedited_script_is_predicted_and_trains_as_without(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(OWN_LOOP)
    line = [sys.executable, "-m", "foretell", "run", str(script), "--plan", "dp=2", "--device"]
    line += ["cpu", "--no-verify", "--json"]
    runs = [
        subprocess.run(
            [*line, *more], env=os.environ | {"XDG_CACHE_HOME": str(tmp_path)},
            capture_output=True, text=True, timeout=600,
        )
        for more in ((), ("--no-predict",))
    ]  # fmt: skip
    assert not any(done.returncode for done in runs), [done.stderr for done in runs]
    found, without = (json.loads(done.stdout) for done in runs)
    answer = found["prediction"]
    assert 0 < answer["low_s"] < found["predicted_s"] < answer["high_s"]
    assert found["losses"] == without["losses"]  # its random numbers are its own
    assert without["predicted_s"] is None


@pytest.mark.parametrize("plan", ["dp=2", pytest.param("dp=2,zero=3", marks=pytest.mark.slow)])
def test_a_run_is_predicted_for_the_machine_it_is_on(tmp_path, plan):
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\nfrom torch import nn\n"
        "def model(): return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))\n"
        "def batch(rank, size): return torch.randn(16 // size, 64), torch.randn(16 // size, 4)\n"
    )
    line = [sys.executable, "-m", "foretell", "run", str(script), "--plan", plan, "--steps", "3"]
    done = subprocess.run(
        [*line, "--device", "cpu", "--no-verify", "--json"],
        env=os.environ | {"XDG_CACHE_HOME": str(tmp_path)}, capture_output=True, text=True,
        timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    answer = found["prediction"]
    assert 0 < answer["low_s"] < found["predicted_s"] < answer["high_s"]
    assert answer["load"] >= 1
    assert answer["load_during"] >= 1
    (kept,) = (tmp_path / "foretell" / "machines").glob("*.json")
    names = {row[0] for row in json.loads(kept.read_text())["ops"]}
    assert {"gemm", "optimizer"} <= names


def sending(rank):
    """A step of one rank by itself, and what a message gives while it is recorded and behind it."""
    mine = torch.full((2,), 1.0 + rank)

    def take():
        there = mine.clone()
        work = dist.all_reduce(there, async_op=True)
        parts, lines = torch.zeros(4), [torch.zeros(2), torch.zeros(2)]
        all_gather(parts, mine)
        dist.all_gather(lines, mine)
        rows = torch.ones(3, 5)
        dist.all_to_all_single(torch.zeros(3, 5), rows, [1 + rank, 2 - rank], [1 + rank, 2 - rank])
        work.wait()
        seen.append((there.tolist(), parts.tolist(), lines[1].tolist()))

    seen = []
    found, _ = dry_run.recorded(take)
    dist.all_reduce(mine)
    return found, seen[-1], mine.tolist()


def recorded():
    rank = dist.get_rank()
    found, seen, after = sending(rank)
    rows = [(e.op, [a.sizes for a in e.args if isinstance(a, dry_run.Shape)]) for e in found.events]
    sizes = [e.args[3] for e in found.events if e.op == "alltoall_base_"]
    return rank, rows, sizes, seen, after, dry_run.dry_run(found).seconds


def test_messages_are_recorded_in_place_of_being_sent():
    for rank, rows, sizes, seen, after, seconds in on_ranks(2, recorded):
        mine = 1.0 + rank
        assert seen == ([mine] * 2, [mine] * 4, [mine] * 2)  # as if all ranks had the same
        assert after == [3.0, 3.0]  # behind it they are sent again
        ops = [op for op, _ in rows]
        assert ops[:2] == ["allreduce_", "_allgather_base_"]
        assert ops[-1] == ""  # waited for at last
        assert rows[1][1] == [(4,), (2,)]
        assert sizes == [[2, 2]]  # rows that samples send where they like go evenly
        assert seconds > 0


def failing():
    def take():
        dist.all_reduce(torch.ones(1))
        if dist.get_rank():
            raise KeyError("labels")

    return dry_run.recorded(take)


def test_a_step_that_fails_on_one_rank_has_no_dry_run_on_any():
    for found, why in on_ranks(2, failing):
        assert found is None
        assert "KeyError: 'labels'" in why


def test_steps_are_summed_up_by_those_with_the_usual_messages():
    def event(seconds, op="allreduce_"):
        return dry_run.Event(seconds, op)

    rows = [dry_run.Recording([event(s), event(2 * s, "")], s) for s in (1.0, 2.0, 6.0)]
    found = dry_run._median([*rows, dry_run.Recording([event(9.0)], 9.0)])
    assert [e.seconds for e in found.events] == [2.0, 4.0]
    assert found.work == pytest.approx(8.0)


def test_a_step_calls_its_model_as_often_as_one_op_reads_each_parameter():
    step = {f"{op}.{k}": [["a", 4]] for op in ("addmm", "t") for k in (0, 1)}
    step |= {f"_foreach_mul_.{k}": [["a", 4], ["b", 4]] for k in range(5)}
    assert script_rank._calls(step | {f"mm.{k}": [["b", 4]] for k in range(4)}) == 2
    assert script_rank._calls({}) == 1


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_copy_has_memory_and_values_of_its_own(device):
    with torch.device(device):
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).eval()
    found, _ = dry_run.copied(model)
    assert dry_run.fits(found, 2)
    assert not found.training
    assert all(p.isfinite().all() for p in found.parameters())
    optimizer = torch.optim.AdamW(found.parameters(), lr=0.1)
    dry_run.freeze(optimizer)
    before = [p.clone() for p in found.parameters()]
    found(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, found.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())


def test_work_is_shared_by_as_many_threads_as_were_busy(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert dry_run.Work(1.0).wide == 0.0
    assert dry_run.Work(2.5).wide == pytest.approx(0.5)
    assert dry_run.Work(9.0).wide == 1.0


SCRIPT = """import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(32, 32) for _ in range(4))

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (4, 8)).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = (nn.Parameter(0.1 * torch.randn(2, 32, 32)) for _ in range(2))

    def forward(self, tokens, index, weights):
        out = torch.zeros_like(tokens)
        for expert in range(len(self.up)):
            at, k = (index == expert).nonzero(as_tuple=True)
            made = tokens[at] @ self.up[expert] @ self.down[expert] * weights[at, k, None]
            out = out.index_add(0, at, made)
        return out


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(32, 2), Experts()

    def forward(self, x):
        weights, index = self.router(x).softmax(-1).max(-1, keepdim=True)
        return x + self.experts(x, index, weights)


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(50, 32)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(32, 4)

    def forward(self, x):
        x = self.words(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 3, padding=1)

    def forward(self, x):
        return self.b(self.a(x).relu()).mean((2, 3))


def model():
    return {make}


def batch(rank, size, step):
    draw = torch.Generator().manual_seed(step)
    x = {inputs}
    y = torch.randint(0, 4, (8,), generator=draw)
    return (x.chunk(size)[rank],), y.chunk(size)[rank]
"""
WORDS = ("Words()", "torch.randint(0, 50, (8, 16), generator=draw)")
ROWS = ("nn.Sequential(Mixture(), Mixture())", "torch.randn(8, 32, generator=draw)")
IMAGES = ("Images()", "torch.randn(8, 3, 16, 16, generator=draw)")


def dry(script, text):
    """What is predicted of a plan, by a dry run or not, and the values behind it."""
    plan = Plan.parse(text)
    run = worker._Steps(worker.load(Path(script)), plan, "cpu", "sync")
    model = run.make()
    held = [p for p in model.parameters() if not p.is_meta]
    before = [p.clone() for p in held]
    predictor = run.predictor()
    same = all(torch.equal(a, b) for a, b in zip(before, held, strict=True))
    run.deploy(model)
    return predictor.predict(), predictor.dry, same


@pytest.mark.parametrize(
    ("made", "plan"),
    [
        (WORDS, "dp=2,micro_batch=2"),
        (WORDS, "tp=2"),
        (WORDS, "cp=2"),
        (ROWS, "dp=2,ep=2"),
        (IMAGES, "spatial=2"),
        (WORDS, "dp=2,zero=3"),
        pytest.param(WORDS, "tp=2,sp=yes", marks=pytest.mark.slow),
        pytest.param(WORDS, "dp=2,precision=bf16-mixed", marks=pytest.mark.slow),
        pytest.param(WORDS, "pp=2,micro_batch=2", marks=pytest.mark.slow),
        pytest.param(IMAGES, "filter=2", marks=pytest.mark.slow),
        pytest.param(WORDS, "dp=2,tp=2", marks=pytest.mark.slow),
    ],
)
def test_every_plan_has_a_dry_run_that_leaves_the_model_alone(tmp_path, monkeypatch, made, plan):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("{make}", made[0]).replace("{inputs}", made[1]))
    for found, took, same in on_ranks(Plan.parse(plan).ranks, dry, str(script), plan):
        assert same
        assert took is not None
        assert 0 < took.work < took.seconds < 60
        assert took.unsure >= 0
        assert took.load >= 1
        if found:
            assert found["low_s"] < found["step_s"] < found["high_s"]
            assert sum(found["breakdown"].values()) == pytest.approx(found["step_s"], rel=0.01)
