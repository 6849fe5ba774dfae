"""Prices timed on the machine at hand: ops, collectives, what runs teach, and what `run` says."""

import json
import math
import os
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
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
from foretell.pytorch.deploy import dry_run, machine, op_times, units
from foretell.pytorch.deploy.op_times import LocalPass, PricedOp
from foretell.workload import load as workload
from tests.pytorch.deploy.ranks import on_ranks

GEMM = {"m": 64.0, "n": 64.0, "k": 64.0}


def gemm(**sizes):
    return TimedOp("gemm", "fp32", tuple(sorted((GEMM | sizes).items())))


def asked(ops, **sizes):
    shape = {k: np.array([v]) for k, v in (GEMM | sizes).items()}
    return float(ops.price("gemm", "fp32", shape, np.array([np.nan]))[0])


def test_what_was_timed_is_its_price_and_what_lies_between_is_interpolated():
    ops = TimedOps({gemm(): 1e-4, gemm(m=256.0): 3e-4}, load=2.0)
    assert asked(ops) == pytest.approx(2e-4)
    assert 2e-4 < asked(ops, m=128.0) < 6e-4
    assert asked(ops, m=1024.0) == pytest.approx(4 * 6e-4)  # large ones grow as their work
    assert list(ops.asked) == [gemm(m=128.0), gemm(m=1024.0)]
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


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_rank_by_itself_takes_a_step_and_leaves_the_model_as_it_was(device):
    with torch.device(device):
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 4))
    before = {name: t.clone() for name, t in model.state_dict().items()}
    batch = (torch.randn(16, 8), torch.randint(0, 4, (16,)))
    alone = LocalPass(model, batch, None, lambda held: torch.optim.Adam(held.parameters()))
    drawn = torch.get_rng_state()
    for times, in_buckets in ((1, True), (4, False)):
        found = alone.taken(4, times, in_buckets=in_buckets)
        assert found is not None
        assert found.compute > 0
        assert found.update > 0
    assert torch.equal(drawn, torch.get_rng_state())
    assert all(p.grad is None for p in model.parameters())
    if device == "cpu":
        assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


class Working(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, there, back):
        ctx.back = back
        work(there)
        return x * weight

    @staticmethod
    def backward(ctx, g):
        work(ctx.back)
        return g, g.sum(0), None, None


class Slow(nn.Module):
    """A layer that works for some core seconds in its forward and others in its backward."""

    def __init__(self, there, back):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.there, self.back = there, back

    def forward(self, x):
        return Working.apply(x, self.weight, self.there, self.back)


def work(seconds):
    start = time.thread_time()
    while time.thread_time() < start + seconds:
        pass


def test_a_pass_is_shared_out_over_units_and_children_forward_and_backward():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model = nn.Sequential(Slow(0.004, 0.002), nn.Tanh(), Slow(0.001, 0.013))
        batch = (torch.randn(16, 8), torch.randn(16, 8))
        alone = LocalPass(model, batch, None, lambda held: torch.optim.Adam(held.parameters()))
        found = alone.taken(16)
    finally:
        torch.set_num_threads(threads)
    for rows in (found.units[1:], (found.parts[0], found.parts[2])):
        shares = [share for part in rows for share in part[:2]]
        assert shares == pytest.approx([0.2, 0.1, 0.05, 0.65], abs=0.06)
        assert [part.width for part in rows] == [8, 8]
    assert found.again() == pytest.approx(0.02, rel=0.25)
    assert found.compute == pytest.approx(0.02, rel=0.25)


