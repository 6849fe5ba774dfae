"""A script timed and traced on the CPU, and what the reader makes of it."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch")

import foretell  # noqa: E402
from foretell.baseline import unprofiled  # noqa: E402
from foretell.cli.main import foretell as command  # noqa: E402
from foretell.errors import InputError  # noqa: E402
from foretell.pytorch.intake.request import Wanted  # noqa: E402
from foretell.pytorch.profile import profile  # noqa: E402
from foretell.pytorch.profile.run import Times  # noqa: E402
from foretell.trace import read  # noqa: E402

FEW = Wanted(warmup=2, timed=6, traced=2)

DESCRIBED = """
import torch

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(32, 32)

    def forward(self, x):
        return torch.relu(self.inner(x)) + x

def model():
    return torch.nn.Sequential(Block(), torch.nn.Sequential(torch.nn.Linear(32, 4)))

def batch():
    return torch.randn(16, 32), torch.randint(0, 4, (16,))

loss = torch.nn.functional.cross_entropy

def optimizer(parameters):
    return torch.optim.Adam(parameters, foreach=False)
"""

MARKED = """
import sys
import foretell
import torch

assert sys.argv[1:] == ["--lr", "0.5"], sys.argv
net = torch.nn.Linear(8, 8)
sgd = torch.optim.SGD(net.parameters(), lr=float(sys.argv[2]))
data = torch.utils.data.DataLoader(torch.randn(400, 8), batch_size=4)
if __name__ == "__main__":
    for x in data:
        with foretell.profile.step():
            try:
                sgd.zero_grad()
                net(x).square().mean().backward()
                sgd.step()
            except Exception:
                raise SystemExit(3)
"""


def script(folder: Path, text: str) -> Path:
    path = folder / "train.py"
    path.write_text(text)
    return path


@pytest.fixture(scope="module")
def described(tmp_path_factory):
    folder = tmp_path_factory.mktemp("described")
    output = folder / "step.json.gz"
    return profile(script(folder, DESCRIBED), output, device="cpu", wanted=FEW), output


def test_both_times_are_in_the_trace(described):
    found, output = described
    result = json.loads(gzip.decompress(output.read_bytes()))["foretell"]
    assert result["unprofiled_s"] == found.plain.median > 0
    assert result["profiled_s"] == found.profiled > 0
    assert result["unprofiled_low_s"] <= result["unprofiled_s"] <= result["unprofiled_high_s"]
    assert result["unprofiled_steps"] == 6
    assert result["torch"] == torch.__version__


def test_the_reader_takes_the_unprofiled_time(described):
    found, output = described
    trace = read(output)
    assert trace.real == found.plain.median
    base = unprofiled(trace)
    assert base.seconds == found.plain.median
    assert "timed with the trace" in base.note
    assert unprofiled(trace, 1.0).seconds == 1.0


def test_steps_shapes_and_layers_are_in_the_trace(described):
    graph = read(described[1]).graph
    assert len(graph.facts["steps"]) == 2
    assert graph.facts["found_by"] == "ProfilerStep"
    layers = set(graph.texts("layer"))
    assert {"0", "0.inner", "1.0"} <= layers  # a container that does nothing has no name
    backward = {graph[int(t)].layer for t in graph.select(phase="backward")}
    assert {"0.inner", "1.0"} <= backward
    assert len(graph.select(phase="update"))


def test_a_script_that_marks_its_steps(tmp_path):
    path = script(tmp_path, MARKED)
    output = tmp_path / "t.json"
    found = profile(path, output, ["--lr", "0.5"], device="cpu", wanted=FEW)
    graph = read(output).graph
    assert len(graph.select(kind="load")) == 1  # between two marks
    assert read(output).real == found.plain.median


def test_marks_do_nothing_by_themselves_and_import_no_torch():
    code = "import foretell, sys\nwith foretell.profile.step(): pass\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
    assert foretell.profile.step is not None


BAD = [
    ("x = 1\n", "ended without a step", "marked"),
    ("def model(: pass", "is not Python", ""),
    ("import foretell\nfor _ in range(3):\n    with foretell.profile.step(): pass\n",
     "ended after 3 steps", "fewer"),
    ("import sys; sys.exit(5)\n", "exited with 5", ""),
    ("def model(): return 3\ndef batch(): return 3\n", "made int", ""),
]  # fmt: skip


@pytest.mark.parametrize(("text", "words", "hint"), BAD)
def test_mistakes_of_a_script(tmp_path, text, words, hint):
    with pytest.raises(InputError) as error:
        profile(script(tmp_path, text), tmp_path / "t.json", device="cpu", wanted=FEW)
    assert words in str(error.value)
    assert hint in str(error.value)
    assert not (tmp_path / "t.json").exists()


def test_mistakes_of_options(tmp_path):
    path = script(tmp_path, DESCRIBED)
    with pytest.raises(InputError, match="at least 1, 2 and 1"):
        profile(path, tmp_path / "t.json", wanted=Wanted(timed=1))
    with pytest.raises(InputError, match="is no device"):
        CliRunner().invoke(
            command, ["profile", "--device", "gpu9", str(path)], catch_exceptions=False
        )
    with pytest.raises(InputError, match="there is no file"):
        profile(tmp_path / "none.py", tmp_path / "t.json", device="cpu")


def test_the_command_and_a_what_if_of_its_trace(tmp_path):
    path, output = script(tmp_path, DESCRIBED), tmp_path / "step.json.gz"
    options = ["--device", "cpu", "--warmup", "2", "--timed", "4", "--traced", "2", "--json"]
    done = CliRunner().invoke(command, ["profile", str(path), "-o", str(output), *options])
    assert done.exit_code == 0, done.exception
    answer = json.loads(done.stdout)
    assert answer["trace"] == str(output)
    query = CliRunner().invoke(command, ["whatif", str(output), "faster-host:times=2", "--json"])
    result = json.loads(query.stdout)
    assert result["baseline_s"] == answer["unprofiled_s"]
    assert result["predicted_s"] < 0.7 * result["baseline_s"]
    assert any("timed with the trace" in note for note in result["notes"])


def test_the_middle_of_times():
    assert Times.of([5.0, 1.0, 2.0, 3.0, 4.0]) == Times(3.0, 2.0, 4.0)
    assert Times.of([1.0]) == Times(1.0, 1.0, 1.0)
