"""`foretell tune-ddp`: what it decides, the buckets DDP really makes, and a run on real ranks."""

import json

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from click.testing import CliRunner
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from foretell.cli.main import foretell
from foretell.cli.tune_ddp import _choose, command
from foretell.errors import InputError
from foretell.pytorch.ranks.wires import refusal
from foretell.pytorch.tune.launch import TuneRequest, measure
from foretell.search.fusion.lanes import Caps

SCRIPT = """
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))TAIL

def batch(rank, size):
    return torch.randn(8, 64), torch.randint(0, 4, (8,))
"""
WAYS = [Caps("default", (), 2, 1.0), Caps("searched", (0.5, 3.25), 2, 0.8)]


def test_the_line_is_printed_where_all_rounds_are_faster():
    found = _choose(WAYS, [[1.0, 1.1, 1.2], [0.9, 1.0, 1.1]])
    assert found["line"] == "bucket_cap_mb_list=[0.5, 3.25]"
    assert not found["keep_default"]
    assert found["gain"] == pytest.approx(0.1, abs=0.02)


@pytest.mark.parametrize(
    "times", [[1.0, 1.1, 1.2], [0.995, 1.095, 1.195], [0.5, 1.2, 1.3], [1.1, 1.2, 1.3]]
)
def test_the_default_is_kept_where_nothing_is_surely_faster(times):
    found = _choose(WAYS, [[1.0, 1.1, 1.2], times])
    assert found["keep_default"]
    assert found["line"] == ""
    assert found["gain"] == 0.0


def test_ddp_makes_exactly_the_buckets_of_the_caps(tmp_path):
    sizes = [4 * n for n in (10, 2560, 256, 65536, 256, 16384)]  # gradients, last parameter first
    wanted = [sizes[0] + sizes[1], sizes[2], sum(sizes[3:])]
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 256), nn.Linear(256, 10))
        ddp = DistributedDataParallel(model, bucket_cap_mb_list=[s / 2**20 for s in wanted])
        for _ in range(3):
            ddp(torch.randn(4, 64)).sum().backward()
        answer = ddp._get_ddp_logging_data()["rebuilt_bucket_sizes"]
        assert [int(s) for s in answer.split(", ")] == wanted
        few = DistributedDataParallel(model, bucket_cap_mb_list=[4 / 2**20, wanted[1] / 2**20])
        for _ in range(3):
            few(torch.randn(4, 64)).sum().backward()
        answer = few._get_ddp_logging_data()["rebuilt_bucket_sizes"]
        ends = [sizes[0], *sizes[1:5], sizes[5]]  # the last cap counts for all that follow
        assert [int(s) for s in answer.split(", ")] == ends
    finally:
        dist.destroy_process_group()


def test_a_script_that_is_not_there():
    with pytest.raises(InputError, match="there is no script"):
        CliRunner().invoke(foretell, ["tune-ddp", "none.py"], catch_exceptions=False)


@pytest.mark.slow
def test_on_real_ranks(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.replace("TAIL", ""))
    words = [str(path), "--steps", "2", "--rounds", "2", "--json", "--device", "cpu"]
    done = CliRunner().invoke(command, words, catch_exceptions=False)
    found = json.loads(done.stdout)
    assert found["default_s"] > 0
    assert found["keep_default"] == (found["line"] == "")
    assert found["tuned_s"] <= found["default_s"] or found["keep_default"]
    assert {c["name"] for c in found["candidates"]} >= {"default"}


@pytest.mark.slow
@pytest.mark.skipif(bool(refusal()), reason=refusal() or "namespaces can be made")
def test_ranks_behind_a_slow_link(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(
        SCRIPT.replace("TAIL", "").replace("64, 64", "64, 4096").replace("64, 4)", "4096, 4)")
    )
    found = measure(TuneRequest(str(path), steps=2, warmup=1, device="cpu", network="20mbit"), 2)
    size, seconds = max(found["wire"])
    assert size / seconds == pytest.approx(20e6 / 8, rel=0.3)  # a ring of two sends all of it once
    with pytest.raises(InputError, match="no delay"):
        measure(TuneRequest(str(path), network="20mbit~5ms"), 2)


@pytest.mark.slow
def test_a_model_without_gradients_on_real_ranks(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.replace("TAIL", ".requires_grad_(False)"))
    with pytest.raises(InputError, match="no parameter that is trained"):
        CliRunner().invoke(command, [str(path), "--device", "cpu"], catch_exceptions=False)