def test_passes_leave_the_values_that_they_were_begun_with():
    model = nn.Linear(8, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    batch = [torch.randn(16, 8), torch.randint(0, 4, (16,))]
    before = model.weight.clone()
    passes = op_times._Passes(model, batch, nn.functional.cross_entropy, optimizer, 2)
    for _ in range(3):
        assert min(passes.take()) > 0
    assert torch.equal(before, model.weight)


def test_a_model_that_cannot_be_taken_alone_is_left_to_the_prices_of_its_ops():
    class Broken(nn.Linear):
        def forward(self, x):
            raise KeyError("labels")

    batch = (torch.randn(4, 8), torch.zeros(4, dtype=torch.long))
    alone = LocalPass(Broken(8, 8), batch, None, lambda held: torch.optim.SGD(held.parameters()))
    assert op_times.fits(alone.model, 2)
    assert alone.taken(4) is None


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


def role(model, core=1e-3, **more):
    """What a proxy model of a model acts."""
    make = lambda held: torch.optim.Adam(held.parameters())  # noqa: E731
    return dry_run.Role(model, make, 8, core, **more)


def test_a_stand_in_has_the_tensors_of_the_model_in_its_units_and_stages():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Embedding(16, 8)
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(3)
            )

    model = Net()
    whole = dry_run._proxy(role(model), Plan(dp=2, zero=3))
    sizes = sorted(tuple(p.shape) for p in model.parameters())
    assert sorted(tuple(p.shape) for p in whole.parameters()) == sizes
    assert [b.dtype for b in whole.buffers()] == [b.dtype for b in model.buffers()]
    held = [units.size_of(unit) for unit in units.units(model).values()]
    assert [units.size_of(unit) for unit in units.units(whole).values()] == held
    assert sum(sum(unit.act.core) for unit in whole.units) == pytest.approx(1e-3 / 8)
    chunks = Plan(pp=2, chunks=2, schedule="interleaved", micro_batch=1)
    staged = dry_run._proxy(role(model), chunks)
    assert len(staged) == 4
    assert sorted(tuple(p.shape) for p in staged.parameters()) == sizes


def test_the_stages_of_a_line_are_cut_as_it_is_and_work_as_its_children_do():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4), nn.Linear(4, 2))
    shares = ((0.2, 0.3, 8), (0.05, 0.05, 8), (0.1, 0.2, 4), (0.05, 0.05, 2))
    parts = [op_times.Part(*row) for row in shares]
    plan = Plan(pp=2, micro_batch=2, layers=(3, 1))
    first, last = dry_run._proxy(role(model, parts=parts), plan)
    assert first.act.core == pytest.approx((0.35e-3 / 8, 0.55e-3 / 8, 4))
    assert last.act.core == pytest.approx((0.05e-3 / 8, 0.05e-3 / 8, 2))
    assert [tuple(p.shape) for p in last.held] == [(2, 4), (2,)]
    x = torch.zeros(2, 1)
    last(first(x)).sum().backward()
    assert all(p.grad is not None for p in first.parameters())


def test_batch_norms_of_all_ranks_send_sums_and_no_buffers():
    model = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 4))
    model.register_buffer("other", torch.zeros(3))
    synced, own = (role(model, is_synced=is_synced) for is_synced in (True, False))
    assert [tuple(b.shape) for b in synced.buffers()] == [(3,)]
    assert len(own.buffers()) == 4
    whole = dry_run._proxy(synced, Plan(dp=2))
    assert [unit.act.norms for unit in whole.units] == [[], [6], []]
    assert dry_run._proxy(own, Plan(dp=2)).units[1].act.norms == []


def test_work_is_shared_by_as_many_threads_as_were_busy(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert dry_run.Work(1.0).wide == 0.0
    assert dry_run.Work(2.5).wide == pytest.approx(0.5)
    assert dry_run.Work(9.0).wide == 1.0


def dry(text, core):
    """A dry run of a step, and whether the model is as it was."""
    from foretell.plan import Plan

    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64))
    before = [p.clone() for p in model.parameters()]
    found = dry_run.dry_run(role(model, core), Plan.parse(text))
    same = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    return found, same


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=1", "dp=2,zero=3", "pp=2,micro_batch=2"])
def test_a_dry_run_leaves_the_model_alone(plan):
    for found, same in on_ranks(2, dry, plan, 0.1):
        assert same
        assert 0.04 < found.seconds < 60  # the work of a stage, at least
        assert found.unsure >= 0
        assert found.load >= 1


def test_what_depends_on_the_layers_has_no_dry_run():
    for text in ("tp=2", "dp=2,dtype=bf16", "dp=2,spatial=2", "cp=2", "dp=1"):
        assert not dry_run.can_dry_run(Plan.parse(text))
