"""No file, field or upload names code; only what the user typed on the command line does."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import foretell
from foretell.cli.main import foretell as command
from foretell.errors import InputError
from foretell.workload import load

SOURCE = Path(foretell.__file__).parent
PAYLOADS = (
    "torch.utils.collect_env:run:command=touch%20{mark}",
    "os:system:command=touch%20{mark}",
    "{folder}/evil.py",
    "{folder}/evil.py:make",
)


@pytest.fixture
def mark(tmp_path):
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')\n")
    return tmp_path / "mark"


@pytest.mark.parametrize("payload", PAYLOADS)
def test_a_request_of_a_batch_runs_nothing(payload, mark, tmp_path):
    text = payload.format(mark=mark, folder=tmp_path)
    line = {"workload": text, "on": "dgx-a100:nodes=1", "plan": "dp=8"}
    (tmp_path / "batch.jsonl").write_text(json.dumps(line))
    (tmp_path / "runs.jsonl").write_text(json.dumps(line | {"step_s": 1.0}))
    for query in (["predict", "--batch", "batch.jsonl"], ["fit", "runs.jsonl"]):
        CliRunner().invoke(command, [*query[:-1], str(tmp_path / query[-1])])
    assert not mark.exists()


@pytest.mark.parametrize("payload", PAYLOADS)
def test_a_workload_is_data_unless_said_otherwise(payload, mark, tmp_path):
    text = payload.format(mark=mark, folder=tmp_path)
    with pytest.raises(InputError, match=r"names code|unknown workload"):
        load(text)
    with pytest.raises(InputError, match=r"no model of the list|unknown workload"):
        load(text, files=False)
    assert not mark.exists()


def test_the_studio_takes_no_file(tmp_path):
    (tmp_path / "step.graph").write_bytes(b"")
    with pytest.raises(InputError, match="no model of the list"):
        load(str(tmp_path / "step.graph"), files=False)


def test_the_folder_of_a_run_names_no_script(mark, tmp_path):
    pytest.importorskip("torch")
    query = {"script": str(tmp_path / "evil.py"), "plan": "dp=2,global_batch=8"}
    (tmp_path / "run.json").write_text(json.dumps(query))
    done = CliRunner().invoke(command, ["fit", str(tmp_path), "--on", "dgx-a100:nodes=1"])
    assert "runs only where you name it" in str(done.exception)
    assert not mark.exists()


def test_a_state_of_training_is_not_unpickled(mark, tmp_path):
    pytest.importorskip("torch_geometric")
    script = (
        "import os, pickle, sys; from pathlib import Path\n"
        "class Evil:\n    def __reduce__(self): return os.system, (f'touch {sys.argv[1]}',)\n"
        "Path(sys.argv[2]).write_bytes(pickle.dumps({'seed': Evil()}))\n"
    )
    state = tmp_path / "policy.npz.state"
    subprocess.run([sys.executable, "-c", script, str(mark), str(state)], check=True)
    query = ["train-policy", "-o", str(tmp_path / "policy.npz"), "--resume", "--games", "1"]
    done = CliRunner().invoke(command, query)
    assert isinstance(done.exception, InputError), done.exception
    assert not mark.exists()


@pytest.mark.parametrize(
    "word",
    ["import pickle", "weights_only=False", "allow_pickle=True", "yaml.load(", "import dill"],
)
def test_no_source_unpickles(word):
    found = [path for path in SOURCE.rglob("*.py") if word in path.read_text()]
    assert not found
