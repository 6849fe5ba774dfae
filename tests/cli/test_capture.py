"""`foretell capture` and what can be done with what it writes."""

import json

import pytest
from click.testing import CliRunner

pytest.importorskip("torch")

from foretell.cli.main import foretell
from foretell.errors import InputError
from foretell.graph import load

SCRIPT = """
import torch
import torch.nn.functional as F

def model():
    return torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))

def batch(batch=32):
    return torch.randn(batch, 64), torch.randint(0, 10, (batch,))

loss = F.cross_entropy
optimizer = "adam:kind=loop"
"""


def invoke(*args):
    return CliRunner().invoke(foretell, [str(a) for a in args], catch_exceptions=False)


@pytest.fixture
def step(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    done = invoke("capture", tmp_path / "train.py", "-o", tmp_path / "step.graph", "--batch", 64)
    assert done.exit_code == 0, done.stderr
    return tmp_path / "step.graph"


def test_a_capture_says_what_it_found(step, tmp_path):
    done = invoke("capture", tmp_path / "train.py", "-o", tmp_path / "again.graph", "--json")
    found = json.loads(done.stdout)
    assert found["parameters"] == 64 * 256 + 256 + 2560 + 10
    assert found["phases"]["forward"]["flops"] == 2 * 32 * (64 * 256 + 2560) + 32 * 256
    assert found["peak_bytes"] == load(tmp_path / "again.graph").facts["peak_bytes"]
    assert (
        "Sequential: 19,210 parameters"
        in invoke("capture", tmp_path / "train.py", "-o", step).stdout
    )


def test_a_captured_step_can_be_shown_simulated_and_changed(step):
    assert "addmm" in invoke("show", step, "--text").stdout
    played = json.loads(invoke("simulate", step, "--on", "h200", "--json").stdout)
    assert played["step_s"] > 0
    assert played["memory"][0]["peak_bytes"] > 0
    assert played["sources"]
    shorter = json.loads(invoke("whatif", step, "fused-optimizer", "--on", "h200", "--json").stdout)
    assert shorter["predicted_s"] < shorter["baseline_s"]  # a small step waits for its host
    graphed = json.loads(invoke("whatif", step, "cuda-graph", "--on", "h200", "--json").stdout)
    assert graphed["predicted_s"] < shorter["predicted_s"]


def test_options_reach_the_capture(step, tmp_path):
    out = tmp_path / "half.graph"
    options = ("--autocast", "bf16", "--optimizer", "sgd:kind=fused", "--kernels-of", "a100-80")
    assert invoke("capture", tmp_path / "train.py", "-o", out, *options).exit_code == 0
    graph = load(out)
    assert graph.facts["autocast"] == "bf16"
    assert graph.facts["kernels_of"] == "a100-80"
    assert len(graph.select(kind="kernel", op="_fused_sgd_")) == 1


def test_a_sample_of_the_package_can_be_named(tmp_path):
    out = tmp_path / "vgg.graph"
    done = invoke("capture", "foretell_lab.samples:vgg16", "--batch", 2, "-o", out)
    assert "138,357,544 parameters" in done.stdout


def test_a_mistake_is_one_message(tmp_path):
    with pytest.raises(InputError, match="there is no file"):
        invoke("capture", tmp_path / "none.py")
