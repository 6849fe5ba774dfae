"""Every input that ever broke a command, and the large ones made here."""

import gzip
import json
import os
import shlex
import shutil
import zipfile
from pathlib import Path

import pytest

from tests.fuzz.harness import problem, run

CORPUS = Path(__file__).parent / "corpus"
COMMANDS = (CORPUS / "COMMANDS.txt").read_text().splitlines()
MODEL = "gpt:layers=2,hidden=64,heads=2,seq=32,vocab=100"
PREDICT = ["predict", MODEL, "--on", "dgx-a100:nodes=1", "--plan", "dp=8,global_batch=8"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    shutil.copytree(CORPUS, folder, dirs_exist_ok=True)
    return folder


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: c[:60])
def test_once_broke_a_command(command, corpus):
    argv = shlex.split(command)
    assert not problem(argv, run(argv, corpus))


DEEP = 100_000
LARGE = {
    "deep.json": b"[" * DEEP + b"]" * DEEP,
    "deep.jsonl": b'{"workload": ' + b"[" * DEEP + b"]" * DEEP + b"}",
    "deep-trace.json": b'{"a": ' + b"[" * DEEP + b"]" * DEEP + b', "traceEvents": []}',
    "deep.toml": b"a = " + b"[" * 5000 + b"]" * 5000,
    "dotted.toml": b".".join([b"a"] * 50_000) + b" = 1",
    "quoted.toml": b".".join([b'"a b"'] * 20_000) + b" = 1",
    "header.toml": b"[" + b" . ".join([b"'a b'"] * 20_000) + b"]",
    "unclosed.toml": b'a = "' + b'\\".a' * 100_000,
    "nodes.toml": b"[[node]]\n" * 30_000,
    "digits.json": b'{"calibration": {"compute": ' + b"9" * 100_000 + b"}}",
    "digits.toml": b"a100-80 = " + b"9" * 100_000,
    "name.jsonl": json.dumps({"workload": "g" * 10**6, "on": "x", "plan": "y"}).encode(),
    "bomb.json.gz": gzip.compress(b'{"traceEvents": [{"a": "' + bytes(6 << 20), 1),
    "spaces.json.gz": gzip.compress(b'{"traceEvents": [' + b" " * (6 << 20), 1),
    "head.json": b'{"a": "' + b"x" * (3 << 20),
    "event.json": b'{"traceEvents": [{"a": "' + b"x" * (3 << 20),
    "empty.gz": b"",
    "cut.gz": b"\x1f\x8b\x08",
    "null.graph": b"foretell-graph 1\n" + bytes(64),
}


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    folder = tmp_path_factory.mktemp("large")
    for name, raw in LARGE.items():
        (folder / name).write_bytes(raw)
    with zipfile.ZipFile(folder / "bomb.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.json", b'{"traceEvents": [{"a": "' + bytes(6 << 20))
    os.mkfifo(folder / "pipe.json")
    return folder


def readers(name: str) -> list[list[str]]:
    """Every command that could be given such a file."""
    steps = [["show", name], ["simulate", name, "--json"], ["replay", name, "--json"]]
    tables = [["predict", "--batch", name, "--json"], ["fit", name, "--json"]]
    plans = [[*PREDICT[:-1], name], [*PREDICT, "--calibration", name, "--json"]]
    others = [["report", name, "--json"], ["schedule", name, "--no-cache", "-n", "2", "--json"]]
    prices = [["oracle", MODEL, "--on", "dgx-a100", "--gpus", "2", "--prices", name, "--json"]]
    clusters = [["predict", MODEL, "--on", f"./{name}", "--plan", "dp=1", "--json"]]
    return [*steps, *tables, *plans, *others, *prices, *clusters]


SMALL = {"DOCUMENT": 4 << 20, "TRACE": 5 << 20, "EVENT": 2 << 20}  # so that the files can be small


@pytest.mark.parametrize("name", [*LARGE, "bomb.zip", "pipe.json"])
def test_large_or_deep_or_no_file_at_all(name, large, monkeypatch):
    for limit, size in SMALL.items():
        monkeypatch.setenv(f"FORETELL_MAX_{limit}", str(size))
    for argv in readers(name):
        found = run(argv, large)
        assert not problem(argv, found), argv
        assert found.code == 2 or found.out.startswith(b'{"error": '), argv


@pytest.mark.parametrize("name", ["/dev/zero", "/dev/stdin", "/proc/self/mem", "/"])
def test_what_is_no_file(name, tmp_path):
    if not os.path.exists(name):
        pytest.skip(f"there is no {name} here")
    for argv in readers(name):
        found = run(argv, tmp_path)
        assert not problem(argv, found), argv
        assert found.code == 2, argv


@pytest.mark.parametrize(
    "argv", [["profile", "pipe.py"], ["capture", "pipe.py"], ["run", "pipe.py", "--plan", "dp=2"]]
)
def test_a_pipe_is_no_script(argv, tmp_path):
    os.mkfifo(tmp_path / "pipe.py")
    found = run(argv, tmp_path)
    assert not problem(argv, found)
    assert found.code == 2


@pytest.mark.parametrize("gpus", ["²", "8,²", "1..999999999", "9" * 5000, "1..²", "٣..", "--5"])
def test_numbers_of_devices_that_are_none(gpus, tmp_path):
    argv = ["oracle", MODEL, "--on", "dgx-a100", "--gpus", gpus]
    found = run(argv, tmp_path)
    assert not problem(argv, found)
    assert found.code == 2
